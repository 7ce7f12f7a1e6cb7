"""Jobs that serve HTTP with few open files, each in a process of its own."""

import resource
from contextlib import AbstractContextManager

from scripts import server_process
from scripts.server_process import ServerProcess


def run_server(module: str, *words: str, files: int = 0) -> AbstractContextManager[ServerProcess]:
    """Run `python -m module words` on a free port until the block ends.

    files: the process may have this many open files; 0: as many as this one.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    return server_process.run_server(module, *words, before=limit if files else None)
