"""On-policy distillation: rows that the student writes and the frozen target scores."""
