"""Jobs that make a shallow drafter from a target: prune, distil, regenerate, pretrain."""

from jobs.interrupts import end_imports_quietly
from jobs.openmp import spin_briefly

spin_briefly()
end_imports_quietly()
