"""Decoding over several requests: turns of a conversation, and rows that join a running batch."""
