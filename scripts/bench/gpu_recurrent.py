"""Part `recurrent`: training and rounds of a recurrent head of a 7B target.

Weights are random, in the published shapes: LLaMA-7B, and a head of two residual blocks with
recurrence. Times do not depend on them; acceptance does (it is about zero), so tokens/s at the
published block efficiency are marked as a projection. The length of a beam counts drafted tokens;
the published beam_length also counts the token before them, so a length of 4 here is 5 there. The
training is in scripts/bench/gpu_recurrent_training.py.

Published figures: arXiv 2403.09919v5, Vicuna-7B on an H100.

Shapes: B rows, N nodes drafted.
"""

import math
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
from transformers import LlamaConfig

from decoding import devices
from decoding.costs.machine_limits import fastest
from decoding.interfaces import Drafter
from decoding.loop import decode, prefill_batch
from decoding.models.native.model import NativeTarget
from decoding.rounds.batch import Batch
from decoding.rounds.settings import Settings
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import RecurrentHead
from scripts.bench import gpu_recurrent_training
from scripts.bench.gpu_decode import judge
from scripts.bench.gpu_recurrent_training import BLOCKS, measure_head_training
from scripts.bench.random_models import LLAMA_7B, TOY_TARGET, random_head, random_weights

GOAL_ROUND_MS, PUBLISHED_ROUND_MS = 9.0, 32.0  # 64 beams of 4, one row
PUBLISHED_TOKENS_A_ROUND = 3.58  # 64 beams, one row, a head distilled from its target
# tokens/s of each of 8 rows, and of all
PUBLISHED_BATCH = {"32 beams": (73.4, 587), "64 beams": (54.2, 433)}


@dataclass(frozen=True)
class Sizes:
    """Models, beams and lengths of a measurement."""

    target: LlamaConfig
    dtype: torch.dtype
    prompt: int  # tokens
    tokens: int  # new ones of a timed run
    widths: tuple[int, ...]  # beams
    lengths: tuple[int, ...]  # drafted tokens of a beam, the first being the published one
    batch: int  # rows of the published command
    batch_width: int  # beams of the published command
    parts_every: int  # rounds between measurements of the parts
    repeats: int  # runs after the one that records every shape

    @property
    def capacity(self) -> int:
        """Maximum number of cache slots that a row needs."""
        nodes = max(*self.widths, self.batch_width) * max(self.lengths)
        return self.prompt + self.tokens + nodes + 1


REAL = Sizes(
    target=LLAMA_7B,
    dtype=torch.bfloat16,
    prompt=64,
    tokens=64,
    widths=(1, 4, 8, 16, 45, 64),
    lengths=(4, 2),
    batch=8,
    batch_width=45,
    parts_every=16,
    repeats=2,
)
TOY = Sizes(
    target=TOY_TARGET,
    dtype=torch.float32,
    prompt=6,
    tokens=12,
    widths=(1, 3),
    lengths=(2,),
    batch=2,
    batch_width=3,
    parts_every=8,
    repeats=1,
)


def prompts(sizes: Sizes, rows: int) -> list[list[int]]:
    """Return `rows` different prompts of sizes.prompt tokens."""
    return [
        [(7 * row + place) % sizes.target.vocab_size for place in range(sizes.prompt)]
        for row in range(rows)
    ]


def measure_step(target: NativeTarget, sizes: Sizes, rows: int) -> float:
    """Return the median milliseconds of an autoregressive step of a batch of `rows` rows."""
    settings = Settings(max_new_tokens=sizes.tokens, ignore_eos=True)
    asked, repeats = prompts(sizes, rows), range(sizes.repeats + 1)
    runs = [decode(target, None, asked, settings)[0] for _ in repeats][1:]
    return 1e3 * median(run.decode_seconds / run.rounds for run in runs)


def measure_parts(running: Batch, length: int) -> tuple[float, float]:
    """Return the milliseconds of a proposal and of the target's forward over it, timed alone.

    Nothing is committed. length: drafted tokens of a beam.
    """
    rows, target, drafter = running.rows, running.target, running.drafter
    assert drafter is not None
    sequences, stopping = [row.sequence for row in rows], [row.stopping for row in rows]
    given = (sequences, [length] * len(rows), stopping, running.chooser)
    proposal = drafter.propose(*given)
    tips_B1 = devices.tensor([sequence[-1:] for sequence in sequences], target.device)
    tokens_BN, parents_BN = torch.cat((tips_B1, proposal.tokens_BN), 1), None
    if proposal.parents_BN is not None:
        parents_BN = torch.cat((torch.full_like(tips_B1, -1), proposal.parents_BN + 1), 1)
    device = str(target.device)
    drafts_per_second = fastest(lambda: drafter.propose(*given), device, 3)
    forwards_per_second = fastest(lambda: target.forward(tokens_BN, parents_BN), device, 3)
    return 1e3 / drafts_per_second, 1e3 / forwards_per_second


def measure_rounds(
    target: NativeTarget,
    drafter: Drafter,
    length: int,
    sizes: Sizes,
    rows: int = 1,
    **sampling: Any,
) -> dict[str, Any]:
    """Measure rounds of the full length: milliseconds of the round, of its parts, of the remainder.

    Returns these with the nodes per round and tau.

    length: drafted tokens of a beam. sampling: further fields of Settings.
    """
    settings = Settings(sizes.tokens, num_draft_tokens=length, ignore_eos=True, **sampling)
    round_ms: list[float] = []
    part_ms: list[tuple[float, float]] = []
    for turn in range(sizes.repeats + 1):
        if turn == 1:  # the first run recorded every shape
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
        "tau": mean(row.generation.block_efficiency for row in running.rows),
        "acceptance": "of random weights; no estimate for a trained head",
    }


def measure_one_row(
    target: NativeTarget, head: RecurrentHead, length: int, sizes: Sizes, figures: Any
) -> None:
    """Measure and record autoregressive steps of one row, and its rounds by beam width."""
    plain_ms = measure_step(target, sizes, 1)
    figures.add(f"autoregressive, one row, {target.execution}", {"token_ms": plain_ms})
    for width in sizes.widths:
        name = f"rounds, {width} beams of {length}, {target.execution}"
        if not figures.in_time(name):
            continue
        drafter = RecurrentDrafter(head=head, beam_width=width, execution=target.execution)
        found = measure_rounds(target, drafter, length, sizes)
        found["tau_that_pays"] = found["round_ms"] / plain_ms
        if width == max(sizes.widths) and length == sizes.lengths[0]:
            found["published_round_ms"] = PUBLISHED_ROUND_MS
            found |= judge(-found["round_ms"], -GOAL_ROUND_MS)
        figures.add(name, found)


def measure_batch(target: NativeTarget, head: RecurrentHead, sizes: Sizes, figures: Any) -> None:
    """Measure and record the published command's setting, greedy and at temperature 1."""
    rows, width, length = sizes.batch, sizes.batch_width, sizes.lengths[0]
    per_second = 1e3 / measure_step(target, sizes, rows)
    plain = {
        "tokens_per_second_of_a_row": per_second,
        "tokens_per_second": rows * per_second,
    }
    figures.add(f"autoregressive, {rows} rows, {target.execution}", plain)
    for way, sampling in {
        "greedy": {},
        "temperature 1": {"temperature": 1.0, "verify": "token"},
    }.items():
        name = f"{rows} rows, {width} beams of {length}, {way}, {target.execution}"
        if not figures.in_time(name):
            continue
        drafter = RecurrentDrafter(head=head, beam_width=width, execution=target.execution)
        found = measure_rounds(target, drafter, length, sizes, rows, **sampling)
        per_second = 1e3 / found["round_ms"]
        projected = per_second * PUBLISHED_TOKENS_A_ROUND
        found |= {
            "rounds_per_second": per_second,
            "tokens_per_second_of_a_row": per_second * found["tau"],
            "tokens_per_second": rows * per_second * found["tau"],
            "projected_tokens_per_second_of_a_row": projected,
            "projected_tokens_per_second": rows * projected,
            "projected": f"at the published {PUBLISHED_TOKENS_A_ROUND} tokens a round, of 64 "
            f"beams; not measured here",
            "published_tokens_per_second": PUBLISHED_BATCH,
        }
        figures.add(name, found)


def run(device: str, toy: bool, figures: Any) -> None:
    """Measure and record training and rounds, figures with goals first."""
    sizes, place = TOY if toy else REAL, torch.device(device)
    training = gpu_recurrent_training.TOY if toy else gpu_recurrent_training.REAL
    found = measure_head_training(training, device)
    figures.add("training", found)
    finite = all(map(math.isfinite, found["losses"] + found["gradient_norms"]))
    figures.expect("the training's losses and gradients are finite", finite)
    devices.release(place)
    weights = random_weights(sizes.target, sizes.dtype, device)
    head = random_head(sizes.target, BLOCKS, sizes.dtype, device).requires_grad_(False)
    devices.peak_bytes(place)  # resets the peak
    for length in sizes.lengths:
        for execution in ("graph", "eager"):
            target = NativeTarget(weights, "target", execution=execution)
            target.open(sizes.batch, sizes.capacity)  # fits every call, so recordings are kept
            measure_one_row(target, head, length, sizes, figures)
            if length == sizes.lengths[0]:
                measure_batch(target, head, sizes, figures)
            del target
            devices.release(place)
    figures.add("decoding_peak_bytes", devices.peak_bytes(place))
