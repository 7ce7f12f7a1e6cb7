"""Overlapped schedules: PEARL and its variants, by name."""
