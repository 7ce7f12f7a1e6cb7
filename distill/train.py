"""`python -m distill.train`: build a student and distil the frozen target into it; leaves a
complete drafter folder.
"""

from pathlib import Path
from typing import Any

import torch

from decoding.errors import UserError
from decoding.models.model_check import check_model
from decoding.models.text.tokenizer import load_tokenizer
from decoding.values import RULES
from distill.acceptance import HeldOutAcceptance, HeldOutMixture
from distill.config import TrainConfig
from distill.drafter_folder import pruning_on_card, write_card
from distill.dry_run import dry_run
from distill.shapes import student_config
from distill.student import build_student
from jobs.amounts import PLANNED
from jobs.job import job_main
from jobs.launch import is_worker, launch, processes_wanted
from jobs.paths import resolve
from jobs.ranks import SHARDED_WEIGHTS
from jobs.run_folder import RunFolder
from jobs.tracker import Recording
from training.bounds import Progress
from training.config import check_values
from training.data.from_config import data_files, held_out_domains, training_data
from training.data.mixture import check_mixture
from training.data.packing import PackedData, Sample
from training.drafter_folder import close_run, origin_of, write_model
from training.held_out import check_stages, target_answers
from training.loop import fit
from training.models.build import (
    check_context,
    check_target,
    dtype_of,
    folder_of,
    known_config,
    target_config,
)
from training.models.frozen import load_frozen
from training.objectives import Distillation, LanguageModelling, TeacherStates
from training.parallel.strategy import Parallel
from training.plan import bounds_of, describe_plan

LOSSES = ("forward_kl", "cross_entropy")


def run(config: TrainConfig) -> Path:
    """Distil, and write the drafter to output_dir/drafter. Returns that folder."""
    target = target_config(config.target)
    target_folder = folder_of(config.target, config.dry_run)
    check(config)
    run_folder = RunFolder(config)
    folder = run_folder.path / "drafter"
    if run_folder.finished(folder):
        print(f"finished before: {folder}")
        return folder
    inputs = input_paths(config, target_folder)
    if config.dry_run:
        run_folder.write_manifest(inputs, {}, finished=False)
        planned = dry_run(config, target_folder, folder, run_folder.was_dry)
        run_folder.write_manifest(inputs, {PLANNED: planned}, finished=False)
        return folder
    if config.student.init != "folder":
        student_config(config.student, target)  # refuses what cannot be built
    check_model(target_folder)
    check_context(config.target, config.data, target_folder)
    processes = processes_wanted(config.parallel)
    if processes > 1 and not is_worker():
        launch(config.job, run_folder.path / "config.yaml", processes)
        return folder
    train(config, run_folder, target_folder, folder, inputs)
    return folder


def check(config: TrainConfig) -> None:
    """Raise UserError for values that would fail, or mislead, only after the models are loaded."""
    check_target(config.target, config.parallel)
    if config.loss.cache_mb and config.parallel.kind in SHARDED_WEIGHTS:
        raise UserError(
            f"loss.cache_mb is {config.loss.cache_mb} with parallel.kind={config.parallel.kind}, "
            f"expected 0: a target in shares is read by all ranks together, so none can skip its "
            f"forward"
        )
    check_mixture(config.data, ("loss", "acceptance"))
    if config.loss.name not in LOSSES:
        raise UserError(f"loss.name is '{config.loss.name}'; expected {' or '.join(LOSSES)}")
    check_values(
        config,
        {
            "loss.temperature": (config.loss.temperature > 0, "more than 0"),
            "held_out.max_prompts": (config.held_out.max_prompts > 0, "1 or more"),
            "held_out.max_new_tokens": (config.held_out.max_new_tokens > 0, "1 or more"),
            "held_out.temperature": (
                RULES["temperature"].fits(config.held_out.temperature),
                RULES["temperature"].expected,
            ),
        },
    )


def input_paths(config: TrainConfig, target_folder: Path) -> list[Path]:
    """Files and folders that the job reads, for the manifest."""
    return list(
        dict.fromkeys(
            [
                target_folder,
                *data_files(config.data, config.dry_run),
                resolve(config.held_out.prompts),
            ]
        )
    )


def train(
    config: TrainConfig,
    run_folder: RunFolder,
    target_folder: Path,
    folder: Path,
    inputs: list[Path],
) -> None:
    """The work of one rank."""
    torch.manual_seed(config.seed)
    parallel = Parallel(config.parallel, config.target.device)
    tokenizer = load_tokenizer(target_folder)
    dtype = dtype_of(config.loop.dtype)
    teacher = load_frozen(target_folder, dtype, parallel)
    student = build_student(config.student, teacher, dtype, target_folder)
    data = training_data(tokenizer, config.data, config.loop, config.seed, parallel.is_main)
    if parallel.is_main:
        describe(config, student, teacher, data)
    objective = make_objective(config, student, teacher)
    held_out = make_held_out(
        config, student.to(parallel.device), teacher, tokenizer, parallel, target_folder
    )
    with Recording(run_folder, config, inputs, parallel.is_main) as tracker:
        progress = fit(
            "distil",
            objective,
            student,
            data,
            config.loop,
            parallel,
            run_folder.path,
            tracker,
            held_out,
        )
    if parallel.is_main:
        finish(config, run_folder, student, target_folder, folder, progress, inputs)
    parallel.close()


def make_held_out(
    config: TrainConfig,
    student: Any,
    teacher: Any,
    tokenizer: Any,
    parallel: Parallel,
    target_folder: Path,
) -> HeldOutAcceptance | HeldOutMixture:
    """What the student is scored on: the target's answers, and the held-out text of every domain
    that has some.
    """
    answers = parallel.broadcast(
        target_answers(target_folder, tokenizer, config) if parallel.is_main else None
    )

    def scored(samples: list[Sample]) -> HeldOutAcceptance:
        return HeldOutAcceptance(
            student, teacher, samples, config.data.max_length, config.held_out.temperature
        )

    domains = held_out_domains(tokenizer, config.data, parallel.is_main)
    if not domains:
        return scored(answers)
    return HeldOutMixture(
        scored(answers), {name: scored(samples) for name, samples in domains.items()}
    )


def make_objective(
    config: TrainConfig, student: Any, teacher: Any
) -> Distillation | LanguageModelling:
    """The training objective by its name in loss.name."""
    if config.loss.name == "forward_kl":
        states = TeacherStates(teacher, config.loss.cache_mb * 10**6)
        return Distillation(student, teacher, config.loss.temperature, states)
    if config.loss.name == "cross_entropy":
        return LanguageModelling(student)
    raise AssertionError(config.loss.name)


def describe(config: TrainConfig, student: Any, teacher: Any, data: PackedData) -> None:
    """What will be trained on what, before the first step."""
    sizes = [
        sum(parameter.numel() for parameter in model.parameters()) / 1e6
        for model in (student, teacher)
    ]
    layers = [model.config.num_hidden_layers for model in (student, teacher)]
    print(
        f"student: {sizes[0]:.1f} M parameters, {layers[0]} of {layers[1]} layers; teacher: "
        f"{sizes[1]:.1f} M, frozen"
    )
    print(
        f"data: {data.tokens:,} tokens in {len(data.rows):,} rows of {data.capacity}, "
        f"{data.fill:.1%} full"
    )
    # The time left is foretold by the steps of the last half minute, which in the first epoch run
    # the teacher too.
    several = bounds_of(config.loop, data).steps > data.steps_per_epoch
    remembers = config.loss.name == "forward_kl" and config.loss.cache_mb > 0 and several
    slow_first = "; the first epoch also runs the teacher and is the slowest" if remembers else ""
    print(f"plan: {describe_plan(config.loop, data)}{slow_first}")


def finish(
    config: TrainConfig,
    run_folder: RunFolder,
    student: Any,
    target_folder: Path,
    folder: Path,
    progress: Progress,
    inputs: list[Path],
) -> None:
    """Export the best weights with their card, and close the manifest."""
    stored_dtype: Any = known_config(target_folder).dtype or torch.float32
    write_model(student, target_folder, folder, stored_dtype, draft_tokens=4)
    origin = origin_of(config, config.student.name, target_folder, progress)
    write_card(
        folder,
        student,
        origin,
        pruning_on_card(resolve(config.student.path)) if config.student.init == "folder" else None,
    )
    close_run(run_folder, inputs, origin, progress)
    best = progress.best
    print(
        f"held-out acceptance {best['acceptance']:.3f} at temperature "
        f"{config.held_out.temperature:g}, {best['greedy_acceptance']:.3f} greedy, after "
        f"{progress.seconds:.0f} s of training; drafter: {folder}"
    )


if __name__ == "__main__":
    job_main("distill.train", TrainConfig, run, check_stages)
