"""Part `losses`: memory and time of every loss at a vocabulary of 128,256.

Each loss and its gradients from hidden states, in chunks as training computes them and eagerly on
complete logits (training/losses/eager.py), with the same student, teacher and rows. The shapes are
LLaMA-3's: a student 2,048 wide, a teacher 4,096 wide. Weights are random, which changes no figure.
With device=meta nothing is computed or timed: the peaks are counted from the sizes of the tensors,
in seconds and without a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.costs.machine_limits import fastest
from scripts.bench.peak_memory import META, peak_bytes
from training.losses.chunked import chunked_loss
from training.losses.config import PARTS, LossConfig, uses_teacher
from training.losses.eager import row_losses
from training.losses.family import Reference, reference_rows
from training.losses.teacher import Teacher

GOAL = 1 / 4  # of the eager loss's peak


@dataclass(frozen=True)
class Sizes:
    """Shapes of a loss: supervised rows, vocabulary, widths of student and teacher."""

    rows: int
    vocab: int
    student: int
    teacher: int
    dtype: torch.dtype
    chunk: int | None = None
    calls: int = 3  # of each of three timed rounds


REAL = Sizes(rows=4096, vocab=128256, student=2048, teacher=4096, dtype=torch.bfloat16)
TOY = Sizes(rows=64, vocab=512, student=16, teacher=32, dtype=torch.float32, chunk=8, calls=1)


@dataclass(frozen=True)
class Inputs:
    """Hidden states and output weights of a student, which learns, and of a teacher; labels."""

    hidden_NH: Tensor
    weight_VH: Tensor
    teacher_hidden_NG: Tensor
    teacher_weight_VG: Tensor
    labels_N: Tensor


def make_inputs(sizes: Sizes, device: str) -> Inputs:
    """Return random hidden states and weights whose logits have a spread of about 2."""
    torch.manual_seed(0)

    def random(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=sizes.dtype) * scale

    return Inputs(
        random(sizes.rows, sizes.student, 1).requires_grad_(),
        random(sizes.vocab, sizes.student, 2 * sizes.student**-0.5).requires_grad_(),
        random(sizes.rows, sizes.teacher, 1),
        random(sizes.vocab, sizes.teacher, 2 * sizes.teacher**-0.5),
        torch.randint(sizes.vocab, (sizes.rows,), device=device),
    )


def chunked(loss: LossConfig, given: Inputs, chunk: int | None) -> Tensor:
    """Return the loss as training computes it; gradients are computed in the same pass."""
    teacher = Teacher(given.teacher_hidden_NG, given.teacher_weight_VG)

    def reference(start: int, end: int) -> Reference:
        if uses_teacher(loss):
            return Reference(teacher=teacher.at(start, end))
        return Reference(given.labels_N[start:end])

    rows = reference_rows(loss)
    total, _ = chunked_loss(given.hidden_NH, given.weight_VH, rows, reference, chunk)
    return total


def eager(loss: LossConfig, given: Inputs) -> Tensor:
    """Return the loss on complete logits in float32, as its formula is written."""
    teacher_NV = None
    if uses_teacher(loss):
        with torch.no_grad():
            teacher_NV = F.linear(given.teacher_hidden_NG, given.teacher_weight_VG).float()
    logits_NV = F.linear(given.hidden_NH, given.weight_VH).float()
    return row_losses(loss, logits_NV, teacher_NV, given.labels_N).sum()


def gradients(loss: Callable[[], Tensor], given: Inputs) -> Tensor:
    """Compute a loss and both gradients, which are dropped, and return the loss."""
    total = loss()
    torch.autograd.grad(total, (given.hidden_NH, given.weight_VH))
    return total.detach()


@torch.inference_mode(False)
def run(device: str, toy: bool, figures: Any) -> None:
    """Record peak bytes and milliseconds of each loss, and the share of the eager loss's peak.

    device: `meta` records only the peaks.
    """
    sizes = TOY if toy else REAL
    given = make_inputs(sizes, device)
    for name in PARTS:
        if not figures.in_time(name):
            continue
        loss = LossConfig(name=name)
        sides = {
            "chunked": partial(gradients, partial(chunked, loss, given, sizes.chunk), given),
            "eager": partial(gradients, partial(eager, loss, given), given),
        }
        found = {side: measure(step, device, sizes) for side, step in sides.items()}
        share = found["chunked"]["peak_bytes"] / found["eager"]["peak_bytes"]
        figures.add(name, {**found, "share_of_peak": share, "goal": GOAL, "met": share <= GOAL})
        if device == META:
            continue
        same = abs(found["chunked"]["loss"] - found["eager"]["loss"])
        figures.expect(
            f"{name}: both sides compute the same loss", same <= 0.02 * abs(found["eager"]["loss"])
        )


def measure(step: Callable[[], Tensor], device: str, sizes: Sizes) -> dict[str, float]:
    """Return the peak bytes of a step and, where it computes, its loss a row and milliseconds."""
    if device == META:
        return {"peak_bytes": peak_bytes(step, device)}
    found = {
        "loss": float(step()) / sizes.rows,
        "peak_bytes": peak_bytes(step, device),
        "milliseconds": 1e3 / fastest(step, device, sizes.calls, 3),
    }
    devices.release(torch.device(device))
    return found
