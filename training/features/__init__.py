"""Features of the frozen target, and stores that keep them between epochs."""
