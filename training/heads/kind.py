"""Interface of a kind of trained head to its training.

A kind is one stateless object; heads are its arguments. To add a head, write a subclass of
`HeadKind` and name it in `decoding.drafters.registry`.

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
    """The fields of a head's shape, a dataclass, that training reads."""

    vocab_size: int  # of the target
    hidden_size: int  # H
    draft_vocab_size: int  # 0: the full vocabulary

    @property
    def num_drafted(self) -> int:
        """V."""
        ...


@dataclass(frozen=True)
class DraftingSetup:
    """Form of drafting that measures a finished head."""

    words: str  # "with 8 beams"
    figure: str  # the name of its block efficiency on the card
    options: dict[str, float] = field(default_factory=dict)  # further values for the card


@dataclass(frozen=True)
class ReadmeParts:
    """The parts of a README that depend on the kind of head."""

    tag: str  # tag on the Hugging Face Hub
    title: str  # "A recurrent drafter head (ReDrafter, arXiv 2403.09919)"
    form: str  # the head's shape, in words
    reads: str  # features of the target that it reads
    layout: str  # of a folder without extensions
    launch: Sequence[str]  # commands that use the folder as HEAD
    remarks: str


class HeadKind(PredictingHead, Protocol):
    """A kind of head, as its training uses it."""

    name: str  # in conf/head
    config: type[HeadJobConfig]  # of its job; `head` holds its options
    reads_tokens: bool  # predictions depend on the tokens drafted before them
    # number of likeliest tokens whose accuracies the drafter uses; 0: none
    ranks: int = 0
    layout: FolderLayout

    def shape(self, config: Any, target: Any) -> Any:
        """Return the `HeadShape` for a target, or that of the folder in head.path.

        target: its Hugging Face configuration. Raises UserError.
        """
        ...

    def taps(self, shape: Any) -> Layers:
        """Return the layers of the target that the head reads (training/features/taps.py)."""
        return ()

    def check(self, config: Any, shape: Any) -> None:
        """Raise UserError for invalid options of this kind."""
        return None

    def rules(self, config: Any, shape: Any) -> dict[str, tuple[bool, str]]:
        """Return the rules for numbers: key -> (whether the value is valid, the expected range)."""
        return {}

    def empty(self, shape: Any) -> nn.Module:
        """Return a head of this shape on the current device, with any weights."""
        ...

    def build(
        self, config: Any, shape: Any, target: Any, samples: Sequence[Sample], show: bool
    ) -> nn.Module:
        """Return the head in float32 that training starts from: random, or from head.path."""
        ...

    def part_of(self, name: str, shape: Any) -> str:
        """Return the part under which a parameter is counted: `output`, `blocks`."""
        ...

    def describe(self, shape: Any) -> str:
        """Describe the shape in a few words."""
        ...

    def measured(self, shape: Any, figures: Mapping[str, Any]) -> Any:
        """Return the shape with the figures of the best checkpoint that its drafter needs."""
        return shape

    def drafter(self, head: Any, shape: Any, config: Any, sampled: bool) -> Drafter:
        """Return a drafter that measures the finished head. sampled: the temperature is above 0."""
        ...

    def drafting(self, config: Any) -> DraftingSetup:
        """Return the form of that drafter's drafting."""
        ...

    def readme(self, card: dict[str, Any]) -> ReadmeParts:
        """Return this kind's parts of the README of a head folder with this card."""
        ...
