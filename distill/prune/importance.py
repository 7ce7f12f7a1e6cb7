"""Importance scores of a target's units, collected in forward passes and cached for other shapes.

The scores are Minitron's (Muralidharan et al. 2024, arXiv 2407.14679, section 2.2): the mean over
the tokens of a row, then the root of the sum of squares over rows. An MLP unit is scored by its
input to the down projection, a head by the norm of its input to the output projection, a group by
all of its heads together, and a residual channel by the outputs of the norms, summed over layers.
The block influence of a layer is 1 - cos(input, output) (ShortGPT, Men et al. 2024, arXiv
2403.03853). The mean square of every residual channel before each norm serves to rescale cut norms.

Shapes: R rows, T tokens, L layers, C hidden size, Q query heads, H key/value heads, G query heads
per group, D head width, F MLP width, N norms, X any width.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from distill.prune.cut import Cut
from jobs.files import write_tensors, write_text
from jobs.progress import ProgressBar
from training.data.packing import PackedBatch
from training.models.shapes import target_widths
from training.objectives import hidden_states
from training.parallel.strategy import Parallel


@dataclass
class ImportanceScores:
    """Importance scores of a model, or their sums over rows before `finished`.

    The sums are float64, because ranks add theirs.
    """

    units_LF: Tensor
    heads_LQ: Tensor
    groups_LH: Tensor
    # by norm: two per layer, then the last one
    hidden_NC: Tensor
    # mean square before each norm
    square_NC: Tensor
    influence_L: Tensor
    # number of rows [1]
    rows: Tensor

    @staticmethod
    def zeros(config: Any) -> "ImportanceScores":
        """Return zero sums in the shapes of a model. config: its Hugging Face configuration."""
        widths, layers = target_widths(config), config.num_hidden_layers
        norms = (2 * layers + 1, widths["hidden_size"])
        units = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
        shapes = [*((layers, widths[name]) for name in units), norms, norms, (layers,), (1,)]
        return ImportanceScores(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def finished(self) -> "ImportanceScores":
        """Return the roots of the sums of squares, and the means over rows of the other sums."""
        return ImportanceScores(
            self.units_LF.sqrt(),
            self.heads_LQ.sqrt(),
            self.groups_LH.sqrt(),
            self.hidden_NC.sqrt(),
            self.square_NC / self.rows,
            self.influence_L / self.rows,
            self.rows,
        )


def rank_batches(
    batches: Sequence[PackedBatch], parallel: Parallel
) -> list[tuple[PackedBatch, float]]:
    """Return (batch, weight) for this rank's share of the batches.

    A sharded model needs the same number of forward passes on every rank. A rank with one batch
    fewer than others gets another batch with weight 0. All other batches have weight 1.
    """
    rank, ranks = parallel.rank, parallel.world_size
    places = range(rank, math.ceil(len(batches) / ranks) * ranks, ranks)
    return [(batches[place % len(batches)], float(place < len(batches))) for place in places]


@torch.no_grad()
def collect_scores(
    model: Any, batches: Sequence[PackedBatch], parallel: Parallel
) -> ImportanceScores:
    """Return the sums of the scores over this rank's share of the batches.

    model: Hugging Face model with packed attention. batches: the batches of all ranks.
    """
    scores, mine = ImportanceScores.zeros(model.config), rank_batches(batches, parallel)
    with (
        ProgressBar("importance", len(mine), show=parallel.is_main) as bar,
        _register_hooks(model, scores) as hooks,
    ):
        for number, (batch, weight) in enumerate(mine, start=1):
            hooks.weights_RT = (batch.documents_RT > 0).float()
            hooks.weights_RT *= weight / hooks.weights_RT.sum(1, keepdim=True).clamp_(min=1)
            hidden_states(model, batch)
            scores.rows += weight * len(batch.ids_RT)
            bar.update(number)
    return scores


class _ScoreHooks:
    """Hooks that add figures of the inputs and outputs of modules to the scores.

    Rows have equal weights, however many tokens are padding.
    """

    def __init__(self, scores: ImportanceScores) -> None:
        self.scores = scores
        self.weights_RT = torch.empty(0)

    def _mean(self, values_RTX: Tensor) -> Tensor:
        return torch.bmm(self.weights_RT[:, None], values_RTX.float())[:, 0].double().cpu()

    def norm(self, norm: int, incoming_RTC: Tensor, outgoing_RTC: Tensor) -> None:
        self.scores.hidden_NC[norm] += self._mean(outgoing_RTC.abs()).square().sum(0)
        self.scores.square_NC[norm] += self._mean(incoming_RTC.float().square()).sum(0)

    def units(self, layer: int, incoming_RTF: Tensor, _: Tensor) -> None:
        self.scores.units_LF[layer] += self._mean(incoming_RTF.abs()).square().sum(0)

    def heads(self, layer: int, incoming_RTX: Tensor, _: Tensor) -> None:
        queries, groups = self.scores.heads_LQ.shape[1], self.scores.groups_LH.shape[1]
        square_RTQ = incoming_RTX.float().unflatten(2, (queries, -1)).square().sum(-1)
        square_RTH = square_RTQ.unflatten(2, (groups, -1)).sum(-1)
        self.scores.heads_LQ[layer] += self._mean(square_RTQ.sqrt()).square().sum(0)
        self.scores.groups_LH[layer] += self._mean(square_RTH.sqrt()).square().sum(0)

    def influence(self, layer: int, incoming_RTC: Tensor, outgoing_RTC: Tensor) -> None:
        turned_RT = 1 - F.cosine_similarity(incoming_RTC.float(), outgoing_RTC.float(), dim=-1)
        self.scores.influence_L[layer] += (self.weights_RT * turned_RT).sum().double().cpu()


@contextlib.contextmanager
def _register_hooks(model: Any, scores: ImportanceScores) -> Iterator[_ScoreHooks]:
    """Register the hooks of all scored modules for the duration of the block."""
    hooks = _ScoreHooks(scores)
    with contextlib.ExitStack() as handles:

        def hook(module: Any, add: Callable[[int, Tensor, Tensor], None], number: int) -> None:
            handles.enter_context(
                module.register_forward_hook(lambda _, given, out: add(number, given[0], out))
            )

        for number, layer in enumerate(model.model.layers):
            hook(layer.input_layernorm, hooks.norm, 2 * number)
            hook(layer.post_attention_layernorm, hooks.norm, 2 * number + 1)
            hook(layer.self_attn.o_proj, hooks.heads, number)
            hook(layer.mlp.down_proj, hooks.units, number)
            hook(layer, hooks.influence, number)
        hook(model.model.norm, hooks.norm, 2 * len(model.model.layers))
        yield hooks


def cut_by_scores(
    scores: ImportanceScores, layers: Sequence[int], student: Any, target: Any, rescale: bool = True
) -> Cut:
    """Return the cut that keeps these layers and, within them, the units with the highest scores.

    student, target: Hugging Face configurations that distill.shapes.refuse_wider accepted. rescale:
    multiply the weights of each norm so that the scale of its output is unchanged. Without this,
    outputs shrink, because a norm divides by the root mean square of its input and the kept
    channels are the largest.
    """
    ours, theirs = target_widths(student), target_widths(target)
    kept = torch.tensor(list(layers))
    groups = theirs["num_key_value_heads"]
    group_size = theirs["num_attention_heads"] // groups
    hidden_K = _top_indices(scores.hidden_NC.sum(0), ours["hidden_size"])
    groups_LK = _top_indices(scores.groups_LH[kept], ours["num_key_value_heads"])
    in_group_LHG = scores.heads_LQ[kept].unflatten(1, (groups, group_size))
    chosen_LKG = in_group_LHG.gather(1, groups_LK[:, :, None].expand(-1, -1, group_size))
    norms = torch.tensor([2 * layer + half for layer in layers for half in (0, 1)] + [-1])
    squares_NC = scores.square_NC[norms]
    scale_N = (squares_NC[:, hidden_K].mean(1) / squares_NC.mean(1)).sqrt()
    return Cut(
        tuple(layers),
        hidden_K,
        groups_LK,
        _top_indices(chosen_LKG, ours["num_attention_heads"] // ours["num_key_value_heads"]),
        _top_indices(scores.units_LF[kept], ours["intermediate_size"]),
        scale_N.float() if rescale else torch.ones(len(norms)),
        group_size,
    )


def _top_indices(scores: Tensor, count: int) -> Tensor:
    """Return the ascending indices of the `count` highest scores; lower indices win ties."""
    order = torch.argsort(scores, dim=-1, descending=True, stable=True)
    return order[..., :count].sort(dim=-1).values


def read_scores(path: Path) -> ImportanceScores | None:
    """Return the scores that `write_scores` wrote, or None if they are missing or damaged."""
    try:
        return ImportanceScores(**load_file(path)) if path.is_file() else None
    except (SafetensorError, TypeError):
        print(f"{path} is damaged: collecting the scores again")
        return None


def write_scores(path: Path, scores: ImportanceScores, notes: dict[str, Any]) -> None:
    """Write the scores; several runs may write the same file at the same time."""
    write_tensors(path, vars(scores), {"notes": json.dumps(notes)})


def read_order(path: Path, layers: int) -> list[int]:
    """Return the layers that `write_order` wrote; empty if the file is missing or damaged.

    layers: number of layers of the model.
    """
    if not path.is_file():
        return []
    try:
        found: Any = json.loads(path.read_text())
        total, removed = found["layers"], [int(layer) for layer in found["removed"]]
    except (KeyError, TypeError, ValueError):
        total, removed = 0, []
    if total != layers or not len(removed) == len({*removed} & {*range(layers)}) < layers:
        print(f"{path} is damaged: ordering the layers again")
        return []
    return removed


def write_order(path: Path, removed: list[int], layers: int) -> None:
    """Write the layers removed so far, in order. layers: number of layers of the model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"layers": layers, "removed": removed}))
