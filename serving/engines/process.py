"""An engine in a process of its own, which decodes one batch at a time."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decoding import SPINS
from decoding.errors import UserError
from serving.engines.interface import Answer, BatchResult, EngineConfig, Sampling

WORKERS = Path(__file__).parent / "workers"
TAIL = 15  # lines of the engine's log in an error


def _inherited(python: str) -> dict[str, str]:
    """Return this process's environment, for another interpreter without our own modules."""
    # SPINS may be our own choice, and other engines keep their defaults.
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", SPINS)
    drop = () if python == sys.executable else ours
    return {name: value for name, value in os.environ.items() if name not in drop}


class EngineProcess:
    """A started engine. Use it as a context manager, so that its process ends."""

    def __init__(
        self,
        worker: str,
        config: EngineConfig,
        log: Path,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Start the engine and wait until it is ready.

        worker: file name of the program in `workers`. log: file for what the engine prints.
        python: interpreter of the environment that the engine is installed in. environment: added
        variables. timeout: seconds to wait for the start and for each batch. Raises UserError with
        the engine's own words if it does not start.
        """
        self.config, self.log, self.timeout = config, log, timeout
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, str(WORKERS / worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**_inherited(python), **(environment or {})},
            )
        try:
            self._send(asdict(config))
            self.version = str(self._receive("starting")["ready"])
        except BaseException:
            self.close()
            raise

    def decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> BatchResult:
        """Decode prompts, given as token ids, together. Raises UserError if the engine fails."""
        self._send({"prompts": [list(ids) for ids in prompts], "sampling": asdict(sampling)})
        reply = self._receive("decoding")
        answers = [Answer(**answer) for answer in reply.pop("answers")]
        return BatchResult(answers=answers, **reply)

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # it ended before it read everything
                    continue
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, values: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(values).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed(f"it ended {self._how_it_ended()}before its turn") from error

    def _receive(self, doing: str) -> dict[str, Any]:
        """Return the next reply. Raises UserError for an error, a timeout and a dead process."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], self.timeout)
        if not ready:
            self._process.kill()
            raise self._failed(f"no reply within {self.timeout:g} s while {doing}")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed(f"it ended {self._how_it_ended()}while {doing}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise self._failed(f"{doing}: {reply['error']}")
        return reply

    def _how_it_ended(self) -> str:
        """Return `by SIGKILL ` for a process that a signal ended, else an empty string."""
        status = self._process.wait()
        return f"by {signal.Signals(-status).name} " if status < 0 else ""

    def _failed(self, how: str) -> UserError:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        method = self.config.method
        drafter = f" {method.drafter}" if method.drafter else ""
        return UserError(
            f"the engine failed with {method.name}{drafter} for {self.config.target}: {how}. The "
            f"end of {self.log}:\n" + "\n".join(f"  {line}" for line in lines)
        )
