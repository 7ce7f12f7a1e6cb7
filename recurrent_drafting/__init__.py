"""The recurrent drafter (ReDrafter): its head, training job, drafter and commands."""

import decoding  # noqa: F401  (before PyTorch: it shortens the spinning of threads)
from jobs.interrupts import end_imports_quietly

end_imports_quietly()
