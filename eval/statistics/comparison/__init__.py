"""Comparison of several evaluations: rows that may be compared, and their ranking."""
