"""Training of part `recurrent`: tokens/s for a head of a 7B target, and hours for ShareGPT.

The step is that of recurrent_drafting.train in one process: packed rows, the target's hidden states
computed in every step, one chunked loss over the predictions of five heads, a bfloat16 head with
float32 masters, torch's AdamW. Published: apple/ml-recurrent-drafter's README, 1.5 hours on 8 H100.
"""

from typing import Any

import torch

from recurrent_drafting.predictions import PREDICTIONS
from scripts.bench.gpu_decode import judge
from scripts.bench.gpu_training import TrainingSizes, measure_training, random_chats
from scripts.bench.random_models import LLAMA_7B, TOY_TARGET, random_head, random_model
from training.features.states import TargetStates
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.losses.config import CROSS_ENTROPY
from training.objectives import freeze

GOAL_HOURS, PUBLISHED_HOURS = 4.0, 12.0  # hours of one card; published: 1.5 hours on 8 H100
SHAREGPT_TOKENS = 248_000_000  # tokens of two epochs without padding
BLOCKS, HEADS = 2, 5  # residual blocks of the head; tokens that a draft predicts

# a step of 262,144 tokens, as published
REAL = TrainingSizes(LLAMA_7B, torch.bfloat16, row=2048, forward_rows=4, step_rows=128, steps=2)
TOY = TrainingSizes(
    TOY_TARGET, torch.bfloat16, row=32, forward_rows=2, step_rows=4, steps=1, chats=(8, 32), turn=8
)


@torch.inference_mode(False)
def measure_head_training(sizes: TrainingSizes, device: str) -> dict[str, Any]:
    """Measure the tokens/s of training a head, and project the card hours for ShareGPT."""
    head = random_head(sizes.target, BLOCKS, sizes.dtype, device)
    states = TargetStates(freeze(random_model(sizes.target, sizes.dtype, device)))
    loss = HeadLossConfig(CROSS_ENTROPY, predict_n_tokens=HEADS)
    objective = HeadObjective(PREDICTIONS, head, states, loss)
    found = measure_training(objective, head, random_chats(sizes), sizes, device)
    hours = SHAREGPT_TOKENS / found["tokens_per_second"] / 3600
    return {
        **found,
        "projected_card_hours": hours,
        "projected": f"{SHAREGPT_TOKENS:,} tokens, two epochs of ShareGPT, on one card",
        "published_card_hours": PUBLISHED_HOURS,
        **judge(-hours, -GOAL_HOURS),
        "head_parameters": head.num_parameters,
    }
