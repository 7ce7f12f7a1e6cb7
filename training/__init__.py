"""What training shares: data, losses, parallelism, the loop, its optimizer and checkpoints."""
