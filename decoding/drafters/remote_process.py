"""The worker process of decoding/drafters/remote.py, which holds the model and answers requests.

Python runs this module by name; the package only imports the other end of the pipe.
"""

import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.registry import imported
from decoding.errors import UserError
from decoding.interfaces import Stopping, TokenConfidence
from decoding.sampling.logits_processors import make_processors
from decoding.sampling.token_chooser import TokenChooser
from decoding.stopping.base import Fixed

LONGEST = 10**9  # a draft length without a limit


class _UntilMessage(Fixed):
    """A policy that drafts `least` tokens, and more until a message arrives."""

    reads = "time"

    def __init__(self, least: int, pipe: Connection) -> None:
        self._least, self._pipe = least, pipe

    def more(self, depth: int, token: TokenConfidence | None) -> bool:
        """Return whether the chain is shorter than `least` or no message has arrived."""
        return depth < self._least or not self._pipe.poll()


class _Worker:
    """The model of the worker process, and its answers to requests."""

    def __init__(self, kind: str, folder: str, named: dict[str, Any], pipe: Connection) -> None:
        self.drafter: ChainDrafter = imported(kind)(folder, **named)
        self._pipe = pipe
        self._choosers: dict[Any, TokenChooser] = {}

    def time_steps(self, count: int) -> float:
        """Return the seconds of `count` forwards over one token per row."""
        began = perf_counter()
        for _ in range(count):
            self.drafter.time_step()
        devices.synchronize(self.drafter.model.device)
        return perf_counter() - began

    def propose(
        self,
        sequences_B: list[list[int]],
        budgets_B: list[int],
        stopping_B: list[Stopping],
        spec: Any,
        begun: Any,
        repetition_penalty: float,
        least: int | None,
    ) -> Any:
        """Draft chains for `RemoteChain.begin`; return what `RemoteChain.finish` reads."""
        began = perf_counter()
        key = (spec, repetition_penalty)
        if key not in self._choosers:
            warper, rule, seed, vocab_size = spec
            processors = make_processors(repetition_penalty, None)
            device = self.drafter.model.device
            made = TokenChooser(warper, rule, seed, vocab_size, device, processors)
            self._choosers = {key: made}
        chooser = self._choosers[key]
        chooser.begin(*begun)
        ends_B = (
            stopping_B if least is None else [_UntilMessage(least, self._pipe)] * len(stopping_B)
        )
        chunk = self.drafter.propose(sequences_B, budgets_B, ends_B, chooser)
        q = None if chunk.q_BNV is None else chunk.q_BNV.cpu().numpy()
        tokens, seconds = chunk.tokens_BN.tolist(), perf_counter() - began
        return tokens, chunk.counts_B, chunk.steps, q, stopping_B, seconds


@torch.inference_mode()
def serve(pipe: Connection) -> None:
    """Load the model that the first message names, and answer requests until the pipe closes."""
    kind, folder, named, cores = pipe.recv()
    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
    try:
        worker = _Worker(kind, folder, named, pipe)
    except UserError as error:
        pipe.send(("error", str(error)))
        return
    drafter = worker.drafter
    about = {key: getattr(drafter, key) for key in ("name", "num_layers", "num_parameters")}
    pipe.send(("value", {**about, "longest": drafter.width(LONGEST)}))
    silent: dict[str, Callable[..., Any]] = {
        "rollback": drafter.rollback,
        "select": drafter.select,
        "enough": lambda: None,  # arrived after its chain was complete
    }
    answers: dict[str, Callable[..., Any]] = {
        "open": lambda prompts_B, capacity: drafter.open(prompts_B, None, capacity),
        "join": lambda prompts_B: drafter.join(prompts_B, None),
        "resume": lambda prompt, kept: drafter.resume(prompt, kept, None),
        "propose": worker.propose,
        "time_steps": worker.time_steps,
    }
    while True:
        try:
            name, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        if name in silent:
            silent[name](*arguments)
            continue
        try:
            pipe.send(("value", answers[name](*arguments)))
        except UserError as error:
            pipe.send(("error", str(error)))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
