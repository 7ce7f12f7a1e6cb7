"""Choice of the layers to keep.

No criterion alone is reliable at severe cuts, so candidate sets of layers are compared by
acceptance:

- even: evenly spaced layers from the first to the last
- even_without_last: evenly spaced layers from the first to the last but one
- influence: the layers with the largest block influence
- greedy: the layers left by a greedy removal that changes the next-token distribution least
- contiguous: the first layers and the last
- early_exit: the first layers

Influence and greedy removal may drop any layer, but they measure the target before distillation,
when a student without the last layer drafts worse. A few training steps can reverse this, as
learned masks show, so two sets always leave it out.

Shapes: N supervised tokens, R rows, T tokens, C hidden size, V vocabulary, L layers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.prune.importance import rank_batches
from distill.student import space_evenly
from jobs.progress import ProgressBar
from training.data.packing import PackedBatch
from training.models.attention import inside_documents
from training.objectives import hidden_states
from training.parallel.strategy import Parallel

CRITERIA = ("even", "even_without_last", "influence", "greedy", "contiguous", "early_exit")


def propose_layer_sets(
    count: int, layers: int, influence_L: Tensor, removal: Sequence[int], distinct: bool = True
) -> dict[str, list[int]]:
    """Return criterion -> the set of `count` layers, out of `layers`, that it proposes.

    influence_L: block influence of each layer. removal: result of `find_removal_order`. distinct:
    omit sets that an earlier criterion proposed.
    """
    by_influence = torch.argsort(influence_L, descending=True, stable=True)[:count]
    proposed = _by_place(count, layers) | {
        "influence": sorted(by_influence.tolist()),
        "greedy": sorted(set(range(layers)) - {*removal[: layers - count]}),
    }
    found: dict[str, list[int]] = {}
    for name in CRITERIA:
        if not distinct or proposed[name] not in found.values():
            found[name] = proposed[name]
    return found


def count_layer_sets(count: int, layers: int) -> int:
    """Return the maximum number of distinct sets that `propose_layer_sets` can propose."""
    by_place = {tuple(chosen) for chosen in _by_place(count, layers).values()}
    return min(len(by_place) + 2, math.comb(layers, count))


def _by_place(count: int, layers: int) -> dict[str, list[int]]:
    """Return the sets that do not depend on the model's weights."""
    return {
        "even": space_evenly(count, layers),
        "even_without_last": space_evenly(count, max(count, layers - 1)),
        "contiguous": [*range(count - 1), layers - 1],
        "early_exit": list(range(count)),
    }


@torch.no_grad()
def find_removal_order(
    model: Any,
    batches: Sequence[PackedBatch],
    parallel: Parallel,
    removed: Sequence[int] = (),
    save: Callable[[list[int]], None] = lambda removed: None,
) -> list[int]:
    """Return all layers but one in the order of their greedy removal from a Hugging Face model.

    Each step removes the layer whose absence changes the next-token distribution least, measured as
    forward KL divergence from the complete model. Of equal layers, the last is removed. The
    candidates of a step share the forward pass up to their layer, so a step over k layers runs
    about k^2 / 2 layers. The ranks share the batches.

    removed: layers that an interrupted search removed, in order. save: function that is called with
    all removed layers after each step.
    """
    layers = [layer for layer in range(model.config.num_hidden_layers) if layer not in removed]
    mine = rank_batches(batches, parallel)
    complete = [batch.at_supervised(hidden_states(model, batch)) for batch, _ in mine]
    order, steps = list(removed), len(removed) + len(layers) - 1
    with ProgressBar("layers by KL", steps, len(order), parallel.is_main) as bar:
        while len(layers) > 1:
            kl_L = torch.zeros(len(layers), dtype=torch.float64)
            for (batch, weight), complete_NC in zip(mine, complete, strict=True):
                p_NV = F.linear(complete_NC, model.lm_head.weight).float().log_softmax(-1)
                kl_L += weight * _kl_without_each(model, batch, layers, p_NV)
            kl_L = parallel.sum(kl_L.to(parallel.device)).cpu()
            order.append(layers.pop(int((kl_L == kl_L.min()).nonzero()[-1])))
            save(order)
            bar.update(len(order))
    return order


def _kl_without_each(model: Any, batch: PackedBatch, layers: Sequence[int], p_NV: Tensor) -> Tensor:
    """Return the KL divergence after removing each of the layers, summed over tokens, [L].

    Only supervised tokens count. p_NV: log probabilities of the complete model.
    """
    kl_L = torch.zeros(len(layers), dtype=torch.float64)
    before_RTC = model.model.embed_tokens(batch.ids_RT)
    given = {
        "position_embeddings": model.model.rotary_emb(before_RTC, batch.positions_RT),
        "position_ids": batch.positions_RT,
        "use_cache": False,
        **inside_documents(model, batch),
    }
    for place, layer in enumerate(layers):
        hidden_RTC = before_RTC
        for later in layers[place + 1 :]:
            hidden_RTC = model.model.layers[later](hidden_RTC, **given)
        hidden_NC = batch.at_supervised(model.model.norm(hidden_RTC))
        q_NV = F.linear(hidden_NC, model.lm_head.weight).float().log_softmax(-1)
        kl_L[place] = F.kl_div(q_NV, p_NV, reduction="sum", log_target=True).double().cpu()
        before_RTC = model.model.layers[layer](before_RTC, **given)
    return kl_L
