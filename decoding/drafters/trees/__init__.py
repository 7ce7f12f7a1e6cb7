"""Draft trees: how they grow, their size, and how children are sampled."""
