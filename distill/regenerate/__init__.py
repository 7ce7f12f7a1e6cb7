"""Regenerate chats: the target's own answers to their requests."""
