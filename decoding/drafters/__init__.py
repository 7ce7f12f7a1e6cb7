"""The drafters that need no training of their own: chains, lookup, lookahead, trees."""
