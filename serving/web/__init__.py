"""A page that decodes a prompt with and without a drafter, side by side."""
