"""Files of conf/drafter, `drafters=` and `decoding.load` agree on every drafter."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from decoding.drafters.build import choose_drafter, options_of
from decoding.drafters.registry import DRAFTERS, imported
from decoding.errors import UserError
from jobs import drafters
from jobs.config import TargetConfig
from jobs.drafters import CONF, WORKERS, check_entries, describe

FILES = sorted(path.stem for path in CONF.glob("*.yaml"))


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the default arguments of a class, including those of its base classes."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if "__init__" in vars(base):
            parameters = signature(vars(base)["__init__"]).parameters.values()
            found |= {one.name: one.default for one in parameters}
    return found


def agrees_with_registry(name: str, values: dict[str, Any]) -> bool:
    """Return whether the values in a drafter's file equal the registry's defaults."""
    entry = DRAFTERS[name]
    kind = imported(entry.kind)
    usual = defaults_of(kind) | dict(entry.options)
    if kind.__name__ == "PromptLookup":
        usual = usual | {"name": "prompt_lookup"}
    plain = {key: value for key, value in values.items() if key not in ("name", entry.needs)}
    return all(
        (list(usual[key]) if isinstance(usual[key], tuple) else usual[key]) == value
        for key, value in plain.items()
    )


def test_files_and_the_registry_have_the_same_names():
    assert sorted(DRAFTERS) == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_values_of_the_registry(name: str):
    values: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert "_target_" not in values
    assert values.get("name", name) == name
    assert [key for key, value in values.items() if value == "???"] == [
        key for key in (DRAFTERS[name].needs,) if key
    ]
    assert values.keys() <= options_of(imported(DRAFTERS[name].kind))  # type: ignore[operator]
    assert agrees_with_registry(name, values)


def test_control_a_different_value_does_not_agree():
    assert not agrees_with_registry("budget_tree", {"max_nodes": 16})
    assert not agrees_with_registry("recurrent", {"by_cost": False})


@pytest.mark.parametrize("name", DRAFTERS)
def test_jobs_and_load_choose_the_same_class_and_options(name: str, tiny_target: Path):
    needed = {key: str(tiny_target) for key in (DRAFTERS[name].needs,) if key}
    choice = choose_drafter({"use": name, **needed})
    target = TargetConfig(path=str(tiny_target), device="cpu")
    (mapping,) = describe([{"use": name, **needed}], target, control=False).values()
    assert imported(mapping["_target_"]) is choice.kind
    given = {
        key: value
        for key, value in mapping.items()
        if key in choice.options and choice.options[key] != "auto"
    }
    assert given == {key: value for key, value in choice.options.items() if key in given}
    assert DRAFTERS[name].options.keys() <= mapping.keys()


def test_a_users_file_names_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drafters, "CONF", tmp_path)
    (tmp_path / "mine.yaml").write_text(f"_target_: {DRAFTERS['lookahead'].kind}\nngram: 3\n")
    found = describe(["mine", "lookahead"], TargetConfig(), control=False)
    assert found["mine"]["ngram"] == 3
    assert found["lookahead"]["_target_"] == found["mine"]["_target_"]
    (tmp_path / "bare.yaml").write_text("ngram: 3\n")
    with pytest.raises(
        UserError, match=r"bare.yaml has no _target_, and the registry has no drafter bare"
    ):
        describe(["bare"], TargetConfig(), control=False)
    with pytest.raises(UserError, match="the nearest is 'mine'"):
        describe(["mime"], TargetConfig(), control=False)


@pytest.mark.parametrize("check", [check_entries, lambda one: describe(one, TargetConfig(), False)])
def test_a_function_is_not_a_class(check: Any):
    with pytest.raises(UserError, match=r"the class math\.sqrt of .* cannot be imported: it is a "):
        check([{"_target_": "math.sqrt", "x": 4}])


@pytest.mark.parametrize(("key", "word"), [("dtype", "float31"), ("backend", "natural")])
def test_an_unknown_dtype_or_backend_is_refused(tiny_target: Path, key: str, word: str):
    target = TargetConfig(path=str(tiny_target), device="cpu", **{key: word})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{key} '{word}' is unknown, expected one of"):
        drafters.with_execution(target, tiny_target)


def test_a_student_shape_is_not_a_drafter():
    with pytest.raises(UserError, match="'llama_796m' is neither a folder"):
        describe(["llama_796m"], TargetConfig(), control=False)


def test_entries_are_checked_before_their_folders_exist():
    check_entries([{"use": "nowhere", "beam_width": 3}, {"use": "nowhere", "execution": "eager"}])
    check_entries([{"use": "chain", "draft_cores": 1}])
    with pytest.raises(UserError, match="has the key 'frontiers', which RankedTree"):
        check_entries([{"use": "budget_tree", "frontiers": 3}])
    check_entries([{"use": "parallel", "draft_cores": 1, "tokens": 4}])
    workers = {kind.__name__: imported(name).__name__ for kind, name in WORKERS.items()}
    assert workers == {"ChainDrafter": "RemoteChain", "ParallelChain": "RemoteParallelChain"}
