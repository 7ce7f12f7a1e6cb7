"""Jobs that make a shallow drafter from a target: prune, distil, regenerate, pretrain."""

from jobs.interrupts import end_imports_quietly

end_imports_quietly()
