"""Machinery of every job: composition, stages, run folders, trackers, processes, help."""
