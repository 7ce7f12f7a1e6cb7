"""What trained drafter heads share, whatever their kind."""
