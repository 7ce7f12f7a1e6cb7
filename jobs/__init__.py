"""What every job shares: composition, stages, run folders, trackers, processes, help, progress."""
