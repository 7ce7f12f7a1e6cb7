"""The training loop, read straight down: rows of a step -> loss -> update -> look -> save.

A step is a pure function of (weights, optimizer state, step number, recorded progress): its rows
come from (seed, step), so k steps, a stop and n - k steps equal n steps bit for bit on one CPU
process; under a bound in seconds they do where the clock reads the same.
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
from training.data.packing import Batch, PackedData, collate, micro_batches
from training.optimizer import Optimizer, Rate, learning_rate
from training.parallel.fsdp import checkpoint_activations
from training.parallel.strategy import Parallel
from training.plan import bounds_of
from training.timer import Timer


class Objective(Protocol):
    """What a job trains: a module whose call on a batch gives sums over that batch's supervised
    tokens.
    """

    metric_names: tuple[str, ...]  # what the second value counts, such as accuracy or acceptance
    rates: Mapping[str, Rate]  # of trained parameters that move otherwise than the rest

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss sum in nats, sums of the metrics [len(metric_names)])."""

    def begin(self, step: int, place: Place) -> None:
        """An optimizer step begins (from 0), at this place of the run: for what follows
        a schedule.
        """


class Recorder(Protocol):
    """Where records go: jobs.tracker.Tracker, or a list in a benchmark."""

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
    """Train `trained` (the part of `module` that is saved) on `data`; on return it holds the
    weights of the best checkpoint.

    module: an Objective. evaluate: held-out figures of the present weights, with `score` (larger is
    better), by which the best checkpoint is chosen. clock: seconds, for config.max_seconds alone.
    Resumes from the newest whole checkpoint under `folder`/checkpoints. Raises Interrupted and
    UserError (loss not finite, no time for a step).
    """
    whole = bounds_of(config, data)
    root = folder / "checkpoints"
    wrapped, optimizer, progress = _begin(root, module, trained, config, parallel)
    data.load(progress.data)
    if tracker is not None:
        tracker.rewind(progress.step)
    timer = Timer(progress, whole, parallel, clock)
    timer.time_evaluation(evaluate)
    signals = _Signals()
    rates: deque[float] = deque(maxlen=20)
    with (
        ProgressBar(
            title, whole.expected_steps(progress.done, 0.0), progress.step, parallel.is_main
        ) as bar,
        signals,
    ):
        while not progress.reached(whole) and not data.ended:
            bounds = timer.bounds
            values = _step(wrapped, data, config, parallel, optimizer, progress, bounds, root)
            timer.count_step()
            last = progress.reached(whole)
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
                    f"same command to go on"
                )
        if not progress.reached(whole):
            of = f" of {whole.steps:.0f}" if whole.steps < math.inf else ""
            bar.say(f"  ended after step {progress.step}{of}: {data.ended}")
        elif progress.time_up and progress.step < whole.steps:
            bar.say(
                f"  ended after step {progress.step}: no other fits into {config.max_seconds:g} s "
                f"(loop.max_seconds)"
            )
    with parallel.whole(for_good=True):
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
    """One optimizer step: moves `progress` on and returns its record. Raises UserError before the
    update when it is not finite.
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
            f"stopped before the update; the last good checkpoint, if there is one, is in {root}. "
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
    """Gradient of one step, divided by the global count of supervised tokens. Returns ([the loss,
    *metrics] on the device, tokens), global.
    """
    count = max(1, data.supervised_in(rows))
    rows_per_forward = max(1, config.micro_batch_tokens // data.capacity)
    totals = torch.zeros(
        1 + len(parallel.inner.metric_names), dtype=torch.float64, device=parallel.device
    )
    forwards = list(micro_batches(rows, parallel.rank, parallel.world_size, rows_per_forward))
    for number, part in enumerate(forwards):
        # Rounded weights add up their gradients in float32 masters, so theirs travel after every
        # forward; others once a step.
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
    """Record held-out figures; every rank is given the same ones, as they decide what is saved and
    may shift the data.
    """
    progress.evaluations.append({"step": progress.step, **figures})
    learned = data.look(figures)
    progress.data = data.state()
    if figures["score"] > progress.best_score:
        progress.best_step, progress.best_score = progress.step, figures["score"]
    if tracker is not None:
        held_out = {f"held_out_{key}": value for key, value in figures.items() if key != "score"}
        tracker.log(progress.step, held_out | learned)
    # What is counted by domain fills a line by itself: it stands in metrics.jsonl.
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
    """Write the whole state in one format, whatever ranks share, so that a run may go on under
    another kind of parallelism.
    """
    states = optimizer.state(keep=parallel.is_main)
    with parallel.whole():
        if parallel.is_main:
            weights = _untied(dict(trained.state_dict()))
            name = f"step_{progress.step:06d}"
            checkpoint.save(root / name, vars(progress), weights, states, checkpoint.rng_state())
            checkpoint.prune(root, config.keep, best=f"step_{progress.best_step:06d}")
    parallel.wait()


def _begin(
    root: Path, module: Any, trained: nn.Module, config: LoopConfig, parallel: Parallel
) -> tuple[nn.Module, Optimizer, Progress]:
    """Load the newest whole checkpoint, if there is one, and hand the objective over to
    the ranks.
    """
    if config.activation_checkpointing:
        checkpoint_activations(trained)
    found = checkpoint.latest(root, report=print if parallel.is_main else lambda _: None)
    if found is not None:  # before ranks take their shares of the weights
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
            f"{error}. It was the best one, which is what this run would export: delete {root} to "
            f"train again"
        ) from error
    _load_weights(trained, best)


def _load_weights(trained: nn.Module, found: checkpoint.Checkpoint) -> None:
    wanted = _untied(dict(trained.state_dict()))
    if wanted.keys() != found.model.keys():
        odd = sorted(wanted.keys() ^ found.model.keys())[0]
        raise UserError(
            f"checkpoint {found.folder} is of another model ('{odd}' is in one of them only): give "
            f"another output_dir="
        )
    trained.load_state_dict(found.model, strict=False)  # tied names are stored once


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop names that share storage with an earlier one (tied heads): safetensors stores a tensor
    once.
    """
    seen: set[int] = set()
    kept = {}
    for name, tensor in weights.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            kept[name] = tensor
    return kept


def _note(values: dict[str, float], progress: Progress, rate: float) -> str:
    # a score may be anything that rises
    looked = progress.evaluations[-1] if progress.evaluations else {}
    held_out = next(
        (f"  held-out {key} {looked[key]:.3f}" for key in looked if key not in ("step", "score")),
        "",
    )
    (name, metric) = list(values.items())[1]
    return f"loss {values['loss']:.3f}  {name} {metric:.3f}{held_out}  {rate:,.0f} tok/s"


class _Signals:
    """Remembers SIGINT and SIGTERM while the loop runs; a second one acts at once."""

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
