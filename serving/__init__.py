"""Terminal chats, a web page, prompt runs and an HTTP server, with any drafter."""

import decoding  # noqa: F401  (before PyTorch: it shortens the spinning of threads)
from jobs.interrupts import end_imports_quietly

end_imports_quietly()
