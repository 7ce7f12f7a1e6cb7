"""Measured acceptance of trained drafters: the lines of acceptance.jsonl, read, found and merged.

A line is a JSON object with the fields of `Curve`. Acceptance depends on the target, the drafter
and the text, and not on the machine, so files of several machines may be joined line by line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from decoding.drafters.registry import DRAFTERS, TRAINED
from decoding.errors import UserError
from decoding.models.folder import CARD, hash_input, read_json
from eval.measure.origins import FILE as ORIGINS
from eval.measure.origins import Origin, read_origins
from eval.report.text import count_label
from eval.statistics import metrics
from eval.statistics.lossless import LOSSY
from eval.statistics.schema import Row, main_rows, read_all_rows
from heads.registry import KINDS
from jobs.files import write_text
from jobs.run_files import WRONG, json_kind
from jobs.run_folder import read_manifest
from jobs.run_lock import MANIFEST
from jobs.saved_config import read_config

CHAIN, PARALLEL, TREE = "chain", "parallel", "tree"
SHAPES = (CHAIN, TREE, PARALLEL)  # of drafts to plan
MODELS = (CHAIN, PARALLEL)  # kinds with layers and a hidden size of their own
EVALUATION, TRAINING = "eval.run", "training"
RESULTS, DRAFTER_CARD = "results.jsonl", f"drafter/{CARD}"  # of an evaluation, of a training
NO_RUNS = ("checkpoints", "shards")  # folders in which no run is looked for
FIXED, BY_COST = "fixed", "by_cost"  # rules that choose the size of a draft
# rules of verification whose acceptance is that of p / q at temperatures above 0
TESTED_BY_RATIO = ("greedy", "token", "block")


@dataclass(frozen=True)
class Curve:
    """Acceptance of one drafter at one temperature on one set of prompts."""

    target: str  # its path or name in that run
    target_hash: str
    drafter: str  # its name
    drafter_hash: str
    kind: str  # chain (a pruned model), parallel (PARD), or the kind of a head
    draft_shape: str  # chain | tree: depth k of a tree is accepted if one of its nodes there is
    drafter_class: str  # dotted name of what drafted; empty in a training
    stopping: str  # fixed, the policy that ends drafts early, or by_cost: the drafter does itself
    layers: int  # of a model; 0 for a head
    hidden_size: int  # of a model; 0 for a head
    draft_vocab_size: int  # tokens that it can propose; 0: all
    training_tokens: int  # that it was trained on, epochs included; 0: unknown
    temperature: float
    alpha_by_depth: list[float | None]  # acceptance rates at depths 1, 2, ...; null: not measured
    tested_by_depth: list[int]  # number of tests at each depth; empty: unknown
    benchmark: str  # the prompts
    source: str  # eval.run | training (held-out prompts)
    # nodes of a tree in a round, their mean if the number varies; 0: a chain, or an unknown number
    tree_nodes: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies a measurement: a later line with the same key replaces an earlier one."""
        models = self.target_hash, self.drafter_hash
        drafts = self.drafter_class, self.draft_shape, self.stopping, self.tree_nodes
        return *models, *drafts, self.temperature, self.benchmark, self.source

    @property
    def form(self) -> tuple[Any, ...]:
        """Kind and size, shared by drafters of other seeds or training and by trees of any size."""
        return self.kind, self.draft_shape, self.layers, self.hidden_size


def curve_of(values: Any) -> Curve:
    """Return the curve in a line's JSON value. Raises ValueError, with what is wrong."""
    if not isinstance(values, dict):
        raise ValueError(f"found {json_kind(values)}, expected an object")
    fields = {one.name: str(one.type) for one in dataclasses.fields(Curve)}
    for what, keys in (
        ("lacks", fields.keys() - {"tree_nodes"} - values.keys()),  # absent in older files
        ("has the unknown fields", values.keys() - fields.keys()),
    ):
        if keys:
            raise ValueError(f"the line {what} {', '.join(sorted(keys))}")
    for name, value in values.items():
        if not _fits(name, fields[name], value):
            raise ValueError(f"{name} is {json.dumps(value)[:40]}, expected {_EXPECTED[name]}")
    is_model = values["kind"] in MODELS
    for name in ("layers", "hidden_size"):
        if is_model != (values[name] > 0):
            expected = "1 or more" if is_model else "0"
            raise ValueError(
                f"{name} is {values[name]}, expected {expected}, as kind is {values['kind']}"
            )
    if values["draft_shape"] == CHAIN and values.get("tree_nodes"):
        raise ValueError(
            f"tree_nodes is {values['tree_nodes']}, expected 0, as draft_shape is {CHAIN}"
        )
    alphas, tested = values["alpha_by_depth"], values["tested_by_depth"]
    if tested and len(tested) != len(alphas):
        raise ValueError(
            f"tested_by_depth has {len(tested)} depths and alpha_by_depth {len(alphas)}, expected "
            f"as many, or none"
        )
    return Curve(**values)


_CHOICES = {
    "kind": (*MODELS, *KINDS),
    "draft_shape": (CHAIN, TREE),
    "source": (EVALUATION, TRAINING),
}
_COUNT, _TEXT = "a whole number from 0 up", "text"
_EXPECTED = {
    **{one.name: _COUNT if one.type == "int" else _TEXT for one in dataclasses.fields(Curve)},
    **{name: f"one of {', '.join(choices)}" for name, choices in _CHOICES.items()},
    "temperature": "a number from 0 up",
    "alpha_by_depth": "rates from 0 to 1 or null, the first one a rate",
    "tested_by_depth": f"a list of counts, each {_COUNT}, the first one 1 or more",
}


def _fits(name: str, kind: str, value: Any) -> bool:
    if name in _CHOICES:
        return value in _CHOICES[name]
    if kind == "str":
        return isinstance(value, str)
    if name == "alpha_by_depth":
        return (
            isinstance(value, list)
            and bool(value)
            and value[0] is not None
            and all(one is None or (_is_number(one) and 0 <= one <= 1) for one in value)
        )
    if name == "tested_by_depth":
        return isinstance(value, list) and all(map(_is_count, value)) and value[:1] != [0]
    return _is_count(value) if kind == "int" else _is_number(value) and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def read_curves(path: Path) -> list[Curve]:
    """Return the curves of a file, none for a missing one.

    Raises UserError, with the number of the line, for a line that is no curve.
    """
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(curve_of(json.loads(line)))
        except (*WRONG, UnicodeDecodeError) as error:
            raise UserError(
                f"{path}, line {number}: {' '.join(str(error).split())}. Correct or remove this "
                f"line; the others are kept."
            ) from error
    return merge(found)


def merge(*files: Iterable[Curve]) -> list[Curve]:
    """Return all curves, of which a later one replaces an earlier one with the same key.

    A tree of an unknown number of nodes is replaced by any whose number is known.
    """
    found: dict[tuple[Any, ...], Curve] = {}
    for curve in (curve for file in files for curve in file):
        found[curve.key] = curve
    known = {dataclasses.replace(one, tree_nodes=0).key for one in found.values() if one.tree_nodes}
    return [one for one in found.values() if one.tree_nodes or one.key not in known]


def write_curves(path: Path, curves: Iterable[Curve]) -> None:
    """Write a file of curves, under a temporary name until it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in curves))


# ------------------------------------------------------------------------------------- run folders
def run_folders(patterns: Iterable[str]) -> list[Path]:
    """Return the folders of evaluations and trainings, at any depth in the folders that match.

    Copies of drafters in checkpoints, and the parts of an evaluation that shards share, do not
    count. A folder that several patterns or links reach counts once.
    """
    found, read = list[Path](), set[str]()
    for top in sorted({path for pattern in patterns for path in glob(pattern)}):
        for folder, inner, _ in os.walk(top, followlinks=True):
            if (real := os.path.realpath(folder)) in read:
                inner.clear()
                continue
            read.add(real)
            inner[:] = sorted(name for name in inner if name not in NO_RUNS)
            if any((Path(folder) / file).is_file() for file in (RESULTS, DRAFTER_CARD)):
                found.append(Path(folder))
    return found


def collect(patterns: Sequence[str]) -> tuple[list[Curve], list[str]]:
    """Return the curves of all run folders that match or lie in folders that do; print how many.

    The second value is a note on each folder that cannot be read.
    """
    found, notes = list[Curve](), list[str]()
    folders = run_folders(patterns)
    if patterns:
        print(f"{', '.join(patterns)}: {count_label(len(folders), 'run')} found")
    for folder in folders:
        try:
            if (folder / RESULTS).is_file():
                found += _of_evaluation(folder)
            if (folder / DRAFTER_CARD).is_file():
                found += _of_training(folder / "drafter")
        except UserError as error:
            notes.append(f"left out: {error}")
        except (*WRONG, OSError) as error:
            notes.append(f"left out: {folder} is incomplete ({error!r}).")
    return found, notes


def _of_evaluation(folder: Path) -> Iterator[Curve]:
    """Yield the curves of an evaluation, each over all batch sizes and draft lengths.

    Trees of a fixed size have a curve for each number of nodes.
    Only drafts of the folder's own drafter count: a lookup before it, or another way to draft with
    the same weights, has another acceptance.
    """
    rows, _ = read_all_rows(folder / RESULTS)
    origins: dict[str, Origin] = read_origins(folder) or {}
    groups: dict[tuple[str, float, int], list[Row]] = defaultdict(list)
    for row in main_rows(rows):
        if row.schedule == "serial" and row.lossless != LOSSY and row.verify in TESTED_BY_RATIO:
            origin = origins.get(row.drafter)
            varies = row.stopping != FIXED or (origin is not None and origin.by_cost)
            groups[row.drafter, row.temperature, 0 if varies else row.tree_nodes].append(row)
    # the first input of an evaluation is its target
    (target, target_hash), *_ = read_manifest(folder / MANIFEST)["inputs"].items()
    for (name, temperature, nodes), same in groups.items():
        origin = origins.get(name)
        tested = metrics.add_by_depth([row.tested_by_depth for row in same])
        accepted = metrics.add_by_depth([row.accepted_by_depth for row in same])
        if origin is None or not origin.card or not tested or not tested[0]:
            continue
        if not origin.drafter_class:
            raise UserError(
                f"{folder / ORIGINS} does not name the class of {name}, as an earlier version "
                f"wrote it. Evaluate again, with another output_dir=."
            )
        facts = _of_card(origin.card, Path(origin.folder))
        if facts and origin.drafter_class not in own_classes(facts["kind"]):
            continue
        if facts and facts["target_hash"] != target_hash:  # the target is not the drafter's own
            facts |= {"target": target, "target_hash": target_hash}
        if facts:
            rates = [(a / n if n else None) for n, a in zip(tested, accepted, strict=True)]
            yield Curve(
                **facts,
                draft_shape=same[0].draft_shape,
                drafter_class=origin.drafter_class,
                stopping=BY_COST if origin.by_cost else same[0].stopping,
                tree_nodes=nodes or _mean_nodes(same),
                temperature=temperature,
                alpha_by_depth=rates,
                tested_by_depth=tested,
                benchmark=same[0].benchmark,
                source=EVALUATION,
            )


def _mean_nodes(rows: Sequence[Row]) -> int:
    """Return the mean nodes of trees whose size varies; 0 for chains, or if it is not recorded."""
    if not all(row.tree_nodes for row in rows):
        return 0
    return round(sum(row.drafted * row.rounds for row in rows) / sum(row.rounds for row in rows))


def own_classes(kind: str) -> tuple[str, ...]:
    """Return the dotted names of the classes whose drafts are those of a plan for this kind."""
    names = {CHAIN: (CHAIN, "ranked_tree"), PARALLEL: (PARALLEL,)}.get(kind, TRAINED)
    return tuple(DRAFTERS[name].kind for name in names)


def _of_training(folder: Path) -> Iterator[Curve]:
    """Yield the held-out acceptance on a drafter's card: of sampled and of greedy chains."""
    card = read_json(folder / CARD)
    facts, measured = _of_card(card, folder), card.get("acceptance", {})
    if not facts or card["drafter_hash"] != hash_input(folder):
        return
    temperature = measured.get("temperature")
    for name, at in (("acceptance", temperature), ("greedy_acceptance", 0.0)):
        if name in measured and at is not None:
            yield Curve(
                **facts,
                draft_shape=CHAIN,
                drafter_class="",
                stopping=FIXED,
                temperature=float(at),
                alpha_by_depth=[float(measured[name])],
                tested_by_depth=[],
                benchmark="held-out prompts",
                source=TRAINING,
            )


def _of_card(card: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the fields of a curve that a card gives; empty for an untrained or unknown drafter."""
    kind, shape = _kind_of(card, folder), card.get("shape", {})
    if not kind or not card.get("drafter_hash") or not card.get("target_hash"):
        return {}
    drafted = card.get("draft_vocabulary") or {"size": shape.get("draft_vocab_size") or 0}
    is_model = kind in MODELS
    return {
        "target": str(card["target"]),
        "target_hash": card["target_hash"],
        "drafter": str(card["name"]),
        "drafter_hash": card["drafter_hash"],
        "kind": kind,
        "layers": shape["num_hidden_layers"] if is_model else 0,
        "hidden_size": shape["hidden_size"] if is_model else 0,
        "draft_vocab_size": drafted["size"],
        "training_tokens": int(card.get("data", {}).get("tokens_seen") or 0),
    }


def _kind_of(card: dict[str, Any], folder: Path) -> str:
    """Return the kind of a drafter, empty if it is unknown.

    Presets share a kind and its layout, so the name on the card distinguishes them; the kind of the
    training's configuration is that of a head with another name.
    """
    if "num_hidden_layers" in card.get("shape", {}):
        return PARALLEL if card.get("parallel_drafting") else CHAIN
    file = folder.parent / "config.yaml"
    saved = read_config(file, "Restore it.") if file.is_file() else {}
    if saved.get("job") == "recurrent_drafting.train":
        return "recurrent"
    names = str(card.get("name")), str(saved.get("kind"))
    return next((name for name in names if name in KINDS), "")
