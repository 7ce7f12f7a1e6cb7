"""Jobs that measure: real speculative decoding with any drafter, its acceptance, its speed and its cost."""
