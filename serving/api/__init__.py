"""An OpenAI-compatible HTTP server for one machine, with any drafter."""
