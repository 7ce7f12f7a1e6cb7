"""Dry runs: the cost of a job, and a student's folder of zeros for trying it in a server.

Neither the target's weights nor the data are read, and the zeros take no disk space. FLOPs count
products with weights: two per weight and token forward, four backward; attention's are left out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from decoding import devices
from distill.config import PruneConfig, TrainConfig
from distill.drafter_folder import write_card
from distill.prune.layer_choice import max_layer_sets
from distill.shapes import (
    describe_size_mismatch,
    removal_flops,
    student_config,
    warn_unaligned_widths,
)
from jobs.amounts import operations, size
from jobs.config import ParallelConfig
from jobs.paths import resolve
from jobs.ranks import ZERO
from training.config import LoopConfig, StudentConfig
from training.drafter_folder import Provenance, keeps_folder, write_untrained
from training.models.build import dtype_of, known_config, print_missing, random_model, target_config
from training.models.shapes import (
    bytes_a_step,
    forward_flops,
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


def dry_run(config: TrainConfig, target_folder: Path, folder: Path, was_dry: bool) -> float:
    """Print the cost of `distill.train` and write the untrained drafter. Returns FLOPs.

    A trained drafter is kept; was_dry: the folder was written by a dry run and is replaced.
    """
    print_missing(config.target)
    target = target_config(config.target)
    student = _student(config, target)
    describe(student, target)
    _print_other_size(config.student, student)
    flops = print_cost(
        config.loop, config.parallel, student, {"target": target}, config.assumed_tflops
    )
    _print_answering(config, student, target)
    _write(config, student, target, target_folder, folder, was_dry)
    return flops


def _print_other_size(shape: StudentConfig, student: Any) -> None:
    if note := describe_size_mismatch(shape.name, student):
        print(note)


def _student(config: TrainConfig, target: Any) -> Any:
    """Return the student's configuration, from its shape or from the folder it continues from."""
    if config.student.init == "folder" and config.student.path:
        folder = resolve(config.student.path)
        student = known_config(folder)
        student.vocab_size = target.vocab_size  # as training fits it
        return student
    return student_config(config.student, target)


def dry_prune(
    config: PruneConfig,
    target: Any,
    shapes: list[Any],
    target_folder: Path,
    folder: Path,
    was_dry: bool,
) -> float:
    """Print the stages of `distill.prune` and write the untrained student. Returns FLOPs."""
    source, flops = target, 0.0
    print_missing(config.target)
    if hint := wide_dtype(config, target):
        print(hint)
    for number, shape in enumerate(shapes, start=1):
        if len(shapes) > 1:
            print(
                f"stage {number} of {len(shapes)}: {source.num_hidden_layers} -> {layers_of(shape)}"
            )
        describe(shape, source if number > 1 else target, "cut from" if number > 1 else "target")
        frozen = {"target": target} | (
            {"student of the stage before": source} if number > 1 else {}
        )
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
            flops += print_cost(
                config.between,
                config.parallel,
                shape,
                frozen,
                config.assumed_tflops,
                config.target.dtype,
            )
        source = shape
    _print_other_size(config.student, shapes[-1])
    stored = parameter_counts(shapes[-1])["all"] * dtype_of(config.target.dtype).itemsize
    print(f"disk: {size(stored)} for the student's folder ({config.target.dtype})")
    _write(config, shapes[-1], target, target_folder, folder, was_dry)
    return flops


def _print_importance(
    config: PruneConfig, source: Any, frozen: Mapping[str, Any], shape: Any
) -> float:
    """Print the cost of mode=importance and its peak memory. Returns FLOPs."""
    settings, row = config.importance, config.data.max_length
    flops = importance_flops(config, source, frozen["target"], shape)
    compared, tried = _probes(config, source, shape)
    what = f", up to {compared} candidates compared on held-out text" if compared else ""
    if tried:
        distilled = settings.probe_steps * config.between.tokens_per_step
        what += (
            f" and {tried} of them distilled on {distilled:,} tokens each "
            f"(importance.probe_steps={settings.probe_steps})"
        )
    print_work(
        f"importance: scores from {settings.sequences * row:,} tokens{what}",
        flops,
        config.assumed_tflops,
    )
    training = config.between if tried else None
    _print_memory(training, config.parallel, shape, frozen, config.target.dtype)
    if training is not None:
        trained = parameter_counts(shape)["all"]
        print(
            f"disk: {size(_checkpoint_bytes(training, trained, trained))} while a candidate is "
            f"distilled"
        )
    return flops


def _print_masks(config: PruneConfig, source: Any, frozen: Mapping[str, Any]) -> float:
    """Print the cost of mode=l0, which trains the source under masks. Returns FLOPs."""
    loop, trained = config.loop, parameter_counts(source)["all"]
    a_token = (6.0 if config.l0.train_weights else 4.0) * trained
    what = "weights and masks" if config.l0.train_weights else "masks, the weights frozen,"
    plan = plan_tokens(loop, a_token, config.assumed_tflops)
    flops = a_token * plan.tokens
    print_work(f"l0: {what} trained on {plan.words}", flops, config.assumed_tflops)
    _print_memory(
        loop, config.parallel, source, frozen, config.target.dtype, config.l0.train_weights
    )
    if config.parallel.kind in (*ZERO, "fsdp"):
        whole = trained * dtype_of(loop.dtype).itemsize
        print(
            f"and {size(whole)} more at evaluations, which hold the weights whole on each rank; "
            f"before the first step a rank reads them whole ({size(whole)} of the machine's "
            f"memory) and has them twice ({size(2 * whole)}) while they are cut"
        )
    _print_checkpoint(loop, trained if config.l0.train_weights else 0, trained)
    return flops


def importance_flops(config: PruneConfig, source: Any, target: Any, shape: Any) -> float:
    """Return the FLOPs of mode=importance: scores, the greedy order of layers, and all probes."""
    settings, row = config.importance, config.data.max_length
    scores = forward_flops(source) * settings.sequences * row
    if settings.choice not in ("probe", "greedy") or not _layers_are_open(config, source, shape):
        return scores
    greedy = removal_flops(source) * settings.greedy_sequences * row
    compared, tried = _probes(config, source, shape)
    if not compared:
        return scores + greedy
    a_token = 6.0 * parameter_counts(shape)["all"] + forward_flops(target)
    distilled = settings.probe_steps * config.between.tokens_per_step * a_token
    looked = settings.probe_sequences * row * forward_flops(shape)
    # Each is evaluated after the cut and again after its distillation; the target reads the
    # held-out text once.
    all_looks = (compared + tried) * looked + settings.probe_sequences * row * forward_flops(target)
    return scores + greedy + tried * distilled + all_looks


def _probes(config: PruneConfig, source: Any, shape: Any) -> tuple[int, int]:
    """Return the largest number of sets of layers that are compared, and of those distilled."""
    settings = config.importance
    if settings.choice != "probe" or not _layers_are_open(config, source, shape):
        return 0, 0
    most = max_layer_sets(shape.num_hidden_layers, source.num_hidden_layers)
    return most, min(most, settings.probe_candidates) if settings.probe_steps else 0


def _layers_are_open(config: PruneConfig, source: Any, shape: Any) -> bool:
    """Return True if this cut drops layers that `student.layers` does not name."""
    count = shape.num_hidden_layers
    return count < source.num_hidden_layers and len(config.student.layers) != count


def wide_dtype(config: PruneConfig, target: Any) -> str:
    """Return a note if a large target in 16 bits would be read in 32, else an empty text."""
    stored, whole = target.dtype or torch.float32, parameter_counts(target)["all"]
    if config.target.dtype != "float32" or stored.itemsize > 2 or whole < LARGE:
        return ""
    told = str(stored).removeprefix("torch.")
    return (
        f"note: the target is stored in {told} and read in float32, {size(4 * whole)}: "
        f"target.dtype=bfloat16 takes half"
    )


def describe(student: Any, target: Any, role: str = "target") -> None:
    """Print parameters, bytes per step, and warnings of unaligned widths.

    role: the relation of the target to the student.
    """
    counts, whole = parameter_counts(student), parameter_counts(target)["all"]
    print(f"{role}: {millions(whole)} parameters, {layers_of(target)}")
    tables = f"{millions(counts['embedding'])} embedding, {millions(counts['head'])} head"
    if not counts["head"]:
        tables = f"{millions(counts['embedding'])} embedding, the head too"
    print(
        f"student: {millions(counts['all'])} parameters ({millions(counts['layers'])} in "
        f"{layers_of(student)}, {tables}); a step reads {size(bytes_a_step(student))} in 16 bits"
    )
    for warning in warn_unaligned_widths(student):
        print(f"warning: {warning}")


def print_cost(
    loop: LoopConfig,
    parallel: ParallelConfig,
    student: Any,
    frozen: Mapping[str, Any],
    tflops: float,
    frozen_dtype: str = "",
) -> float:
    """Print the cost of training a student. Returns FLOPs; 0 if they depend on the data.

    frozen: configurations of the frozen models in memory, by name; `target` also runs, as the
    teacher. frozen_dtype: of their weights; empty: the loop's.
    """
    trained = parameter_counts(student)["all"]
    teacher = parameter_counts(frozen["target"])["all"] if "target" in frozen else 0
    a_token = 6 * trained + 2 * teacher
    print(f"cost: {operations(a_token)} a token (6 x student{' + 2 x teacher' if teacher else ''})")
    flops = print_plan(loop, a_token, tflops, "loop.max_steps")
    _print_memory(loop, parallel, student, frozen, frozen_dtype or loop.dtype)
    _print_checkpoint(loop, trained, trained)
    return flops


def _print_checkpoint(loop: LoopConfig, trained: int, stored: int) -> None:
    """Print the size and number of checkpoints of `stored` weights, `trained` with states."""
    size_of_one = size(_checkpoint_bytes(loop, trained, stored))
    print(
        f"disk: {size_of_one} a checkpoint (weights, float32 masters, two moments), "
        f"{loop.keep + 1} of them at most"
    )


def _checkpoint_bytes(loop: LoopConfig, trained: int, stored: int) -> int:
    return stored * dtype_of(loop.dtype).itemsize + 12 * trained


def _print_memory(
    loop: LoopConfig | None,
    parallel: ParallelConfig,
    student: Any,
    frozen: Mapping[str, Any],
    frozen_dtype: str,
    trains: bool = True,
) -> None:
    """Print the memory of a rank, part by part.

    loop: None if nothing is trained. trains: False if only masks are trained.
    """
    ranks, known = _ranks(parallel)
    kept = {name: _frozen_bytes(config, parallel, frozen_dtype) for name, config in frozen.items()}
    if loop is not None:
        counts = parameter_counts(student)
        outside = counts["embedding"] + counts["head"]
        plan = bytes_per_rank(counts["all"], 0, parallel.kind, ranks, loop.dtype, outside)
        parts = ("weights", "gradients", "optimizer", "buffers") if trains else ("weights",)
        kept |= {name: plan[name] for name in parts}
        made = activation_bytes(
            student, loop.micro_batch_tokens, loop.dtype, loop.activation_checkpointing
        )
        kept |= {"activations": made["layers"], "loss": made["loss"]}
    told = ", ".join(f"{name} {size(held)}" for name, held in kept.items() if held)
    of = (
        f"each of {ranks} ranks ({parallel.kind}{known})"
        if parallel.kind != "single"
        else "one process"
    )
    print(f"memory of {of}: {size(sum(kept.values()))} ({told})")


def _print_answering(config: TrainConfig, student: Any, target: Any) -> None:
    """Print the memory of rank 0 before the first step, while the target's second copy answers."""
    held = {"target": _frozen_bytes(target, config.parallel, config.loop.dtype)}
    held["weights"] = parameter_counts(student)["all"] * dtype_of(config.loop.dtype).itemsize
    print(answering_line(held | answering_bytes(target, config)))


def _frozen_bytes(model: Any, parallel: ParallelConfig, dtype: str) -> float:
    """Return the bytes that a rank holds of a frozen model."""
    whole = parameter_counts(model)
    held = bytes_per_rank(
        0, whole["all"], parallel.kind, _ranks(parallel)[0], "bfloat16", 0, whole["head"]
    )["frozen"]
    return held * dtype_of(dtype).itemsize / 2


def _ranks(parallel: ParallelConfig) -> tuple[int, str]:
    """Return the number of ranks to plan for, and a remark if it is assumed."""
    ranks = 1 if parallel.kind == "single" else parallel.processes or devices.count_gpus()
    return (ranks, "") if ranks else (8, "; give parallel.processes for another number")


def _write(
    config: TrainConfig | PruneConfig,
    student: Any,
    target: Any,
    target_folder: Path,
    folder: Path,
    was_dry: bool,
) -> None:
    """Write the untrained folder, unless there is a trained one."""
    if keeps_folder(folder, was_dry):
        return
    with torch.device("meta"):
        model = random_model(student, dtype_of(config.loop.dtype))
    write_untrained(model, target_folder, folder, target.dtype or torch.float32, draft_tokens=4)
    write_card(
        folder, model, Provenance.untrained(config.student.name, config.target.path, target_folder)
    )
    print(f"untrained student folder, to try serving with: {folder}")
