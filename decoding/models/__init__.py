"""Target models: loading, two backends, several devices, tokenizers and chat templates."""
