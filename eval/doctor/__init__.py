"""The doctor: why a drafter's acceptance is what it is, as causes with what each of them costs."""
