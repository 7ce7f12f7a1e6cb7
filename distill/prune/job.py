"""`python -m distill.prune`: prune a target and write a student folder for `distill.train`.

Severe cuts are made in stages (`depths`) with a short distillation after each but the last. A
resumed run does not repeat finished stages.
"""

import dataclasses
import json
import math
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from decoding.errors import UserError
from decoding.models.folder import WEIGHTS, hash_input
from decoding.models.text.tokenizer import load_tokenizer
from distill.config import PruneConfig
from distill.drafter_folder import write_card
from distill.dry_run import dry_prune, print_sizes, pruning_notes
from distill.prune.context import PruneContext, SourceModel, read_source
from distill.prune.cut import (
    cut_model,
    load_cut,
    refuse_missing_cut,
    refuse_other_shape,
    save_cut,
)
from distill.prune.layer_choice import CRITERIA
from distill.prune.masks import BETA, Masks
from distill.prune.modes import MODES, record_stages
from distill.shapes import refuse_wider, student_config
from distill.student import choose_layers
from jobs.config import refuse_parallel
from jobs.files import write_text
from jobs.paths import resolve, resolve_model
from jobs.protocol import Run
from jobs.ranks import SHARDED_WEIGHTS, is_rank
from jobs.run_files import read_object
from jobs.tracker import track_run
from training.config import check_values
from training.data.from_config import data_files, held_out_samples, sources, training_texts
from training.data.mixture import check_mixture
from training.data.packing import PackedData
from training.data.shares import with_initial_shares
from training.drafter_folder import Provenance, write_model
from training.job import TargetJob
from training.models.build import dtype_of, load_causal_lm, refuse_own_code
from training.parallel.strategy import Parallel

CHOICES = ("probe", *CRITERIA)
MASKS = "masks.safetensors"
# Key of a stage's done.json.
_MODEL = "model_hash"


class Prune(TargetJob[PruneConfig]):
    """Run of distill.prune, which writes a student folder and the masks of the last cut."""

    artefact, also = "student", (MASKS,)

    def __init__(self, config: PruneConfig) -> None:
        check(config)
        if config.masks:
            refuse_missing_cut(resolve(config.masks))
        super().__init__(config)
        self.shapes = plan_stage_shapes(config, self.target)

    def inputs(self) -> list[Path]:
        return [self.target_folder, *data_files(self.config.data, self.config.dry_run)]

    def dry_run(self, run: Run) -> float | None:
        planned = dry_prune(self.config, self.target, self.shapes, self.target_folder, run)
        return planned or None  # None: saved masks and random weights cost nothing

    def prepare(self, run: Run) -> None:
        super().prepare(run)
        if not is_rank():
            for note in pruning_notes(self.config, self.target):
                print(note)

    def work(self, run: Run) -> None:
        config, target_folder, shapes = self.config, self.target_folder, self.shapes
        torch.manual_seed(config.seed)
        context = build_context(config, target_folder)
        parallel = context.parallel
        if parallel.is_main:
            print_sizes(shapes[-1], context.teacher.config, name=config.student.name)
        # Refuse unsuitable masks or texts before the run claims its folder.
        if config.masks:
            cut = load_cut(resolve(config.masks), hash_input(target_folder))
            refuse_other_shape(cut, shapes[-1], config.masks)
        elif config.mode != "random":
            context.data(1)
        if parallel.is_main:
            run.folder.write_manifest(run.inputs, {}, finished=False)
        source, stages = SourceModel(context.teacher, target_folder), []
        for number, shape in enumerate(shapes, start=1):
            last = number == len(shapes)
            between = run.path / "stages" / f"{number}_{shape.num_hidden_layers}_layers"
            place, work = run.artefact if last else between, run.path / "work" / str(number)
            stages.append(run_stage(context, source, shape, place, work, distil=not last))
            if not last:
                source = read_source(config, place, parallel)
        if parallel.is_main:
            finish(config, run, context, stages)
        parallel.close()


def run(config: PruneConfig) -> Path:
    """Prune the target and return the student folder, output_dir/student."""
    return Prune(config).run()


def check(config: PruneConfig) -> None:
    """Raise UserError for invalid values before the target is loaded."""
    dtype_of(config.target.dtype)
    refuse_parallel(config.target)
    refuse_own_code(config.target)
    check_mixture(config.data, ("loss", "acceptance"))
    importance, l0, kind = config.importance, config.l0, config.parallel.kind
    learns_masks, max_steps = config.mode == "l0", config.loop.max_steps
    counts = ("sequences", "greedy_sequences", "probe_sequences", "probe_candidates")
    uncompiled = "false, as pruning replaces layers that a compiled model would keep"
    rules = {
        "mode": (config.mode in MODES, f"one of {', '.join(MODES)}"),
        "data.mixing": (
            config.data.mixing == "fixed" or (learns_masks and not config.masks),
            "fixed, because only the training of masks (mode=l0, without a file of masks) moves "
            "the shares of domains",
        ),
        "importance.choice": (importance.choice in CHOICES, f"one of {', '.join(CHOICES)}"),
        **{f"importance.{name}": (vars(importance)[name] >= 1, "1 or more") for name in counts},
        "importance.probe_steps": (importance.probe_steps >= 0, "0 (none) or more"),
        "l0.beta": (l0.beta in BETA, f"one of {', '.join(BETA)}"),
        "l0.warmup_share": (0 <= l0.warmup_share <= 1, "a share from 0 to 1"),
        "l0.mask_lr": (l0.mask_lr > 0, "more than 0"),
        "l0.train_weights": (
            not learns_masks or l0.train_weights or kind in ("single", "ddp"),
            "true with zero1, zero2, zero3 and fsdp, which shard the trained weights. Use "
            "parallel=ddp to train only masks",
        ),
        "loop.max_steps": (
            not learns_masks or max_steps > 0,
            "more than 0 because the masks follow a schedule",
        ),
        "loop.optimizer.warmup_steps": (
            not learns_masks or 0 <= config.loop.optimizer.warmup_steps < max_steps,
            f"less than loop.max_steps={max_steps}, because the masks must reach their peak "
            f"learning rate",
        ),
        "largest_cut": (0 < config.largest_cut <= 1, "a share above 0 and at most 1"),
        "masks": (
            not config.masks or not config.depths,
            "no file together with depths, because a file holds one cut",
        ),
        "cache_mb": (
            config.cache_mb == 0 or (config.cache_mb > 0 and kind not in SHARDED_WEIGHTS),
            "0 (none) or more, and 0 with zero3 and fsdp, where all ranks must run the sharded "
            "target together",
        ),
        "loop.compile": (not config.loop.compile, uncompiled),
        "between.compile": (not config.between.compile, uncompiled),
        "between.max_steps": (config.between.max_steps > 0, "more than 0"),
    }
    check_values(config, rules)


def plan_stage_shapes(config: PruneConfig, target: Any) -> list[Any]:
    """Return the student's Hugging Face configuration after each stage.

    mode=random has one stage. Raises UserError for a shape to which the target cannot be cut.
    """
    final = student_config(config.student, target)
    depths = config.depths
    if not depths and not config.masks:  # a file of masks holds one cut
        depths = intermediate_depths(
            target.num_hidden_layers, final.num_hidden_layers, config.largest_cut
        )
    deeper = [target.num_hidden_layers, *depths, final.num_hidden_layers]
    if config.depths and any(later >= before for before, later in pairwise(deeper)):
        raise UserError(
            f"depths is {config.depths}, expected decreasing numbers of layers between the "
            f"target's {deeper[0]} and the student's {deeper[-1]}"
        )
    shapes = [
        student_config(dataclasses.replace(config.student, num_hidden_layers=depth), target)
        for depth in deeper[1:]
    ]
    if config.mode == "random":
        return shapes[-1:]
    refuse_wider(final, target)
    if config.student.layers:
        choose_layers(config.student, deeper[-2])
    if config.mode == "l0":
        for before, after in zip([target, *shapes[:-1]], shapes, strict=True):
            with torch.device("meta"):
                Masks(after, before, BETA[config.l0.beta], 0)  # refuses unreachable sparsities
    return shapes


def intermediate_depths(layers: int, final: int, largest_cut: float) -> list[int]:
    """Return the number of layers after each stage but the last.

    Each stage removes at most the share `largest_cut` of the layers, but at least one. For example,
    a cut from 32 layers to 3 with 0.625 gives [12, 5].
    """
    depths = []
    while (layers := min(layers - 1, math.ceil(layers * (1 - largest_cut)))) > final:
        depths.append(layers)
    return depths


def build_context(config: PruneConfig, target_folder: Path) -> PruneContext:
    """Join the other ranks, and load the target, the training text and the held-out text."""
    parallel = Parallel(config.parallel, config.target.device)
    config = dataclasses.replace(config, data=with_initial_shares(config.data))
    data = config.data
    tokenizer = load_tokenizer(target_folder)
    texts = training_texts(tokenizer, data, parallel.is_main)
    domains = held_out_samples(tokenizer, data, parallel.is_main)
    held_out = [sample for samples in domains.values() for sample in samples]
    packed = PackedData(held_out, data.max_length, 1, config.seed)
    rows = min(config.importance.probe_sequences, len(packed.rows))
    chosen = [held_out[index] for step in range(rows) for index in packed.step_rows(step)[0]]
    teacher = read_source(config, target_folder, parallel).model
    moving = domains if data.mixing != "fixed" else {}
    return PruneContext(config, teacher, texts, chosen, parallel, moving)


def run_stage(
    context: PruneContext, source: SourceModel, shape: Any, place: Path, work: Path, distil: bool
) -> dict[str, Any]:
    """Cut a student from the source and write it to `place`. Returns notes on the stage.

    work: folder of the stage's checkpoints and notes. distil: distil the student before it is
    written, because another cut follows.
    """
    config, parallel, done = context.config, context.parallel, work / "done.json"
    # Only rank 0 checks: it could finish the stage before another rank checks.
    before = parallel.broadcast(read_finished_stage(done, place) if parallel.is_main else None)
    if before is not None:
        context.shares = before.get("shares", {})
        return before
    target_hash = hash_input(source.folder)
    if config.masks:
        cut = load_cut(resolve(config.masks), target_hash)
        student = cut_model(source.model, cut, shape).requires_grad_(True)
        notes: dict[str, Any] = {"layers": list(cut.layers), "masks": config.masks}
    else:
        student, notes, cut = MODES[config.mode](context, source, shape, work)
    notes["acceptance_before_distillation"] = context.acceptance(student)["acceptance"]
    if distil:
        title = f"distil {shape.num_hidden_layers} layers"
        with context.track(title, work / "between") as tracker:
            progress = context.distil(title, student, config.between, work / "distil", tracker)
        notes["acceptance"] = progress.best["acceptance"]
    notes |= {"seconds": dict(context.seconds), "flops": dict(context.flops)}
    context.seconds.clear()
    context.flops.clear()
    if context.shares:
        notes["shares"] = context.shares
    if parallel.is_main:
        work.mkdir(parents=True, exist_ok=True)
        if cut is not None:
            save_cut(cut, work / MASKS, target_hash, notes | {"source": str(source.folder)})
        write_model(student, source.folder, place, dtype_of(config.target.dtype))
        write_text(done, json.dumps({**notes, _MODEL: hash_input(place)}, indent=1))
        for checkpoints in ("probe", "distil", "checkpoints"):
            shutil.rmtree(work / checkpoints, ignore_errors=True)
    parallel.wait()
    return notes


def read_finished_stage(done: Path, place: Path) -> dict[str, Any] | None:
    """Return the notes of a finished stage, or None if the stage must run.

    A stage runs again if its model has changed since it was written.
    """
    if not done.is_file() or not (place / WEIGHTS).is_file():
        return None
    notes = read_object(done, "Delete it to run the stage again", _notes_of)
    # Stages of earlier versions have no hash.
    if notes.pop(_MODEL, None) in (None, hash_input(place)):
        return notes
    print(f"{place} has changed since its stage finished: the stage runs again")
    return None


def _notes_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return the notes of a stage. Raises ValueError if a required one is missing."""
    if missing := {"acceptance_before_distillation", "seconds", "flops"} - values.keys():
        raise ValueError(f"{', '.join(sorted(missing))} is missing")
    return values


def finish(
    config: PruneConfig, run: Run, context: PruneContext, stages: list[dict[str, Any]]
) -> None:
    """Write the student's card, the masks, and the manifest with the cost by part of the work.

    stages: the notes of every stage.
    """
    folder, last = run.artefact, run.path / "work" / str(len(stages)) / MASKS
    if last.is_file():
        shutil.copyfile(last, run.path / MASKS)
    untrained = config.mode == "random"
    acceptance = {"acceptance": stages[-1]["acceptance_before_distillation"]}
    shares = stages[-1].get("shares")
    origin = Provenance(
        config.student.name,
        config.target.path,
        resolve_model(config.target.path),
        {"sources": sources(config.data), **({"shares": shares} if shares else {})},
        {
            "name": None,
            "note": "random weights, not trained" if untrained else "pruned, not distilled",
        },
        acceptance,
    )
    pruning = {"mode": config.mode, "stages": stages}
    write_card(folder, load_causal_lm(folder, torch.float32), origin, pruning)
    tracked = dataclasses.replace(config, tracker=context.tracker_config())
    with track_run(run.folder, tracked, run.inputs) as tracker:
        record_stages(tracker, stages)
    seconds, flops = Counter[str](), Counter[str]()
    for notes in stages:
        seconds.update(notes["seconds"])
        flops.update(notes["flops"])
    figures = {**acceptance, "stages": stages, "seconds": seconds, "flops": flops}
    run.folder.write_manifest(run.inputs, figures, finished=True)
    kept = "random weights" if untrained else f"layers {stages[-1]['layers']}"
    print(f"{kept}; acceptance before distillation {acceptance['acceptance']:.3f}")
    if seconds:
        spent = ", ".join(f"{part} {value:.1f} s" for part, value in seconds.items())
        print(f"time: {spent}; {sum(flops.values()) / 1e12:,.2f} TFLOP in total")
    print(f"student: {folder}")
