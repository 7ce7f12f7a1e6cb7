"""A target over several devices: its ranks, their shards and how they pass tensors."""
