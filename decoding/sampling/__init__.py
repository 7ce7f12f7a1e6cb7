"""From logits to tokens: warpers, keyed noise, logits processors, and how a token is chosen."""
