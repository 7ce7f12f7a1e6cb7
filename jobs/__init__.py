"""What every job shares: composing, stages, run folders, trackers, launching, help, progress."""
