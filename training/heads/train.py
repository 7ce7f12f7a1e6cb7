"""Train a drafter head of any kind on the frozen target's hidden states, into a head folder.

The job has the form and machinery of distill.train (training/): chats -> packed rows -> the loop ->
the best checkpoint's folder. Only the head is trained (training/heads/objective.py); checkpoints
are selected by block efficiency on the target's held-out answers.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.costs.prediction import Costs
from decoding.engine import stop_tokens
from decoding.interfaces import Drafter, Target
from decoding.models.load import DTYPES
from decoding.models.native.linear import draft_dtype
from decoding.models.text.tokenizer import load_tokenizer
from jobs.paths import resolve, resolve_model
from jobs.protocol import Run
from jobs.ranks import is_rank
from training.adapters import attach, merge, start_adapter
from training.bounds import Progress
from training.checkpoint import load_weights
from training.data.from_config import data_files, read_samples, sample_evenly, training_data
from training.data.packing import PackedData, Sample
from training.doctor import begin
from training.draft_vocabulary import choose_tokens
from training.drafter_folder import Provenance, close_run, origin_of
from training.export import load_checkpoint, saved_run
from training.features.states import TargetStates
from training.heads.build import describe_mask_token, initialize_head, shape_of, start_head
from training.heads.calibration import Calibration
from training.heads.checks import check, check_same_target, check_start
from training.heads.config import HeadJobConfig, describe_overridden
from training.heads.depth_figures import DepthFigures
from training.heads.draft_vocabulary import COUNTS, choose_by_mass
from training.heads.dry_run import describe, dry_run, states_layout, token_flops
from training.heads.evaluation import Evaluation, GreedyChain, HeadAccuracy, HeldOutRows, combine
from training.heads.folder import write_card, write_head
from training.heads.kind import HeadKind
from training.heads.loss_config import describe_head_loss, reads_final, trained_depths
from training.heads.measure import measure
from training.heads.objective import HeadObjective
from training.heads.on_policy import OnPolicyRows
from training.heads.positions import check_predictions
from training.heads.predicting import count_depths
from training.heads.real_drafting import block_efficiency
from training.heads.stores import fill_store, make_store
from training.heads.temperatures import describe_calibration
from training.held_out.costs import Timing, answers_and_costs, cost_files
from training.held_out.speedup import describe_prediction
from training.held_out.texts import TextFigures, describe_texts, measure_texts
from training.job import TargetJob, fit_recorded
from training.models.build import dtype_of, load_causal_lm
from training.models.layers import compile_layers
from training.models.shapes import sizes_of
from training.objectives import freeze
from training.parallel.strategy import Parallel
from training.plan import describe_plan


class HeadJob(TargetJob[HeadJobConfig]):
    """Job that trains one head for one target and writes a head folder."""

    artefact = "drafter"

    def __init__(self, config: HeadJobConfig, kind: HeadKind) -> None:
        super().__init__(config)
        self.kind, self.shape = kind, shape_of(kind, config, self.target)
        check(config, kind, self.shape, self.target)
        overridden = describe_overridden(config.head, self.shape)
        if overridden and not is_rank():
            print(f"note: {overridden}")
        if config.head.path and not config.dry_run:
            check_start(self.target_folder, resolve_model(config.head.path))

    def inputs(self) -> list[Path]:
        config = self.config
        if config.dry_run:
            return [self.target_folder]
        head = [resolve_model(config.head.path)] if config.head.path else []
        held_out = [resolve(config.held_out.prompts), *cost_files(config.held_out)]
        files = [*head, *data_files(config.data), *held_out]
        return list(dict.fromkeys([self.target_folder, *files]))

    def dry_run(self, run: Run) -> float:
        known = self.kind, self.shape, self.target, self.target_folder
        return dry_run(self.config, *known, run.artefact, run.folder.was_dry)

    def prepare(self, run: Run) -> None:
        super().prepare(run)
        if not is_rank():
            check_same_target(run.folder, self.target_folder)

    def work(self, run: Run) -> None:
        train(self, run)


def train_head(config: HeadJobConfig, kind: HeadKind) -> Path:
    """Train a head, write it to output_dir/drafter and return that folder.

    With config.checkpoint, write that checkpoint's head folder instead and return it.
    """
    return export(config, kind) if config.checkpoint else HeadJob(config, kind).run()


def export(config: HeadJobConfig, kind: HeadKind) -> Path:
    """Write the head folder of config.checkpoint with the settings of its run; return it."""
    saved, folder = saved_run(config, config.checkpoint)
    job = HeadJob(saved, kind)
    found, progress, figures = load_checkpoint(config.checkpoint)
    head = kind.empty(job.shape)
    attach(head, saved.adapter_rank)
    load_weights(head, found)
    merge(head)
    job.shape = kind.measured(job.shape, figures)
    write_folder(job, folder, head, figures, progress, {})
    print(f"head of step {progress.step}: {folder}")
    return folder


def train(job: HeadJob, run: Run) -> None:
    """Train the head as one rank of the job; rank 0 then measures and exports it."""
    config, kind, shape, target_folder = job.config, job.kind, job.shape, job.target_folder
    torch.manual_seed(config.seed)
    parallel = Parallel(config.parallel, config.target.device)
    tokenizer = load_tokenizer(target_folder)
    dtype = dtype_of(config.loop.dtype)
    target = freeze(load_causal_lm(target_folder, dtype))
    printed: list[str] = []
    data = training_data(
        tokenizer, config.data, config.loop, config.seed, parallel.is_main, printed
    )
    check_predictions(data.samples, config.loss.predict_n_tokens)
    note = describe_mask_token(kind.mask_token(shape), data.samples)
    if note and parallel.is_main:
        print(f"note: {note}")
    lm_head_VH = target.get_output_embeddings().weight.detach()
    head, is_new = start_head(kind, config.head, shape), not config.head.path
    if is_new:
        kind.start_from_target(head, config.head, target)
    states = TargetStates(target, taps=kind.taps(shape), final=reads_final(config.loss))
    parallel.place_frozen(target)
    if config.loop.compile and not parallel.shards_state:
        compile_layers(target)
    states.move_to(parallel.device)
    if is_new:
        ids_V = choose_vocabulary(job, data, target, parallel)
        initialize_head(kind, config.head, head, lm_head_VH, ids_V)
    head = head.to(parallel.device, dtype)
    flops = describe_job(job, target, data) if parallel.is_main else 0.0
    answers, costs = parallel.broadcast(
        answers_and_costs(
            target_folder, tokenizer, config, run.path, make_timing(job, head, target.config)
        )
        if parallel.is_main
        else None
    )
    evaluate = make_evaluation(job, head, states, tokenizer, parallel, answers, costs)
    texts = measure_texts(data, answers, target)
    if parallel.is_main:
        print(about := describe_texts(texts, {"target": config.held_out.temperature}))
        printed += [about, f"plan: {describe_plan(config.loop, data)}"]
        stops = stop_tokens(target_folder, tokenizer)
        begin(config, tokenizer, data, head, stops, run.path, flops, printed)
    drafted = None
    if config.on_policy.share:
        drafted = OnPolicyRows(config.on_policy, data.rows_per_step, config.seed)
    objective = HeadObjective(kind, head, states, config.loss, drafted, config.seed)
    layout = states_layout(config, kind, shape, target.config)
    sizes = shape.hidden_size, target_folder, data, parallel.is_main
    states.store = make_store(config.states, layout, *sizes)
    if config.states.fill:
        fill_store(objective, data, parallel)
    start_adapter(head, config.adapter_rank, parallel.is_main)
    progress = fit_recorded("train head", objective, head, data, config, run, parallel, evaluate)
    merge(head)
    if parallel.is_main:
        sampled = config.held_out.temperature > 0
        job.shape = kind.measured(shape, progress.best)
        measured = block_efficiency(
            lambda target: kind.drafter(head.to(target.device), job.shape, config, sampled),
            config,
            config.loss.predict_n_tokens,
            target_folder,
            tokenizer,
            answers,
        )
        finish(job, run, head, progress, measured, texts)
    parallel.close()


def choose_vocabulary(
    job: HeadJob, data: PackedData, target: Any, parallel: Parallel
) -> Tensor | None:
    """Return the ids of a new head's draft vocabulary, rising; None: all tokens.

    All ranks must call it, as they may share the weights of the target.
    """
    size, vocabulary = job.shape.draft_vocab_size, job.shape.vocab_size
    if not size:
        return None
    if job.config.head.draft_vocabulary == COUNTS:
        return choose_tokens(data.samples, vocabulary, size, parallel.is_main)
    ids_V = choose_by_mass(data, target, size, parallel.is_main)
    found = parallel.broadcast(ids_V)  # sums may round otherwise on another rank
    assert isinstance(found, Tensor)
    return found


def make_evaluation(
    job: HeadJob,
    head: Any,
    states: TargetStates,
    tokenizer: Any,
    parallel: Parallel,
    answers: Sequence[Sample],
    costs: Costs | None,
) -> Evaluation:
    """Return the held-out evaluation: a chain on the target's answers, and figures by depth.

    Accuracies that the drafter uses are measured on the answers too; those of other heads only on
    held-out data, if there is any. A confidence is calibrated if the head has one. On greedy
    answers the chain's block efficiency equals that of real decoding, so it selects the checkpoint,
    with the costs of a round if they are known; trees are measured once, at the end.
    """
    config, kind, heads = job.config, job.kind, job.config.loss.predict_n_tokens
    length, longest = config.data.max_length, config.held_out.max_new_tokens
    rows = HeldOutRows(states, answers, length, parallel.device)
    evaluations: list[Evaluation] = [GreedyChain(kind, head, rows, heads, longest, costs)]
    # after the chain, whose acceptance progress shows as the first figure
    evaluations.append(DepthFigures(kind, head, rows, heads, config.held_out.temperature))
    if kind.has_confidence(head):
        evaluations.append(Calibration(kind, head, rows, heads, config.held_out.temperature))
    measured = rows if kind.ranks else None
    if not kind.ranks and (config.data.held_out_chats or config.data.held_out_texts):
        samples = read_samples(tokenizer, config.data, "held_out", parallel.is_main)
        chosen = sample_evenly(samples, config.data.held_out_tokens)
        measured = HeldOutRows(states, chosen, length, parallel.device)
    if measured is not None:
        ranks = max(config.top_k, min(kind.ranks, job.shape.num_drafted))
        evaluations.insert(0, HeadAccuracy(kind, head, measured, count_depths(kind, heads), ranks))
    return combine(evaluations)


def make_timing(job: HeadJob, head: Any, target: Any) -> Timing:
    """Return what is timed for held-out predictions: the head's chain.

    target: the target's Hugging Face configuration.
    """
    dtype = job.config.target.dtype

    def make_drafter(target: Target) -> Drafter:
        place = torch.device(target.device)
        # a copy in the dtype in which eval.run drafts; the head that is trained is left alone
        copied = copy.deepcopy(head).to(place, DTYPES[draft_dtype(dtype, place)]).eval()
        return job.kind.chain_drafter(copied)

    drafter = {"kind": job.kind.name, **vars(job.shape)}
    return Timing(make_drafter, sizes_of(target), drafter, job.config.loss.predict_n_tokens)


def describe_job(job: HeadJob, target: Any, data: PackedData) -> float:
    """Print the sizes of target, head and data, and the plan; return the FLOPs of a token."""
    config, kind, shape = job.config, job.kind, job.shape
    counted = measure(
        kind, shape, trained_depths(config.loss), dtype_of(config.loop.dtype), target.config
    )
    describe(kind, shape, target.config, counted)
    print(
        f"data: {data.tokens:,} tokens in {len(data.rows):,} rows of {data.capacity}, "
        f"{data.fill:.1%} full, {data.supervised / data.tokens:.0%} supervised"
    )
    share = config.on_policy.share
    own = f", {share:.0%} of the rows after the head's own tokens" if share else ""
    heads = "at one depth" if counted.predictions == 1 else f"{counted.predictions} heads"
    loss = describe_head_loss(config.loss)
    print(f"plan: {describe_plan(config.loop, data)}; loss {loss}, {heads}{own}")
    return token_flops(config, target.config, counted)


def write_folder(
    job: HeadJob,
    folder: Path,
    head: Any,
    figures: Mapping[str, float],
    progress: Progress,
    measured: dict[str, float],
) -> Provenance:
    """Write a head folder with its card, and return the head's provenance.

    figures: the head's held-out figures. measured: further ones, by name.
    """
    config, kind = job.config, job.kind
    write_head(kind, head, job.shape, job.target_folder, folder)
    origin = origin_of(
        config,
        config.head.name,
        job.target_folder,
        figures,
        progress,
        selected_by="block_efficiency",
        start=config.head.path,
        **measured,
    )
    parameters = sum(parameter.numel() for parameter in head.parameters())
    write_card(kind, folder, job.shape, parameters, origin)
    return origin


def finish(
    job: HeadJob,
    run: Run,
    head: Any,
    progress: Progress,
    drafted: float,
    texts: Mapping[str, TextFigures],
) -> None:
    """Export the best weights with their card and complete the manifest.

    drafted: the block efficiency measured by real drafting. texts: figures on the texts.
    """
    config, best = job.config, progress.best
    drafting = job.kind.drafting(config, job.shape)
    measured = {drafting.figure: drafted, **drafting.options}
    origin = write_folder(job, run.artefact, head, best, progress, measured)
    found = {name: figures.values() for name, figures in texts.items()}
    close_run(run, origin, progress, {"texts": found})
    figures = [
        f"held-out block efficiency {best['block_efficiency']:.3f} of a greedy chain at "
        f"temperature {config.held_out.temperature:g}, acceptance {best['acceptance']:.3f}",
        describe_prediction(best),
        f"{drafted:.3f} by real drafting {drafting.words}, after {progress.seconds:.0f} s of "
        f"training; head: {run.artefact}",
    ]
    print(", ".join(filter(None, figures)))
    if calibrated := describe_calibration(best):
        print(calibrated)
