"""Statistics that turn records into rows: counts, costs, intervals and predictions."""
