"""SDSAT: trained slot embeddings with which the target itself drafts (arXiv 2403.18647)."""
