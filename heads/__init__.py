"""Trained drafter heads, a folder each, and the job that trains any of them."""

import decoding  # noqa: F401  (before PyTorch: it shortens the spinning of threads)
from jobs.interrupts import end_imports_quietly

end_imports_quietly()
