"""Jobs that measure real speculative decoding: acceptance, speed and cost of any drafter."""

from jobs.interrupts import end_imports_quietly
from jobs.openmp import spin_briefly

spin_briefly()
end_imports_quietly()
