"""Drafters that could be trained: their sizes and costs of training, and folders of random weights.

The time of a draft step depends on a drafter's shape and not on its weights. So a folder with
random weights is drafted with like a trained one, by the same class with the same options.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from decoding.drafters.build import choose_drafter, options_of, with_target_settings
from decoding.drafters.parallel import MASK_TOKEN, TRAINED_TOKENS
from decoding.drafters.registry import AUTO
from decoding.errors import UserError
from decoding.interfaces import Drafter, Target
from decoding.models.draft_vocabulary import restrict_head
from decoding.models.load import DTYPES
from decoding.stopping.planner import PRIOR, sibling_chance
from distill.config import ParallelDraftingConfig
from distill.dry_run import training_flops
from distill.parallel_drafting.setup import most_mask_tokens
from distill.shapes import ALIGNED, refuse_wider, student_config
from eval.plan.acceptance import Prospect
from eval.plan.config import PlanConfig
from eval.plan.curves import CHAIN, PARALLEL, TREE
from heads.rank_trees import RANKS, grow_tree
from heads.registry import KINDS, kind_of
from heads.train import schema_of
from jobs.composing import compose_job
from jobs.config import typed
from training.config import StudentConfig
from training.heads.checkpoint import save_head
from training.heads.dry_run import token_flops
from training.heads.loss_config import trained_depths
from training.heads.measure import measure
from training.models.build import random_model
from training.models.shapes import (
    cache_bytes_per_token,
    head_rows,
    layers_of,
    parameter_counts,
    sizes_of,
    target_widths,
)

SPREAD = 0.02  # standard deviation of a head's random weights
RANDOM = "random weights"  # in place of the path of a target


@dataclass(frozen=True)
class Candidate:
    """A drafter that could be trained."""

    name: str
    kind: str  # chain, parallel, or the kind of a head
    draft_shape: str  # chain | tree
    layers: int  # of a pruned model; 0 for a head
    hidden_size: int  # of a pruned model; 0 for a head
    draft_vocab_size: int  # 0: all tokens
    parameters: int
    cache_bytes_a_token: int  # what drafting stores for each token of a row, such as its keys
    flops_a_token: float  # of a training step, for each token of the data
    longest: int  # draft
    shape: Mapping[str, Any]  # all sizes that its costs depend on
    write: Callable[[Path], None]  # writes a folder with random weights
    use: str = ""  # name of its drafter; empty: what its folder holds decides
    tree_nodes: int = 0  # number that its trees are to have; 0: a chain

    @property
    def facts(self) -> dict[str, Any]:
        """What its measured costs depend on."""
        facts = {"kind": self.kind, "draft_shape": self.draft_shape, "draft_tokens": self.longest}
        size = {"tree_nodes": self.tree_nodes} if self.tree_nodes else {}
        return {**facts, **size, "shape": dict(self.shape)}

    def prospect(
        self, training_tokens: int, temperature: float, prompts: str, tree_nodes: int = 0
    ) -> Prospect:
        """Return what predicts its acceptance. tree_nodes: of its trees; 0: a chain."""
        return Prospect(
            self.kind,
            self.draft_shape,
            self.layers,
            self.hidden_size,
            training_tokens,
            temperature,
            self.draft_vocab_size,
            prompts,
            tree_nodes,
        )

    def as_tree(self, nodes: int) -> Candidate:
        """Return the candidate with trees of some nodes in place of chains."""
        use = "ranked_tree" if self.kind == CHAIN else self.use
        name = f"{self.name} tree of {nodes}"
        return replace(self, name=name, draft_shape=TREE, use=use, tree_nodes=nodes)

    def fixed_options(self, kind: type) -> dict[str, Any]:
        """Return the options of a drafter's class for chains or trees of a fixed size.

        Decisions by cost need the costs that are measured here.
        """
        nodes = self.tree_nodes
        fixed: dict[str, Any] = {"shape": self.draft_shape, "by_cost": False, "beam_width": 1}
        if nodes:
            fixed |= {"max_nodes": nodes, "beam_width": math.ceil(nodes / self.longest)}
            # random weights have no accuracies, from which Medusa's trees grow
            accuracy_KR = [_assumed_accuracies()] * self.longest
            fixed["choices"] = [path for path, _ in grow_tree(accuracy_KR, nodes)]
        known = options_of(kind) or set()
        return {option: value for option, value in fixed.items() if option in known}

    def load(self, folder: Path, target: Target) -> Drafter:
        """Load the drafter of a folder that `write` wrote, as eval.run loads a trained one."""
        asked_for = {"use": self.use, "folder": str(folder)} if self.use else {"use": str(folder)}
        choice = choose_drafter(asked_for)
        asked = {**choice.options, **self.fixed_options(choice.kind)}
        options = with_target_settings(
            choice.kind,
            asked,
            backend="hf" if target.backend.startswith("hf") else "native",
            dtype=target.dtype,
            device=str(target.device),
            execution=getattr(target, "execution", AUTO),
        )
        drafter: Drafter = choice.kind(**options)
        drafter.prepare(target, None)
        return drafter


def _assumed_accuracies() -> list[float]:
    """Return the assumed accuracies of a depth's likeliest tokens, the largest first."""
    found = [PRIOR]
    for place in range(1, RANKS):
        found.append((1 - sum(found)) * sibling_chance(place))
    return found


def candidates(config: PlanConfig, target: Any) -> list[Candidate]:
    """Return all drafters to plan. target: the target's Hugging Face configuration.

    Raises UserError for a target of another family, an unknown head, and a shape that the target
    cannot be cut to.
    """
    student_config(StudentConfig(), target)  # refuses other families
    found = list[Candidate]()
    for width, layers in itertools.product(config.widths, config.depths):
        chain = pruned_model(config, target, layers, width)
        for shape in config.shapes:
            if shape == PARALLEL:
                found.append(pruned_model(config, target, layers, width, is_parallel=True))
            found += _drafts(config, chain, shape)
    for name in config.heads:
        chain = trained_head(config, target, name)
        for shape in config.shapes:
            found += _drafts(config, chain, shape)
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{' and '.join(twice)} would be planned twice. Name each drafter once.")
    return found


def _drafts(config: PlanConfig, chain: Candidate, shape: str) -> list[Candidate]:
    """Return the drafts of a shape with the weights of a chain: itself, or trees of all sizes."""
    if shape == TREE:
        return [chain.as_tree(nodes) for nodes in config.tree_nodes]
    return [chain] if shape == CHAIN else []


def drafted_tokens(config: PlanConfig, vocab_size: int) -> int:
    """Return the size of the draft vocabulary, 0 for all tokens."""
    return 0 if config.draft_vocab_size >= vocab_size else config.draft_vocab_size


def spread_ids(count: int, vocab_size: int) -> torch.Tensor:
    """Return `count` rising token ids, spread over the vocabulary."""
    return torch.arange(count) * vocab_size // count


def shape_of_width(layers: int, width: int, target: Any) -> StudentConfig:
    """Return the shape of a pruned model of this hidden size, with widths in proportion to it.

    The width of a head stays the target's. Query heads are the largest number up to their
    proportion that divides the hidden size.
    """
    widths = target_widths(target)
    if width in (0, widths["hidden_size"]):
        return StudentConfig(num_hidden_layers=layers)
    share = width / widths["hidden_size"]
    inner = widths["intermediate_size"] * share
    most = max(1, round(widths["num_attention_heads"] * share))
    return StudentConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=max(n for n in range(1, most + 1) if width % n == 0),
        head_dim=widths["head_dim"],
        intermediate_size=round(inner / ALIGNED) * ALIGNED or max(1, round(inner)),
    )


def pruned_model(
    config: PlanConfig, target: Any, layers: int, width: int, is_parallel: bool = False
) -> Candidate:
    """Return a model of some layers and a width of the target's, to be distilled.

    is_parallel: whether it drafts a chain in one forward (PARD).
    """
    student: Any = student_config(shape_of_width(layers, width, target), target)
    refuse_wider(student, target)
    drafted = drafted_tokens(config, target.vocab_size)
    if drafted:
        student.draft_vocab_size, student.tie_word_embeddings = drafted, False
    mask_tokens = 0.0
    if is_parallel:
        mask_tokens = most_mask_tokens(ParallelDraftingConfig(tokens=config.max_draft_tokens))

    def write(folder: Path) -> None:
        built: Any = student_config(shape_of_width(layers, width, target), target)
        if is_parallel:
            values = (target.vocab_size - 1, config.max_draft_tokens)
            vars(built).update(zip((MASK_TOKEN, TRAINED_TOKENS), values, strict=True))
        torch.manual_seed(0)
        model = random_model(built, DTYPES[config.target.dtype])
        if drafted:
            restrict_head(model, spread_ids(drafted, target.vocab_size))
        model.save_pretrained(folder)

    widths = target_widths(student)
    return Candidate(
        name=f"{layers_of(student)}, width {widths['hidden_size']}" + " parallel" * is_parallel,
        kind=PARALLEL if is_parallel else CHAIN,
        draft_shape=CHAIN,
        layers=layers,
        hidden_size=widths["hidden_size"],
        draft_vocab_size=drafted,
        parameters=parameter_counts(student)["all"],
        cache_bytes_a_token=cache_bytes_per_token(student, DTYPES[config.target.dtype].itemsize),
        # the student reads the mask tokens too, and the target does not
        flops_a_token=training_flops(student, target) + mask_tokens * training_flops(student),
        longest=config.max_draft_tokens,
        shape={**sizes_of(student), "rows": head_rows(student)},
        write=write,
    )


def trained_head(config: PlanConfig, target: Any, name: str) -> Candidate:
    """Return a head of a kind, with the options of its file in conf/head."""
    _check_head(name)
    kind = kind_of(name)
    chosen: Any = _head_settings(config, target, name)
    shape = kind.shape(chosen, target)
    fits = kind.rules(chosen, shape).get("head.draft_vocab_size", (True, ""))[0]
    if not fits:  # a kind that drafts from all tokens
        chosen.head.draft_vocab_size = 0
        shape = kind.shape(chosen, target)
    dtype = DTYPES[config.target.dtype]
    counted = measure(kind, shape, trained_depths(chosen.loss), dtype, target)
    drafted = shape.draft_vocab_size

    def write(folder: Path) -> None:
        torch.manual_seed(0)
        head = kind.empty(shape)
        with torch.no_grad():
            for weight in head.parameters():
                weight.normal_(std=SPREAD)
        if drafted:
            head.token_ids_V = spread_ids(drafted, shape.vocab_size)
        save_head(kind.layout, shape, head, folder)

    longest = kind.longest_draft(shape) or config.max_draft_tokens
    return Candidate(
        name=name,
        kind=name,
        draft_shape=CHAIN,
        layers=0,
        hidden_size=0,
        draft_vocab_size=drafted,
        parameters=counted.parameters,
        cache_bytes_a_token=kind.cached_numbers(shape) * dtype.itemsize,
        flops_a_token=token_flops(chosen, target, counted),
        longest=min(config.max_draft_tokens, longest),
        shape=asdict(shape),
        write=write,
    )


def _check_head(name: str) -> None:
    if name not in KINDS:
        near = get_close_matches(name, KINDS, n=1, cutoff=0.0)[0]
        raise UserError(
            f"heads: '{name}' is no kind of head, expected some of {', '.join(KINDS)}; the nearest "
            f"is '{near}'."
        )


def _head_settings(config: PlanConfig, target: Any, name: str) -> Any:
    """Return the configuration of heads.train head=NAME for this target."""
    schema = schema_of(name)
    found: Any = typed(compose_job("heads.train", schema, [f"head={name}"]), schema)
    # its weights are random, so no tokenizer is needed to choose a mask token
    found.target, found.dry_run = replace(config.target, path=RANDOM), True
    if hasattr(found.head, "mask_token_id"):
        found.head.mask_token_id = target.vocab_size - 1
    if hasattr(found.head, "draft_vocab_size"):
        found.head.draft_vocab_size = drafted_tokens(config, target.vocab_size)
    return found
