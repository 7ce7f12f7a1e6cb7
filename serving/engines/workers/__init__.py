"""Programs that run in an engine's own Python environment, where this project is not installed."""
