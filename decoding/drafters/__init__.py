"""The drafters that need no training: chains, lookup, lookahead, trees."""
