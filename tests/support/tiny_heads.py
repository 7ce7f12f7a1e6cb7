"""A small frozen target, packed batches of random documents, and heads of every form."""

from typing import Any

import numpy as np
import torch

from recurrent_drafting.head import HeadConfig, RecurrentHead
from recurrent_drafting.predictions import PREDICTIONS
from training.config import StudentConfig
from training.data.packing import PackedBatch, Sample, best_fit, collate
from training.features.states import TargetStates
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.models.build import build_llama
from training.objectives import freeze

VOCABULARY, HIDDEN, HEADS, ROW = 61, 16, 4, 40
# name -> differences from two recurrent blocks of twice the hidden size
FORMS: dict[str, dict[str, Any]] = {
    "recurrent": {},
    "without recurrence": {"rnn": False},
    "projected": {"exit_dim": 24},
    "projected without recurrence": {"exit_dim": HIDDEN, "rnn": False, "num_draft_layers": 1},
    "without blocks": {"num_draft_layers": 0},
    "shortlist": {"draft_vocab_size": 20},
}


def target(dtype: torch.dtype = torch.float64) -> Any:
    """Return a frozen target of two layers."""
    torch.manual_seed(1)
    widths = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 24,
    }
    shape = StudentConfig(hidden_size=HIDDEN, num_hidden_layers=2, **widths)
    base = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.5}
    return freeze(build_llama(shape, dtype, **base))


def head(form: str = "recurrent", dtype: torch.dtype = torch.float64) -> RecurrentHead:
    """Return a random recurrent head of a form in FORMS."""
    torch.manual_seed(2)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "exit_dim": 2 * HIDDEN,
        "num_draft_layers": 2,
    }
    made = RecurrentHead(HeadConfig(**(sizes | FORMS[form])))
    if made.token_ids_V is not None:
        made.token_ids_V = torch.sort(torch.randperm(VOCABULARY)[: len(made.token_ids_V)]).values
    return made.to(dtype)


def samples(count: int = 9, seed: int = 0) -> list[Sample]:
    """Return documents of 2 to 24 tokens with random masks; some are too short to predict."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        ids = random.integers(
            0, VOCABULARY, 2 + int(random.integers(0, 23)) if number else 24
        ).astype(np.int32)
        mask = random.random(len(ids)) < 0.7
        mask[0], mask[-1] = False, True
        found.append(Sample(ids, mask))
    return found


def packed(documents: list[Sample]) -> PackedBatch:
    """Return the documents in one packed batch."""
    return collate(documents, best_fit([len(one.ids) for one in documents], ROW), ROW)


def objective(made: RecurrentHead, model: Any, **loss: Any) -> HeadObjective:
    """Return the training objective of a head on a frozen target.

    loss: fields of `HeadLossConfig`; by default HEADS tokens of the text are predicted.
    """
    settings = HeadLossConfig(**({"name": "cross_entropy", "predict_n_tokens": HEADS} | loss))
    return HeadObjective(PREDICTIONS, made, TargetStates(model), settings)
