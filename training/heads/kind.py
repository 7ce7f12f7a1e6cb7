"""The protocol of a kind of trained head: all that training asks of it.

A kind is one object without state; heads are its arguments. Whoever adds a head writes one, a
subclass of `HeadKind`, and names it in `decoding.drafters.registry`.

Shapes: M drafts, N predictions of all depths, K drafted tokens, H the target's hidden size, C
channels of the states that a head reads, E features, V drafted vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from decoding.interfaces import Drafter
from training.data.packing import Sample
from training.features.taps import Layers
from training.heads.checkpoint import FolderLayout
from training.heads.config import HeadJobConfig
from training.heads.predicting import PredictingHead


class HeadShape(Protocol):
    """The shape of a head, a dataclass, with what training reads of it."""

    vocab_size: int  # of the target
    hidden_size: int  # H
    draft_vocab_size: int  # 0: the whole vocabulary

    @property
    def num_drafted(self) -> int:
        """V."""
        ...


@dataclass(frozen=True)
class Drafting:
    """How a finished head is measured by real drafting."""

    words: str  # "with 8 beams"
    figure: str  # the name of its block efficiency on the card
    options: dict[str, float] = field(default_factory=dict)  # beside it


@dataclass(frozen=True)
class ReadmeParts:
    """What a kind's README says beside what all say."""

    tag: str  # of the Hugging Face Hub
    title: str  # "A recurrent drafter head (ReDrafter, arXiv 2403.09919)"
    form: str  # the head's shape, in words
    reads: str  # what it reads of the target
    layout: str  # that of the folder, where every reader of it loads it
    launch: Sequence[str]  # commands that use the folder, which is called HEAD in them
    remarks: str


class HeadKind(PredictingHead, Protocol):
    """A kind of head, as its training asks it."""

    name: str  # in conf/head
    config: type[HeadJobConfig]  # of its job; `head` holds its options
    reads_tokens: bool  # predictions depend on the tokens drafted before them
    # likeliest tokens of a head whose accuracies its drafter goes by; 0: none
    ranks: int = 0
    layout: FolderLayout

    def shape(self, config: Any, target: Any) -> Any:
        """Return the head's `HeadShape` for a target (its Hugging Face configuration), or that of
        the folder in head.path. Raises UserError.
        """
        ...

    def taps(self, shape: Any) -> Layers:
        """Return the layers of the target that the head reads (training/features/taps.py)."""
        return ()

    def check(self, config: Any, shape: Any) -> None:
        """Raise UserError for values of its own that no head can go by."""
        return None

    def rules(self, config: Any, shape: Any) -> dict[str, tuple[bool, str]]:
        """Return its rules for numbers: key -> (whether its value is fine, what is expected)."""
        return {}

    def note(self, config: Any, shape: Any) -> str:
        """Return which keys have no effect, in words; empty where all have one."""
        return ""

    def empty(self, shape: Any) -> nn.Module:
        """Return a head of this shape on the present device, whatever its weights."""
        ...

    def build(
        self, config: Any, shape: Any, target: Any, samples: Sequence[Sample], show: bool
    ) -> nn.Module:
        """Return the head in float32 that training starts from; its weights by torch's random
        numbers, or those of the folder in head.path.
        """
        ...

    def part_of(self, name: str, shape: Any) -> str:
        """Return what a parameter is counted under: `output`, `blocks`."""
        ...

    def describe(self, shape: Any) -> str:
        """Return the shape in few words."""
        ...

    def measured(self, shape: Any, figures: Mapping[str, Any]) -> Any:
        """Return the shape with what its drafter goes by, of the best checkpoint's figures."""
        return shape

    def drafter(self, head: Any, shape: Any, config: Any, sampled: bool) -> Drafter:
        """Return a drafter with the head, as the finished head is measured. sampled: at a
        temperature.
        """
        ...

    def drafting(self, config: Any) -> Drafting:
        """Return how that drafter drafts."""
        ...

    def readme(self, card: dict[str, Any]) -> ReadmeParts:
        """Return its part of the README of a head folder with this card."""
        ...
