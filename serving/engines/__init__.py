"""Other decoding engines, each run in a process and a Python environment of its own."""
