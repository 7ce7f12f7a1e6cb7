"""Held-out evaluation of drafters on the target's answers, and the figure that selects them."""
