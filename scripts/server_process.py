"""A job that serves HTTP, such as serving.api, in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from decoding.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 10.0  # from the signal that ends a job until it is killed


@dataclass
class ServerProcess:
    """A running job: its address, and the lines that it has printed."""

    process: subprocess.Popen[str]
    url: str = ""
    printed: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)  # it listens, or has ended
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def end(self, by: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """End the job by a signal; return its exit status and all that it printed."""
        self.process.send_signal(by)
        status = self.process.wait(60)
        self.reader.join()
        return status, "".join(self.printed)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            if not self.url and (found := re.search(r"http://[\w.:\[\]-]+:\d+", line)):
                self.url = found[0]
                self.ready.set()
        self.ready.set()


@contextmanager
def run_server(
    module: str,
    *words: str,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Iterator[ServerProcess]:
    """Run `python -m module words` on a free port until the block ends, once it listens.

    environment: variables of the job beside those of this process. before: runs in the new process
    before the job. Raises UserError, with its last lines, for a job that ends before it listens.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words, "port=0"],
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=before,
    )
    job = ServerProcess(process)
    try:
        job.ready.wait()
        if not job.url:
            last = "".join(job.printed[-3:]).strip()
            raise UserError(f"{module} ended before it listened: {last}")
        yield job
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        job.reader.join()
