"""Draft trees: how they grow, how large, and how their children are sampled."""
