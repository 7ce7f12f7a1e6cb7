"""When a drafter stops: policies asked after every token, and the gain of one more."""
