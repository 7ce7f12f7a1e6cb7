"""Policies that end a draft, and planners that compare expected tokens with costs."""
