"""Jobs that serve HTTP in forked processes, which begin after their imports."""

import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.forks import Fork


@dataclass
class ForkedServer:
    """A running job and its address."""

    process: Fork
    url: str

    def end(self) -> tuple[int, str]:
        """End the job by SIGTERM; return its exit status and all that it printed."""
        self.process.send_signal(signal.SIGTERM)
        printed = "".join(self.process.communicate(60))
        assert self.process.returncode is not None
        return self.process.returncode, printed


@contextmanager
def fork_server(module: str, *words: str, files: int = 0) -> Iterator[ForkedServer]:
    """Run a job on a free port until the block ends, as `scripts.server_process.run_server` does.

    files: the process may have this many open files; 0: as many as this one.
    """
    process = Fork(module, *words, "port=0")
    try:
        if files:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
        while not (found := re.search(r"http://[\w.:\[\]-]+:\d+", process.printed())):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        yield ForkedServer(process, found[0])
    finally:
        process.terminate()
        process.wait()
