"""Every job with a run folder, with overrides that make it take about a second."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distill.compact
import distill.pretrain
import distill.prune.job
import distill.quality
import distill.regenerate.job
import distill.skip_search
import distill.train
import eval.compare
import eval.replay
import eval.run
import recurrent_drafting.train
from tests.support.configurations import configuration

_LOG = Path(__file__).parent.parent / "fixtures" / "logged_outputs.jsonl"
_LOOP = [
    "loop.max_steps=2",
    "loop.tokens_per_step=256",
    "loop.micro_batch_tokens=256",
    "loop.checkpoint_every=1",
]
_DATA = ["data.max_samples=12", "data.max_length=128"]
_HELD_OUT = ["held_out.max_prompts=2", "held_out.max_new_tokens=4"]


@dataclass(frozen=True)
class SmallJob:
    """A job at toy size.

    named: keys whose value is the input folder. listed: keys whose value is a list of that folder.
    """

    run: Callable[[Any], Any]
    named: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()


JOBS = {
    "distill.train": SmallJob(
        distill.train.run,
        ("target.path",),
        ("+experiment=smoke", *_LOOP, *_DATA, *_HELD_OUT),
    ),
    "distill.pretrain": SmallJob(
        distill.pretrain.run,
        ("tokenizer",),
        (
            *_LOOP,
            *_DATA,
            "data.texts=[]",
            "data.held_out_texts=[]",
            "data.chats=[embedded:chats]",
            "data.held_out_chats=[embedded:held_out_chats]",
            "model.hidden_size=16",
            "model.num_attention_heads=2",
            "model.intermediate_size=16",
        ),
    ),
    "distill.prune": SmallJob(
        distill.prune.job.run,
        ("target.path",),
        (
            *_DATA,
            "target=embedded",
            "data=embedded",
            "student=shallow",
            "student.num_hidden_layers=2",
            "data.max_samples=60",
            "importance.choice=even",
            "importance.sequences=4",
            "importance.probe_sequences=2",
            "importance.probe_steps=0",
        ),
    ),
    "distill.regenerate": SmallJob(
        distill.regenerate.job.run,
        ("target.path",),
        (
            "data.chats=[embedded:held_out_chats]",
            "data.max_samples=2",
            "data.max_length=256",
            "max_new_tokens=4",
        ),
    ),
    "distill.skip_search": SmallJob(
        distill.skip_search.run,
        ("target.path",),
        (*_HELD_OUT, "max_skips=2"),
    ),
    "distill.quality": SmallJob(distill.quality.run, ("model",), ("functions=1",)),
    "distill.compact": SmallJob(distill.compact.run, ("model",)),
    "recurrent_drafting.train": SmallJob(
        recurrent_drafting.train.run,
        ("target.path",),
        (*_LOOP, *_DATA, *_HELD_OUT),
    ),
    "eval.run": SmallJob(
        eval.run.run,
        ("target.path",),
        (
            "prompt_lookup_control=true",
            "temperatures=[0.0]",
            "num_draft_tokens=[2]",
            "sweep=[]",
            "max_prompts=3",
            "max_seconds=3600",
            "max_new_tokens=4",
            "timing_repeats=1",
            "stopping=fixed",
            "bootstrap_resamples=50",
        ),
        ("drafters",),
    ),
    "eval.compare": SmallJob(eval.compare.run, (), ("bootstrap_resamples=50",), ("runs",)),
    "eval.replay": SmallJob(
        eval.replay.run,
        ("target.path",),
        (f"log={_LOG}", "num_draft_tokens=[2]", "bootstrap_resamples=50"),
        ("drafters",),
    ),
}


def configured(job: str, named: Path | str, folder: Path, *overrides: str) -> Any:
    """Return the configuration of a job in JOBS.

    named: the input folder, a model (for eval.compare, a run of eval.run). folder: the run folder.
    """
    small = JOBS[job]
    given = [
        f"output_dir={folder}",
        *small.overrides,
        *(f"{key}={named}" for key in small.named),
        *(f"{key}=[{named}]" for key in small.listed),
    ]
    if job == "distill.prune":
        given.append(f"importance.cache_dir={Path(named).parent}/importance")
    return configuration(job, *given, *overrides)
