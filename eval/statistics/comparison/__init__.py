"""Rows of several evaluations put next to each other: what may be compared, and who is ahead."""
