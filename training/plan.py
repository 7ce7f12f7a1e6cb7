"""Bounds that a configuration sets for a run, and descriptions of the planned run."""

import math
from typing import NamedTuple

from jobs.amounts import hours, operations
from training.bounds import Bounds
from training.config import LoopConfig
from training.data.packing import PackedData


def bounds_of(loop: LoopConfig, data: PackedData) -> Bounds:
    """Return the bounds that a configuration sets; if it sets none, one pass over the data."""
    steps = float(loop.max_steps or math.inf)
    if epochs := resolve_max_epochs(loop):
        steps = min(steps, max(1, math.ceil(epochs * data.steps_per_epoch)))
    return Bounds(steps, loop.max_tokens or math.inf, loop.max_seconds or math.inf)


# A number between two that were measured: SmolLM2's pruned drafter accepted no more after 28 passes
# over 697 chats than after 6 (docs/experiments/2026-11-30-an-hour-smollm2.md).
MANY_PASSES = 10


def describe_passes(passes: float, max_epochs: float | None) -> str:
    """Return a note if a run has read its data many times, which nobody asked for; else ""."""
    if passes <= MANY_PASSES or max_epochs is not None:
        return ""
    return (
        f"{passes:.0f} passes over the data: so many teach it by heart. More data is likely to "
        f"help more than more time: further chats, or a larger data.max_samples."
    )


def resolve_max_epochs(loop: LoopConfig) -> float:
    """Return the bound on passes over the data; 0 if there is none."""
    if loop.max_epochs is not None:
        return loop.max_epochs
    return 0.0 if loop.max_steps or loop.max_tokens or loop.max_seconds else 1.0


class TokenPlan(NamedTuple):
    """Estimated size of a training run, made by a dry run without reading data."""

    tokens: int  # 0: unknown until the data is read
    words: str


def plan_tokens(
    loop: LoopConfig, flops_a_token: float, tflops: float, pass_tokens: int = 0
) -> TokenPlan:
    """Estimate the number of tokens that a run will train on.

    tflops: the assumed speed, which turns loop.max_seconds into tokens. pass_tokens: tokens of one
    pass over the data; 0: unknown.
    """
    words = [f"at most {loop.max_seconds:g} s"] if loop.max_seconds else []
    epochs = resolve_max_epochs(loop)
    by_steps, by_passes = loop.max_steps * loop.tokens_per_step, int(epochs * pass_tokens)
    by_seconds = int(loop.max_seconds * tflops * 1e12 / flops_a_token)
    tokens = min(
        (count for count in (by_steps, by_passes, loop.max_tokens, by_seconds) if count), default=0
    )
    unknown = bool(epochs) and not pass_tokens
    if unknown:
        words.append(f"{'at most ' if tokens else ''}{epochs:g} epoch{'s' if epochs != 1 else ''}")
    if tokens:
        # a bound that another may undercut is no promise
        most = "at most " if unknown or (loop.max_seconds and tokens != by_seconds) else ""
        about = "" if tokens in (by_steps, by_passes) else "about "
        steps = f"{about}{-(-tokens // loop.tokens_per_step):,} steps"
        words.append(f"{most}{tokens:,} tokens in {steps}")
    return TokenPlan(tokens, ", ".join(words))


def describe_work(what: str, flops: float, tflops: float) -> str:
    """Return `what`, its FLOPs and the hours that they take at the assumed speed `tflops`."""
    seconds = flops / tflops / 1e12
    return f"{what}, {operations(flops)}, {hours(seconds)} at {tflops:g} TFLOP/s (assumed_tflops)"


def print_work(what: str, flops: float, tflops: float) -> None:
    """Print what `describe_work` returns."""
    print(describe_work(what, flops, tflops))


def print_plan(
    loop: LoopConfig, flops_a_token: float, tflops: float, key: str, pass_tokens: int = 0
) -> float:
    """Print the plan of a run and return its FLOPs; 0 if the number of tokens is unknown.

    key: the option that sets the number of tokens. tflops, pass_tokens: see `plan_tokens`.
    """
    plan = plan_tokens(loop, flops_a_token, tflops, pass_tokens)
    flops = float(flops_a_token * plan.tokens)
    if plan.tokens:
        print_work(f"plan: {plan.words}", flops, tflops)
    else:
        print(f"plan: {plan.words}; set {key} to estimate the cost without reading the data")
    return flops


def describe_plan(loop: LoopConfig, data: PackedData) -> str:
    """Describe a run, such as `at most 240 s, at most 2,000 steps of 4,096 tokens, 6.1 epochs`."""
    bounds, row_tokens = bounds_of(loop, data), data.rows_per_step * data.capacity
    words = [f"at most {loop.max_seconds:g} s"] if bounds.has_seconds else []
    steps, about = bounds.steps, ""
    if loop.max_tokens:
        words.append(f"at most {loop.max_tokens:,} tokens")
        by_tokens = math.ceil(loop.max_tokens / (data.tokens / len(data.rows) * data.rows_per_step))
        steps, about = min((steps, ""), (by_tokens, "about "))
    if steps == math.inf:
        return f"{words[0]}, in steps of {row_tokens:,} tokens"
    most = "at most " if bounds.has_seconds else ""
    words.append(f"{most}{about}{steps:,.0f} steps of {row_tokens:,} tokens")
    return ", ".join([*words, f"{steps / data.steps_per_epoch:.2f} epochs"])
