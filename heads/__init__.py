"""Trained heads on the frozen target's hidden states, a folder each."""

from jobs.interrupts import end_imports_quietly

end_imports_quietly()
