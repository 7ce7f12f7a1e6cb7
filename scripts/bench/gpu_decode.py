"""Part `decode`: tokens/s against the bandwidth of the card, complete rounds, and V(n).

Weights are random, which changes no time. Acceptance is about zero, and figures say so; they
measure the cost of each shape, eager, as recorded graphs and with compiled layers. The limit is a
copy inside the card's memory, with bytes read and written both counted; a sum, which only reads, is
reported too.

Shapes: V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from decoding import devices
from decoding.costs.roofline import forward_budget, round_budget
from decoding.drafters.chain import ChainDrafter
from decoding.loop import decode, prefill_batch
from decoding.models.native.model import NativeTarget
from decoding.models.native.weights import Weights
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from scripts.bench.random_models import Shape, random_weights

GOALS = {"target": 0.80, "drafter": 0.60, "overhead": 0.05}


@dataclass(frozen=True)
class Sizes:
    """Models and lengths of a measurement."""

    target: Shape
    drafters: dict[str, Shape]
    dtype: torch.dtype
    copy_bytes: int
    product_side: int
    prompt: int  # tokens
    tokens: int  # new ones of a timed run
    gamma: int
    contexts: tuple[int, ...]  # of V(n)
    widths: tuple[int, ...]
    repeats: int

    @property
    def max_length(self) -> int:
        """Number of positions that the target needs."""
        return max(self.contexts) + max(self.widths) + 64


REAL = Sizes(
    target=Shape(32, 4096, 32, 11008),  # LLaMA-7B
    # the released shallow, wide drafters of Decoding Speculative Decoding (arXiv 2402.01528), and
    # its deeper one
    drafters={
        "1 layer": Shape(1, 2560, 32, 11008),
        "3 layers": Shape(3, 2560, 32, 11008),
        "5 layers": Shape(5, 2560, 32, 11008),
        "12 layers": Shape(12, 2560, 20, 9280),
    },
    dtype=torch.bfloat16,
    copy_bytes=4 << 30,
    product_side=8192,
    prompt=64,
    tokens=128,
    gamma=4,
    contexts=(1024, 8192, 32768),
    widths=(*range(1, 17), 32, 64),
    repeats=5,
)
TOY = Sizes(
    target=Shape(2, 32, 4, 48, 2, 8, 64),
    drafters={"1 layer": Shape(1, 32, 4, 48, 4, 8, 64)},
    dtype=torch.float32,
    copy_bytes=1 << 16,
    product_side=64,
    prompt=8,
    tokens=12,
    gamma=2,
    contexts=(16, 40),
    widths=(1, 2, 4),
    repeats=2,
)


def seconds(action: Callable[[], Any], device: torch.device, times: int, rounds: int = 5) -> float:
    """Return the median seconds of a call, with `times` calls queued before each wait."""
    measured = []
    for _ in range(rounds + 1):
        devices.synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            action()
        devices.synchronize(device)
        measured.append((time.perf_counter() - began) / times)
    return median(measured[1:])


def limits(sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Measure the bytes/s of a copy and of a sum, and the operations/s of a matrix product."""
    source = torch.ones(sizes.copy_bytes // 4, device=device)
    other = torch.empty_like(source)
    side = sizes.product_side
    left, right = (torch.ones(side, side, dtype=sizes.dtype, device=device) for _ in range(2))
    multiplied = 2 * side**3 / seconds(lambda: left @ right, device, sizes.repeats)
    copied = 2 * sizes.copy_bytes / seconds(lambda: other.copy_(source), device, sizes.repeats)
    summed = sizes.copy_bytes / seconds(source.sum, device, sizes.repeats)
    return {"copy": copied, "sum": summed, "operations": multiplied}


def step_seconds(model: NativeTarget, width: int, context: int, repeats: int) -> float:
    """Measure a forward over `width` tokens after `context` ones, queued as in a draft."""
    tokens_BN = torch.ones(1, width, dtype=torch.long, device=model.device)
    model.slots.lengths_B = [context]  # the content of the cache does not change the time
    model.forward(tokens_BN)
    return seconds(lambda: model.forward(tokens_BN), model.device, repeats)


def autoregressive(model: NativeTarget, sizes: Sizes, limit: dict[str, float]) -> dict[str, float]:
    """Measure tokens/s of the decode loop and of queued forwards, and shares of the limits."""
    settings = Settings(max_new_tokens=sizes.tokens, ignore_eos=True)
    prompts = [[3] * sizes.prompt]
    decode(model, None, prompts, settings)  # warms up, and records every bucket
    runs = [decode(model, None, prompts, settings)[0] for _ in range(3)]
    in_loop = median(run.rounds / run.decode_seconds for run in runs)
    context = sizes.prompt + sizes.tokens // 2
    queued = 1 / step_seconds(model, 1, context, sizes.tokens // 2)
    budget = forward_budget(model.config, model.weights.dtype, 1, context)
    return {
        "tokens_per_second": in_loop,
        "share_of_limit": in_loop * budget.bytes_read / limit["copy"],
        "share_of_operations": in_loop * budget.operations / limit["operations"],
        "queued_forwards_per_second": queued,
        "queued_share_of_limit": queued * budget.bytes_read / limit["copy"],
        "megabytes_read": budget.bytes_read / 1e6,
        "megaflop": budget.operations / 1e6,
    }


def measure_rounds(
    target: NativeTarget, draft_model: NativeTarget, sizes: Sizes, limit: dict[str, float]
) -> dict[str, Any]:
    """Measure complete rounds of a chain, their parts alone, and the overhead."""
    gamma, context = sizes.gamma, sizes.prompt + sizes.tokens // 2
    runs, parts = [], []
    # rounds and parts in turn, so that a drift hits both; the first turn warms up and records
    for turn in range(4):
        run = full_rounds(target, ChainDrafter(model=draft_model), sizes)
        t_draft = step_seconds(draft_model, 1, context, gamma)
        part = (
            t_draft,
            step_seconds(target, gamma + 1, context, 5),
            step_seconds(target, 1, context, 5),
        )
        if turn:
            runs.append(run)
            parts.append(part)
    round_s = median(run.decode_seconds / run.rounds for run in runs)
    draft_s, verify_s, one_s = (median(column) for column in zip(*parts))
    steps = median(run.draft_steps / run.rounds for run in runs)
    budget = round_budget(target.config, draft_model.config, target.weights.dtype, gamma, context)
    return {
        "megabytes_read": budget.bytes_read / 1e6,
        "megaflop": budget.operations / 1e6,
        "share_of_limit": budget.bytes_read / limit["copy"] / round_s,
        "share_of_operations": budget.operations / limit["operations"] / round_s,
        "round_ms": 1e3 * round_s,
        "draft_steps": steps,
        "t_draft_ms": 1e3 * draft_s,
        "t_target_ms": {1: 1e3 * one_s, gamma + 1: 1e3 * verify_s},
        "cost_ratio": draft_s / one_s,
        "overhead": 1 - (steps * draft_s + verify_s) / round_s,
        "tau": median(len(run.tokens) / run.rounds for run in runs),
        "acceptance": "of random weights; no estimate for a trained drafter",
        # the block efficiency from which a round beats autoregressive decoding
        "tau_that_pays": round_s / one_s,
    }


def full_rounds(target: NativeTarget, drafter: ChainDrafter, sizes: Sizes) -> Generation:
    """Run only rounds of the full draft length, so that no other width is compiled."""
    settings = Settings(max_new_tokens=sizes.tokens, num_draft_tokens=sizes.gamma, ignore_eos=True)
    running = prefill_batch(target, drafter, [[3] * sizes.prompt], settings)
    (row,) = running.rows
    while row.limit - len(row.sequence) > 2 * sizes.gamma + 1:
        running.round()
    running.close()
    return row.generation


def measure_widths(
    target: NativeTarget, sizes: Sizes, context: int, limit: dict[str, float]
) -> dict[str, Any]:
    """Measure t_target(n) and V(n) after `context` tokens, and the share of the tighter limit."""
    budgets = {
        n: forward_budget(target.config, target.weights.dtype, n, context) for n in sizes.widths
    }
    least = {n: budget.seconds(limit["copy"], limit["operations"]) for n, budget in budgets.items()}
    taken = {n: step_seconds(target, n, context, sizes.repeats) for n in sizes.widths}
    return {
        "t_target_ms": {n: 1e3 * s for n, s in taken.items()},
        "V": {n: s / taken[sizes.widths[0]] for n, s in taken.items()},
        "share_of_limits": {n: least[n] / s for n, s in taken.items()},
    }


def judged(found: float, goal: float) -> dict[str, Any]:
    """Return a goal and whether it is met; a figure that should be small is given negated."""
    return {"goal": abs(goal), "met": found >= goal}


def one_execution(
    weights: Weights, execution: str, sizes: Sizes, limit: dict[str, float], figures: Any
) -> None:
    """Measure the target and each drafter alone, and their rounds."""
    device, capacity = str(weights.device), sizes.prompt + sizes.tokens + 2 * sizes.gamma + 2
    target = NativeTarget(weights, "target", None, None, execution)
    target.open(1, capacity)  # every later call fits into this cache, so layers are compiled once
    found = autoregressive(target, sizes, limit)
    figures.add(
        f"autoregressive, target, {execution}",
        {**found, **judged(found["share_of_limit"], GOALS["target"])},
    )
    for name, shape in sizes.drafters.items():
        if not figures.in_time(f"{name}, {execution}"):
            continue
        model = NativeTarget(
            random_weights(shape, sizes.dtype, device, 2048), name, None, None, execution
        )
        model.open(1, capacity)
        found = autoregressive(model, sizes, limit)
        found |= {
            **judged(found["share_of_limit"], GOALS["drafter"]),
            "parameters": model.num_parameters,
        }
        figures.add(f"autoregressive, {name}, {execution}", found)
        whole = measure_rounds(target, model, sizes, limit)
        figures.add(
            f"rounds, {name}, {execution}",
            {**whole, **judged(-whole["overhead"], -GOALS["overhead"])},
        )
        del model
        devices.release(weights.device)


def run(device: str, toy: bool, figures: Any) -> None:
    """Measure the limits, all executions and V(n)."""
    sizes, place = TOY if toy else REAL, torch.device(device)
    found = limits(sizes, place)
    figures.add("limits", {**found, "of bytes": "copy"})
    weights = random_weights(sizes.target, sizes.dtype, device, sizes.max_length)
    devices.release(place)
    for execution in ("graph", "eager"):
        one_execution(weights, execution, sizes, found, figures)
    for execution in ("graph", "eager"):
        target = NativeTarget(weights, "target", None, None, execution)
        target.open(1, sizes.max_length)
        for context in sizes.contexts:
            if figures.in_time(f"V at {context}, {execution}"):
                v_of_n = measure_widths(target, sizes, context, found)
                figures.add(f"V at {context}, {execution}", v_of_n)
        del target
        devices.release(place)
    if figures.in_time("compiled"):  # last, since a missing compiler ends it
        one_execution(weights, "compiled", sizes, found, figures)
