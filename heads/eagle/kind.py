"""EAGLE-1, EAGLE-3 and P-EAGLE as kinds of trained heads (training/heads/kind.py)."""

import copy
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.interfaces import Drafter
from heads.eagle.checkpoint import load_head, read_head_config
from heads.eagle.config import EagleOptions, EagleTrainConfig
from heads.eagle.drafter import EagleDrafter
from heads.eagle.layouts import SERVED, SERVED_FIRST, SERVED_PARALLEL
from heads.eagle.model import EagleConfig, EagleHead, default_taps, read_rope
from heads.eagle.parallel import ParallelEagleDrafter
from heads.eagle.predictions import EaglePredictions
from heads.eagle.servers import CONTRACT, FIRST_CONTRACT, PARALLEL_CONTRACT
from jobs.paths import name_anywhere
from training.features.taps import Layers
from training.heads.build import mask_token_of
from training.heads.checkpoint import check_trained, trained_shape
from training.heads.config import HeadJobConfig
from training.heads.kind import DraftingSetup, HeadKind, ReadmeParts
from training.heads.published import Contract, PublishedLayout
from training.models.shapes import target_widths

STARTS = ("lm_head", "random")


class EagleKind(EaglePredictions, HeadKind):
    """EAGLE heads of one form as a kind of trained head."""

    config: type[HeadJobConfig] = EagleTrainConfig
    _target_layers = 0  # of the target of folders without layers; 0: unknown

    def __init__(self, name: str, parallel: bool = False, predicts_states: bool = False) -> None:
        """Name the kind.

        parallel: whether its heads draft in one pass. predicts_states: whether they are EAGLE-1's.
        """
        self.name, self.parallel = name, parallel
        self.predicts_states = predicts_states
        self.layout: PublishedLayout = SERVED_PARALLEL if parallel else SERVED
        self.contract: Contract = PARALLEL_CONTRACT if parallel else CONTRACT
        if predicts_states:
            self.layout, self.contract = SERVED_FIRST, FIRST_CONTRACT

    def shape(self, config: EagleTrainConfig, target: Any) -> EagleConfig:
        options, widths = config.head, target_widths(target)
        taps, layers = tuple(options.taps), target.num_hidden_layers
        if self.predicts_states:
            taps = () if taps == (layers,) else taps
        return EagleConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_heads=widths["num_attention_heads"],
            num_kv_heads=widths["num_key_value_heads"],
            head_dim=widths["head_dim"],
            intermediate_size=options.intermediate_size or widths["intermediate_size"],
            taps=taps if self.predicts_states else taps or default_taps(layers),
            rope=read_rope(target.to_dict(), config.target.path),
            max_positions=target.max_position_embeddings,
            draft_vocab_size=options.draft_vocab_size,
            norm_eps=target.rms_norm_eps,
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
            norm_before_residual=options.norm_before_residual,
            parallel=config.loss.predict_n_tokens if self.parallel else 0,
            mask_token_id=mask_token_of(config, options.mask_token_id, target)
            if self.parallel
            else 0,
            masks_by_depth=options.masks_by_depth,
            predicts_states=self.predicts_states,
            fc_bias=options.fc_bias,
        )

    def read_shape(self, folder: Path) -> EagleConfig:
        """Return the shape of a head folder, with the default layers if config.json names none."""
        shape = read_head_config(folder)
        if shape.taps or shape.predicts_states:
            return shape
        taps = tuple(trained_shape(folder).get("taps", ()))
        if self._target_layers:
            taps = shape.taps_of(self._target_layers)
            check_trained(folder, replace(shape, taps=taps))
        if not taps:
            raise UserError(
                f"{folder / 'config.json'} names no layers, and the published default depends on "
                f"the target's number of layers. Name the target too (check_head.py HEAD TARGET, "
                f"export_head.py HEAD LAYOUT OUT TARGET), or add the layers as taps, numbered as "
                f"Hugging Face's hidden_states."
            )
        return replace(shape, taps=taps)

    def load(self, folder: Path) -> EagleHead:
        return load_head(folder)

    def assume(self, layout: str | None = None, target_layers: int = 0) -> HeadKind:
        super().assume(layout)
        kind = copy.copy(self)
        kind._target_layers = target_layers
        return kind

    def taps(self, shape: EagleConfig) -> Layers:
        return shape.taps

    def reads_tokens(self, shape: EagleConfig) -> bool:
        return not self.parallel

    def mask_token(self, shape: EagleConfig) -> int | None:
        return shape.mask_token_id if self.parallel else None

    def cached_numbers(self, shape: EagleConfig) -> int:
        return shape.hidden_size + 2 * shape.num_kv_heads * shape.head_dim  # states, keys, values

    def rules(self, config: EagleTrainConfig, shape: EagleConfig) -> dict[str, tuple[bool, str]]:
        options = config.head
        tokens = config.loss.predict_n_tokens if self.parallel else 0
        return {
            "head.path": (
                shape.parallel == tokens and shape.predicts_states == self.predicts_states,
                f"a folder of head={self.name} whose passes draft {tokens} tokens "
                f"(loss.predict_n_tokens; 0: a token a step), not {shape.parallel}"
                if shape.predicts_states == self.predicts_states
                else f"a folder of head={self.name}",
            ),
            "data.max_length": (
                not config.head.path or config.data.max_length <= shape.max_positions,
                f"at most {shape.max_positions}, the positions of the head in head.path",
            ),
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
                options.draft_vocab_size >= 0,
                "1 or more, or 0 for all tokens",
            ),
            "head.masks_by_depth": (
                self.parallel or not options.masks_by_depth,
                "false, as only head=p_eagle has masks",
            ),
            **self._form_rules(config, shape),
        }

    def _form_rules(
        self, config: EagleTrainConfig, shape: EagleConfig
    ) -> dict[str, tuple[bool, str]]:
        """Return the rules of the keys that EAGLE-1 and EAGLE-3 heads do not share."""
        options = config.head
        if not self.predicts_states:
            return {"head.fc_bias": (not options.fc_bias, "false, as only head=eagle1 has a bias")}
        norms = ("fc_norm", "norm_output", "norm_before_residual")
        only = "as head=eagle1"
        return {
            "head.taps": (
                not shape.taps,
                f"an empty list, {only} reads the target's state after the final norm alone",
            ),
            "head.draft_vocab_size": (
                options.draft_vocab_size == 0,
                f"0, {only} predicts all tokens with the target's own lm_head",
            ),
            **{
                f"head.{name}": (not getattr(options, name), f"false, {only} has no such norm")
                for name in norms
            },
        }

    def empty(self, shape: EagleConfig) -> EagleHead:
        return EagleHead(shape)

    def initialize(self, head: EagleHead, options: EagleOptions, lm_head_VH: Tensor) -> None:
        if options.start == "lm_head" and not self.predicts_states:
            head.start_from(lm_head_VH.float().cpu())

    def part_of(self, name: str, shape: EagleConfig) -> str:
        return "output" if name.startswith("lm_head") else "layer"

    def describe(self, shape: EagleConfig) -> str:
        if shape.predicts_states:
            return "one decoder layer on the target's state after the final norm"
        layers = ", ".join(map(str, shape.taps))
        masks = "mask states by depth" if shape.masks_by_depth else "one mask state"
        passes = f", {shape.parallel} tokens a pass, {masks}" if shape.parallel else ""
        return f"one decoder layer on the target's hidden states {layers}{passes}"

    def drafter(
        self, head: EagleHead, shape: EagleConfig, config: EagleTrainConfig, sampled: bool
    ) -> Drafter:
        if self.parallel:
            return ParallelEagleDrafter(head=head)
        return EagleDrafter(head=head, children="sampled" if sampled else "top_k")

    def chain_drafter(self, head: EagleHead) -> Drafter:
        if self.parallel:
            return ParallelEagleDrafter(head=head)
        return EagleDrafter(head=head, shape="chain")

    def drafting(self, config: EagleTrainConfig, shape: EagleConfig) -> DraftingSetup:
        if self.parallel:
            return DraftingSetup("of a chain", "chain_block_efficiency")
        return DraftingSetup("with a ranked tree", "tree_block_efficiency")

    def readme(self, card: dict[str, Any]) -> ReadmeParts:
        target, shape = shlex.quote(name_anywhere(card["target"])), EagleConfig(**card["shape"])
        served = self.contract.servers[0].launch_of(
            target, self.layout.name, shape, card["num_draft_tokens"]
        )
        paper, drafts = "An EAGLE-3 head (arXiv 2503.01840)", "the size of the tree"
        reads = "hidden states and embedding"
        remarks = (
            "`taps` in config.json numbers layers as Hugging Face's hidden_states, as does vLLM's "
            "key at the top level; that of SGLang, in `eagle_config`, has the same layers by their "
            "outputs."
        )
        if shape.predicts_states:
            paper, reads = (
                "An EAGLE-1 head (arXiv 2401.15077)",
                "last hidden state, embedding and lm_head",
            )
            remarks = "The tree grows as in EAGLE-2."
        if shape.parallel:
            paper, drafts = "A P-EAGLE head (arXiv 2602.01469)", "the length of the chain"
        if shape.masks_by_depth:
            paper = "A ParallelSpec head (arXiv 2410.05589)"
        launch = [f"python -m eval.run target.path={target} drafters=[.]"]
        if served:
            launch.append(served.command)
        served_words = " vLLM drafts a chain." if served else ""
        architectures = ", ".join(self.layout.config(shape, torch.float32)["architectures"])
        return ReadmeParts(
            tag="parallelspec" if shape.masks_by_depth else self.name,
            title=paper,
            form=self.describe(shape),
            reads=reads,
            layout=f"the published layout ({architectures})",
            launch=launch,
            remarks=f"Measured costs choose {drafts}.{served_words} {remarks}",
        )


KIND = EagleKind("eagle3")
FIRST = EagleKind("eagle1", predicts_states=True)
PARALLEL = EagleKind("p_eagle", parallel=True)
