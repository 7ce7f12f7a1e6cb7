"""The table of drafters: their names, classes, options, and the heads that they load.

Classes are given by dotted names and imported when used, since some are in higher packages.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from decoding.models.folder import read_json

AUTO = "auto"  # a drafter's dtype: see decoding.models.native.linear.draft_dtype


@dataclass(frozen=True)
class DrafterEntry:
    """One kind of drafter."""

    kind: str  # dotted name of the class
    needs: str = ""  # name of the required option
    model_type: str = ""  # of the heads that it loads, in config.json
    # keys of config.json, each of which identifies heads without a model_type of their own
    marks: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()  # that identify heads with a language model's model_type
    model_mark: str = ""  # a key of config.json that language models have for this drafter
    trained: str = ""  # dotted name of the HeadKind that trains such a head
    options: Mapping[str, Any] = field(default_factory=dict)  # defaults that differ from the class


DRAFTERS = {
    "chain": DrafterEntry("decoding.drafters.chain.ChainDrafter", "folder"),
    "parallel": DrafterEntry(
        "decoding.drafters.parallel.ParallelChain", "folder", model_mark="pard_token"
    ),
    "other_vocabulary": DrafterEntry(
        "decoding.drafters.other_vocabulary.OtherVocabulary", "folder"
    ),
    "prompt_lookup": DrafterEntry("decoding.drafters.prompt_lookup.PromptLookup"),
    "suffix_lookup": DrafterEntry("decoding.drafters.prompt_lookup.SuffixLookup"),
    "lookahead": DrafterEntry("decoding.drafters.lookahead.Lookahead"),
    "ouroboros": DrafterEntry("decoding.drafters.ouroboros.Ouroboros", "folder"),
    "self_speculation": DrafterEntry("decoding.drafters.self_speculation.SelfSpeculation", "skips"),
    "multi_candidate": DrafterEntry(
        "decoding.drafters.trees.multi_candidate.MultiCandidate", "folder"
    ),
    "static_tree": DrafterEntry("decoding.drafters.trees.static.StaticTree", "folder"),
    "ranked_tree": DrafterEntry("decoding.drafters.trees.ranked.RankedTree", "folder"),
    "budget_tree": DrafterEntry(
        "decoding.drafters.trees.ranked.RankedTree",
        "folder",
        options={"max_nodes": 24, "by_cost": True},
    ),
    "graph": DrafterEntry("decoding.drafters.trees.graph.GraphDrafter", "folder"),
    "chain_with_lookup": DrafterEntry("decoding.drafters.with_lookup.ChainWithLookup", "folder"),
    "recurrent": DrafterEntry(
        "recurrent_drafting.drafter.RecurrentDrafter",
        "folder",
        "recurrent_drafting_drafter",
        trained="recurrent_drafting.kind.KIND",
        options={"by_cost": True, "dtype": AUTO},
    ),
    "medusa": DrafterEntry(
        "heads.medusa.drafter.MedusaDrafter",
        "folder",
        "medusa",
        marks=("medusa_num_heads",),
        trained="heads.medusa.kind.KIND",
        options={"by_cost": True},
    ),
    # before eagle3, whose architecture its heads have too
    "p_eagle": DrafterEntry(
        "heads.eagle.parallel.ParallelEagleDrafter",
        "folder",
        architectures=("PeagleLlamaForCausalLM", "PEagleSpeculator", "PEagleDraftModel"),
        trained="heads.eagle.kind.PARALLEL",
        options={"dtype": AUTO},
    ),
    "eagle3": DrafterEntry(
        "heads.eagle.drafter.EagleDrafter",
        "folder",
        architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"),
        trained="heads.eagle.kind.KIND",
        options={"by_cost": True, "dtype": AUTO},
    ),
    "eagle1": DrafterEntry(
        "heads.eagle.drafter.EagleDrafter",
        "folder",
        architectures=("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"),
        trained="heads.eagle.kind.FIRST",
        options={"by_cost": True, "dtype": AUTO},
    ),
    "block": DrafterEntry(
        "heads.block.drafter.BlockDrafter",
        "folder",
        marks=("dflash_config", "target_layer_ids", "aux_hidden_state_layer_ids"),
        trained="heads.block.kind.KIND",
        options={"by_cost": True, "dtype": AUTO},
    ),
    "early_exit": DrafterEntry(
        "heads.early_exit.drafter.EarlyExitDrafter",
        "folder",
        "shallow_draft_early_exit",
        trained="heads.early_exit.kind.KIND",
    ),
    "sdsat": DrafterEntry(
        "heads.sdsat.drafter.SdsatDrafter",
        "folder",
        "shallow_draft_sdsat",
        trained="heads.sdsat.kind.KIND",
    ),
}
# model_type of a head's config.json -> its drafter's name
HEADS = {entry.model_type: name for name, entry in DRAFTERS.items() if entry.model_type}
# drafters with heads
TRAINED = tuple(name for name, entry in DRAFTERS.items() if entry.trained)


def imported(dotted: str) -> Any:
    """Import and return `package.module.name`.

    Raises ImportError with a one-line message for any error of the import.
    """
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the import of a user's module raises
        raise ImportError(" ".join(f"{type(error).__name__}: {error}".split())) from error


def head_of(folder: str | Path) -> str:
    """Return the name of the drafter that loads a head folder; empty for other folders."""
    file = Path(folder) / "config.json"
    values = read_json(file) if file.is_file() else {}
    found = values.get("architectures")
    architectures = {*found} if isinstance(found, list) else set()
    marked = (
        name
        for name, entry in DRAFTERS.items()
        if {*entry.marks} & values.keys() or {*entry.architectures} & architectures
    )
    return HEADS.get(str(values.get("model_type")), "") or next(marked, "")


def drafter_of(folder: str | Path) -> str:
    """Return the name of the drafter that a folder selects: of a head, or of a language model."""
    if head := head_of(folder):
        return head
    file = Path(folder) / "config.json"
    values = read_json(file) if file.is_file() else {}
    return next((name for name, entry in DRAFTERS.items() if entry.model_mark in values), "chain")


def unknown_drafter(where: str, use: str, names: list[str]) -> UserError:
    """Return the error for a value that is neither a folder nor a name, naming the nearest name."""
    near = get_close_matches(use, names, n=1)
    return UserError(
        f"{where} {use!r} is neither a folder (looked in {Path.cwd()}) nor the name of a drafter "
        f"({', '.join(names)})" + (f"; the nearest is '{near[0]}'." if near else ".")
    )
