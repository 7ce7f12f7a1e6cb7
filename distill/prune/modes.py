"""Modes of pruning: functions (context, source, shape, folder) -> (student, notes, cut).

The source is the target or the student of the previous stage. Acceptance is always measured against
the target.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from decoding.models.folder import hash_input
from decoding.values import is_number
from distill.prune.context import PruneContext, SourceModel
from distill.prune.cut import Cut, cut_model
from distill.prune.importance import (
    ImportanceScores,
    collect_scores,
    cut_by_scores,
    read_order,
    read_scores,
    write_order,
    write_scores,
)
from distill.prune.l0 import MaskedModel, apply_masks
from distill.prune.layer_choice import find_removal_order, propose_layer_sets
from distill.prune.masks import BETA, Masks, describe_masks
from distill.shapes import removal_flops
from jobs.tracker import Tracker
from training.config import LoopConfig
from training.models.build import dtype_of, load_causal_lm, random_model
from training.models.shapes import forward_flops, parameter_counts


def prune_by_importance(
    context: PruneContext, source: SourceModel, shape: Any, folder: Path
) -> tuple[Any, dict[str, Any], Cut]:
    """Keep the units with the highest scores and the set of layers with the best acceptance.

    Returns (student, notes, cut).
    """
    settings, config = context.config.importance, source.model.config
    scores = get_scores(context, source)
    proposed = _propose_layers(context, source, scores, shape.num_hidden_layers)

    def cut_to(name: str) -> tuple[Any, Cut]:
        cut = cut_by_scores(scores, proposed[name], shape, config, settings.rescale_norms)
        return cut_model(source.model, cut, shape).requires_grad_(True), cut

    as_cut: dict[str, float] = {}
    distilled: dict[str, float] = {}
    if len(proposed) > 1:
        as_cut = _compare_as_cut(
            context, proposed, shape, lambda name: cut_to(name)[0], folder / "probe" / "as_cut.json"
        )
        if settings.probe_steps:
            # A distillation costs far more than an evaluation, so only the best sets are distilled.
            best_first = sorted(proposed, key=lambda name: -as_cut[name])
            for name in best_first[: settings.probe_candidates]:
                distilled[name] = _probe(context, cut_to(name)[0], name, folder / "probe" / name)
    found = distilled or as_cut
    best = max(found, key=lambda name: found[name]) if found else next(iter(proposed))
    notes = {
        "layers": proposed[best],
        "proposed_by": best,
        "acceptance_as_cut": as_cut,
        "probe_acceptance": found,
        "candidates": proposed,
    }
    student, cut = cut_to(best)
    return student, notes, cut


def get_scores(context: PruneContext, source: SourceModel) -> ImportanceScores:
    """Return the scores of the source from the cache, or collect and cache them."""
    settings, parallel = context.config.importance, context.parallel
    path = _cache_folder(context, source, settings.sequences) / "scores.safetensors"
    scores = parallel.broadcast(read_scores(path) if parallel.is_main else None)
    if scores is not None:
        if parallel.is_main:
            print(f"scores of {source.folder} were collected before: {path}")
        return scores
    batches = context.rows(settings.sequences)
    tokens = len(batches) * context.config.data.max_length
    with context.account("scores", forward_flops(source.model.config) * tokens):
        sums = {
            name: parallel.sum(tensor.to(parallel.device)).cpu()
            for name, tensor in vars(collect_scores(source.model, batches, parallel)).items()
        }
        scores = ImportanceScores(**sums).finished()
    if parallel.is_main:
        write_scores(path, scores, {"target": str(source.folder), "rows": len(batches)})
    return scores


def _cache_folder(context: PruneContext, source: SourceModel, rows: int) -> Path:
    """Return the cache folder for this source and this number of rows of the text."""
    config, texts = context.config, hashlib.sha256()
    for samples in context.texts.values():
        for sample in samples:
            texts.update(sample.ids.tobytes())
            texts.update(sample.mask.tobytes())
    shares = {name: domain.share for name, domain in config.data.domains.items()}
    settings = [rows, config.data.max_length, config.seed, config.target.dtype]
    key = f"{hash_input(source.folder)} {[*settings, texts.hexdigest(), shares]}"
    return Path(config.importance.cache_dir) / hashlib.sha256(key.encode()).hexdigest()[:16]


def _propose_layers(
    context: PruneContext, source: SourceModel, scores: ImportanceScores, count: int
) -> dict[str, list[int]]:
    """Return criterion -> set of `count` layers to compare.

    Only one set is returned if `student.layers` lists it or `importance.choice` names a criterion.
    """
    settings, layers = context.config.importance, source.model.config.num_hidden_layers
    given = context.config.student.layers
    if given and len(given) == count:
        return {"given": list(given)}
    needs_order = count < layers and settings.choice in ("probe", "greedy")
    removal = get_removal_order(context, source) if needs_order else list(range(layers - 1, 0, -1))
    probing = settings.choice == "probe"
    found = propose_layer_sets(count, layers, scores.influence_L, removal, distinct=probing)
    return found if probing else {settings.choice: found[settings.choice]}


def get_removal_order(context: PruneContext, source: SourceModel) -> list[int]:
    """Return the order of the greedy removal of layers, continuing the order in the cache.

    All ranks search together. Rank 0 saves the order after each step.
    """
    rows, parallel = context.config.importance.greedy_sequences, context.parallel
    layers = source.model.config.num_hidden_layers
    path = _cache_folder(context, source, rows) / "removal.json"
    removed = parallel.broadcast(read_order(path, layers) if parallel.is_main else None)
    if len(removed) == layers - 1:
        return list(removed)

    def save(removed: list[int]) -> None:
        if parallel.is_main:
            write_order(path, removed, layers)

    batches = context.rows(rows)
    tokens = len(batches) * context.config.data.max_length
    with context.account("layers by KL", tokens * removal_flops(source.model.config, len(removed))):
        return find_removal_order(source.model, batches, parallel, removed, save)


def _compare_as_cut(
    context: PruneContext,
    proposed: Mapping[str, list[int]],
    shape: Any,
    student_of: Callable[[str], Any],
    file: Path,
) -> dict[str, float]:
    """Return the acceptance of every candidate before distillation, cached in `file`.

    Each candidate and the target read the held-out text once.
    """

    def compare() -> dict[str, float]:
        tokens = sum(len(sample.ids) for sample in context.held_out)
        students, target = len(proposed) * forward_flops(shape), context.teacher.config
        with context.account("probes", (students + forward_flops(target)) * tokens):
            found = {name: context.acceptance(student_of(name))["acceptance"] for name in proposed}
        if context.parallel.is_main:
            for name, chosen in proposed.items():
                print(f"probe: {name} {chosen} acceptance {found[name]:.3f} as cut")
        return found

    def is_valid(found: Any) -> bool:
        return (
            isinstance(found, dict)
            and found.keys() == proposed.keys()
            and all(map(is_number, found.values()))
        )

    return dict(context.cached(file, compare, is_valid))


def _probe(context: PruneContext, student: Any, name: str, folder: Path) -> float:
    """Return the acceptance of a candidate after a short distillation, cached in `folder`."""
    loop = _shorten(context.config.between, context.config.importance.probe_steps)

    def distil() -> float:
        return context.distil(f"probe {name}", student, loop, folder).best["acceptance"]

    found = float(context.cached(folder / "acceptance.json", distil, is_number))
    if context.parallel.is_main:
        print(f"probe: {name} acceptance {found:.3f} after {loop.max_steps} steps")
        # Checkpoints of large students fill the disk.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return found


def _shorten(between: LoopConfig, steps: int) -> LoopConfig:
    """Return the settings of a distillation that is bounded by `steps` alone.

    The warm-up keeps its share of the steps, so the learning rate reaches its peak.
    """
    warmup = round(between.optimizer.warmup_steps * steps / between.max_steps)
    optimizer = dataclasses.replace(between.optimizer, warmup_steps=warmup)
    return dataclasses.replace(
        between,
        max_steps=steps,
        max_epochs=None,
        max_tokens=0,
        max_seconds=0.0,
        optimizer=optimizer,
        eval_every=0,
        checkpoint_every=0,
    )


def prune_by_masks(
    context: PruneContext, source: SourceModel, shape: Any, folder: Path
) -> tuple[Any, dict[str, Any], Any]:
    """Train masks, and weights if configured, and cut by them. Returns (student, notes, cut)."""
    config = context.config
    masks = Masks(shape, source.model.config, BETA[config.l0.beta], config.seed)
    masks = masks.to(context.parallel.device)
    # Train a copy, because acceptance is measured against the original target.
    model = load_causal_lm(source.folder, dtype_of(config.loop.dtype)).train()
    objective = MaskedModel(model, masks, config.l0, config.loop.optimizer.lr)

    def evaluate() -> dict[str, float]:
        objective.unmask()
        with apply_masks(model, masks.binary()):
            figures = context.evaluate(model)
        # The score is the step, so the last masks are the best.
        return figures | masks.figures() | {"score": float(context.parallel.inner.step)}

    flops_per_token = (6.0 if config.l0.train_weights else 4.0) * parameter_counts(model.config)[
        "all"
    ]
    part = f"masks of {shape.num_hidden_layers} layers"
    with context.track(part, folder) as tracker:
        progress = context.fit(
            "masks", objective, objective, config.loop, folder, tracker, evaluate, flops_per_token
        )
    figures = {key: value for key, value in progress.best.items() if key not in ("step", "score")}
    if context.parallel.is_main:
        print(*describe_masks(figures), sep="\n")
    cut = context.parallel.broadcast(masks.cut())
    notes = {"layers": list(cut.layers), "steps": progress.step, "masks": figures}
    return cut_model(model, cut, shape).requires_grad_(True), notes, cut


def init_randomly(
    context: PruneContext, source: SourceModel, shape: Any, folder: Path
) -> tuple[Any, dict[str, Any], None]:
    """Build the control, a student with random weights. Returns (student, notes, None)."""
    torch.manual_seed(context.config.seed)
    student = random_model(shape, source.model.dtype).to(context.parallel.device)
    return student, {"layers": None}, None


def record_stages(tracker: Tracker, stages: Sequence[Mapping[str, Any]]) -> None:
    """Record the figures of every stage, and a table of the compared sets of layers.

    stages: the notes of every stage. The number of a stage is the step of its record.
    """
    tracker.rewind(0)
    compared = ("acceptance_as_cut", "probe_acceptance")
    rows = []
    for number, notes in enumerate(stages, start=1):
        figures = {key: value for key, value in notes.items() if isinstance(value, float)}
        for group in (*compared, "masks", "shares", "seconds", "flops"):
            # `masks` may also be a string, the file of a saved cut.
            if isinstance(notes.get(group), dict):
                figures |= {f"{group}/{name}": value for name, value in notes[group].items()}
        if notes["layers"]:
            figures["layers"] = len(notes["layers"])
        tracker.log(number, figures)
        for name, layers in notes.get("candidates", {}).items():
            row = {"stage": number, "candidate": name, "layers": str(layers)}
            rows.append(row | {key: notes[key].get(name) for key in compared})
    tracker.show({"candidates": rows} if rows else {}, [], {})


Mode = Callable[[PruneContext, SourceModel, Any, Path], tuple[Any, dict[str, Any], Any]]
MODES: dict[str, Mode] = {
    "importance": prune_by_importance,
    "l0": prune_by_masks,
    "random": init_randomly,
}
