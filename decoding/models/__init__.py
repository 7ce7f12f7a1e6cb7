"""Target models: loading, the two backends, several devices, and text to ids and back."""
