"""Stages of an experiment: inherited keys and overrides."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from decoding.errors import UserError
from distill.config import PretrainConfig, PruneConfig, RegenerateConfig, TrainConfig
from eval.config import EvalConfig
from jobs.composing import CONF, compose_job
from jobs.config import JobConfig, plain, typed
from jobs.inheritance import inherited_keys
from jobs.schemas import SCHEMAS, schema_of
from jobs.stages import Stage, compose_stage, run_stages
from recurrent_drafting.config import HeadTrainConfig
from tests.support.tiers import tiered

EVERY_JOB = ["seed", "dry_run", "threads"]  # of JobConfig
GIVEN = {"eval.run": ["draft_model=/draft", "benchmark_folder=/prompts"]}
RECIPES = {
    file.stem: str(written.get("job", "distill.train"))
    for file in sorted((CONF / "experiment").glob("*.yaml"))
    if "stage_overrides" in (written := yaml.safe_load(file.read_text()))
}


def experiment(job: str, *given: str) -> tuple[JobConfig, DictConfig]:
    """Return the typed and the composed configuration of a job with further settings."""
    composed = compose_job(job, schema_of(job), ["output_dir=/run", *given])
    return typed(composed, schema_of(job)), composed


def stage(name: str, overrides: list[str], *given: str, job: str = "distill.train") -> Stage:
    """Compose one stage, with its overrides, of an experiment of `job`."""
    config, composed = experiment(job, *given)
    composed.stage_overrides = {name: overrides}
    return compose_stage(name, typed(composed, type(config)), composed)


def stage_config(*arguments: Any, **named: Any) -> Any:
    """Return the typed configuration of a stage that is not a sweep."""
    one = stage(*arguments, **named)
    (member,) = one.members
    return typed(member, one.schema)


@pytest.mark.parametrize(
    ("mine", "theirs", "keys"),
    [
        (
            TrainConfig,
            PruneConfig,
            {"target", "student", "data", "parallel", "tracker", "assumed_tflops", "doctor"}
            | {
                f"loop.{name}"
                for name in ("micro_batch_tokens", "dtype", "activation_checkpointing")
            },
        ),
        (TrainConfig, RegenerateConfig, {"target", "data", "parallel"}),
        # `loss` and `top_k` have different meanings in the two jobs
        (TrainConfig, EvalConfig, {"target", "tracker"}),
        (HeadTrainConfig, EvalConfig, {"target", "tracker"}),
    ],
)
def test_a_stage_inherits_the_keys_of_shared_dataclasses(mine: type, theirs: type, keys: set[str]):
    assert {*inherited_keys(mine, theirs)} == {*EVERY_JOB, *keys}


def test_control_keys_of_equal_names_in_two_dataclasses_differ():
    assert "top_k" in vars(EvalConfig()) and "top_k" in vars(HeadTrainConfig())
    assert "loss" in vars(TrainConfig()) and "loss" in vars(HeadTrainConfig())
    assert "loss" not in inherited_keys(TrainConfig, HeadTrainConfig)


def test_a_stage_of_the_called_job_inherits_all_keys():
    keys = {*inherited_keys(TrainConfig, TrainConfig, is_called_job=True)}
    assert {*vars(TrainConfig())} - keys == {"output_dir", "stages", "stage_overrides"}


@pytest.mark.parametrize(
    ("mine", "theirs", "groups"),
    [
        (HeadTrainConfig, TrainConfig, {"target", "parallel", "tracker"}),
        (PretrainConfig, PretrainConfig, {"parallel", "tracker"}),
    ],
)
def test_a_stage_with_its_own_experiment_inherits_only_groups_of_setting(
    mine: type, theirs: type, groups: set[str]
):
    assert {*inherited_keys(mine, theirs, has_own_experiment=True)} == {*EVERY_JOB, *groups}


def test_every_job_has_a_schema_and_a_configuration():
    assert {*SCHEMAS} == {
        str(yaml.safe_load(file.read_text())["job"])
        for file in CONF.glob("*.yaml")
        if file.name != "base.yaml"
    }
    for job in SCHEMAS:
        assert issubclass(schema_of(job), JobConfig)
    with pytest.raises(
        UserError, match="stage eval.walk: 'eval.walk' is not a job, expected one of distill"
    ):
        stage("eval.walk", [])


OTHERS = [
    "target.parallel=layers",
    "target.processes=2",
    "parallel.kind=ddp",
    "data.texts=[a.txt]",
    "data.mixing=loss",
    "data.max_samples=70",
    "from_drafter=old",
]


def find_needless_keys(name: str, more: dict[str, list[str]]) -> set[str]:
    """Return the keys that an experiment needlessly writes for a stage, each as "STAGE KEY".

    A key is needless if the stage would inherit the same value, even if the settings in OTHERS
    change. more: further overrides, by stage.

    Asserts that all stages and members have different folders.
    """
    job, found = RECIPES[name], set()
    fits = [text for text in OTHERS if re.split("[.=]", text)[0] in vars(schema_of(job)())]
    config, composed = experiment(job, f"+experiment={name}", *GIVEN.get(job, []), *fits)
    for one, overrides in more.items():
        composed.stage_overrides[one] += overrides
    config, folders = typed(composed, type(config)), []
    for one in config.stages:
        found_stage, overrides = compose_stage(one, config, composed), config.stage_overrides
        member = found_stage.members[-1]
        has_own_experiment = any("experiment=" in text for text in overrides.get(one, []))
        is_called_job = found_stage.job == job
        keys = inherited_keys(type(config), found_stage.schema, is_called_job, has_own_experiment)
        for text in overrides.get(one, []):
            key = text.lstrip("+").partition("=")[0]
            if any(f"{key}.".startswith(f"{mine}.") for mine in keys):
                values = [OmegaConf.select(node, key) for node in (member, composed)]
                found |= {f"{one} {key}"} if values[0] == values[1] else set()
        folders += [str(member.output_dir) for member in found_stage.members]
    assert len({*folders}) == len(folders)
    return found


@pytest.mark.parametrize("name", tiered(RECIPES, ["redrafter_smollm2_quick"]))
def test_an_experiment_writes_only_differences_for_its_stages(name: str):
    """Check that no stage repeats an inherited value, and that no two stages share a folder."""
    assert not find_needless_keys(name, {})


def test_control_a_needless_key_is_found():
    forwarded = {"distill.prune": ["target.device=${target.device}", "++tracker=${tracker}"]}
    assert find_needless_keys("llama_796m", forwarded) == {
        "distill.prune target.device",
        "distill.prune tracker",
    }


def test_a_group_whose_file_a_stage_chooses_is_not_inherited():
    config = stage_config("distill.prune", ["target=llama3_8b"], "target.path=/mine", "seed=7")
    assert (config.target.path, config.target.config["vocab_size"]) == ("models/llama3_8b", 128256)
    assert config.seed == 7


def test_a_stage_of_another_kind_of_head_takes_its_settings():
    """Check that a stage with another kind of head has the defaults of that kind.

    It inherits the other settings of its job, such as those of the loop.
    """
    given = ["head=recurrent", "loop.max_steps=77", "loss.temperature=0.5", "top_k=3"]
    for overrides, kind, predicted, top_k in (
        ([], "recurrent", 5, 3),
        (["head=medusa"], "medusa", 4, 10),
    ):
        config = stage_config("heads.train:one", overrides, *given, job="heads.train")
        assert (config.kind, config.loss.predict_n_tokens, config.top_k) == (kind, predicted, top_k)
        assert (config.loop.max_steps, config.loss.temperature) == (77, 0.5)
    other = stage_config("heads.train", [], *given, job="heads.train")
    assert type(config.head) is not type(other.head)


def test_an_inherited_group_replaces_the_default_of_the_stage():
    """Check that no key of the default, a published target, remains in the inherited group."""
    inherited, default = (
        stage_config("distill.prune", [], *given).target.config
        for given in (["target=qwen3_8b"], ["target=llama_7b"])
    )
    assert "torch_dtype" in default and inherited["model_type"] == "qwen3"
    assert inherited == yaml.safe_load((CONF / "target" / "qwen3_8b.yaml").read_text())["config"]


def test_a_forwarded_group_keeps_quotes_and_accents():
    path = '/texts/o\'neill, "été" = 1.txt'
    given = [f"+data.domains={{one: {{texts: ['{path.replace(chr(39), chr(92) + chr(39))}']}}}}"]
    for overrides in ([], ["++data.domains=${data.domains}"]):
        assert stage_config("distill.prune", overrides, *given).data.domains["one"].texts == [path]


@pytest.mark.parametrize("folder", ["/run/a=1,b", "/run/it's [one] {two}", '/run/a "b" $c'])
def test_the_experiments_folder_may_have_any_name(folder: str):
    config, composed = experiment("distill.train")
    composed.output_dir = folder
    composed.stage_overrides = {"eval.run": ["drafters=[{use: {output_dir}/drafter, name: x}]"]}
    config = typed(composed, TrainConfig)
    (member,) = compose_stage("eval.run", config, composed).members
    assert member.drafters[0]["use"] == f"{folder}/drafter"
    assert member.output_dir == f"{folder}/eval.run"


def test_a_sweep_has_one_member_per_combination():
    overrides = ["-m", "seed=1,2", "student.num_hidden_layers=${ladder}", "student.name=d@{seed}"]
    one = stage("distill.train:all", overrides, 'ladder="3,4"')
    found = [typed(member, TrainConfig) for member in one.members]
    assert [(member.seed, member.student.num_hidden_layers) for member in found] == [
        (1, 3),
        (1, 4),
        (2, 3),
        (2, 4),
    ]
    assert found[0].output_dir == "/run/all/seed=1,student.num_hidden_layers=3"
    assert [member.student.name for member in found] == ["d1", "d1", "d2", "d2"]
    with pytest.raises(UserError, match="stage distill.train:all: 'seed=1,2' has several values"):
        stage("distill.train:all", overrides[1:])


def test_a_sweep_over_files_gives_each_member_the_settings_of_its_file():
    """Check that kinds of heads are swept like values, and that both combine."""
    overrides = ["-m", "head=medusa,dflash", "head.draft_vocab_size=64,128"]
    given = ["head=recurrent", "loop.max_steps=77"]
    one = stage("heads.train:heads", overrides, *given, job="heads.train")
    found = [(m.head.name, m.head.draft_vocab_size, m.loss.predict_n_tokens) for m in one.members]
    assert found == [("medusa", 64, 4), ("medusa", 128, 4), ("dflash", 64, 7), ("dflash", 128, 7)]
    assert {m.loop.max_steps for m in one.members} == {77}
    folders = [m.output_dir for m in one.members]
    assert folders[-1] == "/run/heads/head=dflash,head.draft_vocab_size=128"
    assert len({*folders}) == len(folders)
    with pytest.raises(UserError, match="'head=medusa,dflash' has several values"):
        stage("heads.train:heads", overrides[1:2], *given, job="heads.train")
    overrides.append("head.slots=3")
    with pytest.raises(UserError, match="stage heads.train:heads: .*slots"):
        stage("heads.train:heads", overrides, *given, job="heads.train")


def test_control_a_wrong_key_of_a_stage_is_found(tmp_path: Path):
    """Control: a wrong key of the last stage is an error before the first stage starts."""
    config, composed = experiment("distill.train", f"output_dir={tmp_path}")
    composed.stages = ["distill.train", "eval.run"]
    composed.stage_overrides = {"eval.run": ["target.devise=cpu"]}
    with pytest.raises(
        UserError, match=r"stage eval.run: unknown .*'target.devise'.*target.device"
    ):
        run_stages(typed(composed, TrainConfig), composed)
    assert not [*tmp_path.iterdir()]


def test_a_stage_does_not_inherit_stages():
    """Check that a stage does not inherit its experiment's stages, which would run in its place."""
    overrides = ["+experiment=quickstart"]
    config = stage_config("distill.train", overrides, job="recurrent_drafting.train")
    assert (config.stages, config.stage_overrides, config.experiment) == ([], {}, "quickstart")
    assert plain(config)["loop"]["max_steps"] == 2000
