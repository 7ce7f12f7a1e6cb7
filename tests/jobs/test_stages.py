"""What a stage inherits of its experiment, and how its overrides are read."""

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

HOW = ["seed", "dry_run", "threads"]  # of JobConfig
GIVEN = {"eval.run": ["draft_model=/draft", "benchmark_folder=/prompts"]}
RECIPES = {
    file.stem: str(written["job"])
    for file in sorted((CONF / "experiment").glob("*.yaml"))
    if "stage_overrides" in (written := yaml.safe_load(file.read_text()))
}


def experiment(job: str, *given: str) -> tuple[JobConfig, DictConfig]:
    composed = compose_job(job, schema_of(job), ["output_dir=/run", *given])
    return typed(composed, schema_of(job)), composed


def stage(name: str, overrides: list[str], *given: str, job: str = "distill.train") -> Stage:
    """One stage with its overrides, of an experiment of `job` with further settings."""
    config, composed = experiment(job, *given)
    composed.stage_overrides = {name: overrides}
    return compose_stage(name, typed(composed, type(config)), composed)


def seen(*arguments: Any, **named: Any) -> Any:
    """The configuration of a stage that does not sweep."""
    one = stage(*arguments, **named)
    (member,) = one.members
    return typed(member, one.schema)


@pytest.mark.parametrize(
    ("mine", "theirs", "keys"),
    [
        (
            TrainConfig,
            PruneConfig,
            {"target", "student", "data", "parallel", "tracker", "assumed_tflops"}
            | {
                f"loop.{name}"
                for name in ("micro_batch_tokens", "dtype", "activation_checkpointing")
            },
        ),
        (TrainConfig, RegenerateConfig, {"target", "data", "parallel"}),
        # loss.name, and top_k of sampling and of accuracies, are called alike and mean two things
        (TrainConfig, EvalConfig, {"target", "tracker"}),
        (HeadTrainConfig, EvalConfig, {"target", "tracker"}),
    ],
)
def test_a_key_is_shared_where_one_dataclass_declares_it(mine: type, theirs: type, keys: set[str]):
    assert {*inherited_keys(mine, theirs)} == {*HOW, *keys}


def test_control_keys_of_one_name_are_not_one_key():
    assert "top_k" in vars(EvalConfig()) and "top_k" in vars(HeadTrainConfig())
    assert "loss" in vars(TrainConfig()) and "loss" in vars(HeadTrainConfig())
    assert "loss" not in inherited_keys(TrainConfig, HeadTrainConfig)


def test_the_called_jobs_own_stage_inherits_all():
    keys = {*inherited_keys(TrainConfig, TrainConfig, is_called_job=True)}
    assert {*vars(TrainConfig())} - keys == {"output_dir", "stages", "stage_overrides"}


@pytest.mark.parametrize(
    ("mine", "theirs", "groups"),
    [
        (HeadTrainConfig, TrainConfig, {"target", "parallel", "tracker"}),
        (PretrainConfig, PretrainConfig, {"parallel", "tracker"}),
    ],
)
def test_a_stage_with_an_experiment_of_its_own_takes_what_it_does_from_there(
    mine: type, theirs: type, groups: set[str]
):
    assert {*inherited_keys(mine, theirs, has_own_experiment=True)} == {*HOW, *groups}


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
]


def needless(name: str, more: dict[str, list[str]]) -> set[str]:
    """Keys that an experiment writes for a stage with the value that would be inherited, where
    other settings than its own are asked for. more: further overrides by stage.
    """
    job, found = RECIPES[name], set()
    fits = [text for text in OTHERS if text.split(".")[0] in vars(schema_of(job)())]
    config, composed = experiment(job, f"+experiment={name}", *GIVEN.get(job, []), *fits)
    for one, overrides in more.items():
        composed.stage_overrides[one] += overrides
    config, folders = typed(composed, type(config)), []
    for one in config.stages:
        put_together, overrides = compose_stage(one, config, composed), config.stage_overrides
        member = put_together.members[-1]
        has_own_experiment = any("experiment=" in text for text in overrides.get(one, []))
        is_called_job = put_together.job == job
        keys = inherited_keys(type(config), put_together.schema, is_called_job, has_own_experiment)
        for text in overrides.get(one, []):
            key = text.lstrip("+").partition("=")[0]
            if any(f"{key}.".startswith(f"{mine}.") for mine in keys):
                values = [OmegaConf.select(whole, key) for whole in (member, composed)]
                found |= {f"{one} {key}"} if values[0] == values[1] else set()
        folders += [str(member.output_dir) for member in put_together.members]
    assert len({*folders}) == len(folders)
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_writes_only_what_differs(name: str):
    """And its stages compose, by keys that they have, each in a folder of its own."""
    assert not needless(name, {})


def test_control_what_is_forwarded_by_hand_is_found():
    forwarded = {"distill.prune": ["target.device=${target.device}", "++tracker=${tracker}"]}
    assert needless("llama_796m", forwarded) == {
        "distill.prune target.device",
        "distill.prune tracker",
    }


def test_what_a_stage_chooses_of_conf_is_not_inherited():
    config = seen("distill.prune", ["target=llama3_8b"], "target.path=/mine", "seed=7")
    assert (config.target.path, config.target.config["vocab_size"]) == ("models/llama3_8b", 128256)
    assert config.seed == 7


def test_a_stage_of_another_kind_of_head_has_what_that_kind_sets():
    """And inherits the rest of its job's settings, of the loop too."""
    given = ["head=recurrent", "loop.max_steps=77", "loss.temperature=0.5", "top_k=3"]
    for overrides, kind, predicted, top_k in (
        ([], "recurrent", 5, 3),
        (["head=medusa"], "medusa", 4, 10),
    ):
        config = seen("heads.train:one", overrides, *given, job="heads.train")
        assert (config.kind, config.loss.predict_n_tokens, config.top_k) == (kind, predicted, top_k)
        assert (config.loop.max_steps, config.loss.temperature) == (77, 0.5)
    assert type(config.head) is not type(seen("heads.train", [], *given, job="heads.train").head)


def test_an_inherited_group_replaces_what_the_stages_job_has():
    """Its own default is a published target, of whose configuration nothing may be left over."""
    experiment_s, of_its_own = (
        seen("distill.prune", [], *given).target.config
        for given in (["target=qwen3_8b"], ["target=llama_7b"])
    )
    assert "torch_dtype" in of_its_own and experiment_s["model_type"] == "qwen3"
    assert experiment_s == yaml.safe_load((CONF / "target" / "qwen3_8b.yaml").read_text())["config"]


def test_a_group_forwarded_by_hand_arrives_as_it_is():
    """Quotes and accents in a path as well."""
    path = '/texts/o\'neill, "été" = 1.txt'
    given = [f"+data.domains={{one: {{texts: ['{path.replace(chr(39), chr(92) + chr(39))}']}}}}"]
    for overrides in ([], ["++data.domains=${data.domains}"]):
        assert seen("distill.prune", overrides, *given).data.domains["one"].texts == [path]


@pytest.mark.parametrize("folder", ["/run/a=1,b", "/run/it's [one] {two}", '/run/a "b" $c'])
def test_the_experiments_folder_may_be_called_anything(folder: str):
    config, composed = experiment("distill.train")
    composed.output_dir = folder
    composed.stage_overrides = {"eval.run": ["drafters=[{use: {output_dir}/drafter, name: x}]"]}
    config = typed(composed, TrainConfig)
    (member,) = compose_stage("eval.run", config, composed).members
    assert member.drafters[0]["use"] == f"{folder}/drafter"
    assert member.output_dir == f"{folder}/eval.run"


def test_a_sweep_has_a_member_for_each_combination():
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


def test_control_a_wrong_key_of_a_stage_is_found(tmp_path: Path):
    """Of the last one too, before the first starts."""
    config, composed = experiment("distill.train", f"output_dir={tmp_path}")
    composed.stages = ["distill.train", "eval.run"]
    composed.stage_overrides = {"eval.run": ["target.devise=cpu"]}
    with pytest.raises(
        UserError, match=r"stage eval.run: unknown .*'target.devise'.*target.device"
    ):
        run_stages(typed(composed, TrainConfig), composed)
    assert not [*tmp_path.iterdir()]


def test_a_stage_has_no_stages():
    """Those of an experiment that it is given would run instead of it."""
    config = seen("distill.train", ["+experiment=quickstart"], job="recurrent_drafting.train")
    assert (config.stages, config.stage_overrides, config.experiment) == ([], {}, "quickstart")
    assert plain(config)["loop"]["max_steps"] == 2000
