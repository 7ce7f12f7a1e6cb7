"""`python -m distill.train`: distil the frozen target into a student and write a drafter folder."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decoding.models.text.tokenizer import load_tokenizer
from decoding.values import check_value
from distill.acceptance import HeldOutAcceptance, score_mixture
from distill.config import TrainConfig
from distill.drafter_folder import NUM_DRAFT_TOKENS, read_pruning, write_card
from distill.dry_run import dry_run
from distill.shapes import student_config
from distill.student import build_student
from jobs.job import job_main
from jobs.paths import resolve
from jobs.protocol import Run
from jobs.ranks import SHARDED_WEIGHTS
from training.bounds import Progress
from training.config import check_values
from training.data.from_config import data_files, held_out_domains, training_data
from training.data.mixture import check_mixture
from training.data.packing import PackedData, Sample
from training.drafter_folder import close_run, origin_of, write_model
from training.held_out import check_stages, target_answers
from training.job import TargetJob, fit_recorded
from training.models.build import check_target, dtype_of, known_config
from training.models.frozen import load_frozen
from training.models.shapes import millions
from training.objectives import Distillation, LanguageModelling, TeacherStates
from training.parallel.strategy import Parallel
from training.plan import bounds_of, describe_plan

LOSSES = ("forward_kl", "cross_entropy")


class Distil(TargetJob[TrainConfig]):
    """Run of distill.train, which writes a drafter folder."""

    artefact = "drafter"

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        check(config)

    def inputs(self) -> list[Path]:
        data = data_files(self.config.data, self.config.dry_run)
        prompts = resolve(self.config.held_out.prompts)
        return list(dict.fromkeys([self.target_folder, *data, prompts]))

    def dry_run(self, run: Run) -> float:
        return dry_run(self.config, self.target_folder, run)

    def prepare(self, run: Run) -> None:
        if self.config.student.init != "folder":
            student_config(self.config.student, self.target)  # refuses invalid shapes
        super().prepare(run)

    def work(self, run: Run) -> None:
        config, target_folder = self.config, self.target_folder
        torch.manual_seed(config.seed)
        parallel = Parallel(config.parallel, config.target.device)
        tokenizer = load_tokenizer(target_folder)
        dtype = dtype_of(config.loop.dtype)
        teacher = load_frozen(target_folder, dtype, parallel)
        student = build_student(config.student, teacher, dtype, target_folder)
        data = training_data(tokenizer, config.data, config.loop, config.seed, parallel.is_main)
        if parallel.is_main:
            print_overview(config, student, teacher, data)
        objective = make_objective(config, student, teacher)
        held_out = make_held_out(
            config, student.to(parallel.device), teacher, tokenizer, parallel, target_folder
        )
        progress = fit_recorded("distil", objective, student, data, config, run, parallel, held_out)
        if parallel.is_main:
            finish(config, run, student, target_folder, progress)
        parallel.close()


def run(config: TrainConfig) -> Path:
    """Distil the target and return the drafter folder, output_dir/drafter."""
    return Distil(config).run()


def check(config: TrainConfig) -> None:
    """Raise UserError for invalid values before the models are loaded."""
    check_target(config.target, config.parallel)
    check_mixture(config.data, ("loss", "acceptance"))
    loss, held_out, kind = config.loss, config.held_out, config.parallel.kind
    rules = {
        "loss.name": (loss.name in LOSSES, " or ".join(LOSSES)),
        "loss.temperature": (loss.temperature > 0, "more than 0"),
        "loss.cache_mb": (
            not loss.cache_mb or kind not in SHARDED_WEIGHTS,
            f"0 with parallel.kind={kind}, where all ranks must run the sharded target together",
        ),
        "held_out.max_prompts": (held_out.max_prompts > 0, "1 or more"),
    }
    check_values(config, rules)
    for name in ("max_new_tokens", "temperature"):
        check_value(name, vars(held_out)[name], key=f"held_out.{name}")


def make_held_out(
    config: TrainConfig,
    student: Any,
    teacher: Any,
    tokenizer: Any,
    parallel: Parallel,
    target_folder: Path,
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the student on the target's answers and the domains."""

    def scored(samples: list[Sample]) -> HeldOutAcceptance:
        return HeldOutAcceptance(
            student, teacher, samples, config.data.max_length, config.held_out.temperature
        )

    on_main = target_answers(target_folder, tokenizer, config) if parallel.is_main else None
    answers = scored(parallel.broadcast(on_main))
    domains = held_out_domains(tokenizer, config.data, parallel.is_main)
    if not domains:
        return answers
    scorers = {name: scored(samples) for name, samples in domains.items()}
    return partial(score_mixture, answers, scorers)


def make_objective(
    config: TrainConfig, student: Any, teacher: Any
) -> Distillation | LanguageModelling:
    """Return the training objective for loss.name."""
    if config.loss.name == "cross_entropy":
        return LanguageModelling(student)
    states = TeacherStates(teacher, config.loss.cache_mb * 10**6)
    return Distillation(student, teacher, config.loss.temperature, states)


def print_overview(config: TrainConfig, student: Any, teacher: Any, data: PackedData) -> None:
    """Print the sizes of the models and the data, and the plan of the training."""
    sizes = [millions(model.num_parameters()) for model in (student, teacher)]
    layers = [model.config.num_hidden_layers for model in (student, teacher)]
    print(
        f"student: {sizes[0]} parameters, {layers[0]} of {layers[1]} layers; teacher: {sizes[1]}, "
        f"frozen"
    )
    print(
        f"data: {data.tokens:,} tokens in {len(data.rows):,} rows of {data.capacity}, "
        f"{data.fill:.1%} full"
    )
    # The progress bar predicts the remaining time from steps that also run the teacher.
    several = bounds_of(config.loop, data).steps > data.steps_per_epoch
    remembers = config.loss.name == "forward_kl" and config.loss.cache_mb > 0 and several
    slow_first = "; the first epoch also runs the teacher and is the slowest" if remembers else ""
    print(f"plan: {describe_plan(config.loop, data)}{slow_first}")


def finish(
    config: TrainConfig, run: Run, student: Any, target_folder: Path, progress: Progress
) -> None:
    """Write the drafter folder with its card, and complete the manifest.

    student: the model with the best weights.
    """
    folder, best = run.artefact, progress.best
    stored_dtype: Any = known_config(target_folder).dtype or torch.float32
    write_model(student, target_folder, folder, stored_dtype, NUM_DRAFT_TOKENS)
    origin = origin_of(config, config.student.name, target_folder, progress)
    from_folder = config.student.init == "folder"
    pruning = read_pruning(resolve(config.student.path)) if from_folder else None
    write_card(folder, student, origin, pruning)
    close_run(run, origin, progress)
    print(
        f"held-out acceptance {best['acceptance']:.3f} at temperature "
        f"{config.held_out.temperature:g}, {best['greedy_acceptance']:.3f} greedy, after "
        f"{progress.seconds:.0f} s of training; drafter: {folder}"
    )


if __name__ == "__main__":
    job_main("distill.train", TrainConfig, run, check_stages)
