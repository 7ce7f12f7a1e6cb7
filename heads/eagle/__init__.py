"""EAGLE-3: one decoder layer that drafts from its own states (Li et al. 2025, arXiv 2503.01840)."""
