"""Drafters measured in other engines, beside our own loop."""
