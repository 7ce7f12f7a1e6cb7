"""Prune, distil, regenerate, pretrain: the jobs that make a shallow drafter out of a target, and their maths."""
