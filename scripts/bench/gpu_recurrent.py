"""Part `recurrent`: training and rounds of a recurrent head of a 7B target.

Weights are random, in the published shapes: LLaMA-7B, and a head of two residual blocks with
recurrence. Times do not depend on them; acceptance does (it is about zero), so tokens/s at the
published tokens a round are marked as a projection. The length of a beam counts drafted tokens; the
published beam_length also counts the token before them, so that 4 here are 5 there. The training is
in scripts/bench/gpu_recurrent_training.py.

Published figures: arXiv 2403.09919v5, Vicuna-7B on an H100.

Shapes: B rows, N nodes drafted.
"""

import math
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from decoding import devices
from decoding.loop import decode, prefill_batch
from decoding.models.native.model import NativeTarget
from decoding.models.native.weights import Weights
from decoding.rounds.batch import Batch
from decoding.rounds.settings import Settings
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import RecurrentHead
from scripts.bench import gpu_recurrent_training
from scripts.bench.gpu_decode import judged, seconds
from scripts.bench.gpu_recurrent_training import training
from scripts.bench.random_models import Shape, random_head, random_weights

GOAL_ROUND_MS, PUBLISHED_ROUND_MS = 9.0, 32.0  # 64 beams of 4, one row
PUBLISHED_TOKENS_A_ROUND = 3.58  # 64 beams, one row, a head distilled from its target
# tokens/s of each of 8 rows, and of all
PUBLISHED_BATCH = {"32 beams": (73.4, 587), "64 beams": (54.2, 433)}
BLOCKS = 2  # residual blocks of the head


@dataclass(frozen=True)
class Sizes:
    """Models, beams and lengths of a measurement."""

    target: Shape
    dtype: torch.dtype
    prompt: int  # tokens
    tokens: int  # new ones of a timed run
    widths: tuple[int, ...]  # beams
    lengths: tuple[int, ...]  # drafted tokens of a beam, the first being the published one
    batch: int  # rows of the published command
    batch_width: int  # beams of the published command
    max_length: int  # tokens of the target's context
    parts_every: int  # rounds between measurements of the parts
    repeats: int  # runs after the one that records every shape

    @property
    def capacity(self) -> int:
        """Largest number of slots that a row needs."""
        return (
            self.prompt + self.tokens + max(*self.widths, self.batch_width) * max(self.lengths) + 1
        )


REAL = Sizes(
    target=Shape(32, 4096, 32, 11008),  # LLaMA-7B
    dtype=torch.bfloat16,
    prompt=64,
    tokens=64,
    widths=(1, 4, 8, 16, 45, 64),
    lengths=(4, 2),
    batch=8,
    batch_width=45,
    max_length=2048,
    parts_every=16,
    repeats=2,
)
TOY = Sizes(
    target=Shape(2, 32, 4, 48, 2, 8, 64),
    dtype=torch.float32,
    prompt=6,
    tokens=12,
    widths=(1, 3),
    lengths=(2,),
    batch=2,
    batch_width=3,
    max_length=64,
    parts_every=8,
    repeats=1,
)


def prompts(sizes: Sizes, rows: int) -> list[list[int]]:
    """Return different prompts of equal length."""
    return [
        [(7 * row + place) % sizes.target.vocab_size for place in range(sizes.prompt)]
        for row in range(rows)
    ]


def autoregressive(target: NativeTarget, sizes: Sizes, rows: int) -> float:
    """Return the milliseconds of a step without a drafter, of all rows."""
    settings = Settings(max_new_tokens=sizes.tokens, ignore_eos=True)
    runs = [
        decode(target, None, prompts(sizes, rows), settings)[0] for _ in range(sizes.repeats + 1)
    ][1:]
    return 1e3 * median(run.decode_seconds / run.rounds for run in runs)


def measure_parts(running: Batch, length: int) -> tuple[float, float]:
    """Measure the draft and the target's forward alone, in milliseconds, without committing."""
    rows, target, drafter = running.rows, running.target, running.drafter
    assert drafter is not None
    given = (
        [row.sequence for row in rows],
        [length] * len(rows),
        [row.stopping for row in rows],
        running.chooser,
    )
    proposal = drafter.propose(*given)
    tips_B1 = devices.tensor([row.sequence[-1:] for row in rows], target.device)
    tokens_BN, parents_BN = torch.cat((tips_B1, proposal.tokens_BN), 1), None
    if proposal.parents_BN is not None:
        parents_BN = torch.cat((torch.full_like(tips_B1, -1), proposal.parents_BN + 1), 1)
    draft_s = seconds(lambda: drafter.propose(*given), target.device, 3, 3)
    target_s = seconds(lambda: target.forward(tokens_BN, parents_BN), target.device, 3, 3)
    return 1e3 * draft_s, 1e3 * target_s


def measure_rounds(
    target: NativeTarget,
    drafter: RecurrentDrafter,
    length: int,
    sizes: Sizes,
    rows: int = 1,
    **ways: Any,
) -> dict[str, Any]:
    """Measure rounds of the full length, their parts, and the rest, in milliseconds."""
    settings = Settings(
        max_new_tokens=sizes.tokens, num_draft_tokens=length, ignore_eos=True, **ways
    )
    round_ms: list[float] = []
    part_ms: list[tuple[float, float]] = []
    for turn in range(sizes.repeats + 1):  # the first run records every shape
        if turn == 1:
            round_ms.clear()
            part_ms.clear()
        running = prefill_batch(target, drafter, prompts(sizes, rows), settings)
        made = running.rows[0].generation
        while min(row.limit - len(row.sequence) for row in running.rows) > 2 * length + 1:
            before = made.decode_seconds
            running.round()
            round_ms.append(1e3 * (made.decode_seconds - before))
            if made.rounds % sizes.parts_every == 1:
                part_ms.append(measure_parts(running, length))
        running.close()
    draft_ms, target_ms = (median(column) for column in zip(*part_ms))
    return {
        "round_ms": median(round_ms),
        "draft_ms": draft_ms,
        "target_ms": target_ms,
        "rest_ms": median(round_ms) - draft_ms - target_ms,
        "nodes": made.verified / made.rounds,
        "tau": mean(len(row.generation.tokens) / row.generation.rounds for row in running.rows),
        "acceptance": "of random weights; no estimate for a trained head",
    }


def one_row(
    target: NativeTarget, head: RecurrentHead, length: int, sizes: Sizes, figures: Any
) -> None:
    """Measure rounds of one row by beam width."""
    plain_ms = autoregressive(target, sizes, 1)
    figures.add(f"autoregressive, one row, {target.execution}", {"token_ms": plain_ms})
    for width in sizes.widths:
        name = f"rounds, {width} beams of {length}, {target.execution}"
        if not figures.in_time(name):
            continue
        drafter = RecurrentDrafter(head=head, beam_width=width, execution=target.execution)
        found = measure_rounds(target, drafter, length, sizes)
        found["tau_that_pays"] = found["round_ms"] / plain_ms
        if width == max(sizes.widths) and length == sizes.lengths[0]:
            found |= {
                "published_round_ms": PUBLISHED_ROUND_MS,
                **judged(-found["round_ms"], -GOAL_ROUND_MS),
            }
        figures.add(name, found)


def one_batch(target: NativeTarget, head: RecurrentHead, sizes: Sizes, figures: Any) -> None:
    """Measure the published command's setting, greedy and at temperature 1."""
    plain_ms, length = autoregressive(target, sizes, sizes.batch), sizes.lengths[0]
    plain = {
        "tokens_per_second_of_a_row": 1e3 / plain_ms,
        "tokens_per_second": sizes.batch * 1e3 / plain_ms,
    }
    figures.add(f"autoregressive, {sizes.batch} rows, {target.execution}", plain)
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature 1": {"temperature": 1.0, "verify": "token"},
    }
    for way, named in ways.items():
        name = (
            f"{sizes.batch} rows, {sizes.batch_width} beams of {length}, {way}, {target.execution}"
        )
        if not figures.in_time(name):
            continue
        drafter = RecurrentDrafter(
            head=head, beam_width=sizes.batch_width, execution=target.execution
        )
        found = measure_rounds(target, drafter, length, sizes, sizes.batch, **named)
        per_second = 1e3 / found["round_ms"]
        projected = per_second * PUBLISHED_TOKENS_A_ROUND
        found |= {
            "rounds_per_second": per_second,
            "tokens_per_second_of_a_row": per_second * found["tau"],
            "tokens_per_second": sizes.batch * per_second * found["tau"],
            "projected_tokens_per_second_of_a_row": projected,
            "projected_tokens_per_second": sizes.batch * projected,
            "projected": f"at the published {PUBLISHED_TOKENS_A_ROUND} tokens a round, of 64 "
            f"beams; not measured here",
            "published_tokens_per_second": PUBLISHED_BATCH,
        }
        figures.add(name, found)


def open_target(weights: Weights, execution: str, sizes: Sizes) -> NativeTarget:
    """Return a target whose cache fits all measurements, so that recordings are kept."""
    target = NativeTarget(weights, "target", None, None, execution)
    target.open(sizes.batch, sizes.capacity)
    return target


def run(device: str, toy: bool, figures: Any) -> None:
    """Measure training and rounds, the figures of the goals first."""
    sizes, place = TOY if toy else REAL, torch.device(device)
    found = training(gpu_recurrent_training.TOY if toy else gpu_recurrent_training.REAL, device)
    figures.add("training", found)
    finite = all(map(math.isfinite, found["losses"] + found["gradient_norms"]))
    figures.expect("the training's losses and gradients are finite", finite)
    devices.release(place)
    weights = random_weights(sizes.target, sizes.dtype, device, sizes.max_length)
    head = random_head(sizes.target, BLOCKS, sizes.dtype, device).requires_grad_(False)
    devices.peak_bytes(place)
    for length in sizes.lengths:
        for execution in ("graph", "eager"):
            target = open_target(weights, execution, sizes)
            one_row(target, head, length, sizes, figures)
            if length == sizes.lengths[0]:
                one_batch(target, head, sizes, figures)
            del target
            devices.release(place)
    figures.add("decoding_peak_bytes", devices.peak_bytes(place))
