"""Chats and texts as token ids and loss masks: readers, packing, mixtures."""
