"""Random chats and a timed optimizer step, for the training parts of gpu.py.

The step is that of training/loop.py in one process, without checkpoints, held-out prompts and
records. Chats are random tokens with ShareGPT's mean length and share of answers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from decoding import devices
from training.data.packing import PackedData, Sample, collate, micro_batches
from training.objectives import StaticObjective
from training.optimizer import MasterAdamW
from training.optimizer_config import OptimizerConfig

SUPERVISED = 0.6  # share of ShareGPT's tokens


@dataclass(frozen=True)
class TrainingSizes:
    """Target, chats and steps of a training run."""

    target: LlamaConfig
    dtype: torch.dtype  # of both models; masters are float32
    row: int  # tokens of a packed row
    forward_rows: int  # rows of a forward
    step_rows: int  # rows of an optimizer step
    steps: int  # timed steps
    # tokens of the shortest chat, and one more than of the longest; uniform in between. The
    # default has about ShareGPT's mean.
    chats: tuple[int, int] = (64, 2049)
    turn: int = 250  # tokens of a request and its answer


def random_chats(sizes: TrainingSizes) -> list[Sample]:
    """Return chats of random tokens for all steps, with ShareGPT's share of supervised tokens."""
    random = np.random.default_rng(0)
    made, tokens, turn = [], 0, sizes.turn
    while tokens < sizes.row * sizes.step_rows * (sizes.steps + 1):
        length = int(random.integers(*sizes.chats))
        ids = random.integers(0, sizes.target.vocab_size, length).astype(np.int32)
        # a chat begins anywhere in a turn
        places = np.arange(length) + int(random.integers(turn))
        answered = places % turn >= round((1 - SUPERVISED) * turn)
        answered[0] = False
        made.append(Sample(ids, answered))
        tokens += length
    return made


def train_step(
    objective: StaticObjective,
    optimizer: MasterAdamW,
    data: PackedData,
    rows: Sequence[Sequence[int]],
    sizes: TrainingSizes,
) -> tuple[float, float]:
    """Take an optimizer step as training/loop.py does.

    rows: indices of the packed samples in each row. Returns the loss in nats per supervised token,
    and the norm of the gradient.
    """
    device, count = optimizer.parameters[0].device, data.supervised_in(rows)
    total = torch.zeros((), device=device)
    for part in micro_batches(rows, 0, 1, sizes.forward_rows):
        loss_sum, _ = objective(collate(data.samples, part, data.capacity, device))
        (loss_sum / count).backward()
        optimizer.collect()
        total += loss_sum.detach()
    loss_sum, norm = devices.read(total, optimizer.clip())
    optimizer.step(optimizer.config.lr)
    return loss_sum / count, norm


def measure_training(
    objective: StaticObjective,
    trained: torch.nn.Module,
    samples: list[Sample],
    sizes: TrainingSizes,
    device: str,
) -> dict[str, Any]:
    """Measure the tokens/s of training the module `trained`, after a step for warm-up.

    Masters are float32 and on the device. Padding does not count.
    """
    place, data = torch.device(device), PackedData(samples, sizes.row, sizes.step_rows, 0)
    devices.peak_bytes(place)  # resets the peak
    optimizer = MasterAdamW(trained, OptimizerConfig())
    train_step(objective, optimizer, data, data.step_rows(0)[: 2 * sizes.forward_rows], sizes)
    tokens, took, found = 0, [], []
    for number in range(1, sizes.steps + 1):
        rows = data.step_rows(number)
        devices.synchronize(place)
        began = time.perf_counter()
        found.append(train_step(objective, optimizer, data, rows, sizes))
        devices.synchronize(place)
        took.append(time.perf_counter() - began)
        tokens += sum(len(data.samples[index].ids) for row in rows for index in row)
    rate = tokens / sum(took)
    return {
        "tokens_per_second": rate,
        "supervised_tokens_per_second": rate * data.supervised / data.tokens,
        "hours_per_100M_tokens": 1e8 / rate / 3600,
        "supervised_share": data.supervised / data.tokens,
        "rows_full": data.fill,
        "step_seconds": took,
        "losses": [loss for loss, _ in found],
        "gradient_norms": [norm for _, norm in found],
        "peak_bytes": devices.peak_bytes(place),
    }
