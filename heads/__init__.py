"""Trained drafter heads, a folder each, and the job that trains any of them."""

from jobs.interrupts import end_imports_quietly
from jobs.openmp import spin_briefly

spin_briefly()
end_imports_quietly()
