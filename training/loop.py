"""The training loop, in reading order: rows of a step -> loss -> update -> evaluate -> save.

A step is a pure function of (weights, optimizer state, step number, recorded progress). Its rows
come from (seed, step), so k steps, a stop and n - k steps equal n steps bit for bit on one CPU
process; under a bound in seconds this needs the same clock readings.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from decoding import devices
from decoding.errors import UserError
from jobs.interrupts import Interrupted
from jobs.progress import ProgressBar
from training import checkpoint
from training.bounds import Bounds, Place, Progress
from training.config import LoopConfig
from training.data.packing import PackedBatch, PackedData, collate, micro_batches
from training.optimizer import Optimizer, Rate, learning_rate
from training.parallel.fsdp import checkpoint_activations
from training.parallel.strategy import Parallel
from training.plan import bounds_of
from training.timer import Timer


class Objective(Protocol):
    """The module that a job trains; a call returns sums over the batch's supervised tokens."""

    # names of the second value's entries, such as accuracy or acceptance
    metric_names: tuple[str, ...]
    # rates of the trained parameters that differ from the rest, by name
    rates: Mapping[str, Rate]

    def __call__(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return (sum of the loss in nats, sums of the metrics [len(metric_names)])."""

    def begin(self, step: int, place: Place) -> None:
        """Prepare an optimizer step (from 0) for values that follow a schedule."""


class Recorder(Protocol):
    """Receiver of metric records: jobs.tracker.Tracker, or a list in a benchmark."""

    def rewind(self, step: int) -> None: ...

    def log(self, step: int, values: dict[str, Any]) -> None: ...


def fit(
    title: str,
    module: Any,
    trained: nn.Module,
    data: PackedData,
    config: LoopConfig,
    parallel: Parallel,
    folder: Path,
    tracker: Recorder | None,
    evaluate: Callable[[], dict[str, float]],
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Train `trained`, the part of `module` that is saved, and leave it at its best checkpoint.

    module: an Objective. evaluate: returns held-out figures of the current weights, with `score`
    (larger is better), which selects the best checkpoint. clock: seconds, used only for
    config.max_seconds. Resumes from the newest complete checkpoint under `folder`/checkpoints.
    Raises Interrupted, and UserError for a loss that is not finite or a time limit without room for
    a step.
    """
    limits = bounds_of(config, data)
    root = folder / "checkpoints"
    wrapped, optimizer, progress = _begin(root, module, trained, config, parallel)
    data.load(progress.data)
    if tracker is not None:
        tracker.rewind(progress.step)
    timer = Timer(progress, limits, parallel, clock)
    timer.time_evaluation(evaluate)
    signals = _Signals()
    rates: deque[float] = deque(maxlen=20)
    with (
        ProgressBar(
            title, limits.expected_steps(progress.done, 0.0), progress.step, parallel.is_main
        ) as bar,
        signals,
    ):
        while not progress.reached(limits) and not data.ended:
            bounds = timer.bounds
            values = _step(wrapped, data, config, parallel, optimizer, progress, bounds, root)
            timer.count_step()
            last = progress.reached(limits)
            if tracker is not None and progress.step % config.log_every == 0:
                tracker.log(progress.step, values)
            if last or data.ended or _due(progress.step, config.eval_every):
                _look(progress, timer.timed(evaluate), data, tracker, bar)
            stop = parallel.any(signals.received)
            due = (
                _due(progress.step, config.checkpoint_every) or progress.best_step == progress.step
            )
            if last or due or stop or data.ended:
                _save(root, progress, config, trained, optimizer, parallel)
            rates.append(values["tokens_per_second"])
            total = progress.step if last else bounds.expected_steps(progress.done, progress.pace)
            bar.update(progress.step, _note(values, progress, sum(rates) / len(rates)), total)
            if stop:
                raise Interrupted(
                    f"stopped by a signal after step {progress.step}; saved in {root}. Run the "
                    f"same command to continue"
                )
        if not progress.reached(limits):
            of = f" of {limits.steps:.0f}" if limits.steps < math.inf else ""
            bar.say(f"  ended after step {progress.step}{of}: {data.ended}")
        elif progress.time_up and progress.step < limits.steps:
            bar.say(
                f"  ended after step {progress.step}: no other fits in {config.max_seconds:g} s "
                f"(loop.max_seconds)"
            )
    with parallel.gathered_weights(for_good=True):
        _load_best(root, progress, trained, parallel)
    return progress


def _step(
    module: Any,
    data: PackedData,
    config: LoopConfig,
    parallel: Parallel,
    optimizer: Optimizer,
    progress: Progress,
    bounds: Bounds,
    root: Path,
) -> dict[str, float]:
    """Run one optimizer step, advance `progress` and return the step's record.

    Raises UserError before the update if the loss or the gradient is not finite.
    """
    began = time.monotonic()
    rows = data.step_rows(progress.step)
    progress.data = data.state()
    if progress.step == config.optimizer.warmup_steps:
        progress.warm_tokens, progress.warm_elapsed = progress.tokens, progress.elapsed
    place = Place(progress.done, bounds)
    parallel.inner.begin(progress.step, place)
    sums, tokens = _backward(module, rows, data, config, parallel, optimizer)
    # the step's one wait for the device
    (loss, *metrics), norm = devices.read(sums, optimizer.clip())
    if not math.isfinite(loss) or not math.isfinite(norm):
        clip = config.optimizer.clip
        remedy = (
            f"or loop.optimizer.clip (now {clip})"
            if clip > 0
            else "or set loop.optimizer.clip (now off)"
        )
        raise UserError(
            f"the loss is {loss} and the gradient's norm {norm} at step {progress.step + 1}: "
            f"stopped before the update. The last good checkpoint, if any, is in {root}. "
            f"Lower loop.optimizer.lr (now {config.optimizer.lr}) {remedy}, then run again"
        )
    behind = bounds.share(place.done, since=progress.warm(config.optimizer.warmup_steps))
    rate = learning_rate(config.optimizer, progress.step, behind)
    optimizer.step(rate)
    seconds = time.monotonic() - began
    progress.step += 1
    progress.tokens += tokens
    progress.supervised += data.supervised_in(rows)
    progress.seconds += seconds
    named = dict(zip(parallel.inner.metric_names, metrics, strict=True))
    record = {
        "loss": loss,
        **named,
        "lr": rate,
        "progress": place.share(),
        "gradient_norm": norm,
        "tokens": progress.tokens,
    }
    return record | {
        "supervised_tokens": progress.supervised,
        "tokens_per_second": tokens / seconds,
    }


def _backward(
    module: nn.Module,
    rows: list[list[int]],
    data: PackedData,
    config: LoopConfig,
    parallel: Parallel,
    optimizer: Optimizer,
) -> tuple[Tensor, int]:
    """Compute the gradient of one step, divided by the global count of supervised tokens.

    Returns ([loss, *metrics] on the device, tokens), both over all ranks.
    """
    count = max(1, data.supervised_in(rows))
    rows_per_forward = max(1, config.micro_batch_tokens // data.capacity)
    totals = torch.zeros(
        1 + len(parallel.inner.metric_names), dtype=torch.float64, device=parallel.device
    )
    forwards = list(micro_batches(rows, parallel.rank, parallel.world_size, rows_per_forward))
    for number, part in enumerate(forwards):
        # Gradients of bfloat16 weights accumulate in float32 masters, so ranks exchange them after
        # every forward; others are exchanged once a step.
        travel = optimizer.has_copies or number == len(forwards) - 1
        with parallel.exchange(module, last=travel):
            batch = collate(data.samples, part or [[]], data.capacity, parallel.device)
            loss_sum, metric_sums = module(batch)
            parallel.backward(module, loss_sum / count)
        optimizer.collect()
        totals += torch.cat([loss_sum.detach().double().reshape(1), metric_sums.double()])
    tokens = sum(len(data.samples[index].ids) for row in rows for index in row)
    return parallel.sum(totals) / count, tokens


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _look(
    progress: Progress,
    figures: dict[str, float],
    data: PackedData,
    tracker: Recorder | None,
    bar: ProgressBar,
) -> None:
    """Record held-out figures, which are the same on every rank.

    They decide what is saved and may change the mixture of the data.
    """
    progress.evaluations.append({"step": progress.step, **figures})
    learned = data.look(figures)
    progress.data = data.state()
    if figures["score"] > progress.best_score:
        progress.best_step, progress.best_score = progress.step, figures["score"]
    if tracker is not None:
        held_out = {f"held_out_{key}": value for key, value in figures.items() if key != "score"}
        tracker.log(progress.step, held_out | learned)
    # Figures by domain would fill a line; they are in metrics.jsonl.
    shown = "  ".join(
        f"{key} {value:.3f}" for key, value in figures.items() if key != "score" and "/" not in key
    )
    bar.say(f"  step {progress.step}: held-out {shown}")


def _save(
    root: Path,
    progress: Progress,
    config: LoopConfig,
    trained: nn.Module,
    optimizer: Optimizer,
    parallel: Parallel,
) -> None:
    """Write the complete state in one format, which every kind of parallelism can resume."""
    states = optimizer.state(keep=parallel.is_main)
    with parallel.gathered_weights():
        if parallel.is_main:
            weights = _untied(dict(trained.state_dict()))
            name = f"step_{progress.step:06d}"
            checkpoint.save(root / name, vars(progress), weights, states, checkpoint.rng_state())
            checkpoint.prune(root, config.keep, best=f"step_{progress.best_step:06d}")
    parallel.wait()


def _begin(
    root: Path, module: Any, trained: nn.Module, config: LoopConfig, parallel: Parallel
) -> tuple[nn.Module, Optimizer, Progress]:
    """Load the newest complete checkpoint, if any, and prepare the objective for the ranks."""
    if config.activation_checkpointing:
        checkpoint_activations(trained)
    found = checkpoint.latest(root, report=print if parallel.is_main else lambda _: None)
    if found is not None:  # before the weights are sharded
        _load_weights(trained, found)
    wrapped, optimizer = parallel.prepare(module, trained, config.optimizer, module.rates)
    if found is None:
        return wrapped, optimizer, Progress()
    optimizer.load(found.optimizer)
    checkpoint.restore_rng(found.rng)
    return wrapped, optimizer, Progress(**found.state)


def _load_best(root: Path, progress: Progress, trained: nn.Module, parallel: Parallel) -> None:
    parallel.wait()
    if progress.best_step in (-1, progress.step):
        return
    try:
        best = checkpoint.load(root / f"step_{progress.best_step:06d}")
    except UserError as error:
        raise UserError(
            f"{error}. It was the best one, which this run would export. Delete {root} to train "
            f"again"
        ) from error
    _load_weights(trained, best)


def _load_weights(trained: nn.Module, found: checkpoint.Checkpoint) -> None:
    wanted = _untied(dict(trained.state_dict()))
    if wanted.keys() != found.model.keys():
        odd = sorted(wanted.keys() ^ found.model.keys())[0]
        raise UserError(
            f"checkpoint {found.folder} belongs to another model ('{odd}' is in only one of them): "
            f"choose another output_dir="
        )
    trained.load_state_dict(found.model, strict=False)  # tied names are stored once


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop names that share storage with an earlier one: safetensors stores a tensor once."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in weights.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            kept[name] = tensor
    return kept


def _note(values: dict[str, float], progress: Progress, rate: float) -> str:
    # the score itself has no unit
    looked = progress.evaluations[-1] if progress.evaluations else {}
    held_out = next(
        (f"  held-out {key} {looked[key]:.3f}" for key in looked if key not in ("step", "score")),
        "",
    )
    (name, metric) = list(values.items())[1]
    return f"loss {values['loss']:.3f}  {name} {metric:.3f}{held_out}  {rate:,.0f} tok/s"


class _Signals:
    """Recorder of SIGINT and SIGTERM while the loop runs; a second signal acts at once."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(number, self._before[number])
