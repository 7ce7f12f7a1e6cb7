"""Interface between a kind of trained head and its training.

A kind is one object, and heads are arguments of its methods; `assume` returns a kind for folders
that leave something open. To add a kind, write a subclass of `HeadKind` and name it in
`decoding.drafters.registry`.

Shapes: C channels of the states that a head reads, E features, H the target's hidden size, K
drafted tokens, M drafts, N predictions of all depths, V drafted vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from decoding.errors import UserError
from decoding.interfaces import Drafter
from training.features.taps import Layers
from training.heads.checkpoint import FolderLayout
from training.heads.config import HeadJobConfig
from training.heads.predicting import PredictingHead
from training.heads.published import Contract


class HeadShape(Protocol):
    """Fields of a head's shape that training reads."""

    vocab_size: int  # of the target
    hidden_size: int  # H
    draft_vocab_size: int  # 0: the full vocabulary

    @property
    def num_drafted(self) -> int:
        """Return V, the size of the drafted vocabulary."""
        ...


@dataclass(frozen=True)
class DraftingSetup:
    """Description of the drafting that measures a finished head."""

    words: str  # "with 8 beams"
    figure: str  # name of the measured block efficiency on the card
    options: dict[str, float] = field(default_factory=dict)  # further values for the card


@dataclass(frozen=True)
class ReadmeParts:
    """Parts of a README that depend on the kind of head."""

    tag: str  # tag on the Hugging Face Hub
    title: str  # "A recurrent drafter head (ReDrafter, arXiv 2403.09919)"
    form: str  # the head's shape, in words
    reads: str  # features of the target that the head reads
    layout: str  # files of a folder without extensions
    launch: Sequence[str]  # commands that name the folder `.`
    remarks: str


class HeadKind(PredictingHead, Protocol):
    """What training needs of one kind of head: shape, weights, predictions, drafter and README."""

    name: str  # `kind` of its presets (heads/registry.py)
    config: type[HeadJobConfig]  # configuration of its job; `head` holds its options
    # number of likeliest tokens whose accuracies the drafter uses; 0: none
    ranks: int = 0
    layout: FolderLayout
    contract: Contract | None = None  # its published layouts; None: no server reads it

    def shape(self, config: Any, target: Any) -> Any:
        """Return the `HeadShape` of a new head for a target.

        config: an instance of `self.config`. target: the target's Hugging Face configuration.
        """
        ...

    def read_shape(self, folder: Path) -> Any:
        """Return the `HeadShape` of a head folder.

        Raises UserError if the folder holds no valid head of this kind.
        """
        ...

    def load(self, folder: Path) -> nn.Module:
        """Load the head of a folder in float32.

        Raises UserError if the folder holds no valid head of this kind.
        """
        ...

    def assume(self, layout: str | None = None, target_layers: int = 0) -> "HeadKind":
        """Return this kind with values for folders whose config.json lacks them.

        layout: of the slots of a block. target_layers: number of the target's layers, from which
        the published default of a head's layers follows; 0: unknown. Raises UserError for a layout
        if heads of this kind have none.
        """
        if layout is not None:
            raise UserError(
                f"layout={layout} was given for a head of the kind {self.name}. Leave it out: only "
                f"block drafters have a layout of slots."
            )
        return self

    def open_layouts(self, folder: Path) -> Sequence[str]:
        """Return the layouts of slots that config.json leaves open; empty if it names one."""
        return ()

    def taps(self, shape: Any) -> Layers:
        """Return the layers of the target that the head reads (training/features/taps.py)."""
        return ()

    def reads_tokens(self, shape: Any) -> bool:
        """Return whether predictions depend on the tokens drafted before them."""
        return False

    def mask_token(self, shape: Any) -> int | None:
        """Return the token of slots that the head fills, which no text should have."""
        return None

    def longest_draft(self, shape: Any) -> int | None:
        """Return the largest number of tokens of a chain; None: no limit."""
        return None

    def cached_numbers(self, shape: Any) -> int:
        """Return the count of numbers that drafting stores for each token, keys and values too."""
        return 0

    def rules(self, config: Any, shape: Any) -> dict[str, tuple[bool, str]]:
        """Return rules for this kind's keys: key -> (validity of its value, expected values)."""
        return {}

    def empty(self, shape: Any) -> nn.Module:
        """Return a head of this shape on the current device, with arbitrary weights."""
        ...

    def initialize(self, head: Any, options: Any, lm_head_VH: Tensor) -> None:
        """Set the weights of a new head that do not start at random.

        lm_head_VH: the target's output weights, of any dtype and device.
        """
        ...

    def start_from_target(self, head: Any, options: Any, target: Any) -> None:
        """Copy into a new head the weights of the target that it starts from, if there are any.

        target: a Hugging Face causal LM.
        """
        return

    def part_of(self, name: str, shape: Any) -> str:
        """Return the part of the head that a parameter belongs to, such as `output` or `blocks`."""
        ...

    def describe(self, shape: Any) -> str:
        """Describe the shape in a few words."""
        ...

    def measured(self, shape: Any, figures: Mapping[str, Any]) -> Any:
        """Return the shape, with the best checkpoint's held-out figures that drafting needs."""
        return shape

    def drafter(self, head: Any, shape: Any, config: Any, sampled: bool) -> Drafter:
        """Return the drafter that measures the finished head.

        sampled: whether the held-out temperature is above 0.
        """
        ...

    def chain_drafter(self, head: Any) -> Drafter:
        """Return the drafter of the head's greedy chain, whose costs training may measure."""
        ...

    def drafting(self, config: Any, shape: Any) -> DraftingSetup:
        """Return the description of the drafting that measures the finished head."""
        ...

    def readme(self, card: dict[str, Any]) -> ReadmeParts:
        """Return this kind's parts of the README of a head folder with this card."""
        ...
