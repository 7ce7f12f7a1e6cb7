"""Measure: the prompts, the interleaved generations, their records, the time they may take."""
