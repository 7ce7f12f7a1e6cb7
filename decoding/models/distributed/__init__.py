"""A target over several processes: its ranks, their shards and the links between them."""
