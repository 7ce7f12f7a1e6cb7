"""Dry runs: what a job would cost, and the student's folder with weights of zero, to try serving with before anything is trained.

Nothing of the target's weights or of the data is read, and the zeros take no room: the weights file is sparse. Operations are those of
products with weights, two a weight and token forward and four backward; attention's own are left out.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from decoding.folder import read_config
from distill.config import PruneConfig, TrainConfig
from distill.drafter_folder import write_card
from distill.shapes import odd_widths, removal_flops, student_config
from training.config import LoopConfig, ParallelConfig
from training.drafter_folder import write_untrained
from training.memory_plan import Shape, activation_bytes, bytes_per_rank
from training.models import dtype_of, missing_of, random_model, target_config, target_is_here
from training.paths import resolve
from training.shapes import bytes_a_step, forward_flops, millions, parameter_counts, target_widths


def dry_run(config: TrainConfig, target_folder: Path, folder: Path, was_dry: bool) -> Path:
    """Of `distill.train`: print shapes and cost and write the untrained drafter to `folder`, unless a trained one is there. Returns `folder`.

    was_dry: what is there was written by a dry run, and is replaced.
    """
    target = target_config(config.target)
    student = _student(config, target)
    describe(student, target)
    print_cost(config.loop, config.parallel, student, target, config.assumed_tflops)
    return _write(config, student, target, target_folder, folder, was_dry)


def _student(config: TrainConfig, target: Any) -> Any:
    """The configuration of the student: by its shape, or of the folder that it goes on from where that is there."""
    if config.drafter.init == "folder" and config.drafter.path:
        folder = resolve(config.drafter.path)
        read_config(folder)
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    return student_config(config.drafter, target)


def dry_prune(
    config: PruneConfig, target: Any, shapes: list[Any], target_folder: Path, folder: Path, was_dry: bool
) -> Path:
    """Of `distill.prune`: what every stage makes and takes, then the untrained student. Returns its folder."""
    source = target
    for number, shape in enumerate(shapes, start=1):
        if len(shapes) > 1:
            print(f"stage {number}: {source.num_hidden_layers} -> {shape.num_hidden_layers} layers")
        describe(shape, target)
        if config.mode == "importance":
            _say("importance", importance_flops(config, source, target, shape), config.assumed_tflops)
        if config.mode == "l0":
            print_cost(config.loop, config.parallel, source, target, config.assumed_tflops)
        if number < len(shapes):
            print_cost(config.between, config.parallel, shape, target, config.assumed_tflops)
        source = shape
    return _write(config, shapes[-1], target, target_folder, folder, was_dry)


def importance_flops(config: PruneConfig, source: Any, target: Any, shape: Any) -> float:
    """Operations of mode=importance by its settings: scores, the greedy order of layers, and all probes."""
    settings, row = config.importance, config.data.max_length
    scores = forward_flops(source) * settings.sequences * row
    if settings.choice not in ("probe", "greedy"):
        return scores
    greedy = removal_flops(source) * settings.greedy_sequences * row
    if settings.choice == "greedy":
        return scores + greedy
    a_token = 6.0 * parameter_counts(shape)["all"] + forward_flops(target)
    distilled = settings.probe_steps * config.between.tokens_per_step * a_token
    looked = settings.probe_sequences * row * forward_flops(shape)
    return scores + greedy + 4 * (distilled + looked) + settings.probe_sequences * row * forward_flops(target)


def describe(student: Any, target: Any) -> None:
    """Parameters, bytes of a step, and warnings of odd widths."""
    counts, whole = parameter_counts(student), parameter_counts(target)["all"]
    print(f"target: {millions(whole)} parameters, {target.num_hidden_layers} layers")
    print(
        f"student: {millions(counts['all'])} parameters ({millions(counts['layers'])} in {student.num_hidden_layers} layers, "
        f"{millions(counts['embedding'])} embedding, {millions(counts['head'])} head); a step reads {bytes_a_step(student) / 1e6:,.0f} MB in 16 bits"
    )
    for warning in odd_widths(student):
        print(f"warning: {warning}")


def print_cost(loop: LoopConfig, parallel: ParallelConfig, student: Any, teacher: Any, tflops: float) -> None:
    """Say what training a student of this configuration takes, and running a frozen teacher (None: there is none) beside it."""
    counts = parameter_counts(student)
    trained, frozen = counts["all"], parameter_counts(teacher)["all"] if teacher is not None else 0
    flops = 6 * trained + 2 * frozen
    print(f"cost: {flops / 1e6:,.0f} MFLOP a token (6 x student{' + 2 x teacher' if frozen else ''})")
    if loop.max_steps:
        tokens = loop.max_steps * loop.tokens_per_step
        _say(f"plan: {tokens:,} tokens in {loop.max_steps:,} steps", float(flops * tokens), tflops)
    else:
        print(
            f"plan: {loop.max_epochs:g} epochs; their tokens are known when the data is read (or give loop.max_steps)"
        )
    _print_memory(loop, parallel, student, teacher)
    width = dtype_of(loop.dtype).itemsize
    print(f"disk: {trained * (width + 12) / 1e6:,.0f} MB a checkpoint (weights, float32 masters, two moments)")


def _print_memory(loop: LoopConfig, parallel: ParallelConfig, student: Any, teacher: Any) -> None:
    """Megabytes of a rank, part by part."""
    counts, widths = parameter_counts(student), target_widths(student)
    frozen = parameter_counts(teacher) if teacher is not None else {"all": 0, "head": 0}
    ranks = max(1, parallel.processes)
    outside = (counts["embedding"] + counts["head"], frozen["head"])
    plan = bytes_per_rank(counts["all"], frozen["all"], parallel.kind, ranks, loop.dtype, *outside)
    shape = Shape(
        student.num_hidden_layers,
        widths["hidden_size"],
        widths["num_attention_heads"],
        widths["head_dim"],
        widths["intermediate_size"],
        student.vocab_size,
    )
    plan |= activation_bytes(shape, loop.micro_batch_tokens, loop.dtype, loop.activation_checkpointing)
    words = {"frozen": "teacher", "layers": "activations"}
    parts = ", ".join(
        f"{words.get(name, name)} {size / 1e6:,.0f}" for name, size in plan.items() if size and name != "total"
    )
    total = sum(size for name, size in plan.items() if name != "total")
    of = f"each of {ranks} ranks ({parallel.kind})" if ranks > 1 else "one process"
    print(f"memory of {of}: {total / 1e6:,.0f} MB ({parts})")


def _say(what: str, flops: float, tflops: float) -> None:
    print(f"{what}, {flops / 1e12:,.1f} TFLOP, {flops / tflops / 1e12 / 3600:,.2f} hours at {tflops:g} TFLOP/s")


def _write(
    config: TrainConfig | PruneConfig, student: Any, target: Any, target_folder: Path, folder: Path, was_dry: bool
) -> Path:
    """The untrained folder, unless a trained one is there."""
    if was_dry:
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        print(f"kept: {folder} is there already")
        return folder
    with torch.device("meta"):
        model = random_model(student, dtype_of(config.loop.dtype))
    write_untrained(model, target_folder, folder, target.dtype or torch.float32, draft_tokens=4)
    about = {"name": "nothing yet (dry run)"}
    write_card(folder, config.drafter.name, model, config.target.path, target_folder, {"sources": []}, about, {})
    if not target_is_here(config.target):
        print(f"note: {missing_of(config.target)}")
    print(f"untrained student folder, to try serving with: {folder}")
    return folder
