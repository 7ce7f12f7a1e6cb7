"""Medusa-1: independent heads on the last hidden state (Cai et al. 2024, arXiv 2401.10774)."""
