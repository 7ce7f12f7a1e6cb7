"""EESD's early-exit head: one layer after the target's first layers (arXiv 2406.03853)."""
