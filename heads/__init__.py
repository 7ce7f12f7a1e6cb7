"""Trained drafter heads, a folder each, and the job that trains any of them."""

from jobs.interrupts import end_imports_quietly

end_imports_quietly()
