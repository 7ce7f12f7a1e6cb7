"""Training code shared by all kinds of drafter heads."""
