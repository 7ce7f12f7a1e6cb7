"""Jobs that make a shallow drafter from a target: prune, distil, regenerate, pretrain."""

import decoding  # noqa: F401  (before PyTorch: it shortens the spinning of threads)
from jobs.interrupts import end_imports_quietly

end_imports_quietly()
