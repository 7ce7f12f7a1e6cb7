"""Parameters, FLOPs and memory of a head, counted on the meta device from one draft."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from training.data.packing import Sample, collate
from training.features.states import TargetStates
from training.heads.kind import HeadKind
from training.heads.positions import Positions
from training.heads.predicting import count_depths
from training.losses.chunked import Outputs, trained_part


@dataclass(frozen=True)
class HeadStatistics:
    """Sizes of a head in parameters, FLOPs and bytes."""

    parts: dict[str, int]  # parameters by part, the largest first
    flops: float  # of the forward pass over one draft
    # bytes that a step keeps per draft: tensors saved by autograd, features and their gradient
    kept: int
    outputs: int  # parameters of the trained output layers
    predictions: int  # of one draft in training

    @property
    def parameters(self) -> int:
        return sum(self.parts.values())


def measure(
    kind: HeadKind, shape: Any, heads: int, dtype: torch.dtype, target: Any = None
) -> HeadStatistics:
    """Count a head's parameters, FLOPs and memory from one draft of `heads` tokens.

    target: the target's Hugging Face configuration, for kinds with `runs_target`.
    """
    heads = count_depths(kind, heads)
    with torch.device("meta"):
        head = kind.empty(shape).to(dtype)
    model = _whole(target, dtype) if kind.runs_target else _ends(kind, shape, dtype)
    states = TargetStates(model, taps=kind.taps(shape), final=False)
    # a head that predicts once at each token reads one token for each prediction
    length = 1 if kind.computes_states else heads + 2
    text = Sample(np.arange(length, dtype=np.int32) % 2, np.arange(length) > 1)
    batch = collate([text], [[0]], length, "meta")
    channels = len(states.layers) * shape.hidden_size
    states_PC = torch.empty(1, channels, dtype=dtype, device="meta")
    known = [*head.parameters(), *model.parameters()]
    with FlopCounterMode(display=False) as counted, _count_saved_bytes(known) as kept:
        features_NE = kind.features(head, states, batch, _one_draft(heads), states_PC)
    weights = kind.outputs(head, states)
    outputs = Outputs(weights, np.arange(heads) if len(weights) > 1 else None)
    with FlopCounterMode(display=False) as last, torch.no_grad():
        outputs.logits(features_NE, 0, heads)
    parts: dict[str, int] = {}
    for name, parameter in head.named_parameters():
        part = kind.part_of(name, shape)
        parts[part] = parts.get(part, 0) + parameter.numel()
    layers = map(trained_part, weights)
    trained = sum(layer.numel() for layer in layers if layer.requires_grad)
    flops = float(counted.get_total_flops() + last.get_total_flops())
    by_size = dict(sorted(parts.items(), key=lambda part: -part[1]))
    saved = sum(kept.values()) + 2 * features_NE.nbytes
    return HeadStatistics(by_size, flops, saved, trained, heads)


def _ends(kind: HeadKind, shape: Any, dtype: torch.dtype) -> Any:
    """Return the embedding and output layer of a target, as one layer on the meta device."""
    with torch.device("meta"):
        embedding = nn.Embedding(shape.vocab_size, shape.hidden_size, dtype=dtype)
    embedding.requires_grad_(False)
    return SimpleNamespace(
        config=SimpleNamespace(num_hidden_layers=max([1, *kind.taps(shape)])),
        get_input_embeddings=lambda: embedding,
        get_output_embeddings=lambda: embedding,
        parameters=embedding.parameters,
    )


def _whole(target: Any, dtype: torch.dtype) -> Any:
    """Return the model of a Hugging Face configuration, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            target, dtype=dtype, trust_remote_code=False
        ).requires_grad_(False)


@contextmanager
def _count_saved_bytes(parameters: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Yield a dict that collects the bytes that autograd saves, except the parameters."""
    known = {parameter.untyped_storage()._cdata for parameter in parameters}
    kept: dict[int, int] = {}
    alive = []  # keeps storages alive, so that their ids are not reused

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            alive.append(storage)
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        yield kept


def _one_draft(heads: int) -> Positions:
    """Return the positions of one draft with all its predictions, on the meta device."""

    def indices(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.long, device="meta")

    return Positions(
        kept_P=indices(1),
        drafts_M=indices(1),
        tokens_MK=indices(1, heads),
        own_O=indices(0),
        continues_own=False,
        draft_N=indices(heads),
        head_N=indices(heads),
        heads=np.arange(heads),
        labels_N=indices(heads),
        targets_N=indices(0),
        targets=np.zeros(0, dtype=np.int64),
        counts_K=[1] * heads,
        kept_R=[1],
    )
