"""Test that every job refuses an invalid number by its key, before anything is loaded."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

import distill.pretrain
import distill.prune.job
import distill.quality
import distill.regenerate.job
import distill.skip_search
import distill.train
import recurrent_drafting.train
from decoding.errors import UserError
from distill.config import (
    PretrainConfig,
    PruneConfig,
    QualityConfig,
    RegenerateConfig,
    SkipSearchConfig,
    TrainConfig,
)
from eval.config import CompareConfig, EvalConfig
from jobs.config_checks import THREADS_PER_CORE
from jobs.job import CONF, register, run_typed
from recurrent_drafting.config import HeadTrainConfig
from tests.support.tiers import tiered

JOBS: dict[str, tuple[type, Any]] = {
    "distill.train": (TrainConfig, distill.train.run),
    "distill.pretrain": (PretrainConfig, distill.pretrain.run),
    "distill.prune": (PruneConfig, distill.prune.job.run),
    "distill.regenerate": (RegenerateConfig, distill.regenerate.job.run),
    "distill.skip_search": (SkipSearchConfig, distill.skip_search.run),
    "distill.quality": (QualityConfig, distill.quality.run),
    "recurrent_drafting.train": (HeadTrainConfig, recurrent_drafting.train.run),
    "eval.run": (EvalConfig, None),
    "eval.compare": (CompareConfig, None),
}
HUGE, NAN, INF = 10**9, float("nan"), float("inf")
LOOP = [
    ("max_steps", -1),
    ("max_epochs", -1.0),
    ("max_epochs", NAN),
    ("max_epochs", INF),
    ("tokens_per_step", -5),
    ("tokens_per_step", 0),
    ("tokens_per_step", 10**15),
    ("micro_batch_tokens", 0),
    ("micro_batch_tokens", -1),
    ("eval_every", -1),
    ("checkpoint_every", -1),
    ("keep_every", -1),
    ("patience", -1),
    ("min_gain", -0.1),
    ("keep", -1),
    ("log_every", 0),
    ("optimizer.lr", 0.0),
    ("optimizer.lr", -1e-3),
    ("optimizer.lr", NAN),
    ("optimizer.lr", INF),
    ("optimizer.betas", [0.9]),
    ("optimizer.betas", [0.9, 1.0]),
    ("optimizer.betas", [-0.1, 0.9]),
    ("optimizer.betas", [NAN, 0.9]),
    ("optimizer.weight_decay", -0.1),
    ("optimizer.weight_decay", NAN),
    ("optimizer.warmup_steps", -1),
    ("optimizer.final_lr", -0.1),
    ("optimizer.final_lr", INF),
    ("optimizer.clip", -1.0),
    ("optimizer.clip", NAN),
]
DATA = [
    ("data.max_bad", NAN),
    ("data.max_bad", -0.1),
    ("data.max_bad", 1.5),
    ("data.max_length", 1),
    ("data.max_length", -1),
    ("data.max_length", HUGE),
    ("data.max_samples", -1),
    ("data.held_out_tokens", -1),
    ("data.template", "foo"),
    ("data.train_on", "foo"),
    ("data.cache", "foo"),
    ("data.workers", -1),
]
TRAIN, PRETRAIN, PRUNE, HEADS = (
    "distill.train",
    "distill.pretrain",
    "distill.prune",
    "recurrent_drafting.train",
)
REGENERATE, SEARCH, QUALITY = "distill.regenerate", "distill.skip_search", "distill.quality"
CASES = [
    *[(job, f"loop.{key}", value) for job in (TRAIN, PRETRAIN) for key, value in LOOP],
    *[(PRUNE, f"between.{key}", value) for key, value in LOOP if "max_epochs" not in key],
    *[(HEADS, f"loop.{key}", value) for key, value in LOOP[::4]],
    *[
        (job, key, value)
        for job in (TRAIN, REGENERATE, SEARCH)
        for key, value in DATA
        if value != HUGE
    ],
    *[(job, "data.max_length", HUGE) for job in (PRETRAIN, HEADS)],
    (TRAIN, "student.num_hidden_layers", HUGE),
    (TRAIN, "student.hidden_size", HUGE),
    (TRAIN, "student.intermediate_size", HUGE),
    (TRAIN, "loss.temperature", NAN),
    (TRAIN, "loss.teacher_temperature", -1.0),
    (HEADS, "loss.jsd_beta", 1.0),
    (TRAIN, "held_out.temperature", NAN),
    (TRAIN, "held_out.cost_seconds", 0.0),
    (TRAIN, "held_out.cost_seconds", NAN),
    (TRAIN, "held_out.costs", ""),
    (PRUNE, "student.num_hidden_layers", HUGE),
    (PRETRAIN, "model.num_hidden_layers", HUGE),
    (PRETRAIN, "model.num_hidden_layers", -1),
    (PRETRAIN, "model.hidden_size", HUGE),
    (PRETRAIN, "model.intermediate_size", -1),
    (HEADS, "head.num_draft_layers", HUGE),
    (HEADS, "head.exit_dim", HUGE),
    (SEARCH, "max_skips", -1),
    (SEARCH, "candidates", 0),
    (SEARCH, "held_out.max_prompts", 0),
    *[(job, "held_out.render", "foo") for job in (TRAIN, HEADS, SEARCH)],
    (REGENERATE, "assumed_tokens_per_second", -1.0),
    (QUALITY, "functions", 0),
    (QUALITY, "temperature", -1.0),
    (QUALITY, "max_new_tokens", 0),
]
REPEATED = ("loop.", "between.", "data.")  # keys of every job that trains or reads data


@cache
def composed(job: str) -> DictConfig:
    """Return the default configuration of a job."""
    register(job, JOBS[job][0])
    more = {PRETRAIN: ["+experiment=quickstart_target", "stages=[]"], PRUNE: ["data=embedded"]}.get(
        job, []
    )
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(job.replace(".", "_"), more)


def refused(job: str, key: str, value: Any, folder: Path, target: Path, dry: bool = False) -> str:
    """Return the error of a job with one changed value, and assert that its run did not begin."""
    config = composed(job).copy()
    changes = {
        "output_dir": str(folder),
        "dry_run": dry,
        **({"target.path": str(target)} if "target" in config else {}),
        key: value,
    }
    for name, one in changes.items():
        OmegaConf.update(config, name, one, force_add=True)
    with pytest.raises(UserError) as error:
        run_typed(config, job, *JOBS[job])
    assert not (folder / "manifest.json").exists(), "a corrected command can use the same folder"
    return str(error.value)


def is_quick(job: str, key: str, value: Any) -> bool:
    """Return whether the short suite has a case: one of the keys that repeat those of TRAIN."""
    return job == TRAIN or not key.startswith(REPEATED) or key.endswith(("_steps", "_samples"))


@pytest.mark.parametrize(
    ("job", "key", "value"), tiered(CASES, is_quick), ids=lambda value: str(value)
)
def test_an_invalid_number_is_refused_by_its_key(
    job: str, key: str, value: Any, tmp_path: Path, tiny_target: Path
):
    words = refused(job, key, value, tmp_path / "run", tiny_target)
    assert words.startswith(f"{key} is ") and "expected" in words


@pytest.mark.parametrize(
    ("job", "key", "value", "message"),
    [
        (TRAIN, "student.init", "foo", "student.init 'foo' is unknown, expected one of layers"),
        (TRAIN, "student.init", "folder", "student.path is empty, but student.init=folder needs"),
        (TRAIN, "student.layers", [99], "student.layers is [99], expected 1 layers"),
        (TRAIN, "student.head_dim", 4, "student.head_dim is 4, expected the target's"),
        (TRAIN, "student.draft_vocab_size", -1, "student.draft_vocab_size is -1, expected 0 for"),
        (TRAIN, "data.template", "foo", "data.template is foo, expected one of auto, vicuna"),
        (TRAIN, "data.workers", -1, "data.workers is -1, expected a whole number from 0"),
        (TRAIN, "data.train_on", "foo", "data.train_on is foo, expected one of answers, all"),
        (HEADS, "data.train_on", "foo", "data.train_on is foo, expected one of answers, all"),
        (PRETRAIN, "data.cache", "foo", "data.cache is foo, expected one of auto, none, disk"),
        (PRUNE, "data.cache", "foo", "data.cache is foo, expected one of auto, none, disk"),
        (TRAIN, "held_out.render", "foo", "held_out.render is foo, expected one of auto, chat"),
        (HEADS, "held_out.render", "foo", "held_out.render is foo, expected one of auto, chat"),
        (SEARCH, "held_out.render", "foo", "held_out.render is foo, expected one of auto, chat"),
        (PRUNE, "depths", [9], "depths is [9], expected decreasing numbers of layers"),
        (PRUNE, "masks", "/nowhere", "/nowhere does not exist"),
        (PRUNE, "masks", str(CONF), "conf is not a file, expected the masks.safetensors of"),
        (REGENERATE, "assumed_tokens_per_second", -1.0, "assumed_tokens_per_second is -1.0, expe"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(
    job: str, key: str, value: Any, message: str, tmp_path: Path, tiny_target: Path
):
    assert message in refused(job, key, value, tmp_path / "run", tiny_target, dry=True)


@pytest.mark.parametrize(
    ("job", "key", "message"),
    [
        (TRAIN, "output_dir", "output_dir is '', expected a folder for the run"),
        (TRAIN, "target.path", "target.path is '', expected a model folder"),
        (TRAIN, "held_out.prompts", "held_out.prompts is '', expected a file of prompts"),
        (QUALITY, "model", "model is '', expected a model folder"),
        ("eval.run", "benchmark.path", "benchmark.path is '', expected a file of prompts"),
    ],
)
def test_an_empty_path_is_not_the_working_folder(
    job: str, key: str, message: str, tmp_path: Path, tiny_target: Path
):
    words = refused(job, key, "", tmp_path / "run", tiny_target, dry=True)
    assert words.startswith(message)


@pytest.mark.parametrize(
    ("job", "key", "value", "message"),
    [
        (TRAIN, "data.chats", [""], "data.chats is [''], and entry 1 of it is empty, expected a"),
        (TRAIN, "data.chats", ["embedded:chats", " "], "and entry 2 of it is empty, expected a Sh"),
        (HEADS, "data.held_out_chats", [""], "data.held_out_chats is [''], and entry 1 of it"),
        (PRETRAIN, "data.texts", [""], "entry 1 of it is empty, expected a text file, a folder"),
        (
            PRETRAIN,
            "data.domains",
            {"code": {"texts": [""]}},
            "data.domains.code.texts is [''], and entry 1 of it is empty, expected a text file",
        ),
        (REGENERATE, "drafters", [""], "drafters is [''], and entry 1 of it is empty, expected a"),
        ("eval.run", "drafters", ["prompt_lookup", None], "and entry 2 of it is empty, expected a"),
        (
            "eval.compare",
            "runs",
            [""],
            "runs is [''], and entry 1 of it is empty, expected a run folder of eval.run. Remove",
        ),
    ],
)
def test_an_empty_entry_of_a_list_is_refused(
    job: str, key: str, value: Any, message: str, tmp_path: Path, tiny_target: Path
):
    assert message in refused(job, key, value, tmp_path / "run", tiny_target, dry=True)


@pytest.mark.parametrize(
    ("job", "key"), [(TRAIN, "parallel.processes"), ("eval.run", "target.processes")]
)
def test_a_number_of_processes_is_not_negative(
    job: str, key: str, tmp_path: Path, tiny_target: Path
):
    words = refused(job, key, -1, tmp_path / "run", tiny_target, dry=True)
    assert words.startswith(f"{key} is -1, expected a whole number from 0 to ")


@pytest.mark.parametrize("job", [TRAIN, QUALITY, "eval.run"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 10**30),
        ("threads", -1),
        ("threads", 100_000),
        ("threads", "many"),
        ("threads", 1.5),
        ("threads", THREADS_PER_CORE * (os.cpu_count() or 1) + 1),
    ],
)
def test_every_job_checks_seed_and_threads(
    job: str, key: str, value: int | float | str, tmp_path: Path, tiny_target: Path
):
    words = refused(job, key, value, tmp_path / "run", tiny_target)
    assert words.startswith(f"{key} is {value}, expected ")


def test_values_at_the_limits_are_accepted(tmp_path: Path, tiny_target: Path):
    """Control: valid extreme values are accepted."""
    register(TRAIN, TrainConfig)
    fine = [
        "seed=18446744073709551615",
        "threads=1",
        "loop.keep=0",
        "loop.optimizer.final_lr=0.0",
        "data.max_bad=1.0",
        "data.train_on=all",
        "data.cache=none",
        "held_out.render=text",
    ]
    fine += [
        "loop.eval_every=0",
        "loop.checkpoint_every=0",
        "loop.optimizer.clip=0.0",
        "loop.optimizer.betas=[0.0,0.0]",
    ]
    fine += [
        f"target.path={tiny_target}",
        f"output_dir={tmp_path}",
        "dry_run=true",
        "student.init=random",
    ]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(
            "distill_train", ["+experiment=smoke", *fine, "student.num_hidden_layers=8"]
        )
    run_typed(config, TRAIN, *JOBS[TRAIN])
    assert (tmp_path / "drafter" / "config.json").is_file()
