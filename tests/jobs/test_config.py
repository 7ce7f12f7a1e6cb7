"""Configuration: every file of conf/ composes, unknown keys are named with the nearest valid one,
the wrong job is told.
"""

import json
import re
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from decoding.errors import UserError
from distill.config import (
    CompactConfig,
    PretrainConfig,
    PruneConfig,
    QualityConfig,
    RegenerateConfig,
    TrainConfig,
)
from eval.config import CompareConfig, EvalConfig
from heads.train import find_kind_name, schema_of
from jobs import stages
from jobs.amounts import PLANNED
from jobs.config import JobConfig, plain, typed, valid_keys
from jobs.help import field_docs, print_help
from jobs.job import CONF, _exit_on_errors, check_arguments, register, run_typed
from jobs.run_folder import RunFolder
from recurrent_drafting.config import HeadTrainConfig
from serving.config import GenerateConfig

SCHEMAS: dict[str, type[JobConfig]] = {
    "distill.pretrain": PretrainConfig,
    "distill.regenerate": RegenerateConfig,
    "distill.train": TrainConfig,
    "eval.compare": CompareConfig,
    "eval.run": EvalConfig,
    "heads.train": schema_of("recurrent"),
    "recurrent_drafting.generate": GenerateConfig,
    "recurrent_drafting.train": HeadTrainConfig,
}


def schema_for(job: str, *overrides: str) -> type[JobConfig]:
    """A job's configuration; a kind of head has one of its own."""
    return schema_of(find_kind_name(overrides)) if job == "heads.train" else SCHEMAS[job]


def composed(job: str, *overrides: str) -> DictConfig:
    register(job, schema_for(job, *overrides))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(job.replace(".", "_"), list(overrides))


def experiments() -> list[tuple[str, str]]:
    files = sorted((CONF / "experiment").glob("*.yaml"))
    return [(file.stem, yaml.safe_load(file.read_text())["job"]) for file in files]


@pytest.mark.parametrize("job", SCHEMAS)
def test_every_job_has_a_schema_and_composes(job: str):
    config = typed(
        composed(job, *(["drafters=[prompt_lookup]"] if job == "eval.run" else [])), SCHEMAS[job]
    )
    assert config.job == job
    assert config.output_dir == f"runs/{job}/default"


@pytest.mark.parametrize(("name", "job"), experiments())
def test_every_experiment_composes_with_its_job(name: str, job: str):
    given = f"+experiment={name}"
    config = typed(composed(job, given), schema_for(job, given))
    assert config.experiment == name, "an experiment carries its own name, for the run folder"


def test_the_quickstarts_bounds_leave_room_in_ten_minutes():
    """Imports, held-out answers and the report come on top of its two loops: on a third of a core
    they took a minute and a half.
    """
    loop = typed(composed("distill.train", "+experiment=quickstart"), TrainConfig).loop
    head = typed(
        composed("recurrent_drafting.train", "+experiment=redrafter_quickstart"), HeadTrainConfig
    ).loop
    measuring = typed(composed("eval.run", "+experiment=quickstart_eval"), EvalConfig)
    assert (
        0 < loop.max_seconds <= 240
        and 0 < measuring.max_seconds <= 150
        and 0 < head.max_seconds <= 240
    )


def test_every_group_file_belongs_to_a_job_or_makes_a_drafter():
    known = {
        "data",
        "drafter",
        "loss",
        "student",
        "parallel",
        "target",
        "tracker",
        "benchmark",
        "experiment",
        "head",
        "hydra",
    }
    assert {path.name for path in CONF.iterdir() if path.is_dir()} <= known


@pytest.mark.parametrize(
    ("argument", "near"),
    [
        ("loop.optimizer.learning_rate=1", "loop.optimizer.lr"),
        ("student.num_hidden_layer=2", "student.num_hidden_layers"),
        ("+student.hidden_layers=2", "student.num_hidden_layers"),
        ("++outputdir=x", "output_dir"),
    ],
)
def test_an_unknown_key_on_the_command_line_names_the_nearest(argument: str, near: str):
    with pytest.raises(
        UserError, match=rf"unknown configuration key .*nearest valid key is '{near}'"
    ):
        check_arguments([argument], "distill.train", TrainConfig)


def test_a_group_of_other_jobs_is_an_unknown_key_and_an_added_one_is_hydras_to_find():
    with pytest.raises(
        UserError, match=r"unknown configuration key 'drafter'; the nearest valid key is 'drafters'"
    ):
        check_arguments(["drafter=runs/mine"], "eval.run", EvalConfig)
    check_arguments(["+student=llama_796m"], "eval.run", EvalConfig)


def test_valid_keys_groups_and_hydra_flags_pass():
    good = [
        "student.num_hidden_layers=1,2,4",
        "target=embedded",
        "-m",
        "loop.optimizer.lr=1e-3",
        "hydra.verbose=true",
        "+experiment=smoke",
    ]
    check_arguments(good, "distill.train", TrainConfig)


def test_an_unknown_key_in_an_experiment_file_names_the_nearest():
    config = composed("distill.train")
    OmegaConf.set_struct(config, False)
    config.loop = {**config.get("loop", {}), "max_stepz": 3}
    with pytest.raises(
        UserError,
        match=r"unknown configuration key 'loop.max_stepz'; the nearest valid key is "
        r"'loop.max_steps'",
    ):
        typed(config, TrainConfig)


def test_a_value_of_the_wrong_type_names_the_key():
    with pytest.raises(UserError, match=r"loop\.max_steps"):
        typed(composed("distill.train", "loop.max_steps=many"), TrainConfig)


def test_a_value_where_a_list_is_expected_is_told_how_to_be_one():
    for key, value in (("num_draft_tokens", "6"), ("batch_sizes", "4")):
        with pytest.raises(
            UserError, match=rf"key '{key}' is {value}, expected a list: {key}=\[{value}\]"
        ):
            typed(composed("eval.run", f"{key}={value}"), EvalConfig)


def test_an_experiment_of_another_job_prints_the_right_command():
    with pytest.raises(
        UserError, match=r"run: python -m distill.pretrain \+experiment=quickstart_target"
    ):
        check_arguments(["+experiment=quickstart_target"], "distill.train", TrainConfig)
    with pytest.raises(UserError, match=r"no experiment .quikstart.; there are: .*quickstart"):
        check_arguments(["+experiment=quikstart"], "distill.train", TrainConfig)


def test_a_folder_of_another_configuration_is_refused_with_the_keys_that_differ(tmp_path: Path):
    config = typed(
        composed("distill.train", "+experiment=smoke", f"output_dir={tmp_path}"), TrainConfig
    )
    RunFolder(config)
    config.seed += 1
    RunFolder(config)  # nothing was begun yet: a start that failed does not hold the folder
    config.seed -= 1
    RunFolder(config).write_manifest([], {}, finished=False)
    RunFolder(config)  # the same configuration goes on
    config.loop.optimizer.lr *= 2
    config.threads = 5  # changes no result, so it may differ; the same of how ranks share the work
    config.parallel.kind, config.loop.micro_batch_tokens, config.loop.activation_checkpointing = (
        "zero2",
        128,
        True,
    )
    with pytest.raises(UserError, match=r"different: loop\.optimizer\.lr \(.*output_dir=") as error:
        RunFolder(config)
    assert not {"threads", "parallel", "micro_batch"} & {*re.split(r"[ .(]", str(error.value))}


def test_a_saved_configuration_gives_the_same_one_back(tmp_path: Path):
    config = typed(
        composed("distill.train", "+experiment=quickstart", f"output_dir={tmp_path}"), TrainConfig
    )
    RunFolder(config)
    again = OmegaConf.load(tmp_path / "config.yaml")
    assert isinstance(again, DictConfig)
    assert plain(typed(again, TrainConfig)) == plain(config)


def test_a_broken_experiment_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("job: distill.train\nloop: max_steps: 3\n")
    monkeypatch.setattr("jobs.job.CONF", tmp_path)
    with pytest.raises(
        UserError,
        match=r"mine.yaml is no valid YAML: mapping values are not allowed here .* line 2",
    ):
        check_arguments(["+experiment=mine"], "distill.train", TrainConfig)


def test_a_full_disk_anywhere_in_a_job_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = composed("distill.train", "+experiment=smoke", f"output_dir={tmp_path}")

    def write_a_log(config: TrainConfig) -> None:
        with Path("/dev/full").open("w") as file:
            file.write("a line")

    with pytest.raises(
        UserError,
        match=f"could not write {tmp_path}: .*No space left on device.* MB are free there",
    ):
        run_typed(config, "distill.train", TrainConfig, write_a_log)


def test_a_signal_outside_the_loop_ends_without_a_traceback(capsys: pytest.CaptureFixture[str]):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        _exit_on_errors(interrupted)
    assert stop.value.code == 130
    assert "Run the same command to continue" in capsys.readouterr().err


def test_an_output_dir_that_is_a_file_is_named(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "run"):
        config = typed(
            composed("distill.train", "+experiment=smoke", f"output_dir={folder}"), TrainConfig
        )
        with pytest.raises(
            UserError, match="is no folder: .*taken.* is a file. Give another output_dir="
        ):
            RunFolder(config)


@pytest.mark.parametrize(
    "schema",
    [
        TrainConfig,
        PretrainConfig,
        PruneConfig,
        QualityConfig,
        CompactConfig,
        RegenerateConfig,
        EvalConfig,
        CompareConfig,
        GenerateConfig,
        HeadTrainConfig,
    ],
)
def test_every_setting_has_a_line_in_the_help(schema: type[JobConfig]):
    docs = field_docs(schema)
    assert not [key for key, text in docs.items() if not text]
    inner = {
        key
        for key in valid_keys(schema)
        if not any(other.startswith(f"{key}.") for other in valid_keys(schema))
    }
    assert docs.keys() == inner


def test_help_shows_the_values_of_its_command_line(capsys: pytest.CaptureFixture[str]):
    register("distill.train", TrainConfig)
    print_help("distill.train", TrainConfig, CONF, ["+experiment=smoke", "seed=7"])
    text = capsys.readouterr().out
    assert "seed=7" in text
    assert "experiment=smoke" in text
    assert "the depth that sets" in text
    assert "benchmark=" not in text, "that group is another job's"


def test_an_experiment_without_its_plus_is_named():
    with pytest.raises(UserError, match=r"added with a plus: \+experiment=smoke"):
        check_arguments(["experiment=smoke"], "distill.train", TrainConfig)


def test_the_total_of_stages_counts_folders_elsewhere_and_each_at_its_own_pace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    elsewhere = tmp_path / "elsewhere"
    for folder, flops, pace in (
        (tmp_path / "run" / "a", 2e12, 1.0),
        (elsewhere, 6e12, 0.5),
        (tmp_path / "not asked", 9e12, 1.0),
    ):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"metrics": {PLANNED: flops}}))
        (folder / "config.yaml").write_text(f"assumed_tflops: {pace}\n")
    stages._print_total([str(tmp_path / "run"), str(elsewhere)], started=0.0)
    assert (
        "all stages together: 8.0 TFLOP, 0.0039 hours (14 s) at 0.5 and 1 TFLOP/s"
        in capsys.readouterr().out
    )
