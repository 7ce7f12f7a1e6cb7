"""Drafters without trained heads: chains, lookups, lookahead, trees."""
