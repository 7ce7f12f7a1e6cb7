"""Losses between a student and its data or teacher, in chunks, so that no [tokens, vocabulary]
tensor is ever held whole.
"""
