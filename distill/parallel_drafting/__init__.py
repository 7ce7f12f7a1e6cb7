"""Parallel drafting: mask tokens with which a student drafts a chain in one forward (PARD)."""
