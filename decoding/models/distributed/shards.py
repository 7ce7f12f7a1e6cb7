"""The part of a model that each rank of a parallel target reads and holds.

*tp* splits every layer (Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3): a rank
has some attention heads and some columns of the MLP, and the results of the two output products are
summed. Every rank holds the full embedding, whose lookup costs nothing; the head is split by rows
of the vocabulary, since it is a model's largest product (a quarter of a small model). *layers*
gives each rank consecutive layers; the first rank also has the embedding, the final norm and the
head, so that only hidden states are exchanged.

Shapes: V vocabulary, C hidden size.
"""

import re
import socket
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.models.distributed.links import Collectives, Link, Sockets
from decoding.models.folder import load_state
from decoding.models.native.weights import NativeConfig

KINDS = ("tp", "layers")
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ROWS = re.compile(r"(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.(weight|bias)")
_COLUMNS = re.compile(r"(self_attn\.o_proj|mlp\.down_proj)\.weight")
_ONCE = re.compile(r"(self_attn\.o_proj|mlp\.down_proj)\.bias")


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model, given by the kind of split and the number of ranks."""

    kind: str  # tp | layers
    rank: int
    size: int

    def span(self, total: int) -> slice:
        """Return this rank's share of `total` rows, columns or heads, in the order of the ranks."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)


def check_divisible(config: NativeConfig, kind: str, size: int, where: str) -> None:
    """Raise UserError for a model that cannot be split into `size` parts.

    where: the start of the message.
    """
    if config.draft_vocab_size:
        raise UserError(
            f"{where} has a draft vocabulary of {config.draft_vocab_size} tokens, expected all "
            f"{config.vocab_size} in a model that is split over processes. Use parallel=none."
        )
    if kind == "layers":
        if config.num_layers < size:
            raise UserError(
                f"{where} has {config.num_layers} layers, expected at least one for each of {size} "
                f"processes. Use fewer processes."
            )
        return
    heads, groups = config.num_heads, config.num_kv_heads
    for what, count in {"attention heads": heads, "key/value heads": groups}.items():
        if count % size:
            fitting = [n for n in range(2, groups + 1) if heads % n == groups % n == 0]
            counts = f"{' or '.join(map(str, fitting))} processes, or " if fitting else ""
            raise UserError(
                f"{where}: {count} {what} cannot be split evenly over {size} processes. Use "
                f"{counts}parallel=layers."
            )


def layer_span(config: NativeConfig, shard: Shard) -> range:
    """Return a rank's layers under parallel=layers.

    The ranks get about equal numbers of parameters, with the embedding and head on the first.
    """
    C, D = config.hidden_size, config.head_dim
    attention = 2 * C * D * (config.num_heads + config.num_kv_heads)
    layer_parameters = attention + 3 * C * config.intermediate_size
    ends = config.vocab_size * C * (1 if config.tied else 2) / layer_parameters  # in layers
    others = shard.size - 1
    first = round((config.num_layers + ends) / shard.size - ends)
    first = min(max(first, 1), config.num_layers - others)
    if shard.rank == 0:
        return range(first)
    rest, index = config.num_layers - first, shard.rank - 1
    return range(first + rest * index // others, first + rest * (index + 1) // others)


def local_config(config: NativeConfig, shard: Shard) -> NativeConfig:
    """Return the configuration of a model that consists of a rank's part."""
    if shard.kind == "layers":
        return replace(config, num_layers=len(layer_span(config, shard)))
    width = shard.span(config.intermediate_size)
    return replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=config.num_kv_heads // shard.size,
        intermediate_size=width.stop - width.start,
        tied=False,  # the head is a part of the embedding, which is complete
    )


def cut(
    name: str, shape: list[int], config: NativeConfig, shard: Shard
) -> tuple[slice, ...] | None:
    """Return the index of a rank's part of a tensor, None if it has no part."""
    everything = (slice(None),) * len(shape)
    layer = _LAYER.fullmatch(name)
    if shard.kind == "layers":
        mine = shard.rank == 0 if layer is None else int(layer[1]) in layer_span(config, shard)
        return everything if mine else None
    if layer is None:
        return (shard.span(shape[0]), *everything[1:]) if name == HEAD else everything
    if _ROWS.fullmatch(layer[2]):
        return (shard.span(shape[0]), *everything[1:])
    if _COLUMNS.fullmatch(layer[2]):
        return (slice(None), shard.span(shape[1]))
    if _ONCE.fullmatch(layer[2]) and shard.rank:
        return None  # the results are summed, so only rank 0 adds the bias
    return everything


def read_shard(
    folder: str | Path, config: NativeConfig, shard: Shard
) -> tuple[dict[str, Tensor], int]:
    """Return a rank's tensors, and the number of parameters of the complete model.

    The tensors are named as in a model of `local_config`. Raises UserError for a damaged folder.
    """
    parameters = 0

    def taken(name: str, shape: list[int]) -> tuple[slice, ...] | None:
        nonlocal parameters
        counted = (EMBEDDING, NORM) if config.tied else (EMBEDDING, NORM, HEAD)
        if _LAYER.fullmatch(name) or name in counted:
            parameters += prod(shape)
        return cut(name, shape, config, shard)

    state = load_state(folder, taken)
    if shard.kind == "tp" and config.tied and EMBEDDING in state:
        state[HEAD] = state[EMBEDDING][shard.span(config.vocab_size)]
    if shard.kind == "layers":
        first = layer_span(config, shard).start
        state = {_renumbered(name, first): tensor for name, tensor in state.items()}
    return state, parameters


def _renumbered(name: str, first: int) -> str:
    layer = _LAYER.fullmatch(name)
    return name if layer is None else f"model.layers.{int(layer[1]) - first}.{layer[2]}"


@dataclass(frozen=True)
class RankSetup:
    """The settings with which a rank starts."""

    folder: str
    shard: Shard
    dtype: torch.dtype
    device: str
    max_length: int | None
    threads: int
    link: str  # see decoding/models/distributed/links.py
    meeting_file: str = ""  # of gloo and nccl
    sockets: dict[int, int] = field(default_factory=dict)  # of `sockets`: file descriptor by rank


def connect(setup: RankSetup) -> Link:
    """Return the link to the other ranks."""
    if setup.link == "sockets":
        peers = {rank: socket.socket(fileno=number) for rank, number in setup.sockets.items()}
        return Sockets(setup.shard.rank, peers)
    return Collectives(setup.link, setup.shard.rank, setup.shard.size, setup.meeting_file)
