"""The job `eval.plan`: measure costs, predict, print one page, write plan.jsonl and plan.html."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from decoding.devices import device_of
from decoding.errors import UserError
from decoding.models.folder import hash_input
from decoding.values import check_settings
from eval.plan.acceptance import choose_curves
from eval.plan.candidates import Candidate, candidates
from eval.plan.config import PlanConfig
from eval.plan.costs import (
    CostFile,
    capacity,
    check_memory,
    has_weights,
    matrix_tflops,
    open_target,
)
from eval.plan.curves import (
    PARALLEL,
    SHAPES,
    TREE,
    Curve,
    collect,
    merge,
    read_curves,
    write_curves,
)
from eval.plan.report import advice, plan_page, print_plan
from eval.plan.rows import Outlook, build_outlook
from eval.report.text import count_label
from jobs.amounts import hours, operations
from jobs.config import refuse_parallel
from jobs.files import write_text
from jobs.paths import resolve, resolve_model
from jobs.run_folder import RunFolder, hardware
from training.models.build import dtype_of, target_config

CONTEXT = 512  # tokens of a row, where the target holds as many and no other number is set
ROWS, PAGE = "plan.jsonl", "plan.html"


def run(config: PlanConfig) -> Path:
    """Plan; return the run folder with plan.jsonl, plan.html and costs.jsonl.

    A dry run prints what would be measured, with the cost of each training, and writes nothing.
    Raises UserError for invalid input.
    """
    check(config)
    target: Any = target_config(config.target)
    found = candidates(config, target)
    config = replace(config, context=_context(config, target))
    if config.dry_run:
        _print_dry(config, found)
        return Path(config.output_dir)
    check_memory(config, target, found)
    curves, notes = measured_curves(config)
    _check_prompts(config, curves)
    folder = RunFolder(config)
    costs = CostFile(config, target, folder.path)
    inputs = [resolve_model(config.target.path)] if has_weights(config) else []
    folder.write_manifest(inputs, {}, finished=False)
    if any(costs.find(one) is None for one in found):
        notes += costs.measure(open_target(config, target), found)
    else:
        print(f"{costs.path} holds the costs of all drafters; nothing is measured again.")
    pairs = [(one, known) for one in found if (known := costs.find(one)) is not None]
    if not pairs:
        raise UserError(f"no drafter is left to plan. {' '.join(notes)}")
    tflops = config.assumed_tflops or matrix_tflops(config)
    outlook = build_outlook(config, pairs, curves, tflops)
    _write(config, folder, outlook, notes)
    folder.write_manifest(inputs, {"advice": advice(outlook, config)}, finished=True)
    print_plan(outlook, config, notes)
    print(f"\nrows: {folder.path / ROWS}\npage: {folder.path / PAGE}")
    return folder.path


def check(config: PlanConfig) -> None:
    """Raise UserError for settings that cannot be planned, before anything is read."""
    device_of(config.target.device)
    dtype_of(config.target.dtype)
    check_settings(config, ("temperature",))
    refuse_parallel(config.target)
    for key, valid, expected in (
        ("threads", config.threads != "auto", "a number, as costs depend on it, or 0"),
        ("depths", all(one >= 1 for one in config.depths), "whole numbers from 1 up"),
        ("widths", all(one >= 0 for one in config.widths), "hidden sizes, or 0 for the target's"),
        (
            "heads",
            bool(config.heads or (config.depths and config.widths)),
            "one kind or more, as depths and widths combine to no drafter",
        ),
        (
            "shapes",
            bool(config.shapes)
            and {*config.shapes} <= {*SHAPES}
            and bool({*config.shapes} - {PARALLEL} or (config.depths and config.widths)),
            f"one or more of {', '.join(SHAPES)}; {PARALLEL} is for pruned models alone",
        ),
        (
            "tree_nodes",
            bool(config.tree_nodes or TREE not in config.shapes)
            and all(one >= 2 for one in config.tree_nodes),
            "one or more numbers of nodes, each 2 or more",
        ),
        ("draft_vocab_size", config.draft_vocab_size >= 0, "1 or more, or 0 for all tokens"),
        (
            "max_draft_tokens",
            config.max_draft_tokens >= 1 + (PARALLEL in config.shapes),
            f"2 or more with shapes={PARALLEL}" if PARALLEL in config.shapes else "1 or more",
        ),
        ("batch_size", config.batch_size >= 1, "1 or more"),
        ("context", config.context == 0 or config.context >= 2, "2 or more, or 0 for what fits"),
        (
            "speedups",
            bool(config.speedups) and all(one > 0 for one in config.speedups),
            "one or more numbers above 0",
        ),
        ("cost_seconds", 0 < config.cost_seconds <= 3600, "more than 0, at most 3600"),
        ("training_tokens", config.training_tokens >= 0, "1 or more, or 0 if not known"),
        ("assumed_tflops", config.assumed_tflops >= 0, "more than 0, or 0 for this machine's"),
    ):
        if not valid:
            raise UserError(f"{key} is {vars(config)[key]}, expected {expected}.")


def _context(config: PlanConfig, target: Any) -> int:
    """Return the tokens of a row while costs are measured; 0 in `config` chooses what fits.

    target: its configuration. Raises UserError for a context that the target does not hold.
    """
    holds = config.target.max_length or int(target.max_position_embeddings)
    drafts = capacity(config) - config.context
    if drafts + 2 > holds:
        raise UserError(
            f"{config.target.path} holds {holds} tokens, of which drafts need {drafts}. Lower "
            f"max_draft_tokens, or tree_nodes where trees are planned."
        )
    if config.context + drafts > holds:
        raise UserError(
            f"context is {config.context}, expected at most {holds - drafts}: "
            f"{config.target.path} holds {holds} tokens, of which drafts need {drafts}."
        )
    return config.context or min(CONTEXT, holds - drafts)


def _check_prompts(config: PlanConfig, curves: Sequence[Curve]) -> None:
    """Raise UserError for prompts on which nothing was measured, if there are curves of others."""
    known = sorted({one.benchmark for one in choose_curves(curves)})
    if config.prompts and known and config.prompts not in known:
        raise UserError(
            f"prompts is {config.prompts}, on which no drafter of this target was measured, "
            f"expected one of {', '.join(known)}. Evaluate a drafter on them first, or leave "
            f"prompts empty."
        )


def measured_curves(config: PlanConfig) -> tuple[list[Curve], list[str]]:
    """Return the measured acceptances of this target, and notes; add new ones to the file.

    Raises UserError for a line that is no curve, and for a file in `curves` that holds none of this
    target.
    """
    file = Path(config.acceptance).expanduser()
    known, (new, notes) = read_curves(file), collect(config.runs)
    every = merge(known, new)
    if every != known:
        write_curves(file, every)
        print(f"{file}: {len(every)} acceptances, {len(every) - len(known)} of them new")
    own, others = _of_target(config, every)
    if others and not own:
        notes.append(f"{file} holds no acceptance of this target, only of {_targets(others)}.")
    for name in config.curves:
        mine, others = _of_target(config, read_curves(resolve(name)))
        if not mine:
            found = f"only of {_targets(others)}" if others else "but is empty"
            raise UserError(
                f"curves: {name} holds no acceptance of {config.target.path}, {found}. Leave this "
                f"file out, or set target.path to a target that it holds."
            )
        own = merge(own, mine)
    return own, notes


def _targets(curves: Sequence[Curve]) -> str:
    return ", ".join(sorted({one.target for one in curves}))


def _of_target(config: PlanConfig, curves: Sequence[Curve]) -> tuple[list[Curve], list[Curve]]:
    """Return the curves of this target, and those of others.

    The hash decides; a target without weights is found by its name.
    """
    path, by_hash = config.target.path, has_weights(config)
    expected = hash_input(resolve_model(path)) if by_hash else path
    mine = [one for one in curves if (one.target_hash if by_hash else one.target) == expected]
    return mine, [one for one in curves if one not in mine]


def _write(config: PlanConfig, folder: RunFolder, outlook: Outlook, notes: Sequence[str]) -> None:
    """Write plan.jsonl and plan.html."""
    lines = [json.dumps(dataclasses.asdict(row)) + "\n" for row in outlook.rows]
    write_text(folder.path / ROWS, "".join(lines))
    machine = hardware()
    threads = count_label(machine["threads"], "thread")
    provenance = {
        "command": folder.command(),
        "code": folder.manifest["git_revision"],
        "machine": ", ".join([machine["cpu"], *machine["gpus"], threads]),
        "target": "its own weights" if has_weights(config) else "random weights",
        "drafters": "random weights, which change no time",
    }
    write_text(folder.path / PAGE, plan_page(outlook, config, notes, provenance))


def _print_dry(config: PlanConfig, found: Sequence[Candidate]) -> None:
    """Print what would be measured, and the cost of each training."""
    weights = "its own weights" if has_weights(config) else "random weights"
    print(f"target: {config.target.path}, {weights}, {config.target.dtype}")
    for one in found:
        cost = f"{operations(one.flops_a_token)} for each token of its training"
        if tokens := config.training_tokens:
            flop = one.flops_a_token * tokens
            cost = f"{operations(flop)} on {tokens:,} tokens"
            if config.assumed_tflops:
                cost += f", {hours(flop / config.assumed_tflops / 1e12)}"
        print(f"  {one.name}: {one.parameters / 1e6:.1f} M parameters, {cost}")
    print(
        f"would measure {len(found)} drafters of random weights, some {config.cost_seconds:g} s "
        f"each, and write {ROWS} and {PAGE} into {config.output_dir}"
    )
