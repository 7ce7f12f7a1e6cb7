"""Jobs check settings by the same table as `generate`, before a model is loaded."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from distill.config import RegenerateConfig, TrainConfig
from distill.regenerate.job import check as check_regenerate
from distill.train import check as check_train
from eval.config import BenchmarkConfig, EvalConfig
from eval.measure.setup import check as check_eval
from jobs.config import TargetConfig
from jobs.paths import resolve
from serving.config import GenerateConfig
from serving.setup import check as check_generate
from training.config import DataConfig, HeldOutConfig
from training.data.readers import read_chats, read_prompts

ASSETS = Path(__file__).resolve().parents[2] / "assets"
TARGET = TargetConfig(path=str(ASSETS / "target"), device="cpu")
NAN, INF = math.nan, math.inf
TEMPERATURES = [NAN, INF, -1.0, 1e-300, 1e9]
BAD: list[tuple[str, Any]] = [
    *(("temperature", value) for value in TEMPERATURES),
    *(("top_p", value) for value in (NAN, 0.0, 1.5)),
    *(("min_p", value) for value in (NAN, -0.1, 1.5)),
    *(("top_k", value) for value in (-1, 2**31)),
    *(("seed", value) for value in (-1, 2**64)),
    *(("max_new_tokens", value) for value in (0, -5, 2**31)),
]


def evaluation(**changed: Any) -> None:
    if "temperature" in changed:
        changed["temperatures"] = [0.0, changed.pop("temperature")]
    changed = {"benchmark": BenchmarkConfig(path=str(ASSETS / "prompts.jsonl")), **changed}
    check_eval(EvalConfig(job="eval.run", output_dir="", target=TARGET, **changed))


def generation(**changed: Any) -> None:
    check_generate(
        GenerateConfig(job="recurrent_drafting.generate", output_dir="", target=TARGET, **changed)
    )


def regeneration(**changed: Any) -> None:
    data = DataConfig(chats=[str(ASSETS / "chats.json")], max_length=256)
    plain = RegenerateConfig(
        job="distill.regenerate", output_dir="", target=TARGET, data=data, max_new_tokens=64
    )
    check_regenerate(replace(plain, **changed))


@pytest.mark.parametrize("check", [evaluation, generation, regeneration])
@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_job_refuses_what_generate_refuses(check: Any, name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"{name}s?( is |=).*[Ee]xpected"):
        check(**{name: value})


@pytest.mark.parametrize("check", [evaluation, generation, regeneration])
@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 1e-5},
        {"seed": 2**64 - 1},
        {"top_p": 1.0, "min_p": 1.0},
        {"max_new_tokens": 2},
    ],
    ids=str,
)
def test_a_job_accepts_values_at_the_bounds(check: Any, good: dict[str, Any]) -> None:
    check(**good)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"repetition_penalty": NAN},
            "repetition_penalty is nan, expected a number from 0.01 to 100",
        ),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty is 0.0, expected a number from 0.01 to 100",
        ),
        (
            {"stop_strings": [""]},
            "stop_strings is .*, expected a tuple of nonempty strings",
        ),
        (
            {"benchmark": BenchmarkConfig(path="x", stop_strings=[""])},
            "benchmark.stop_strings is .*, expected a tuple of nonempty strings",
        ),
        ({"stopping_threshold": NAN}, "stopping_threshold is nan, expected a number from 0 to 1"),
        ({"temperatures": []}, "temperatures is .., expected one or more"),
        ({"batch_sizes": [10**9]}, "batch_sizes is .*, expected one or more whole numbers from 1"),
        ({"max_prompts": -1}, "max_prompts is -1, expected 1 or more, or 0 for all"),
        ({"sweep_prompts": -1}, "sweep_prompts is -1, expected 1 or more, or 0 for no sweep"),
        ({"show_texts": -1}, "show_texts is -1, expected 1 or more, or 0 for none"),
        ({"timing_repeats": 0}, "timing_repeats is 0, expected 1 or more"),
        ({"bootstrap_resamples": 0}, "bootstrap_resamples is 0, expected 1 or more"),
        ({"engine_timeout": -1.0}, "engine_timeout is -1.0, expected more than 0 s"),
        ({"allowed": "math.pi"}, "allowed=math.pi cannot be imported: it is a float"),
    ],
)
def test_invalid_settings_of_an_evaluation_are_refused(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        evaluation(**changed)


@pytest.mark.parametrize(("name", "value"), [("verify", "lenient"), ("stopping", "mood")])
def test_invalid_settings_of_a_generation_are_refused(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name} '{value}' is unknown, expected one of"):
        generation(**{name: value})


@pytest.mark.parametrize("value", TEMPERATURES)
def test_the_temperature_of_held_out_answers(value: float) -> None:
    config = TrainConfig(
        job="distill.train", output_dir="", target=TARGET, held_out=HeldOutConfig(temperature=value)
    )
    with pytest.raises(
        UserError, match=r"held_out.temperature is .*, expected 0 .greedy., or a number from 1e-05"
    ):
        check_train(config)


def test_unreadable_prompt_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    deep = "[" * 200_000 + "]" * 200_000
    (tmp_path / "folder.jsonl").mkdir()
    good = '{"turns": ["Hello"]}\n'
    for path, message in (
        (Path("n" * 5000), "cannot be opened .File name too long."),
        (Path("a\0b.jsonl"), "cannot be opened .*null"),
        (tmp_path / "nowhere.jsonl", "no such file or folder; expected"),
        (tmp_path / "folder.jsonl", "the folder holds no .jsonl"),
        (written("deep.jsonl", '{"turns": ' + deep + "}\n"), "values nested too deeply"),
        (written("deep.json", deep), "nested too deeply"),
        (written("cut.jsonl", '{"turns": ["a \\ud83d"]}\n'), "half a character"),
    ):
        with pytest.raises(UserError, match=message):
            read_prompts(path)
    mixed = written(
        "mixed.jsonl", good * 3 + '{"turns": ' + deep + "}\n" + '{"turns": ["a \\ud83d"]}\n'
    )
    assert len(read_prompts(mixed, max_bad=0.5)) == 3
    with pytest.raises(UserError, match="cannot be opened .File name too long."):
        resolve("n" * 5000)

    def denied(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)  # root may read everything
    for read in (read_prompts, read_chats):
        with pytest.raises(UserError, match=r"mixed.jsonl cannot be read .Permission denied."):
            read(mixed)
