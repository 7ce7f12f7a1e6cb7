"""Prune a target to a smaller LLaMA: scores, masks, the choice of layers, cuts in stages."""
