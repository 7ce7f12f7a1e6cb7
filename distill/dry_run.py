"""Dry runs: the cost of a job, and a student folder with weights of zero to try in a server.

A dry run reads neither the target's weights nor the data, and the zeros take no disk space. FLOPs
count products with weights: per weight and token, two in a forward pass and four in a backward
pass. Attention scores are not counted.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from decoding import devices
from distill.config import PruneConfig, TrainConfig
from distill.drafter_folder import NUM_DRAFT_TOKENS, write_card
from distill.parallel_drafting.setup import dry_parallel
from distill.prune.layer_choice import count_layer_sets
from distill.shapes import (
    describe_size_mismatch,
    removal_flops,
    student_config,
    warn_unaligned_widths,
)
from jobs.amounts import operations, size
from jobs.config import ParallelConfig
from jobs.paths import resolve_model
from jobs.protocol import Run
from jobs.ranks import ZERO
from training.config import LoopConfig, TrainingJobConfig
from training.drafter_folder import Provenance, keeps_folder, write_untrained
from training.features.teacher_cache import Layout
from training.features.teacher_config import NONE
from training.models.build import dtype_of, known_config, print_missing, random_model, target_config
from training.models.shapes import (
    bytes_a_step,
    forward_flops,
    head_rows,
    layers_of,
    millions,
    parameter_counts,
)
from training.parallel.memory_plan import (
    activation_bytes,
    answering_bytes,
    answering_line,
    bytes_per_rank,
)
from training.plan import plan_tokens, print_plan, print_work

LARGE = 10**9  # parameters above which a target's dtype is noted


def dry_run(config: TrainConfig, target_folder: Path, run: Run) -> float:
    """Print the cost of `distill.train` and write the untrained drafter.

    Returns the FLOPs of the run; 0 if they depend on the data.
    """
    print_missing(config.target)
    target = target_config(config.target)
    if config.student.init == "folder" and config.student.path:
        student: Any = known_config(resolve_model(config.student.path))
        student.vocab_size = target.vocab_size  # training resizes it
    else:
        student = student_config(config.student, target)
    complete = copy.deepcopy(student)
    if drafted := config.student.draft_vocab_size:
        student.draft_vocab_size, student.tie_word_embeddings = drafted, False
    print_sizes(student, target, name=config.student.name)
    cached = config.teacher.cache != NONE
    flops = print_cost(config, config.loop, student, {"target": target}, cached=cached)
    # Before the first step, a second copy of the target on rank 0 answers the held-out prompts.
    held = {
        "target": _frozen_bytes(target, config.parallel, config.loop.dtype),
        "weights": parameter_counts(student)["all"] * dtype_of(config.loop.dtype).itemsize,
    }
    print(answering_line(held | answering_bytes(target, config)))
    if config.on_policy.share:
        print(
            f"note: the student writes {config.on_policy.share:.0%} of the rows "
            f"(on_policy.share), and this cost leaves out its decoding"
        )
    if cached:
        layout = Layout.of(config.teacher, head_rows(student))
        once = operations(2 * parameter_counts(target)["all"])
        print(
            f"teacher cache: before the first step, {once} for each token of the data, and "
            f"{layout.bytes} bytes for each supervised one, {size(layout.bytes * 10**9)} for a "
            f"billion"
        )
    if head_rows(student) < student.vocab_size:
        vars(complete).pop("draft_vocab_size", None)
        print(
            "note: the draft vocabulary is counted from the data, which a dry run does not read: "
            "the untrained student has all tokens"
        )
    dry_parallel(complete, config.parallel_drafting, target_folder)
    _write(config, complete, target, target_folder, run)
    return flops


def dry_prune(
    config: PruneConfig, target: Any, shapes: list[Any], target_folder: Path, run: Run
) -> float:
    """Print the cost of every stage of `distill.prune` and write the untrained student.

    target: the target's Hugging Face configuration. shapes: the student's after each stage. Returns
    the FLOPs of all stages.
    """
    source, flops, dtype = target, 0.0, config.target.dtype
    frozen, role = {"target": target}, "target"
    print_missing(config.target)
    for note in pruning_notes(config, target):
        print(note)
    for number, shape in enumerate(shapes, start=1):
        if len(shapes) > 1:
            layers = f"{source.num_hidden_layers} -> {layers_of(shape)}"
            print(f"stage {number} of {len(shapes)}: {layers}")
        print_sizes(shape, source, role)
        if config.masks:
            print("cut by the saved masks: nothing is scored or trained")
        elif config.mode == "importance":
            flops += _print_importance(config, source, frozen, shape)
        elif config.mode == "l0":
            flops += _print_masks(config, source, frozen)
        else:
            print("random weights: nothing is scored or trained")
        if number < len(shapes):
            print("then a short distillation, before the next cut:")
            flops += print_cost(config, config.between, shape, frozen, dtype)
        source, role = shape, "cut from"
        frozen = {"target": target, "student of the stage before": source}
    if note := describe_size_mismatch(config.student.name, shapes[-1]):
        print(note)
    stored = parameter_counts(shapes[-1])["all"] * dtype_of(dtype).itemsize
    print(f"disk: {size(stored)} for the student's folder ({dtype})")
    _write(config, shapes[-1], target, target_folder, run)
    return flops


def _print_importance(
    config: PruneConfig, source: Any, frozen: Mapping[str, Any], shape: Any
) -> float:
    """Print the cost and the memory of one stage of mode=importance. Returns its FLOPs."""
    settings, tokens = config.importance, config.importance.sequences * config.data.max_length
    compared, distilled = _count_candidates(config, source, shape)
    what = f"importance: scores from {tokens:,} tokens"
    if compared:
        what += f", up to {compared} candidates compared on held-out text"
    if distilled:
        what += (
            f" and {distilled} of them distilled on "
            f"{settings.probe_steps * config.between.tokens_per_step:,} tokens each "
            f"(importance.probe_steps={settings.probe_steps})"
        )
    flops = importance_flops(config, source, frozen["target"], shape)
    print_work(what, flops, config.assumed_tflops)
    training = config.between if distilled else None
    _print_memory(training, config.parallel, shape, frozen, config.target.dtype)
    if distilled:
        trained = parameter_counts(shape)["all"]
        _print_checkpoint(config.between, trained, trained)
    return flops


def _print_masks(config: PruneConfig, source: Any, frozen: Mapping[str, Any]) -> float:
    """Print the cost of one stage of mode=l0, which trains masks over `source`. Returns its FLOPs.

    source: Hugging Face configuration of the model to cut.
    """
    loop, both, weights = config.loop, config.l0.train_weights, parameter_counts(source)["all"]
    flops_per_token = (6.0 if both else 4.0) * weights
    what = "weights and masks" if both else "masks, the weights frozen,"
    plan = plan_tokens(loop, flops_per_token, config.assumed_tflops)
    flops = flops_per_token * plan.tokens
    print_work(f"l0: {what} trained on {plan.words}", flops, config.assumed_tflops)
    _print_memory(loop, config.parallel, source, frozen, config.target.dtype, both)
    if config.parallel.kind in (*ZERO, "fsdp"):
        held = weights * dtype_of(loop.dtype).itemsize
        print(
            f"and {size(held)} more at evaluations, for which each rank gathers all weights. "
            f"Before the first step each rank loads all weights ({size(held)} of the machine's "
            f"memory) and holds them twice ({size(2 * held)}) while it shards them"
        )
    _print_checkpoint(loop, weights if both else 0, weights)
    return flops


def importance_flops(config: PruneConfig, source: Any, target: Any, shape: Any) -> float:
    """Return the FLOPs of mode=importance: scores, greedy removal of layers, and probes."""
    settings, row = config.importance, config.data.max_length
    flops = forward_flops(source) * settings.sequences * row
    if settings.choice not in ("probe", "greedy") or not _chooses_layers(config, source, shape):
        return flops
    flops += removal_flops(source) * settings.greedy_sequences * row
    compared, distilled = _count_candidates(config, source, shape)
    if compared:
        # A candidate is evaluated after its cut and again after its distillation. The target reads
        # the held-out text once.
        students = (compared + distilled) * forward_flops(shape)
        flops += (students + forward_flops(target)) * settings.probe_sequences * row
        flops_per_token = 6.0 * parameter_counts(shape)["all"] + forward_flops(target)
        flops += distilled * settings.probe_steps * config.between.tokens_per_step * flops_per_token
    return flops


def _count_candidates(config: PruneConfig, source: Any, shape: Any) -> tuple[int, int]:
    """Return the maximum number of candidate sets of layers, and how many of them are distilled."""
    settings = config.importance
    if settings.choice != "probe" or not _chooses_layers(config, source, shape):
        return 0, 0
    most = count_layer_sets(shape.num_hidden_layers, source.num_hidden_layers)
    return most, min(most, settings.probe_candidates) if settings.probe_steps else 0


def _chooses_layers(config: PruneConfig, source: Any, shape: Any) -> bool:
    """Return whether this cut drops layers, and `student.layers` does not list those to keep."""
    count = shape.num_hidden_layers
    return count < source.num_hidden_layers and len(config.student.layers) != count


def pruning_notes(config: PruneConfig, target: Any) -> list[str]:
    """Return notes on a large target in 16 bits that is loaded in 32, and on a draft vocabulary."""
    notes = []
    stored, count = target.dtype or torch.float32, parameter_counts(target)["all"]
    if config.target.dtype == "float32" and stored.itemsize <= 2 and count >= LARGE:
        notes.append(
            f"note: the target is stored in {str(stored).removeprefix('torch.')} and loaded in "
            f"float32, {size(4 * count)}: target.dtype=bfloat16 takes half"
        )
    if config.student.draft_vocab_size:
        notes.append(
            "note: student.draft_vocab_size restricts a student in distill.train; the pruned one "
            "keeps all tokens"
        )
    return notes


def print_sizes(student: Any, target: Any, role: str = "target", name: str = "") -> None:
    """Print the parameters of student and target, and warnings about the student's shape.

    role: label of `target` in the output. name: the student's name, which may contain a size.
    """
    counts = {part: millions(count) for part, count in parameter_counts(student).items()}
    head = "the head too" if student.tie_word_embeddings else f"{counts['head']} head"
    print(f"{role}: {millions(parameter_counts(target)['all'])} parameters, {layers_of(target)}")
    print(
        f"student: {counts['all']} parameters ({counts['layers']} in {layers_of(student)}, "
        f"{counts['embedding']} embedding, {head}); a step reads {size(bytes_a_step(student))} in "
        f"16 bits"
    )
    for warning in warn_unaligned_widths(student):
        print(f"warning: {warning}")
    if note := describe_size_mismatch(name, student):
        print(note)


def training_flops(student: Any, teacher: Any = None) -> float:
    """Return the FLOPs of a training step for each token.

    student, teacher: their Hugging Face configurations. teacher=None: no step runs a teacher.
    """
    judged = 0 if teacher is None else parameter_counts(teacher)["all"]
    return float(6 * parameter_counts(student)["all"] + 2 * judged)


def print_cost(
    config: TrainingJobConfig,
    loop: LoopConfig,
    student: Any,
    frozen: Mapping[str, Any],
    frozen_dtype: str = "",
    cached: bool = False,
) -> float:
    """Print the cost of training a student. Returns its FLOPs; 0 if they depend on the data.

    frozen: name -> configuration of each frozen model in memory. The one called `target` is the
    teacher. frozen_dtype: dtype of the frozen weights; empty: loop.dtype. cached: whether steps
    read a cache of the teacher instead of running it.
    """
    trained = parameter_counts(student)["all"]
    teacher = None if cached else frozen.get("target")
    flops_per_token = training_flops(student, teacher)
    terms = "6 x student + 2 x teacher" if teacher is not None else "6 x student"
    print(f"cost: {operations(flops_per_token)} a token ({terms})")
    flops = print_plan(loop, flops_per_token, config.assumed_tflops, "loop.max_steps")
    _print_memory(loop, config.parallel, student, frozen, frozen_dtype or loop.dtype)
    _print_checkpoint(loop, trained, trained)
    return flops


def _print_checkpoint(loop: LoopConfig, trained: int, stored: int) -> None:
    """Print the size of a checkpoint and the maximum number of them.

    trained: number of weights with optimizer states. stored: number of all stored weights.
    """
    one = size(stored * dtype_of(loop.dtype).itemsize + 12 * trained)
    print(
        f"disk: {one} a checkpoint (weights, float32 masters, two moments), at most "
        f"{loop.keep + 1} of them"
    )


def _print_memory(
    loop: LoopConfig | None,
    parallel: ParallelConfig,
    student: Any,
    frozen: Mapping[str, Any],
    frozen_dtype: str,
    trains: bool = True,
) -> None:
    """Print the memory of one rank, in total and by part.

    loop: settings of the training; None if nothing is trained. frozen: name -> configuration of
    each frozen model. trains: whether weights are trained; False if only masks are.
    """
    ranks = _ranks(parallel)
    held = {name: _frozen_bytes(config, parallel, frozen_dtype) for name, config in frozen.items()}
    if loop is not None:
        counts = parameter_counts(student)
        outside = counts["embedding"] + counts["head"]
        plan = bytes_per_rank(counts["all"], 0, parallel.kind, ranks, loop.dtype, outside)
        parts = ("weights", "gradients", "optimizer", "buffers") if trains else ("weights",)
        made = activation_bytes(
            student, loop.micro_batch_tokens, loop.dtype, loop.activation_checkpointing
        )
        held |= {name: plan[name] for name in parts}
        held |= {"activations": made["layers"], "loss": made["loss"]}
    listed = ", ".join(f"{name} {size(count)}" for name, count in held.items() if count)
    known = parallel.processes or devices.count_gpus()
    assumed = "" if known else "; set parallel.processes for another number"
    ranked = f"each of {ranks} ranks ({parallel.kind}{assumed})"
    of = "one process" if parallel.kind == "single" else ranked
    print(f"memory of {of}: {size(sum(held.values()))} ({listed})")


def _frozen_bytes(model: Any, parallel: ParallelConfig, dtype: str) -> float:
    """Return the bytes that a rank holds of a frozen model."""
    counts = parameter_counts(model)
    plan = bytes_per_rank(
        0, counts["all"], parallel.kind, _ranks(parallel), "bfloat16", 0, counts["head"]
    )
    return plan["frozen"] * dtype_of(dtype).itemsize / 2


def _ranks(parallel: ParallelConfig) -> int:
    """Return the number of ranks to plan for; 8 if it is unknown."""
    return 1 if parallel.kind == "single" else parallel.processes or devices.count_gpus() or 8


def _write(
    config: TrainConfig | PruneConfig, student: Any, target: Any, target_folder: Path, run: Run
) -> None:
    """Write the untrained student, unless the folder holds a trained one."""
    folder = run.artefact
    if keeps_folder(folder, run.folder.was_dry):
        return
    with torch.device("meta"):
        model = random_model(student, dtype_of(config.loop.dtype))
    dtype = target.dtype or torch.float32
    write_untrained(model, target_folder, folder, dtype, NUM_DRAFT_TOKENS)
    origin = Provenance.untrained(config.student.name, config.target.path, target_folder)
    write_card(folder, model, origin)
    print(f"untrained student folder, to try serving with: {folder}")
