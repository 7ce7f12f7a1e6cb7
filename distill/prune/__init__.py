"""Prune a target to a smaller LLaMA in stages, by importance scores or learned masks."""
