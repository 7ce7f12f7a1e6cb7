"""Milliseconds of a native forward, of a drafter's chain and of a round, eager beside fused.

    python scripts/bench/native_step.py target=models/smollm2_135m
    python scripts/bench/native_step.py target=models/smollm2_135m drafter=FOLDER temperature=1

A forward reads `tokens` new tokens in each of `rows` rows after `past` committed ones. A chain is a
draft of `gammas` tokens for one row: fused, it is one call of C++. Forward, chain and verification
(the forward over gamma + 1 tokens) are repeated back to back, so they find their weights in the
caches. A round drafts such a chain and verifies it; its rest is timed in the same rounds: what they
take outside the drafter's proposal and the target's forward. All sides take turns in every round of
measurement, and the medians count. The code of another revision is measured by the same command in
a checkout of it, if it has this script.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from decoding.devices import synchronize
from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.load import DTYPES, load_target
from decoding.models.native.model import EXECUTIONS, NativeTarget
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.stopping.base import Fixed
from jobs.paths import resolve_model
from scripts.bench import common
from scripts.bench.common import BenchOptions
from scripts.usage import run_script

Sides = dict[str, Callable[[], float]]  # name -> a measurement in milliseconds


@dataclass
class Options(BenchOptions):
    target: str = "embedded:target"  # model folder
    drafter: str = ""  # model folder of the chains; empty: forwards alone
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])  # of both models
    executions: list[str] = field(default_factory=lambda: ["eager", "fused"])  # to compare
    rows: list[int] = field(default_factory=lambda: [1, 8])  # rows of a forward
    tokens: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])  # new ones in each row
    past: list[int] = field(default_factory=lambda: [128])  # committed tokens in each row
    gammas: list[int] = field(default_factory=lambda: [2, 4, 8])  # lengths of a chain
    temperature: float = 0.0  # of chains and rounds; 0: greedy
    new_tokens: int = 64  # tokens of a generation whose rounds are timed
    calls: int = 5  # timings of a forward or a chain in each round, of which the median counts
    rounds: int = 7  # rounds of measurement
    name: str = "native_step"  # name of the results file


def median_ms(call: Callable[[], object], target: NativeTarget, calls: int) -> float:
    """Return the median milliseconds of a call, after one that does not count."""

    def finish() -> None:
        call()
        synchronize(target.device)

    return 1000 * statistics.median([common.measure_seconds(finish) for _ in range(calls + 1)][1:])


def forward_ms(target: NativeTarget, rows: int, tokens: int, past: int, calls: int) -> float:
    """Return the milliseconds of a forward over `tokens` new tokens in each row."""
    target.open(rows, past + tokens)
    target.slots.lengths_B = [past] * rows  # the content of the cache does not change the time
    tokens_BN = torch.ones(rows, tokens, dtype=torch.long, device=target.device)
    return median_ms(partial(target.forward, tokens_BN), target, calls)


def chain_ms(drafter: ChainDrafter, prompt: list[int], gamma: int, chosen: Options) -> float:
    """Return the milliseconds of drafting `gamma` tokens after the prompt."""
    model, warper = drafter.model, Warper(chosen.temperature)
    assert isinstance(model, NativeTarget)
    rule = "token" if chosen.temperature else "greedy"
    chooser = TokenChooser(warper, rule, 0, model.vocab_size, model.device)
    drafter.open([prompt], None, len(prompt) + gamma + 1)

    def draft() -> None:
        drafter.rollback([len(prompt) - 1])
        chooser.begin([0], [0], [len(prompt)], gamma + 1)
        drafter.propose([prompt], [gamma], [Fixed()], chooser)

    return median_ms(draft, model, chosen.calls)


class Stopwatch:
    """The seconds spent inside calls that it times."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, which adds its seconds."""

        def run(*given: Any, **named: Any) -> Any:
            began = perf_counter()
            found = call(*given, **named)
            synchronize(self.device)
            self.seconds += perf_counter() - began
            return found

        return run


def rest_ms(
    target: NativeTarget, drafter: ChainDrafter, prompt: list[int], gamma: int, chosen: Options
) -> float:
    """Return the mean milliseconds of a round outside the proposal and the target's forward."""
    clock = Stopwatch(target.device)
    with (
        patch.object(target, "forward", clock.timed(target.forward)),
        patch.object(drafter, "propose", clock.timed(drafter.propose)),
    ):
        done = generation(target, drafter, prompt, gamma, chosen)
    return 1000 * (done.decode_seconds - clock.seconds) / done.rounds


def round_ms(
    target: NativeTarget, drafter: ChainDrafter, prompt: list[int], gamma: int, chosen: Options
) -> float:
    """Return the mean milliseconds of a round at a fixed draft length."""
    done = generation(target, drafter, prompt, gamma, chosen)
    return 1000 * done.decode_seconds / done.rounds


def generation(
    target: NativeTarget, drafter: ChainDrafter, prompt: list[int], gamma: int, chosen: Options
) -> Generation:
    """Decode in rounds of a fixed draft length."""
    settings = Settings(
        chosen.new_tokens,
        chosen.temperature,
        num_draft_tokens=gamma,
        stopping="fixed",
        ignore_eos=True,
    )
    [done] = decode(target, drafter, [prompt], settings)
    return done


def load_native(folder: str, dtype: str, execution: str, device: str) -> NativeTarget:
    """Load a model on the native backend."""
    path = resolve_model(folder)
    model = load_target(path, dtype=dtype, device=device, execution=execution)
    assert isinstance(model, NativeTarget)
    return model


def sides_of(chosen: Options, dtype: str, execution: str) -> Sides:
    """Return the measurements of one dtype and execution."""
    target = load_native(chosen.target, dtype, execution, chosen.device)
    longest = max(chosen.past) + max([*chosen.tokens, chosen.new_tokens + max(chosen.gammas)]) + 1
    if longest > target.max_length:
        raise UserError(
            f"past, tokens, gammas and new_tokens need {longest} tokens, but the context of "
            f"{target.name} has {target.max_length}. Lower them."
        )
    sides: Sides = {
        f"forward, {execution}, {rows} x {tokens} after {past}": partial(
            forward_ms, target, rows, tokens, past, chosen.calls
        )
        for past in chosen.past
        for rows in chosen.rows
        for tokens in chosen.tokens
    }
    if not chosen.drafter:
        return sides
    drafter = ChainDrafter(model=load_native(chosen.drafter, dtype, execution, chosen.device))
    ids = torch.randint(target.vocab_size, (max(chosen.past),), generator=torch.manual_seed(0))
    for past in chosen.past:
        prompt = ids[:past].tolist()
        for gamma in chosen.gammas:
            place = f"{execution}, {gamma} after {past}"
            sides[f"chain, {place}"] = partial(chain_ms, drafter, prompt, gamma, chosen)
            sides[f"verify, {place}"] = partial(
                forward_ms, target, 1, gamma + 1, past, chosen.calls
            )
            sides[f"round, {place}"] = partial(round_ms, target, drafter, prompt, gamma, chosen)
            sides[f"rest, {place}"] = partial(rest_ms, target, drafter, prompt, gamma, chosen)
    return sides


def measure(chosen: Options, dtype: str) -> dict[str, float]:
    """Return the median milliseconds of every side."""
    sides: Sides = {}
    for execution in chosen.executions:
        sides |= sides_of(chosen, dtype, execution)
    with torch.inference_mode():
        return common.medians(common.take_turns(sides, chosen.rounds))


def main() -> None:
    """Measure every dtype, and write the results after each."""
    chosen = common.read_options(Options, dtypes=DTYPES, executions=EXECUTIONS)
    figures = {}
    for dtype in chosen.dtypes:
        print(dtype, file=sys.stderr)
        figures[dtype] = measure(chosen, dtype)
        common.save(chosen.name, chosen, figures, show=False)
    common.save(chosen.name, chosen, figures)


if __name__ == "__main__":
    run_script(main)
