"""Published benchmarks: their forms, worked examples, and checks of answers."""
