"""Chain drafters in a separate process, so that they can draft while the target verifies.

The worker holds the model and answers over a pipe. It sends q as an array if the rule tests q, and
no random numbers, since noise is a function of its key. With `draft_cores` the worker is bound to
some processor cores and the target's process to the others (`separate_cores`), one thread per core,
since processes that share cores slow each other down.

Shapes: B rows, N drafted tokens, V vocabulary.
"""

import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.base import StatelessDrafter
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Policies, Proposal, Target, Tokens

ROOT = Path(__file__).resolve().parents[2]


class RemoteChain(StatelessDrafter):
    """A ChainDrafter in a worker process. Hydra: `_target_: decoding.drafters.remote.RemoteChain`.

    draft_cores: number of processor cores for the worker, the last ones of this process; 0 binds
    nothing. The other arguments are those of ChainDrafter. The worker ends with this object or this
    process. Raises UserError if no core is left for the target, or the worker cannot load the
    folder.
    """

    kind = "decoding.drafters.chain.ChainDrafter"  # dotted name of the drafter in the worker
    capabilities = Capabilities(shape="chain", has_q=True, can_overlap=True)

    def __init__(
        self, folder: str | Path, *, draft_cores: int = 1, name: str | None = None, **named: Any
    ) -> None:
        available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if draft_cores and len(available) <= draft_cores:
            raise UserError(
                f"draft_cores is {draft_cores}, which leaves no core to the target: this process "
                f"has {len(available)}. Use draft_cores=0 to share all cores, or run on more cores."
            )
        self.target_cores = available[:-draft_cores] if draft_cores else []
        worker_cores = available[-draft_cores:] if draft_cores else []
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", "decoding.drafters.remote_process", str(theirs.fileno())]
        # a new session, so that Ctrl-C reaches this process only
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        if draft_cores:
            environment["OMP_NUM_THREADS"] = str(draft_cores)
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self._pipe, self._process)
        self._answer_due = False  # whether the answer to `begin` is unread
        self._send((self.kind, str(folder), named, worker_cores))
        about = self._receive()
        self.name = name or about["name"]
        self.num_layers, self.num_parameters = about["num_layers"], about["num_parameters"]
        self._longest: int = about["longest"]
        # by the worker's clock: seconds of the last proposal, and of all since `open`
        self.worker_seconds = self._chain_seconds = 0.0
        self._chain_steps = 0

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Make the worker read all tokens of each prompt except the last."""
        self._drop_answer()
        self._call("open", [list(prompt) for prompt in prompts_B], capacity)
        self._chain_seconds, self._chain_steps = 0.0, 0

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Make the worker read all tokens of each new prompt except the last."""
        self._drop_answer()
        self._call("join", [list(prompt) for prompt in prompts_B])

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Make the worker keep the first `kept` tokens and read the others except the last."""
        self._drop_answer()
        self._call("resume", list(prompt), kept)

    def _drop_answer(self) -> None:
        if self._answer_due:  # a decode failed between `begin` and `finish`
            self.enough()
            self._answer_due = False
            self._receive()

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft a chain for each row and wait for it."""
        self.begin(sequences_B, budgets_B, stopping_B, chooser)
        return self.finish()

    def begin(
        self,
        sequences_B: Tokens,
        budgets_B: Sequence[int],
        stopping_B: Policies,
        chooser: Chooser,
        least: int | None = None,
    ) -> None:
        """Start drafting a chain for each row; `finish` waits for it.

        The worker receives the policies and returns them updated. It also receives the repetition
        penalty, but not the caller's `allowed`, so it may draft tokens that `allowed` forbids.

        least: the number of tokens after which the chain continues, within the budgets, until
        `enough` is called; the policies are then ignored. None: the policies end the chain.
        """
        sequences_B = [list(sequence) for sequence in sequences_B]
        penalty = chooser.processors.repetition_penalty if chooser.processors is not None else 1.0
        begun, policies_B = chooser.begun, list(stopping_B)
        request = (sequences_B, list(budgets_B), policies_B, chooser.spec, begun, penalty, least)
        self._send(("propose", request))
        self._answer_due = True
        self._device, self._policies_B = chooser.device, stopping_B

    def enough(self) -> None:
        """Make the worker end its current chain."""
        self._send(("enough", ()))  # has no answer

    def finish(self) -> Proposal:
        """Wait for the chains that `begin` started and return them; update the policies."""
        answer = self._receive()
        self._answer_due = False
        tokens, counts_B, steps, q, policies_B, self.worker_seconds = answer
        self._chain_seconds += self.worker_seconds
        self._chain_steps += steps
        for policy, returned in zip(self._policies_B, policies_B, strict=True):
            vars(policy).update(vars(returned))
        tokens_BN = devices.tensor(tokens, self._device, torch.long).view(len(counts_B), -1)
        q_BNV = None if q is None else devices.tensor(q, self._device)
        return Proposal(tokens_BN, counts_B, None, q_BNV, steps)

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Keep the tokens that the target kept."""
        self._send(("rollback", (list(lengths_B),)))  # has no answer

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._send(("select", (list(rows),)))

    def time_step(self, frontier: int = 1) -> None:
        """Make the worker run one forward over one token per row, and wait for its answer."""
        self.time_steps(1)

    def time_steps(self, count: int) -> float:
        """Return the seconds of `count` forwards on the worker's clock, excluding messages.

        Messages are excluded because a chain of any length needs only one.
        """
        return float(self._call("time_steps", count))

    @property
    def seconds_a_step(self) -> float | None:
        """Mean seconds per draft step since `open`; None before the first step.

        Measured on the worker's clock: sampling included, messages excluded.
        """
        return self._chain_seconds / self._chain_steps if self._chain_steps else None

    def close(self) -> None:
        """End the worker."""
        self._end()

    def _call(self, name: str, *arguments: Any) -> Any:
        self._send((name, arguments))
        return self._receive()

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:  # a broken pipe, or one that was closed here
            raise self._ended() from error

    def _ended(self) -> UserError:
        return UserError(
            f"the drafter's worker ended with status {self._process.wait()}; its output is above. "
            f"Create the drafter again."
        )

    def _receive(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if kind == "error":
            raise UserError(value)
        return value


class RemoteParallelChain(RemoteChain):
    """A ParallelChain in a worker process; `named` of RemoteChain has its options."""

    kind = "decoding.drafters.parallel.ParallelChain"
    capabilities = replace(RemoteChain.capabilities, steps="round", stops_by_token=False)

    def width(self, gamma: int) -> int:
        """Return the length of the chain: gamma, at most the trained number of tokens."""
        return min(gamma, self._longest)


@runtime_checkable
class MultiProcessTarget(Protocol):
    """A target in several processes (decoding/models/distributed/parallel.py)."""

    @property
    def ranks(self) -> Any:
        """The processes, which can be bound to cores."""
        ...


@contextmanager
def separate_cores(drafter: RemoteChain, target: Target | None = None) -> Iterator[None]:
    """Bind this process to the cores that the worker does not use, one thread per core.

    The binding ends with the `with` block. The processes of a parallel target share these cores.
    Nothing is bound if the drafter has draft_cores=0. Raises UserError if a parallel target has
    more processes than there are cores.
    """
    if not drafter.target_cores:
        yield
        return
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    ranks = target.ranks if isinstance(target, MultiProcessTarget) else None
    target_cores = drafter.target_cores if ranks is None else ranks.bind(drafter.target_cores)
    os.sched_setaffinity(0, target_cores)
    torch.set_num_threads(min(threads, len(target_cores)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)
        if ranks is not None and ranks.running:
            ranks.unbind(sorted(cores))


def _end(pipe: Connection, process: "subprocess.Popen[bytes]") -> None:
    pipe.close()  # the worker ends when it reads the end of the pipe
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
