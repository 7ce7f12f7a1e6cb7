"""Measurement: prompts, interleaved generations, their records and the time limit."""
