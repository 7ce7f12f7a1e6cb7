"""Training of part `recurrent`: our step on a head of a 7B target, in tokens a second and in hours of ShareGPT on one card.

As recurrent_drafting.train takes it in one process: packed rows, the target's hidden states made in every step, one chunked loss over the
predictions of five heads, a bfloat16 head with float32 masters, torch's AdamW. Chats are random tokens of ShareGPT's mean length and share of
answers; the clock does not see what they say. Published: apple/ml-recurrent-drafter's README, 1.5 hours on 8 H100.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decoding import cuda
from recurrent_drafting.loss_config import HeadLossConfig
from recurrent_drafting.objective import HeadTraining
from recurrent_drafting.states import TargetStates
from scripts.bench.random_models import Shape, random_head
from training.attention import PACKED
from training.objectives import freeze
from training.optimizer import MasterAdamW
from training.optimizer_config import OptimizerConfig
from training.packing import PackedData, Sample, collate, micro_batches

GOAL_HOURS, PUBLISHED_HOURS = 4.0, 12.0  # of one card; published: 1.5 hours on 8 H100
SHAREGPT_TOKENS = 248_000_000  # of two epochs, padding not counted
SUPERVISED = 0.6  # of them
BLOCKS, HEADS = 2, 5  # residual blocks of the head; tokens that a draft predicts


@dataclass(frozen=True)
class Sizes:
    """What is trained on what."""

    target: Shape
    dtype: torch.dtype  # of both models; masters are float32
    row: int  # tokens of a packed row
    forward_rows: int  # rows of a forward
    step_rows: int  # rows of an optimizer step
    steps: int  # timed ones
    chats: tuple[int, int]  # tokens of the shortest chat, and one more than of the longest; all between as often
    turn: int  # tokens of a request and its answer


REAL = Sizes(
    target=Shape(32, 4096, 32, 11008),  # LLaMA-7B
    dtype=torch.bfloat16,
    row=2048,
    forward_rows=4,
    step_rows=128,  # 262,144 tokens, as published
    steps=2,
    chats=(64, 2049),  # about ShareGPT's mean
    turn=250,
)
TOY = Sizes(
    target=Shape(2, 32, 4, 48, 2, 8, 64),
    dtype=torch.bfloat16,
    row=32,
    forward_rows=2,
    step_rows=4,
    steps=1,
    chats=(8, 32),
    turn=8,
)


def chats(sizes: Sizes) -> list[Sample]:
    """Random tokens in requests and answers, for the rows of all steps; as large a share of them is supervised as of ShareGPT's."""
    random = np.random.default_rng(0)
    made, tokens, turn = [], 0, sizes.turn
    while tokens < sizes.row * sizes.step_rows * (sizes.steps + 1):
        ids = random.integers(0, sizes.target.vocab_size, int(random.integers(*sizes.chats))).astype(np.int32)
        places = np.arange(len(ids)) + int(random.integers(turn))  # a chat begins anywhere in a turn
        answered = places % turn >= round((1 - SUPERVISED) * turn)
        answered[0] = False
        made.append(Sample(ids, answered))
        tokens += len(ids)
    return made


def frozen_target(sizes: Sizes, device: str) -> Any:
    """The Hugging Face target that a training job reads hidden states of."""
    values: dict[str, Any] = sizes.target.config(sizes.row)
    config = AutoConfig.for_model(**values)
    with torch.device(device):
        return freeze(AutoModelForCausalLM.from_config(config, dtype=sizes.dtype, attn_implementation=PACKED))


def step(
    objective: HeadTraining, optimizer: MasterAdamW, data: PackedData, rows: Sequence[Sequence[int]], sizes: Sizes
) -> tuple[float, float]:
    """One optimizer step on these rows, as training/loop.py takes it. Returns its loss in nats a supervised token and the gradient's norm."""
    device, count = objective.head.output.device, data.supervised_in(rows)
    total = torch.zeros((), device=device)
    for part in micro_batches(rows, 0, 1, sizes.forward_rows):
        loss_sum, _ = objective(collate(data.samples, part, data.capacity, device))
        (loss_sum / count).backward()
        optimizer.collect()
        total += loss_sum.detach()
    loss, norm = float(total) / count, float(optimizer.clip())
    optimizer.step(optimizer.config.lr)
    return loss, norm


@torch.inference_mode(False)
def training(sizes: Sizes, device: str) -> dict[str, Any]:
    """Tokens a second of our training: hidden states made in every step, the head's float32 masters and the optimizer's states on the card."""
    place = torch.device(device)
    cuda.peak_bytes(place)
    head = random_head(sizes.target, BLOCKS, sizes.dtype, device)
    loss_config = HeadLossConfig(predict_n_tokens=HEADS)
    objective = HeadTraining(head, TargetStates(frozen_target(sizes, device)), loss_config)
    optimizer = MasterAdamW(head, OptimizerConfig())
    data = PackedData(chats(sizes), sizes.row, sizes.step_rows, 0)
    step(objective, optimizer, data, data.step_rows(0)[: 2 * sizes.forward_rows], sizes)  # warms up
    tokens, took, seen = 0, [], []
    for number in range(1, sizes.steps + 1):
        rows = data.step_rows(number)
        cuda.synchronize(place)
        began = time.perf_counter()
        seen.append(step(objective, optimizer, data, rows, sizes))
        cuda.synchronize(place)
        took.append(time.perf_counter() - began)
        tokens += sum(len(data.samples[index].ids) for row in rows for index in row)
    rate = tokens / sum(took)
    return {
        "tokens_per_second": rate,
        "supervised_tokens_per_second": rate * data.supervised / data.tokens,
        "hours_per_100M_tokens": 1e8 / rate / 3600,
        "projected_card_hours": SHAREGPT_TOKENS / rate / 3600,
        "projected": f"{SHAREGPT_TOKENS:,} tokens, two epochs of ShareGPT, on one card",
        "published_card_hours": PUBLISHED_HOURS,
        "goal_card_hours": GOAL_HOURS,
        "supervised_share": data.supervised / data.tokens,
        "rows_full": data.fill,
        "step_seconds": took,
        "losses": [loss for loss, _ in seen],
        "gradient_norms": [norm for _, norm in seen],
        "head_parameters": head.num_parameters,
        "peak_bytes": cuda.peak_bytes(place),
    }
