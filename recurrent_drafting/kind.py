"""The recurrent head as a kind of trained head (training/heads/kind.py)."""

import shlex
from pathlib import Path
from typing import Any

from torch import Tensor

from decoding.interfaces import Drafter
from jobs.paths import name_anywhere
from recurrent_drafting.build import head_config, initialize, shape_rules
from recurrent_drafting.checkpoint import LAYOUT, load_head, read_head_config
from recurrent_drafting.config import HeadShapeConfig, HeadTrainConfig
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import HeadConfig, RecurrentHead
from recurrent_drafting.predictions import RecurrentPredictions
from training.heads.checkpoint import FolderLayout
from training.heads.config import HeadJobConfig
from training.heads.kind import DraftingSetup, HeadKind, ReadmeParts


class RecurrentKind(RecurrentPredictions, HeadKind):
    """Recurrent heads (ReDrafter) as a kind of trained head."""

    name = "recurrent"
    config: type[HeadJobConfig] = HeadTrainConfig
    layout: FolderLayout = LAYOUT

    def shape(self, config: HeadTrainConfig, target: Any) -> HeadConfig:
        return head_config(config.head, target)

    def read_shape(self, folder: Path) -> HeadConfig:
        return read_head_config(folder)

    def load(self, folder: Path) -> RecurrentHead:
        return load_head(folder)

    def rules(self, config: HeadTrainConfig, shape: HeadConfig) -> dict[str, tuple[bool, str]]:
        drafted = shape.num_drafted
        width = 1 <= config.beam_width <= drafted, f"1 to {drafted}, the number of drafted tokens"
        return shape_rules(config.head, shape) | {"beam_width": width}

    def empty(self, shape: HeadConfig) -> RecurrentHead:
        return RecurrentHead(shape)

    def initialize(self, head: RecurrentHead, options: HeadShapeConfig, lm_head_VH: Tensor) -> None:
        initialize(head, options, lm_head_VH)

    def part_of(self, name: str, shape: HeadConfig) -> str:
        if name == f"lm_head.{shape.num_draft_layers}.weight":
            return "output"
        module = name.partition(".")[0]
        parts = {"lm_head": "blocks", "input_proj": "projection"}
        return parts.get(module, "recurrence")

    def describe(self, shape: HeadConfig) -> str:
        return "recurrent" if shape.rnn else "without recurrence"

    def drafter(
        self, head: RecurrentHead, shape: HeadConfig, config: HeadTrainConfig, sampled: bool
    ) -> Drafter:
        """Return a drafter of `config.beam_width` beams, sampled or top-k."""
        children = "sampled" if sampled else "top_k"
        return RecurrentDrafter(head=head, beam_width=config.beam_width, children=children)

    def chain_drafter(self, head: RecurrentHead) -> Drafter:
        return RecurrentDrafter(head=head, beam_width=1, children="top_k")

    def reads_tokens(self, shape: HeadConfig) -> bool:
        return True

    def drafting(self, config: HeadTrainConfig, shape: HeadConfig) -> DraftingSetup:
        width = config.beam_width
        return DraftingSetup(f"with {width} beams", "beams_block_efficiency", {"beam_width": width})

    def readme(self, card: dict[str, Any]) -> ReadmeParts:
        shape, target = card["shape"], shlex.quote(name_anywhere(card["target"]))
        blocks = (
            "1 residual block"
            if shape["num_draft_layers"] == 1
            else f"{shape['num_draft_layers']} residual blocks"
        )
        kind = "recurrent" if shape["rnn"] else "without recurrence"
        return ReadmeParts(
            tag="recurrent-drafting",
            title="A recurrent drafter head (ReDrafter, arXiv 2403.09919)",
            form=f"{kind}, {blocks} of width {shape['exit_dim']}",
            reads="hidden states and embedding",
            layout="the published layout (config.json and model.safetensors with the published "
            "names)",
            launch=(
                f"python -m eval.run target.path={target} drafters=[.]",
                f"python -m recurrent_drafting.cmd.generate --hf_llm {target} --hf_drafter . "
                f"--beam_width 8 --beam_length 5",
            ),
            remarks=_REMARKS,
        )


_REMARKS = """The best number of beams depends on the machine: both commands measure it, and search at most `beam_width`. `by_cost=false` fixes width and length (in the first
line `"drafters=[{use: ., by_cost: false}]"`). At temperatures above 0 beams are sampled; `children=top_k` takes the likeliest ones as
published, as exact and rarely as fast."""  # noqa: E501


KIND = RecurrentKind()
