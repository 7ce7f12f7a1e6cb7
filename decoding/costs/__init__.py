"""Measured costs of a round on this machine, and the machine's limits."""
