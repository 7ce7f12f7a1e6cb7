"""Jobs that serve HTTP, each in a process of its own."""

import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class ServerJob:
    """A running job: its address, and what it has printed."""

    process: subprocess.Popen[str]
    url: str = ""
    printed: list[str] = field(default_factory=list)

    def end(self, by: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """End the job by a signal; return its exit status and all that it printed."""
        self.process.send_signal(by)
        status = self.process.wait(60)
        return status, "".join(self.printed)


@contextmanager
def run_server(module: str, *words: str, files: int = 0) -> Iterator[ServerJob]:
    """Run `python -m module words` on a free port until the block ends.

    files: the process may have this many open files; 0: as many as this one.
    """

    def limit() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    process = subprocess.Popen(
        [sys.executable, "-m", module, *words, "port=0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limit,
    )
    job, ready = ServerJob(process), threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            job.printed.append(line)
            if found := re.search(r"http://[\d.]+:\d+", line):
                job.url = found[0]
                ready.set()
        ready.set()  # it has ended

    reader = threading.Thread(target=read)
    reader.start()
    try:
        ready.wait()
        assert job.url, f"the job ended: {''.join(job.printed)}"
        yield job
    finally:
        process.kill()
        process.wait()
        reader.join()
