"""Jobs that measure: real speculative decoding with any drafter, its acceptance, its speed and its
cost.
"""

from jobs.interrupts import end_imports_quietly

end_imports_quietly()
