"""What a round costs on this machine, measured, and what the machine can do at most."""
