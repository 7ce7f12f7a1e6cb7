"""Part `decode`: tokens/s against the bandwidth of the card, complete rounds, and V(n).

Weights are random, which changes no time. Acceptance is about zero, as the figures note. They
measure the cost of each shape, eager, as recorded graphs and with compiled layers. The limits are
the fastest plain read of memory and a matrix product (decoding/costs/machine_limits.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig

from decoding import devices
from decoding.costs.machine_limits import Limits, fastest, measure_limits
from decoding.costs.roofline import ForwardBudget, forward_budget, round_budget
from decoding.costs.timing import time_parts
from decoding.drafters.chain import ChainDrafter
from decoding.loop import decode, prefill_batch
from decoding.models.native.model import NativeTarget
from decoding.models.native.weights import Weights
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from scripts.bench.random_models import LLAMA_7B, TOY_DRAFTER, TOY_TARGET, llama, random_weights

GOALS = {"target": 0.80, "drafter": 0.60, "overhead": 0.05}


@dataclass(frozen=True)
class Sizes:
    """Models and lengths of a measurement."""

    target: LlamaConfig
    drafters: Mapping[str, LlamaConfig]
    dtype: torch.dtype
    prompt: int  # tokens
    tokens: int  # new ones of a timed run
    gamma: int
    contexts: tuple[int, ...]  # of V(n)
    widths: tuple[int, ...]
    compiled_widths: tuple[int, ...]
    repeats: int
    limit_seconds: float  # for each measurement of a limit

    @property
    def context(self) -> int:
        """Mean number of committed tokens of a timed run."""
        return self.prompt + self.tokens // 2


REAL = Sizes(
    target=LLAMA_7B,
    # the released shallow, wide drafters of Decoding Speculative Decoding (arXiv 2402.01528), and
    # its deeper one
    drafters={
        "1 layer": llama(1, 2560, 32, 11008),
        "3 layers": llama(3, 2560, 32, 11008),
        "5 layers": llama(5, 2560, 32, 11008),
        "12 layers": llama(12, 2560, 20, 9280),
    },
    dtype=torch.bfloat16,
    prompt=64,
    tokens=128,
    gamma=4,
    contexts=(1024, 8192, 32768),
    widths=(*range(1, 9), 12, 16, 32, 64),
    compiled_widths=(1, 5, 16),
    repeats=25,
    limit_seconds=0.5,
)
TOY = Sizes(
    target=TOY_TARGET,
    drafters={"1 layer": TOY_DRAFTER},
    dtype=torch.float32,
    prompt=8,
    tokens=12,
    gamma=2,
    contexts=(16, 40),
    widths=(1, 2, 4),
    compiled_widths=(1, 2),
    repeats=2,
    limit_seconds=0.001,
)


def judge(found: float, goal: float) -> dict[str, Any]:
    """Return the goal and whether `found` reaches it; pass both negated if less is better."""
    return {"goal": abs(goal), "met": found >= goal}


def shares(budget: ForwardBudget, per_second: float, limits: Limits) -> dict[str, float]:
    """Return the bytes and operations of a forward or round, and the shares of the limits reached.

    per_second: measured number of them per second.
    """
    return {
        "megabytes_read": budget.bytes_read / 1e6,
        "megaflop": budget.operations / 1e6,
        "share_of_limit": per_second * budget.bytes_read / limits.bytes_a_second,
        "share_of_operations": per_second * budget.operations / limits.operations_a_second,
    }


def measure_autoregressive(model: NativeTarget, sizes: Sizes, limits: Limits) -> dict[str, Any]:
    """Measure tokens/s of the decode loop and of queued forwards, and shares of the limits."""
    settings = Settings(max_new_tokens=sizes.tokens, ignore_eos=True)
    prompts = [[3] * sizes.prompt]
    decode(model, None, prompts, settings)  # warms up, and records every bucket
    runs = [decode(model, None, prompts, settings)[0] for _ in range(3)]
    in_loop = median(run.rounds / run.decode_seconds for run in runs)
    tokens_BN = torch.ones(1, 1, dtype=torch.long, device=model.device)
    model.slots.lengths_B = [sizes.context]  # the content of the cache does not change the time
    queued = fastest(partial(model.forward, tokens_BN), str(model.device), sizes.tokens // 2)
    budget = forward_budget(model.config, model.weights.dtype, 1, sizes.context)
    return {
        "tokens_per_second": in_loop,
        **shares(budget, in_loop, limits),
        "queued_forwards_per_second": queued,
        "queued_share_of_limit": shares(budget, queued, limits)["share_of_limit"],
    }


def measure_rounds(
    target: NativeTarget, draft_model: NativeTarget, sizes: Sizes, limits: Limits
) -> dict[str, Any]:
    """Measure complete rounds of a chain, their parts timed alone, and the overhead."""
    gamma, drafter = sizes.gamma, ChainDrafter(model=draft_model)
    runs, draft_ms, target_ms = [], [], []
    # rounds and parts in turn, so that a drift affects both; the first turn warms up and records
    for turn in range(4):
        run = run_full_rounds(target, drafter, sizes)
        parts = time_parts(
            target,
            drafter,
            [3],
            widths=[gamma + 1],
            context=sizes.context,
            repeats=sizes.repeats,
        )
        if turn:
            runs.append(run)
            draft_ms.append(parts.t_draft_ms or 0.0)
            target_ms.append(parts.t_target_ms)
    round_ms = median(1e3 * run.decode_seconds / run.rounds for run in runs)
    steps = median(run.draft_steps / run.rounds for run in runs)
    t_draft = median(draft_ms)
    t_target = {n: median(each[n] for each in target_ms) for n in (1, gamma + 1)}
    models = target.config, draft_model.config, target.weights.dtype
    return {
        **shares(round_budget(*models, gamma, sizes.context), 1e3 / round_ms, limits),
        "round_ms": round_ms,
        "draft_steps": steps,
        "t_draft_ms": t_draft,
        "t_target_ms": t_target,
        "cost_ratio": t_draft / t_target[1],
        "overhead": 1 - (steps * t_draft + t_target[gamma + 1]) / round_ms,
        "tau": median(run.block_efficiency for run in runs),
        "acceptance": "of random weights; no estimate for a trained drafter",
        # the block efficiency from which a round beats autoregressive decoding
        "tau_that_pays": round_ms / t_target[1],
    }


def run_full_rounds(target: NativeTarget, drafter: ChainDrafter, sizes: Sizes) -> Generation:
    """Decode in rounds of the full draft length alone, so that no other width is compiled."""
    settings = Settings(max_new_tokens=sizes.tokens, num_draft_tokens=sizes.gamma, ignore_eos=True)
    running = prefill_batch(target, drafter, [[3] * sizes.prompt], settings)
    (row,) = running.rows
    while row.limit - len(row.sequence) > 2 * sizes.gamma + 1:
        running.round()
    running.close()
    return row.generation


def measure_widths(
    target: NativeTarget, widths: Sequence[int], repeats: int, context: int, limits: Limits
) -> dict[str, Any]:
    """Measure t_target(n) and V(n) after `context` tokens, and compare them with the limits.

    share_of_limits: the least time that bandwidth and arithmetic allow, over the measured time.
    """
    t_target_ms = time_parts(
        target, None, [3], widths=widths, context=context, repeats=repeats
    ).t_target_ms
    least = {
        n: forward_budget(target.config, target.weights.dtype, n, context).seconds(
            limits.bytes_a_second, limits.operations_a_second
        )
        for n in t_target_ms
    }
    return {
        "t_target_ms": t_target_ms,
        "V": {n: ms / t_target_ms[1] for n, ms in t_target_ms.items()},
        "share_of_limits": {n: 1e3 * least[n] / ms for n, ms in t_target_ms.items()},
    }


def open_model(weights: Weights, name: str, execution: str, capacity: int) -> NativeTarget:
    """Return a model whose cache fits all later calls, so that layers are compiled once."""
    model = NativeTarget(weights, name, max(capacity, 2048), execution=execution)
    model.open(1, capacity)
    return model


def measure_execution(
    weights: Weights, execution: str, sizes: Sizes, limits: Limits, figures: Any
) -> None:
    """Measure and record the target and each drafter alone, and their rounds, in one execution."""
    capacity = sizes.prompt + sizes.tokens + 2 * sizes.gamma + 2
    target = open_model(weights, "target", execution, capacity)
    found = measure_autoregressive(target, sizes, limits)
    found |= judge(found["share_of_limit"], GOALS["target"])
    figures.add(f"autoregressive, target, {execution}", found)
    for name, config in sizes.drafters.items():
        if not figures.in_time(f"{name}, {execution}"):
            continue
        draft_weights = random_weights(config, sizes.dtype, str(weights.device))
        model = open_model(draft_weights, name, execution, capacity)
        found = measure_autoregressive(model, sizes, limits)
        found |= judge(found["share_of_limit"], GOALS["drafter"])
        found["parameters"] = model.num_parameters
        figures.add(f"autoregressive, {name}, {execution}", found)
        found = measure_rounds(target, model, sizes, limits)
        found |= judge(-found["overhead"], -GOALS["overhead"])
        figures.add(f"rounds, {name}, {execution}", found)
        del model, draft_weights
        devices.release(weights.device)


def run(device: str, toy: bool, figures: Any, executions: Sequence[str]) -> None:
    """Measure and record the machine's limits, then decoding and V(n) in each execution."""
    sizes, place = TOY if toy else REAL, torch.device(device)
    weights = random_weights(sizes.target, sizes.dtype, device)
    devices.release(place)
    step = forward_budget(weights.config, sizes.dtype, 1, sizes.context)
    limits = measure_limits(step.weight_bytes, sizes.dtype, device, sizes.limit_seconds)
    figures.add("limits", asdict(limits))
    for execution in executions:
        # compiling takes long, so it does not start late
        if execution != "compiled" or figures.in_time(execution):
            measure_execution(weights, execution, sizes, limits, figures)
        capacity = max(sizes.contexts) + max(sizes.widths) + 64
        target = open_model(weights, "target", execution, capacity)
        # compiling a form for each width would take minutes
        widths = sizes.compiled_widths if execution == "compiled" else sizes.widths
        for context in sizes.contexts:
            if figures.in_time(f"V at {context}, {execution}"):
                found = measure_widths(target, widths, sizes.repeats, context, limits)
                figures.add(f"V at {context}, {execution}", found)
        del target
        devices.release(place)
