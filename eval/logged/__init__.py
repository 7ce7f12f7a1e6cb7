"""Logged outputs of a target: their formats, and the replay of drafters on them."""
