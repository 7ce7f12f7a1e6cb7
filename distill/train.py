"""`python -m distill.train`: distil the frozen target into a student and write a drafter folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from decoding.engine import stop_tokens
from decoding.models.draft_vocabulary import D2T, ids_of, restrict_head, token_ids
from decoding.models.folder import hash_input
from decoding.models.text.tokenizer import load_tokenizer
from decoding.values import check_value
from distill.config import TrainConfig
from distill.drafter_folder import draft_length, read_pruning, write_card
from distill.dry_run import dry_run, training_flops
from distill.held_out import make_held_out, make_timing
from distill.on_policy.start import add_student_rows, report_texts
from distill.parallel_drafting.held_out import BLOCK_EFFICIENCY
from distill.parallel_drafting.objective import ParallelDistillation
from distill.parallel_drafting.setup import (
    describe_mask_tokens,
    parallel_objective,
    parallel_rules,
    prepare_student,
    refuse_in_data,
)
from distill.student import build_student, check_student, restrict_vocabulary
from jobs.job import job_main
from jobs.paths import resolve, resolve_model
from jobs.protocol import Run
from jobs.ranks import SHARDED_WEIGHTS
from training.adapters import adapter_rules, attach, merge, start_adapter
from training.bounds import Progress
from training.cached_distillation import CachedDistillation
from training.checkpoint import load_weights
from training.config import check_values, held_out_rules
from training.data.from_config import data_files, training_data
from training.data.mixture import check_mixture
from training.data.packing import PackedData
from training.doctor import begin
from training.drafter_folder import Provenance, close_run, origin_of, write_model
from training.export import load_checkpoint, saved_run
from training.features.teacher_cache import CachedTeacher, teacher_cache
from training.features.teacher_config import NONE, cache_rules
from training.held_out.answers import check_stages
from training.held_out.costs import (
    MEASURED,
    answers_and_costs,
    cost_files,
    cost_rules,
)
from training.held_out.speedup import describe_prediction
from training.job import TargetJob, fit_recorded
from training.losses.config import (
    CROSS_ENTROPY,
    describe_loss,
    loss_rules,
    parts_of,
    teacher_temperature,
    uses_teacher,
)
from training.models.build import check_target, dtype_of, known_config, load_causal_lm
from training.models.frozen import load_frozen
from training.models.layers import compile_layers
from training.models.shapes import millions
from training.objectives import Distillation, LanguageModelling, TeacherStates
from training.on_policy import schedule_rules
from training.parallel.strategy import Parallel
from training.plan import bounds_of, describe_plan


class Distil(TargetJob[TrainConfig]):
    """Run of distill.train, which writes a drafter folder."""

    artefact = "drafter"

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        check(config)
        check_student(config.student, self.target)

    def inputs(self) -> list[Path]:
        data = data_files(self.config.data, self.config.dry_run)
        held_out = self.config.held_out
        prompts = resolve(held_out.prompts)
        files = [self.target_folder, *data, prompts, *cost_files(held_out)]
        return list(dict.fromkeys(files))

    def dry_run(self, run: Run) -> float:
        return dry_run(self.config, self.target_folder, run)

    def work(self, run: Run) -> None:
        config, target_folder = self.config, self.target_folder
        torch.manual_seed(config.seed)
        parallel = Parallel(config.parallel, config.target.device)
        tokenizer = load_tokenizer(target_folder)
        dtype = dtype_of(config.loop.dtype)
        teacher = load_frozen(target_folder, dtype, parallel)
        if config.loop.compile and not parallel.shards_state:
            compile_layers(teacher)
        student = build_student(config.student, teacher, dtype, target_folder)
        printed: list[str] = []
        data = training_data(
            tokenizer, config.data, config.loop, config.seed, parallel.is_main, printed
        )
        stop = stop_tokens(target_folder, tokenizer)
        special = {*tokenizer.all_special_ids, *stop}
        restrict_vocabulary(student, config.student, data.samples, special, parallel.is_main)
        prepare_student(student.config, config.parallel_drafting, tokenizer, stop)
        if config.parallel_drafting.tokens:
            refuse_in_data(student.config.pard_token, data.samples)
        if parallel.is_main:
            print_overview(config, student, teacher, data)
        student.to(parallel.device)
        objective = make_objective(config, student, teacher, data, target_folder, parallel)
        on_main = None
        if parallel.is_main:
            timing = make_timing(config, student, teacher.config)
            on_main = answers_and_costs(target_folder, tokenizer, config, run.path, timing)
        answers, costs = parallel.broadcast(on_main)
        held_out = make_held_out(config, student, teacher, tokenizer, parallel, answers, costs)
        texts_data = data
        data = add_student_rows(data, student, teacher, config, parallel, stop)
        texts = report_texts(data, student, teacher, answers, config, parallel, printed)
        if parallel.is_main:
            printed.append(f"plan: {describe_plan(config.loop, data)}")
            runs_teacher = config.teacher.cache == NONE
            flops = training_flops(student.config, teacher.config if runs_teacher else None)
            begin(config, tokenizer, texts_data, student, stop, run.path, flops, printed)
        start_adapter(student, config.adapter_rank, parallel.is_main)
        progress = fit_recorded("distil", objective, student, data, config, run, parallel, held_out)
        merge(student)
        if parallel.is_main:
            finish(config, run, student, target_folder, progress, texts)
        parallel.close()


def run(config: TrainConfig) -> Path:
    """Distil the target and return the drafter folder, output_dir/drafter.

    With config.checkpoint, write that checkpoint's drafter folder instead and return it.
    """
    return export(config) if config.checkpoint else Distil(config).run()


def export(config: TrainConfig) -> Path:
    """Write the drafter folder of config.checkpoint with the settings of its run; return it."""
    saved, folder = saved_run(config, config.checkpoint)
    job, dtype = Distil(saved), dtype_of(saved.loop.dtype)
    found, progress, figures = load_checkpoint(config.checkpoint)
    teacher = load_causal_lm(job.target_folder, dtype)
    student = build_student(saved.student, teacher, dtype, job.target_folder)
    if D2T in found.model and token_ids(student) is None:
        restrict_head(student, ids_of(found.model[D2T], job.target.vocab_size, found.folder))
    tokenizer = load_tokenizer(job.target_folder)
    stop = stop_tokens(job.target_folder, tokenizer)
    prepare_student(student.config, saved.parallel_drafting, tokenizer, stop)
    attach(student, saved.adapter_rank)
    load_weights(student, found)
    merge(student)
    write_folder(saved, folder, student, job.target_folder, figures, progress)
    print(f"drafter of step {progress.step}: {folder}")
    return folder


def check(config: TrainConfig) -> None:
    """Raise UserError for invalid values before the models are loaded."""
    check_target(config.target, config.parallel)
    check_mixture(config.data, ("loss", "acceptance"))
    loss, held_out, kind = config.loss, config.held_out, config.parallel.kind
    own, cached = config.on_policy, config.teacher.cache != NONE
    rules = {
        **loss_rules(loss),
        "loss.cache_mb": (
            not loss.cache_mb or (kind not in SHARDED_WEIGHTS and not cached),
            f"0 with teacher.cache={config.teacher.cache}, from which steps read instead"
            if cached
            else f"0 with parallel.kind={kind}, where all ranks must run the sharded target "
            f"together",
        ),
        **held_out_rules(held_out),
        **cost_rules(held_out),
        **cache_rules(
            config.teacher, loss, kind in SHARDED_WEIGHTS, bool(config.data.domains), own.share > 0
        ),
        "on_policy.share": (
            0 <= own.share < 1 and (not own.share or CROSS_ENTROPY not in parts_of(loss)),
            "from 0 (off) to below 1, and 0 with cross_entropy, alone or in a mixture, which has "
            "no teacher to score the student's text",
        ),
        "on_policy.max_new_tokens": (
            not own.share or own.max_new_tokens < config.data.max_length,
            f"less than data.max_length ({config.data.max_length})",
        ),
        **schedule_rules(own),
        **parallel_rules(config),
        **adapter_rules(config, "student.path", started_from(config)),
        "on_policy.refresh": (own.refresh >= 1, "1 or more"),
    }
    if held_out.costs == MEASURED and config.target.backend != "native":
        rules["held_out.costs"] = (
            False,
            f"a file or none with target.backend={config.target.backend}, as only students for a "
            f"native target can be timed before they are written",
        )
    check_values(config, rules)
    for name in ("max_new_tokens", "temperature"):
        check_value(name, vars(held_out)[name], key=f"held_out.{name}")
        check_value(name, vars(own)[name], key=f"on_policy.{name}")


def started_from(config: TrainConfig) -> str:
    """Return the folder that the student starts from; empty if it starts from no folder."""
    return config.student.path if config.student.init == "folder" else ""


def make_objective(
    config: TrainConfig,
    student: Any,
    teacher: Any,
    data: PackedData,
    target_folder: Path,
    parallel: Parallel,
) -> Distillation | LanguageModelling | CachedDistillation | ParallelDistillation:
    """Return the training objective for the loss; a cache of the teacher is written first.

    data: the training data without the rows that the student writes.
    """
    if config.parallel_drafting.tokens:
        return parallel_objective(config, student, teacher_states(config, teacher, data))
    if not uses_teacher(config.loss):
        return LanguageModelling(student)
    if config.teacher.cache != NONE:
        cached = CachedTeacher(
            teacher,
            hash_input(target_folder),
            teacher_temperature(config.loss),
            token_ids(student),
            config.seed,
        )
        cache = teacher_cache(config.teacher, cached, data, parallel)
        return CachedDistillation(student, config.loss, cache)
    return Distillation(student, teacher, config.loss, teacher_states(config, teacher, data))


def teacher_states(config: TrainConfig, teacher: Any, data: PackedData) -> TeacherStates:
    """Return the target's states, with a cache for the rows that recur."""
    return TeacherStates(teacher, config.loss.cache_mb * 10**6, len(data.samples))


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
    online = uses_teacher(config.loss) and config.teacher.cache == NONE
    remembers = online and config.loss.cache_mb > 0 and several
    slow_first = "; the first epoch also runs the teacher and is the slowest" if remembers else ""
    loss = describe_loss(config.loss)
    print(f"plan: {describe_plan(config.loop, data)}; loss {loss}{slow_first}")
    if config.parallel_drafting.tokens:
        print(describe_mask_tokens(student, config.parallel_drafting))


def write_folder(
    config: TrainConfig,
    folder: Path,
    student: Any,
    target_folder: Path,
    figures: Mapping[str, float],
    progress: Progress,
) -> Provenance:
    """Write a drafter folder with its card, and return the student's provenance.

    figures: the student's held-out figures.
    """
    stored_dtype: Any = known_config(target_folder).dtype or torch.float32
    selected_by = BLOCK_EFFICIENCY if config.parallel_drafting.tokens else "acceptance"
    origin = origin_of(
        config,
        config.student.name,
        target_folder,
        figures,
        progress,
        selected_by=selected_by,
        start=started_from(config),
    )
    write_model(student, target_folder, folder, stored_dtype, draft_length(origin))
    from_folder = config.student.init == "folder"
    pruning = read_pruning(resolve_model(config.student.path)) if from_folder else None
    write_card(folder, student, origin, pruning)
    return origin


def finish(
    config: TrainConfig,
    run: Run,
    student: Any,
    target_folder: Path,
    progress: Progress,
    texts: dict[str, dict[str, float]],
) -> None:
    """Write the drafter folder with its card, and complete the manifest.

    student: the model with the best weights. texts: figures on the texts, for the manifest.
    """
    folder, best = run.artefact, progress.best
    origin = write_folder(config, folder, student, target_folder, best, progress)
    close_run(run, origin, progress, {"texts": texts})
    chain = f"block efficiency {best[BLOCK_EFFICIENCY]:.2f}" if BLOCK_EFFICIENCY in best else ""
    figures = [
        f"held-out acceptance {best['acceptance']:.3f} at temperature "
        f"{config.held_out.temperature or 1:g}, {best['greedy_acceptance']:.3f} greedy",
        chain,
        describe_prediction(best),
        f"after {progress.seconds:.0f} s of training; drafter: {folder}",
    ]
    print(", ".join(filter(None, figures)))


if __name__ == "__main__":
    job_main("distill.train", TrainConfig, run, check_stages)
