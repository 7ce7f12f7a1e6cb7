"""Verification rules for chains and trees, and their device versions, which wait once per round."""
