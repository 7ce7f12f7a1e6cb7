"""From records to the rows of results.jsonl: counts, costs, intervals, predictions."""
