"""Chats and texts to token ids and loss masks: readers, packing, mixtures."""
