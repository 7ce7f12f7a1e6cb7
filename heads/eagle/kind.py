"""EAGLE-3 as a kind of trained head (training/heads/kind.py).

Shapes: M drafts, N predictions of all steps, O drafts with own tokens, P positions, H the target's
hidden size.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.interfaces import Drafter
from decoding.models.native.rope import rope_parameters
from heads.eagle.checkpoint import LAYOUT, load_head, read_head_config
from heads.eagle.config import EagleOptions, EagleTrainConfig
from heads.eagle.drafter import EagleDrafter
from heads.eagle.drafts import Drafts
from heads.eagle.model import EagleConfig, EagleHead, default_taps
from jobs.paths import name_anywhere
from training.data.packing import PackedBatch
from training.features.states import TargetStates
from training.features.taps import Layers
from training.heads.checkpoint import FolderLayout
from training.heads.config import HeadJobConfig
from training.heads.kind import DraftingSetup, HeadKind, ReadmeParts
from training.heads.positions import Positions
from training.heads.predicting import Choose, DraftStarts, choose_likeliest, spread
from training.models.shapes import target_widths

STARTS = ("lm_head", "random")


class EagleKind(HeadKind):
    """EAGLE-3 heads as a kind of trained head."""

    name, label, reads_tokens, reads_context = "eagle3", "eagle", True, True
    config: type[HeadJobConfig] = EagleTrainConfig
    layout: FolderLayout = LAYOUT

    def outputs(self, head: EagleHead, states: TargetStates) -> Sequence[Tensor]:
        return (head.lm_head.weight,)

    def features(
        self,
        head: EagleHead,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        """Return the inputs (N, H) of the lm_head for all steps of the training-time test."""
        steps, tips_M = len(where.counts_K), where.kept_P[where.drafts_M] + 1
        drafts = _begin(head, states, batch, where.kept_P, states_PC, tips_M, steps)
        reached: list[Tensor] = []
        for step in range(steps):
            tokens_M = where.tokens_MK[:, step]
            if step and where.continues_own:
                own_OH = reached[-1].detach().index_select(0, where.own_O)
                own_O = _ids(head, choose_likeliest(own_OH, head.lm_head.weight, step - 1))
                tokens_M = tokens_M.index_copy(0, where.own_O, own_O)
            reached.append(drafts.advance(states.embed(tokens_M)))
        return torch.cat(reached).index_select(0, where.head_N * len(tips_M) + where.draft_N)

    @torch.no_grad()
    def draft(
        self,
        head: EagleHead,
        states: TargetStates,
        tips: DraftStarts,
        count: int,
        choose: Choose = choose_likeliest,
    ) -> Tensor:
        text = tips.context
        assert text is not None
        drafts = _begin(head, states, text.batch, text.kept_P, text.states_PC, text.tips_M, count)
        drafted, tokens_M = [], tips.tokens_M
        for depth in range(count):
            features_MH = drafts.advance(states.embed(tokens_M))
            tokens_M = _ids(head, choose(features_MH, head.lm_head.weight, depth))
            drafted.append(tokens_M)
        return torch.stack(drafted, dim=1)

    def shape(self, config: EagleTrainConfig, target: Any) -> EagleConfig:
        options, widths = config.head, target_widths(target)
        return EagleConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_heads=widths["num_attention_heads"],
            num_kv_heads=widths["num_key_value_heads"],
            head_dim=widths["head_dim"],
            intermediate_size=options.intermediate_size or widths["intermediate_size"],
            taps=tuple(options.taps) or default_taps(target.num_hidden_layers),
            rope=rope_parameters(target.to_dict()),
            max_positions=target.max_position_embeddings,
            draft_vocab_size=options.draft_vocab_size,
            norm_eps=target.rms_norm_eps,
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
            norm_before_residual=options.norm_before_residual,
        )

    def read_shape(self, folder: Path) -> EagleConfig:
        shape = read_head_config(folder)
        if not shape.taps:
            raise UserError(
                f"{folder / 'config.json'} names no layers, which training needs. Add the target's "
                f"layers that the head reads as taps, numbered as Hugging Face's hidden_states."
            )
        return shape

    def load(self, folder: Path) -> EagleHead:
        return load_head(folder)

    def taps(self, shape: EagleConfig) -> Layers:
        return shape.taps

    def rules(self, config: EagleTrainConfig, shape: EagleConfig) -> dict[str, tuple[bool, str]]:
        options, V = config.head, shape.vocab_size
        return {
            "head.start": (options.start in STARTS, f"one of {', '.join(STARTS)}"),
            "head.taps": (
                len(set(options.taps)) == len(options.taps),
                "different layers of the target, or an empty list for three by default",
            ),
            "head.intermediate_size": (
                options.intermediate_size >= 0,
                "1 or more, or 0 for the target's",
            ),
            "head.draft_vocab_size": (
                0 <= options.draft_vocab_size <= V,
                f"a size from 1 to {V}, the target's vocabulary, or 0 for all tokens",
            ),
        }

    def empty(self, shape: EagleConfig) -> EagleHead:
        return EagleHead(shape)

    def initialize(self, head: EagleHead, options: EagleOptions, lm_head_VH: Tensor) -> None:
        if options.start == "lm_head":
            head.start_from(lm_head_VH.float().cpu())

    def part_of(self, name: str, shape: EagleConfig) -> str:
        return "output" if name.startswith("lm_head") else "layer"

    def describe(self, shape: EagleConfig) -> str:
        layers = ", ".join(map(str, shape.taps))
        return f"one decoder layer on the target's hidden states {layers}"

    def drafter(
        self, head: EagleHead, shape: EagleConfig, config: EagleTrainConfig, sampled: bool
    ) -> Drafter:
        return EagleDrafter(head=head, children="sampled" if sampled else "top_k")

    def chain_drafter(self, head: EagleHead) -> Drafter:
        return EagleDrafter(head=head, shape="chain")

    def drafting(self, config: EagleTrainConfig) -> DraftingSetup:
        return DraftingSetup("with a ranked tree", "tree_block_efficiency")

    def readme(self, card: dict[str, Any]) -> ReadmeParts:
        target, shape = shlex.quote(name_anywhere(card["target"])), EagleConfig(**card["shape"])
        speculative = {"method": "eagle3", "model": ".", "num_speculative_tokens": 3}
        option = f"--speculative-config '{json.dumps(speculative)}'"
        return ReadmeParts(
            tag="eagle3",
            title="An EAGLE-3 head (arXiv 2503.01840)",
            form=self.describe(shape),
            reads="hidden states and embedding",
            layout="the layout of vLLM and SGLang (LlamaForCausalLMEagle3)",
            launch=(
                f"python -m eval.run target.path={target} drafters=[.]",
                f"vllm serve {target} {option}",
            ),
            remarks="Measured costs choose the size of the tree. vLLM drafts a chain. `taps` in "
            "config.json numbers layers as Hugging Face's hidden_states, as does vLLM's key at the "
            "top level; that of SGLang, in `eagle_config`, has the same layers by their outputs.",
        )


def _begin(
    head: EagleHead,
    states: TargetStates,
    batch: PackedBatch,
    kept_P: Tensor,
    states_PC: Tensor,
    tips_M: Tensor,
    depth: int,
) -> Drafts:
    """Return drafts of at most `depth` steps from these tips of a batch."""
    embedded_RTH, states_RTC = states.embed(batch.ids_RT), spread(batch, kept_P, states_PC)
    return Drafts(head, batch, embedded_RTH, states_RTC, tips_M, depth)


def _ids(head: EagleHead, indices: Tensor) -> Tensor:
    """Return the target's ids of indices into the draft vocabulary."""
    ids_V = head.token_ids_V
    return indices if ids_V is None else ids_V[indices]


KIND = EagleKind()
