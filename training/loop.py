"""The training loop, in reading order: rows of a step -> loss -> update -> evaluate -> save.

A step is a pure function of (weights, optimizer state, step number, recorded progress). Its rows
follow from the seed, the step number and, in a mixture, the recorded shares. Therefore k steps, a
stop and n - k steps equal n steps bit for bit on one CPU process; under a bound in seconds only if
the clock reads the same.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from decoding import devices
from decoding.errors import UserError, without_stop
from decoding.rounds.memory import HeapTrimmer
from jobs.interrupts import Interrupted, deferred_signals
from jobs.progress import ProgressBar
from training import checkpoint
from training.bounds import Bounds, Place, Progress
from training.config import LoopConfig
from training.data.packing import PackedBatch, PackedData, Rows, collate, micro_batches
from training.held_out.speedup import (
    COST_RATIO,
    LENGTH,
    SPEEDUP,
    TOKENS,
    UNRELIABLE,
    describe_prediction,
)
from training.models.layers import compile_layers
from training.optimizer import Optimizer, Rate, learning_rate
from training.parallel.fsdp import checkpoint_activations
from training.parallel.strategy import Parallel
from training.plan import bounds_of, describe_passes
from training.timer import Timer


class Objective(Protocol):
    """The module that a job trains; a call returns sums over the batch's supervised tokens."""

    # names of the metrics that a call returns, such as accuracy or acceptance
    metric_names: tuple[str, ...]
    # learning rates of single trained parameters, by parameter name
    rates: Mapping[str, Rate]
    # True if ranks call its parts a different number of times. ZeRO-3 then works as ZeRO-2, with
    # all trained weights on every rank, as ranks that gather them in each call would wait forever
    keeps_weights: bool

    def __call__(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return (sum of the loss in nats, sums of the metrics [len(metric_names)])."""

    def begin(self, step: int, place: Place, rows: Rows) -> None:
        """Set the values that follow a schedule for step `step` (from 0), at `place` in the run.

        rows: the samples of each row of the step, of all ranks.
        """


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

    Resumes from the newest complete checkpoint under `folder`/checkpoints and returns the progress.
    module: an Objective. evaluate: returns held-out figures of the current weights, with `score`
    (larger is better), which selects the best checkpoint. clock: returns seconds, and is read only
    under config.max_seconds. Raises Interrupted once the step in which SIGINT or SIGTERM arrived is
    saved. Raises UserError if a loss or gradient is not finite, if the time limit has no room for a
    step, or if the checkpoints belong to another model or the best one is damaged.
    """
    root, limits = folder / "checkpoints", bounds_of(config, data)
    training = _begin(root, module, trained, data, config, parallel)
    progress = training.progress
    if tracker is not None:
        tracker.rewind(progress.step)
    timer = Timer(progress, limits, parallel, clock)
    timer.time_evaluation(evaluate)
    bar = _progress_bar(title, progress, limits, parallel.is_main)
    speeds: deque[float] = deque(maxlen=20)
    give_back_memory = HeapTrimmer()

    def ended() -> bool:
        return bool(_end(progress, limits, data, config))

    with bar, deferred_signals() as signalled:
        while not ended():
            bounds = timer.bounds
            values = training.step(bounds)
            timer.count_step()
            if tracker is not None and progress.step % config.log_every == 0:
                tracker.log(progress.step, values)
            if ended() or _due(progress.step, config.eval_every):
                figures = timer.run_evaluation(evaluate)
                record = training.record_evaluation(figures)
                if tracker is not None:
                    tracker.log(progress.step, record)
                bar.say(f"  step {progress.step}: held-out {_describe(figures)}")
            stop = parallel.any(signalled.is_set())
            best = progress.best_step == progress.step
            due = (_due(progress.step, n) for n in (config.checkpoint_every, config.keep_every))
            if ended() or best or stop or any(due):
                training.save()
            speeds.append(values["tokens_per_second"])
            done, step = _advance(progress, limits)
            note = _note(values, progress, sum(speeds) / len(speeds))
            bar.update(done, f"{step}{note}", done if ended() else None)
            give_back_memory()
            if stop:
                raise Interrupted(
                    f"stopped by a signal after step {progress.step}; saved in {root}. Run the "
                    f"same command to continue"
                )
        progress.ended_by = _end(progress, limits, data, config)
        if reason := _early_end(progress, limits, data, config):
            bar.say(f"  ended after step {progress.step}{reason}")
        if note := describe_passes(progress.step / data.steps_per_epoch, config.max_epochs):
            bar.say(f"  {note}")
    with parallel.gathered_weights(for_good=True):
        _load_best(root, progress, trained, parallel)
    return progress


@dataclass
class Training:
    """State and settings of one run; a step changes weights, optimizer and `progress`."""

    # the objective as the ranks run it
    module: Any
    # the part of it that is saved
    trained: nn.Module
    data: PackedData
    config: LoopConfig
    parallel: Parallel
    optimizer: Optimizer
    progress: Progress
    # folder of the checkpoints
    root: Path

    def step(self, bounds: Bounds) -> dict[str, float]:
        """Run one optimizer step, advance `progress` and return the step's record.

        Raises UserError before the update if the loss or the gradient is not finite.
        """
        began = time.monotonic()
        progress, config, objective = self.progress, self.config.optimizer, self.parallel.inner
        rows = self.data.step_rows(progress.step)
        progress.data = self.data.state()
        if progress.step == config.warmup_steps:
            progress.warm_tokens, progress.warm_elapsed = progress.tokens, progress.elapsed
        place = Place(progress.done, bounds)
        objective.begin(progress.step, place, rows)
        sums, tokens = self._backward(rows)
        # the step's one wait for the device
        (loss, *metrics), norm = devices.read(sums, self.optimizer.clip())
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise self._not_finite(loss, norm)
        share = bounds.share(place.done, since=progress.warm(config.warmup_steps))
        lr = learning_rate(config, progress.step, share)
        self.optimizer.step(lr)
        seconds = time.monotonic() - began
        progress.step += 1
        progress.tokens += tokens
        progress.supervised += self.data.supervised_in(rows)
        progress.seconds += seconds
        return {
            "loss": loss,
            **dict(zip(objective.metric_names, metrics, strict=True)),
            "lr": lr,
            "progress": place.share(),
            "gradient_norm": norm,
            "tokens": progress.tokens,
            "supervised_tokens": progress.supervised,
            "tokens_per_second": tokens / seconds,
        }

    def _backward(self, rows: list[list[int]]) -> tuple[Tensor, int]:
        """Compute the gradient of one step, divided by the global count of supervised tokens.

        Returns ([loss, *metrics] per supervised token, on the device; number of tokens), both over
        all ranks.
        """
        data, parallel = self.data, self.parallel
        count = max(1, data.supervised_in(rows))
        rows_per_forward = max(1, self.config.micro_batch_tokens // data.capacity)
        sums = []
        forwards = list(micro_batches(rows, parallel.rank, parallel.world_size, rows_per_forward))
        for number, part in enumerate(forwards):
            # Gradients of bfloat16 weights accumulate in float32 masters, so ranks exchange them
            # after every forward; others are exchanged once per step.
            last = self.optimizer.has_copies or number == len(forwards) - 1
            with parallel.exchange(self.module, last):
                batch = collate(data.samples, part or [[]], data.capacity, parallel.device)
                with parametrize.cached():  # an adapter's sum is computed once
                    loss_sum, metric_sums = self.module(batch)
                parallel.backward(self.module, loss_sum / count)
            self.optimizer.collect()
            sums.append(torch.cat([loss_sum.detach().double()[None], metric_sums.double()]))
        tokens = sum(len(data.samples[index].ids) for row in rows for index in row)
        return parallel.sum(torch.stack(sums).sum(dim=0)) / count, tokens

    def _not_finite(self, loss: float, norm: float) -> UserError:
        lr, clip = self.config.optimizer.lr, self.config.optimizer.clip
        clipping = f"or loop.optimizer.clip (now {clip})" if clip else "or set loop.optimizer.clip"
        found = (
            f"the loss is {loss} and the gradient's norm {norm} at step {self.progress.step + 1}"
        )
        if not self.progress.step:  # no learning rate has changed a weight yet
            return UserError(
                f"{found}, before any update, so the weights that the run starts from hold NaN or "
                f"infinity, or overflow. Check the folder that they come from (of a student: "
                f"student.path), or set loop.dtype=float32 (now {self.config.dtype})"
            )
        return UserError(
            f"{found}, so the run stopped before the update. The last good checkpoint, if any, is "
            f"in {self.root}. Lower loop.optimizer.lr (now {lr}) {clipping}, then run again"
        )

    def record_evaluation(self, figures: dict[str, float]) -> dict[str, float]:
        """Store held-out figures, which are equal on every rank, and return their record.

        They select the best checkpoint and may change the mixture of the data.
        """
        progress = self.progress
        progress.evaluations.append({"step": progress.step, **figures})
        changes = self.data.adapt(figures)
        progress.data = self.data.state()
        progress.count_gain(figures["score"], self.config.min_gain)
        if figures["score"] > progress.best_score:
            progress.best_step, progress.best_score = progress.step, figures["score"]
        held_out = {f"held_out_{key}": value for key, value in figures.items() if key != "score"}
        return held_out | changes

    def save(self) -> None:
        """Write a checkpoint that every kind of parallelism can resume, and delete old ones.

        All ranks must call it.
        """
        progress, parallel = self.progress, self.parallel
        states = self.optimizer.state(keep=parallel.is_main)
        with parallel.gathered_weights():
            if parallel.is_main:
                weights = checkpoint.drop_tied(self.trained.state_dict())
                folder = self.root / checkpoint.name_of(progress.step)
                checkpoint.save(folder, vars(progress), weights, states, checkpoint.rng_state())
                keep, every = self.config.keep, self.config.keep_every
                checkpoint.prune(self.root, keep, progress.best_step, every)
        parallel.wait()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _begin(
    root: Path,
    module: Any,
    trained: nn.Module,
    data: PackedData,
    config: LoopConfig,
    parallel: Parallel,
) -> Training:
    """Prepare a run on this rank, from the newest complete checkpoint if there is one."""
    if config.activation_checkpointing:
        checkpoint_activations(trained)
    if config.compile and not parallel.shards_state:
        compile_layers(trained)
    elif config.compile and parallel.is_main:
        print(f"note: loop.compile=true does not compile layers under parallel={parallel.kind}")
    found = checkpoint.latest(root, report=print if parallel.is_main else lambda _: None)
    if found is not None:  # before the weights are sharded
        checkpoint.load_weights(trained, found)
    wrapped, optimizer = parallel.prepare(module, trained, config.optimizer, module.rates)
    progress = Progress() if found is None else Progress(**found.state)
    if found is not None:
        optimizer.load(found.optimizer)
        checkpoint.restore_rng(found.rng)
    data.load(progress.data)
    return Training(wrapped, trained, data, config, parallel, optimizer, progress, root)


def _load_best(root: Path, progress: Progress, trained: nn.Module, parallel: Parallel) -> None:
    parallel.wait()
    if progress.best_step in (-1, progress.step):
        return
    try:
        best = checkpoint.load(root / checkpoint.name_of(progress.best_step))
    except UserError as error:
        raise UserError(
            f"cannot export the best weights of the run: {without_stop(error)}. To train again, "
            f"delete all of {root}"
        ) from error
    checkpoint.load_weights(trained, best)


def _end(progress: Progress, limits: Bounds, data: PackedData, config: LoopConfig) -> str:
    """Return the key of the option that ends the run here, or "" if it continues."""
    if reached := progress.reached(limits):
        by_epochs = reached == "steps" and progress.step != config.max_steps
        return "loop.max_epochs" if by_epochs else f"loop.max_{reached}"
    if data.ended:
        return "data.when_exhausted"
    return "loop.patience" if 0 < config.patience <= progress.without_gain else ""


def _early_end(progress: Progress, limits: Bounds, data: PackedData, config: LoopConfig) -> str:
    """Return the end of a message on why a run ended before its bound in steps; else ""."""
    of = f" of {limits.steps:.0f}" if limits.steps < math.inf else ""
    reasons = {
        "loop.max_seconds": ": the next one would exceed loop.max_seconds",
        "data.when_exhausted": f"{of}: {data.ended}",
        "loop.patience": f"{of}: evaluations without a gain of more than "
        f"{config.min_gain:g}: {progress.without_gain} (loop.patience)",
    }
    return reasons.get(_end(progress, limits, data, config), "")


def _describe(figures: Mapping[str, float], most: int | None = None) -> str:
    """Format held-out figures, without the score and figures of a domain or depth (NAME/...).

    most: the largest number of figures to show; None: all.
    """
    hidden = ("step", "score", SPEEDUP, TOKENS, LENGTH, COST_RATIO, UNRELIABLE)
    keys = [key for key in figures if key not in hidden and "/" not in key]
    words = [f"{key} {figures[key]:.3f}" for key in keys[:most]]
    prediction = describe_prediction(figures) if most is None else ""
    return "  ".join([*words, prediction] if prediction else words)


def _progress_bar(title: str, progress: Progress, limits: Bounds, show: bool) -> ProgressBar:
    """Return the bar of a run: in steps if their number is known, else in percent of a bound."""
    percent = not limits.in_steps_alone
    total = 100 if percent else limits.steps
    return ProgressBar(title, total, _advance(progress, limits)[0], show, percent)


def _advance(progress: Progress, limits: Bounds) -> tuple[float, str]:
    """Return the units of the bar that are done, and the step if these are percent."""
    if limits.in_steps_alone:
        return progress.step, ""
    return 100 * limits.share(progress.done), f"step {progress.step:,}  "


def _note(values: dict[str, float], progress: Progress, speed: float) -> str:
    figures = _describe(progress.evaluations[-1], most=1) if progress.evaluations else ""
    held_out = f"  held-out {figures}" if figures else ""
    name, metric = list(values.items())[1]
    return f"loss {values['loss']:.3f}  {name} {metric:.3f}{held_out}  {speed:,.0f} tok/s"
