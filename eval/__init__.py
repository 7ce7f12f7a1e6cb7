"""Jobs that measure real speculative decoding: acceptance, speed and cost of any drafter."""

from jobs.interrupts import end_imports_quietly

end_imports_quietly()
