"""Replace the answers in chats with the target's own answers."""
