"""Hugging Face models for training: students, frozen targets, packed attention, shapes."""
