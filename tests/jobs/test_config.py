"""Every file of conf/ composes, and errors suggest the nearest key or the right job."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from decoding.errors import UserError
from decoding.models.native import linear
from distill.config import (
    CompactConfig,
    PretrainConfig,
    PruneConfig,
    QualityConfig,
    RegenerateConfig,
    TrainConfig,
)
from eval.config import AnalyzeConfig, CompareConfig, EvalConfig, ReplayConfig
from eval.doctor.config import DoctorConfig
from eval.plan.config import PlanConfig
from heads.train import find_kind_name, schema_of
from jobs import stages
from jobs.amounts import PLANNED, add_planned_seconds, collect_planned_seconds
from jobs.config import JobConfig, plain, typed, valid_keys
from jobs.help import field_docs, print_help
from jobs.job import CONF, check_arguments, exit_on_errors, register, run_typed
from jobs.run_folder import RunFolder
from recurrent_drafting.config import HeadTrainConfig
from serving.api.config import ApiConfig
from serving.config import GenerateConfig
from serving.web.config import WebConfig

SCHEMAS: dict[str, type[JobConfig]] = {
    "distill.pretrain": PretrainConfig,
    "distill.regenerate": RegenerateConfig,
    "distill.train": TrainConfig,
    "eval.analyze": AnalyzeConfig,
    "eval.compare": CompareConfig,
    "eval.doctor": DoctorConfig,
    "eval.plan": PlanConfig,
    "eval.replay": ReplayConfig,
    "eval.run": EvalConfig,
    "heads.train": schema_of("recurrent"),
    "recurrent_drafting.generate": GenerateConfig,
    "recurrent_drafting.train": HeadTrainConfig,
    "serving.api": ApiConfig,
    "serving.web": WebConfig,
}


def schema_for(job: str, *overrides: str) -> type[JobConfig]:
    """Return the schema of a job; for heads.train, it depends on the kind of head."""
    return schema_of(find_kind_name(overrides)) if job == "heads.train" else SCHEMAS[job]


def composed(job: str, *overrides: str) -> DictConfig:
    """Compose a job's configuration with overrides."""
    register(job, schema_for(job, *overrides))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(job.replace(".", "_"), list(overrides))


TRAINERS = ("distill.train", "heads.train", "recurrent_drafting.train")


def experiments() -> list[tuple[str, str]]:
    """Return the name and the job of every experiment; one without a job suits every trainer."""
    found = []
    for file in sorted((CONF / "experiment").glob("*.yaml")):
        job = yaml.safe_load(file.read_text()).get("job")
        found += [(file.stem, one) for one in ([job] if job else TRAINERS)]
    return found


@pytest.mark.parametrize("job", SCHEMAS)
def test_every_job_composes_with_its_schema(job: str):
    needed = {"eval.run": ["drafters=[prompt_lookup]"], "eval.doctor": ["++drafter={use: FOLDER}"]}
    config = typed(composed(job, *needed.get(job, [])), SCHEMAS[job])
    assert config.job == job
    assert config.output_dir == f"runs/{job}/default"


@pytest.mark.parametrize(("name", "job"), experiments())
def test_every_experiment_composes_with_its_job(name: str, job: str):
    given = f"+experiment={name}"
    config = typed(composed(job, given), schema_for(job, given))
    assert config.experiment == name, "the experiment's name names the run folder"


def test_the_quickstart_fits_into_ten_minutes():
    """Check that the time limits of training and evaluation leave time for the rest.

    Imports, held-out answers and the report took 90 seconds on a third of a core.
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


def test_conf_has_only_known_groups():
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


def test_a_value_for_a_group_names_its_keys():
    with pytest.raises(
        UserError, match=r"'on_policy' is 0.25, but it is a group of keys.*on_policy\.share"
    ):
        typed(OmegaConf.create({"on_policy": 0.25}), TrainConfig)


def test_a_group_of_another_job_is_an_unknown_key():
    with pytest.raises(
        UserError, match=r"unknown configuration key 'drafter'; the nearest valid key is 'drafters'"
    ):
        check_arguments(["drafter=runs/mine"], "eval.run", EvalConfig)
    check_arguments(["+student=llama_796m"], "eval.run", EvalConfig)


def test_valid_keys_groups_and_hydra_flags_are_accepted():
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


def test_the_error_for_a_missing_list_shows_the_list():
    for key, value in (("num_draft_tokens", "6"), ("batch_sizes", "4")):
        with pytest.raises(
            UserError, match=rf"key '{key}' is {value}, expected a list: {key}=\[{value}\]"
        ):
            typed(composed("eval.run", f"{key}={value}"), EvalConfig)


def test_the_error_for_another_jobs_experiment_has_the_right_command():
    with pytest.raises(
        UserError, match=r"Run python -m distill.pretrain \+experiment=quickstart_target"
    ):
        check_arguments(["+experiment=quickstart_target"], "distill.train", TrainConfig)
    with pytest.raises(UserError, match=r"experiment .quikstart. is unknown, .*quickstart"):
        check_arguments(["+experiment=quikstart"], "distill.train", TrainConfig)


def test_a_folder_of_another_configuration_is_refused_by_key(tmp_path: Path):
    config = typed(
        composed("distill.train", "+experiment=smoke", f"output_dir={tmp_path}"), TrainConfig
    )
    RunFolder(config)
    config.seed += 1
    RunFolder(config)  # without a manifest, a failed start does not keep the folder
    config.seed -= 1
    RunFolder(config).write_manifest([], {}, finished=False)
    RunFolder(config)  # the same configuration resumes
    config.loop.optimizer.lr *= 2
    # Threads and the sharing of work among ranks change no result, so they may differ.
    config.threads = 5
    config.parallel.kind, config.loop.micro_batch_tokens, config.loop.activation_checkpointing = (
        "zero2",
        128,
        True,
    )
    with pytest.raises(UserError, match=r"different: loop\.optimizer\.lr \(.*output_dir=") as error:
        RunFolder(config)
    assert not {"threads", "parallel", "micro_batch"} & {*re.split(r"[ .(]", str(error.value))}


def test_a_saved_configuration_loads_equal(tmp_path: Path):
    config = typed(
        composed("distill.train", "+experiment=quickstart", f"output_dir={tmp_path}"), TrainConfig
    )
    folder = RunFolder(config)
    again = OmegaConf.load(folder.path / "config.yaml")
    assert isinstance(again, DictConfig)
    assert plain(typed(again, TrainConfig)) == plain(config)


def test_a_changed_configuration_changes_no_later_one():
    found = composed("distill.train", "output_dir=/run")
    before, changed = (typed(found, TrainConfig) for _ in range(2))
    changed.loop.max_steps += 1
    changed.stages.append("eval.run")
    changed.stage_overrides["eval.run"] = ["seed=1"]
    assert plain(typed(found, TrainConfig)) == plain(before) != plain(changed)


def test_the_error_for_invalid_yaml_names_the_experiment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("job: distill.train\nloop: max_steps: 3\n")
    monkeypatch.setattr("jobs.job.CONF", tmp_path)
    with pytest.raises(
        UserError,
        match=r"mine.yaml is not valid YAML: mapping values are not allowed here .* line 2",
    ):
        check_arguments(["+experiment=mine"], "distill.train", TrainConfig)


def test_a_full_disk_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = composed("distill.train", "+experiment=smoke", f"output_dir={tmp_path}")

    def write_a_log(config: TrainConfig) -> None:
        with Path("/dev/full").open("w") as file:
            file.write("a line")

    with pytest.raises(
        UserError,
        match=f"could not write {tmp_path}: .*No space left on device.* MB are free there",
    ):
        run_typed(config, "distill.train", TrainConfig, write_a_log)


def test_a_signal_outside_of_the_loop_has_no_traceback(capsys: pytest.CaptureFixture[str]):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        exit_on_errors(interrupted)
    assert stop.value.code == 130
    assert "Run the same command to continue" in capsys.readouterr().err


def test_an_output_dir_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "run"):
        config = typed(
            composed("distill.train", "+experiment=smoke", f"output_dir={folder}"), TrainConfig
        )
        with pytest.raises(
            UserError, match="is not a folder: .*taken.* is a file. Set another output_dir="
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
def test_every_setting_has_a_description(schema: type[JobConfig]):
    docs = field_docs(schema)
    assert not [key for key, text in docs.items() if not text]
    inner = {
        key
        for key in valid_keys(schema)
        if not any(other.startswith(f"{key}.") for other in valid_keys(schema))
    }
    assert docs.keys() == inner


def test_help_shows_the_values_of_its_command_line(capsys: pytest.CaptureFixture[str]):
    print_help("distill.train", TrainConfig, ["+experiment=smoke", "seed=7"])
    text = capsys.readouterr().out
    assert "seed=7" in text
    assert "experiment=smoke" in text
    assert "the depth that sets" in text
    assert "benchmark=" not in text, "another job's group"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_cuts_no_value(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [f"a/long/folder/number_{number}/chats.json" for number in range(5)]
    folder = "a_long_name_of_a_folder" * 6
    print_help("distill.train", TrainConfig, [f"data.chats={names}", f"target.path={folder}"])
    lines = capsys.readouterr().out.splitlines()
    assert not any("…" in line for line in lines), "the mark of what rich cuts"
    shown = "".join("".join(line[: columns // 2].split()) for line in lines)
    assert "".join(f"data.chats={names}".split()) in shown
    assert f"target.path={folder}" in shown


def test_an_experiment_without_a_plus_is_refused():
    with pytest.raises(UserError, match=r"needs a plus: \+experiment=smoke"):
        check_arguments(["experiment=smoke"], "distill.train", TrainConfig)


def test_the_total_cost_converts_each_stage_by_its_own_speed(
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
    folders = [str(tmp_path / "run"), str(elsewhere)]
    stages._print_total(folders, started=0.0, answers=0.0)
    counted = "8.0 TFLOP, 0.0039 hours (14 s) at 0.5 and 1 TFLOP/s (assumed_tflops)"
    left_out = "; evaluations are not counted\n"
    assert capsys.readouterr().out == f"all stages together: {counted}{left_out}"
    stages._print_total(folders, started=0.0, answers=720.0)
    answers = "at most 0.20 hours for the target's answers"
    assert capsys.readouterr().out == f"all stages together: {counted}, and {answers}{left_out}"
    stages._print_total([], started=0.0, answers=720.0)
    assert capsys.readouterr().out == f"all stages together: {answers}{left_out}"


def test_seconds_that_a_stage_plans_reach_the_experiment(monkeypatch: pytest.MonkeyPatch):
    add_planned_seconds(1.0)  # outside of an experiment
    program = "from jobs.amounts import add_planned_seconds; add_planned_seconds(2.5)"
    with collect_planned_seconds() as file:
        for _ in range(2):
            subprocess.run([sys.executable, "-c", program], check=True)
        assert file.read_text().split() == ["2.5", "2.5"]
    assert not file.exists()


@pytest.mark.parametrize("flags", ["avx2", "avx2 avx512_bf16"])
def test_auto_trains_in_the_dtype_that_the_processor_multiplies(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the dtype is chosen once, so that the run folder names the one trained in."""
    monkeypatch.setattr(linear, "_cpuinfo", lambda: f"flags : {flags}")
    monkeypatch.setattr(linear, "can_pack", lambda device, dtype: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = {"job": "distill.train", "output_dir": "x", "loop": {"dtype": "auto"}}
    config = typed(OmegaConf.create({**given, "target": {"path": "x"}}), TrainConfig)
    assert config.loop.dtype == ("bfloat16" if "bf16" in flags else "float32")
    assert plain(config)["loop"]["dtype"] == config.loop.dtype
