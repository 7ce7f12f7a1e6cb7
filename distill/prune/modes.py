"""Modes of pruning: functions (context, source model, shape, folder) -> (student, notes, cut).

The source is the target or the student of the previous stage. Acceptance is always measured against
the target.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.models.folder import hash_input
from distill.prune import importance
from distill.prune.context import PruneContext, SourceModel
from distill.prune.cut import Cut, cut_model
from distill.prune.l0 import MaskedModel, masked
from distill.prune.layer_choice import propose_layer_sets, removal_order
from distill.prune.masks import BETA, Masks, describe_masks
from distill.shapes import removal_flops
from jobs.files import write_text
from jobs.tracker import Tracker
from training.config import LoopConfig
from training.data.from_config import rows_of_step
from training.data.packing import Sample
from training.loop import fit
from training.models.build import dtype_of, load_causal_lm, random_model
from training.models.shapes import forward_flops, parameter_counts


def prune_by_importance(
    context: PruneContext, source: SourceModel, shape: Any, folder: Path
) -> tuple[Any, dict[str, Any], Any]:
    """Keep the units with the highest scores and the layers that draft best.

    Returns (student, notes, cut).
    """
    settings, layers = context.config.importance, shape.num_hidden_layers
    scores = _scores(context, source)
    proposed = _proposed(context, source, scores, layers)

    def cut_to(name: str) -> tuple[Any, Cut]:
        cut = importance.cut_by_scores(
            scores, proposed[name], shape, source.model.config, settings.rescale_norms
        )
        return cut_model(source.model, cut, shape).requires_grad_(True), cut

    as_cut: dict[str, float] = {}
    distilled: dict[str, float] = {}
    if len(proposed) > 1:
        as_cut = _as_cut(
            context, proposed, shape, lambda name: cut_to(name)[0], folder / "probe" / "as_cut.json"
        )
        if settings.probe_steps:
            # A distillation costs far more than an evaluation, so only the best sets get one.
            for name in sorted(proposed, key=lambda name: -as_cut[name])[
                : settings.probe_candidates
            ]:
                distilled[name] = _probe(context, cut_to(name)[0], name, folder / "probe" / name)
    found = distilled or as_cut
    best = max(found, key=lambda name: found[name]) if found else next(iter(proposed))
    best = context.parallel.broadcast(best)  # the figures of the ranks may differ slightly
    notes = {
        "layers": proposed[best],
        "proposed_by": best,
        "acceptance_as_cut": as_cut,
        "probe_acceptance": found,
        "candidates": proposed,
    }
    student, cut = cut_to(best)
    return student, notes, cut


def _scores(context: PruneContext, source: SourceModel) -> importance.ImportanceScores:
    """Return the source's scores from the cache, or collect and cache them."""
    settings = context.config.importance
    path = _cached(context, source, settings.sequences) / "scores.safetensors"
    scores = importance.read_scores(path) if context.parallel.is_main else None
    scores = context.parallel.broadcast(scores)
    if scores is not None:
        if context.parallel.is_main:
            print(f"scores of {source.folder} were collected before: {path}")
        return scores
    batches = context.rows(settings.sequences)
    tokens = len(batches) * context.config.data.max_length
    parallel = context.parallel
    with context.account("scores", forward_flops(source.model.config) * tokens):
        mine = importance.collect(
            source.model, batches, parallel.is_main, parallel.rank, parallel.world_size
        )
        summed = {
            name: parallel.sum(tensor.to(parallel.device)).cpu()
            for name, tensor in mine.tensors().items()
        }
        scores = importance.ImportanceScores(**summed).finished()
    if parallel.is_main:
        importance.write_scores(path, scores, {"target": str(source.folder), "rows": len(batches)})
    return scores


def _cached(context: PruneContext, source: SourceModel, rows: int) -> Path:
    """Return the cache folder for a source and a number of rows of this text."""
    shares = {name: domain.share for name, domain in context.config.data.domains.items()}
    settings = (
        rows,
        context.config.data.max_length,
        context.config.seed,
        context.config.target.dtype,
    )
    data = [*settings, _samples_hash(context.texts), shares]
    return Path(context.config.importance.cache_dir) / importance.cache_key(
        hash_input(source.folder), str(data)
    )


def _samples_hash(texts: dict[str, list[Sample]]) -> str:
    digest = hashlib.sha256()
    for samples in texts.values():
        for sample in samples:
            digest.update(sample.ids.tobytes())
            digest.update(sample.mask.tobytes())
    return digest.hexdigest()


def _proposed(
    context: PruneContext, source: SourceModel, scores: importance.ImportanceScores, count: int
) -> dict[str, list[int]]:
    """Return the sets of layers to compare, or the single set that the configuration names."""
    settings, layers = context.config.importance, source.model.config.num_hidden_layers
    given = context.config.student.layers
    if given and len(given) == count:
        return {"given": list(given)}
    asked = count < layers and settings.choice in ("probe", "greedy")
    # Otherwise the order is not used.
    removal = _removal(context, source) if asked else list(range(layers - 1, 0, -1))
    probing = settings.choice == "probe"
    found = propose_layer_sets(count, layers, scores.influence_L, removal, distinct=probing)
    return found if probing else {settings.choice: found[settings.choice]}


def _removal(context: PruneContext, source: SourceModel) -> list[int]:
    """Return the layers in the order of their greedy removal, found by all ranks together.

    The order is saved next to the scores after each step.
    """
    settings, parallel, layers = (
        context.config.importance,
        context.parallel,
        source.model.config.num_hidden_layers,
    )
    path = _cached(context, source, settings.greedy_sequences) / "removal.json"
    begun = parallel.broadcast(importance.read_order(path, layers) if parallel.is_main else None)
    if len(begun) == layers - 1:
        return list(begun)

    def add(mine: Tensor) -> Tensor:
        return parallel.sum(mine.to(parallel.device)).cpu()

    def keep(removed: list[int]) -> None:
        if parallel.is_main:
            importance.write_order(path, removed, layers)

    batches = context.rows(settings.greedy_sequences)
    tokens = len(batches) * context.config.data.max_length
    with context.account("layers by KL", tokens * removal_flops(source.model.config, len(begun))):
        return removal_order(
            source.model,
            batches,
            parallel.is_main,
            parallel.rank,
            parallel.world_size,
            add,
            begun,
            keep,
        )


def _as_cut(
    context: PruneContext,
    proposed: Mapping[str, list[int]],
    shape: Any,
    student_of: Callable[[str], Any],
    known: Path,
) -> dict[str, float]:
    """Return the acceptance of every candidate before distillation.

    This takes one forward pass over the held-out text per candidate and one of the target. All
    ranks use the figures of rank 0, which are cached in `known`, so that they compare the same
    candidates.
    """
    here = context.parallel.is_main and known.is_file()
    found = context.parallel.broadcast(json.loads(known.read_text()) if here else None)
    if found is not None:
        return dict(found)
    tokens = sum(len(sample.ids) for sample in context.held_out)
    flops = (len(proposed) * forward_flops(shape) + forward_flops(context.teacher.config)) * tokens
    with context.account("probes", flops):
        found = {name: context.acceptance(student_of(name))["acceptance"] for name in proposed}
    if context.parallel.is_main:
        for name, chosen in proposed.items():
            print(f"probe: {name} {chosen} acceptance {found[name]:.3f} as cut")
        known.parent.mkdir(parents=True, exist_ok=True)
        write_text(known, json.dumps(found))
    return dict(context.parallel.broadcast(found))


def _probe(context: PruneContext, student: Any, name: str, place: Path) -> float:
    """Return the acceptance of a candidate after a short distillation, cached in `place`."""
    known, steps = place / "acceptance.json", context.config.importance.probe_steps
    here = context.parallel.is_main and known.is_file()
    found = context.parallel.broadcast(json.loads(known.read_text()) if here else None)
    if found is None:
        loop = _in_small(context.config.between, steps)
        found = context.distil(f"probe {name}", student, loop, place).best["acceptance"]
    if context.parallel.is_main:
        place.mkdir(parents=True, exist_ok=True)
        write_text(known, json.dumps(found))
        print(f"probe: {name} acceptance {found:.3f} after {steps} steps")
        # Checkpoints of large students fill the disk.
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
    return found


def _in_small(between: LoopConfig, steps: int) -> LoopConfig:
    """Return the distillation between stages shortened to `steps` steps, without other limits.

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
    """Learn masks and weights together; returns (student, notes, cut)."""
    config = context.config
    masks = Masks(shape, source.model.config, BETA[config.l0.beta], config.seed).to(
        context.parallel.device
    )
    # Train a copy, because acceptance is measured against the unchanged target.
    model = load_causal_lm(source.folder, dtype_of(config.loop.dtype)).train()
    settings, lr = config.l0, config.loop.optimizer.lr
    objective = MaskedModel(
        model, masks, settings.warmup_share, settings.mask_lr, lr, settings.train_weights
    )

    def evaluate() -> dict[str, float]:
        objective.unmask()
        with masked(model, masks.binary()):
            figures = context.acceptance(model)
        # The last masks are used, so the score is the step.
        return figures | masks.figures() | {"score": float(context.parallel.inner.step)}

    data = context.data(rows_of_step(config.data, config.loop))
    a_token = (6 if config.l0.train_weights else 4) * parameter_counts(model.config)["all"]
    tracker = context.recording(f"masks of {shape.num_hidden_layers} layers", folder)
    with context.account("masks", 0.0):
        progress = fit(
            "masks",
            objective,
            objective,
            data,
            config.loop,
            context.parallel,
            folder,
            tracker,
            evaluate,
        )
    context.flops["masks"] += float(a_token) * progress.step * config.loop.tokens_per_step
    if tracker is not None:
        tracker.close()
    figures = {key: value for key, value in progress.best.items() if key not in ("step", "score")}
    for line in describe_masks(figures) if context.parallel.is_main else []:
        print(line)
    cut = context.parallel.broadcast(masks.cut())
    notes = {"layers": list(cut.layers), "steps": progress.step, "masks": figures}
    return cut_model(model, cut, shape).requires_grad_(True), notes, cut


def init_randomly(
    context: PruneContext, source: SourceModel, shape: Any, folder: Path
) -> tuple[Any, dict[str, Any], None]:
    """Build the control, the same shape with random weights; returns (student, notes, None)."""
    torch.manual_seed(context.config.seed)
    return (
        random_model(shape, source.model.dtype).to(context.parallel.device),
        {"layers": None},
        None,
    )


def record_stages(tracker: Tracker, told: list[dict[str, Any]]) -> None:
    """Record each stage's figures at its number, and a table of the compared sets of layers."""
    tracker.rewind(0)
    rows = []
    for number, notes in enumerate(told, start=1):
        figures = {key: value for key, value in notes.items() if isinstance(value, float)}
        for group in ("acceptance_as_cut", "probe_acceptance", "masks", "seconds", "flops"):
            # `masks` may also be the file of a saved cut.
            if isinstance(notes.get(group), dict):
                figures |= {f"{group}/{name}": value for name, value in notes[group].items()}
        tracker.log(
            number, figures | {"layers": len(notes["layers"])} if notes["layers"] else figures
        )
        for name, layers in notes.get("candidates", {}).items():
            compared = {
                key: notes[key].get(name) for key in ("acceptance_as_cut", "probe_acceptance")
            }
            rows.append({"stage": number, "candidate": name, "layers": str(layers), **compared})
    tracker.show({"candidates": rows} if rows else {}, [], {})


Mode = Callable[[PruneContext, SourceModel, Any, Path], tuple[Any, dict[str, Any], Any]]
MODES: dict[str, Mode] = {
    "importance": prune_by_importance,
    "l0": prune_by_masks,
    "random": init_randomly,
}
