"""Keys, values and class paths of earlier versions keep their meaning."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from decoding.drafters.registry import imported
from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from distill.config import PruneConfig, TrainConfig
from jobs import aliases
from jobs.aliases import current_arguments, current_config, current_costs, current_target
from jobs.config import TargetConfig, plain, typed
from jobs.drafter_use import DrafterUse
from jobs.drafters import build, describe, uses
from jobs.job import CONF, check_arguments, register
from jobs.run_folder import RunFolder
from jobs.saved_config import add_stamp, read_config, upgrade_config
from serving.config import GenerateConfig

CLASSES = {
    "decoding.chain": "ChainDrafter",
    "decoding.graph": "GraphDrafter",
    "decoding.lookahead": "Lookahead",
    "decoding.multi_candidate": "MultiCandidate",
    "decoding.ouroboros": "Ouroboros",
    "decoding.prompt_lookup": "SuffixLookup",
    "decoding.self_speculation": "SelfSpeculation",
    "decoding.static_tree": "StaticTree",
    "decoding.trees": "RankedTree",
    "decoding.with_lookup": "ChainWithLookup",
    "decoding.worker": "RemoteChain",
    "training.drafters": "looked_up",
}


def composed(job: str, *overrides: str) -> DictConfig:
    """Compose a training job's configuration."""
    register(job, {"distill.train": TrainConfig, "distill.prune": PruneConfig}[job])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(job.replace(".", "_"), [*overrides])


@pytest.mark.parametrize("module", aliases.MODULES)
def test_an_old_class_path_names_the_current_class(module: str):
    name = CLASSES[module]
    current = {"looked_up": "build_with_lookup"}.get(name, name)
    assert imported(current_target(f"{module}.{name}")).__name__ == current
    with pytest.raises(ImportError):
        imported(f"{module}.{name}")


def test_describe_accepts_an_old_class_path():
    entry = {"_target_": "decoding.prompt_lookup.PromptLookup", "name": "mine"}
    found = describe([entry], TargetConfig(), control=False)
    assert found["mine"]["_target_"] == "decoding.drafters.prompt_lookup.PromptLookup"


def test_old_keys_of_measured_costs_are_renamed():
    entry = {"t_target_ms": [1.0], "beams": 3, "t_draft_by_beams_ms": [[1, 0.5]]}
    assert {*current_costs(entry)} - {"t_target_ms"} == {*aliases.COSTS.values()}
    assert {*aliases.COSTS.values()} <= {*RoundCosts.__dataclass_fields__}


@pytest.mark.parametrize("job", ["distill.train", "distill.prune"])
def test_old_keys_on_the_command_line_are_renamed(job: str, capsys: pytest.CaptureFixture[str]):
    aliases._print_note.cache_clear()
    schema = {"distill.train": TrainConfig, "distill.prune": PruneConfig}[job]
    old = [
        "drafter=llama_796m",
        "drafter.num_hidden_layers=4,5",
        "++drafter.name=deep_${drafter.num_hidden_layers}",
        "data.texts=[drafter.txt]",
        "-m",
    ]
    found = current_arguments(job, old)
    assert found == [
        "student=llama_796m",
        "student.num_hidden_layers=4,5",
        "++student.name=deep_${student.num_hidden_layers}",
        "data.texts=[drafter.txt]",
        "-m",
    ]
    printed = capsys.readouterr().out
    assert printed.count("note: the key drafter is now called student") == 1
    check_arguments(found, job, schema)
    config: Any = typed(composed(job, *found[:1], "student.num_hidden_layers=4"), schema)
    assert (config.student.hidden_size, config.student.num_hidden_layers) == (2560, 4)
    assert current_arguments(job, found) == found
    with pytest.raises(UserError, match="unknown configuration key 'drafter"):
        check_arguments(old, job, schema)


def test_the_same_key_of_another_job_is_not_renamed():
    given = ["drafter={use: chain}", "drafter.folder=x"]
    assert current_arguments("recurrent_drafting.generate", given) == given
    assert current_arguments("eval.run", ["drafters=[x]"]) == ["drafters=[x]"]


def test_a_saved_configuration_gets_the_current_keys():
    saved = {
        "job": "distill.train",
        "drafter": {"num_hidden_layers": 3},
        "stage_overrides": {
            "distill.prune:first": ["drafter=shallow", "drafter.name=x", "output_dir=drafter"],
            "distill.train:second": ["drafter.path=a/@{drafter.num_hidden_layers}/b"],
            "eval.run": ["drafters=[a/drafter]", "name=${drafter.name}"],
        },
    }
    found = current_config(saved)
    assert found["student"] == {"num_hidden_layers": 3}
    assert "drafter" not in found
    assert found["stage_overrides"] == {
        "distill.prune:first": ["student=shallow", "student.name=x", "output_dir=drafter"],
        "distill.train:second": ["student.path=a/@{student.num_hidden_layers}/b"],
        "eval.run": ["drafters=[a/drafter]", "name=${student.name}"],
    }
    assert current_config({"job": "recurrent_drafting.generate", "drafter": {}})["drafter"] == {}


def test_a_run_of_an_earlier_version_resumes(tmp_path: Path):
    config = typed(
        composed("distill.train", "+experiment=smoke", f"output_dir={tmp_path}"), TrainConfig
    )
    RunFolder(config).write_manifest([], {}, finished=False)
    file = tmp_path / "config.yaml"
    saved = read_config(file, "")
    saved["drafter"] = saved.pop("student")
    file.write_text(add_stamp(OmegaConf.to_yaml(OmegaConf.create(saved))))
    RunFolder(config)
    assert typed(OmegaConf.create(upgrade_config(saved)), TrainConfig) == config
    saved["drafter"]["num_hidden_layers"] += 1
    file.write_text(add_stamp(OmegaConf.to_yaml(OmegaConf.create(saved))))
    with pytest.raises(UserError, match=r"different: student\.num_hidden_layers"):
        RunFolder(config)
    assert plain(config)["student"]["num_hidden_layers"] == 1


def test_old_options_of_drafters_are_renamed(tiny_target: Path):
    model = str(tiny_target)
    given: dict[str, Any] = {
        "job": "eval.run",
        "target": {"path": model, "device": "cpu"},
        "drafters": [
            {"use": "ranked_tree", "folder": model, "draws": "picked"},
            {"_target_": "decoding.static_tree.StaticTree", "folder": model, "draws": "drawn"},
            {"_target_": "mine.Drawing", "draws": "picked"},
            "prompt_lookup",
        ],
    }
    config = current_config(given)
    assert current_config(config) == config
    assert [one for one in config["drafters"] if "draws" in one] == [given["drafters"][2]]
    assert [one["children"] for one in config["drafters"][:2]] == ["top_k", "sampled"]
    entries = [*config["drafters"][:2], "prompt_lookup"]
    found = describe(entries, TargetConfig(**given["target"]), control=False)
    made = build(found, uses(found, DrafterUse()), tiny_target)
    assert [one.children for one in list(made.values())[:2]] == ["top_k", "sampled"]
    with pytest.raises(UserError, match="has the key 'draws', which RankedTree does not take"):
        describe(given["drafters"][:1], TargetConfig(**given["target"]), control=False)


@pytest.mark.parametrize(("old", "new"), [("picked", "top_k"), ("drawn", "sampled")])
def test_old_keys_and_values_of_the_generate_job_are_renamed(
    old: str, new: str, capsys: pytest.CaptureFixture[str]
):
    aliases._print_note.cache_clear()
    job = "recurrent_drafting.generate"
    entry = f"drafter={{use: graph, folder: x, draws: {old}}}"
    assert current_arguments(job, [f"draws={old}", entry]) == [f"children={new}", entry]
    assert capsys.readouterr().out.count("the key draws is now called children") == 1
    found = typed(
        OmegaConf.create(
            {
                "job": job,
                "output_dir": "x",
                "target": {"path": "y"},
                "draws": old,
                "drafter": {"use": "graph", "folder": "x", "draws": old},
            }
        ),
        GenerateConfig,
    )
    assert found.children == new
    assert found.drafter == {"use": "graph", "folder": "x", "children": new}
    assert {*aliases.VALUES["children"]} == {"picked", "drawn"}
