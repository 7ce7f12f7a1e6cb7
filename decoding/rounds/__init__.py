"""A decode call: its settings, its batch of rows and their rounds, and what they counted."""
