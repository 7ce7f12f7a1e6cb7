"""Losses against data or a teacher, in chunks that avoid a [tokens, vocabulary] tensor."""
