"""Every job with a run folder, with overrides that make it take about a second."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

import distill.compact
import distill.pretrain
import distill.prune.job
import distill.quality
import distill.regenerate.job
import distill.skip_search
import distill.train
import eval.compare
import eval.run
import recurrent_drafting.train
from distill import config as distilling
from eval import config as evaluating
from jobs.config import typed
from jobs.job import CONF, register
from recurrent_drafting.config import HeadTrainConfig

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

    schema: type
    run: Callable[[Any], Any]
    named: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()


JOBS = {
    "distill.train": SmallJob(
        distilling.TrainConfig,
        distill.train.run,
        ("target.path",),
        ("+experiment=smoke", *_LOOP, *_DATA, *_HELD_OUT),
    ),
    "distill.pretrain": SmallJob(
        distilling.PretrainConfig,
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
        distilling.PruneConfig,
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
        distilling.RegenerateConfig,
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
        distilling.SkipSearchConfig,
        distill.skip_search.run,
        ("target.path",),
        (*_HELD_OUT, "max_skips=2"),
    ),
    "distill.quality": SmallJob(
        distilling.QualityConfig, distill.quality.run, ("model",), ("functions=1",)
    ),
    "distill.compact": SmallJob(distilling.CompactConfig, distill.compact.run, ("model",)),
    "recurrent_drafting.train": SmallJob(
        HeadTrainConfig,
        recurrent_drafting.train.run,
        ("target.path",),
        (*_LOOP, *_DATA, *_HELD_OUT),
    ),
    "eval.run": SmallJob(
        evaluating.EvalConfig,
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
    "eval.compare": SmallJob(
        evaluating.CompareConfig, eval.compare.run, (), ("bootstrap_resamples=50",), ("runs",)
    ),
}


def configured(job: str, named: Path | str, folder: Path, *overrides: str) -> Any:
    """Return the configuration of a job in JOBS.

    named: the input folder, a model (for eval.compare, a run of eval.run). folder: the run folder.
    """
    config = deepcopy(_composed(job, str(named), overrides))
    config.output_dir = str(folder)
    return config


@cache
def _composed(job: str, named: str, overrides: tuple[str, ...]) -> Any:
    """Compose the configuration of a job, whose output_dir the caller sets.

    Results are cached, since Hydra takes longer than some of the jobs.
    """
    small = JOBS[job]
    register(job, small.schema)
    given = [
        *small.overrides,
        *(f"{key}={named}" for key in small.named),
        *(f"{key}=[{named}]" for key in small.listed),
    ]
    if job == "distill.prune":
        given.append(f"importance.cache_dir={Path(named).parent}/importance")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return typed(compose(job.replace(".", "_"), [*given, *overrides]), small.schema)
