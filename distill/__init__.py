"""Prune, distil, regenerate, pretrain: the jobs that make a shallow drafter out of a target, and
their maths.
"""

from jobs.interrupts import end_imports_quietly

end_imports_quietly()
