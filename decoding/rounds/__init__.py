"""The parts of a decode call: settings, the batch and its rounds, and counts."""
