"""The launch lines in a drafter folder's README: valid in any folder, for any name of a target."""

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoding import generate, load
from distill.drafter_folder import write_card
from jobs.job import CONF
from tests.support.vllm_server import code_block
from training.drafter_folder import Provenance

ROOT = CONF.parent


@pytest.fixture
def drafter(tiny_target: Path, tmp_path: Path) -> Path:
    """Return a copy of a model folder, with no README yet."""
    return Path(shutil.copytree(tiny_target, tmp_path / "my drafter"))


def write_readme(drafter: Path, target: str, target_folder: Path) -> Path:
    """Write a drafter's card and README for a target, as a job does; return the README."""
    model = AutoModelForCausalLM.from_pretrained(drafter)
    write_card(drafter, model, Provenance.untrained("mine", target, target_folder))
    return drafter / "README.md"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("embedded:target", None), ("a target/of mine", "a target/of mine"), ("~/target", "target")],
)
def test_the_vllm_line_names_a_target_by_its_absolute_path(
    drafter: Path,
    embedded_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    expected: str | None,
):
    path = tmp_path / expected if expected else embedded_target
    path.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    readme = write_readme(drafter, name, embedded_target)
    *command, given = shlex.split(code_block(readme, "vLLM"))
    assert command == ["vllm", "serve", str(path), "--speculative-config"]
    assert json.loads(given) == {"method": "draft_model", "model": ".", "num_speculative_tokens": 4}
    assert "On another machine, replace it" in readme.read_text()


@pytest.mark.parametrize("unreliable", [False, True])
def test_a_readme_shows_no_unreliable_speedup(
    drafter: Path, embedded_target: Path, unreliable: bool
):
    figures = {"acceptance": 0.5, "predicted_speedup": 1.234, "temperature": 0.0}
    figures["predicted_draft_length"] = 4.0
    if unreliable:
        figures["predicted_speedup_unreliable"] = 1.0
    origin = Provenance.untrained("mine", "embedded:target", embedded_target)
    origin = dataclasses.replace(origin, acceptance=figures)
    write_card(drafter, AutoModelForCausalLM.from_pretrained(drafter), origin)
    readme = (drafter / "README.md").read_text()
    assert "Held-out: acceptance 0.500, texts at temperature 0. Predicted: speedup " in readme
    assert ", draft length 4.\n" in readme, "a whole number"
    assert ("Predicted: speedup unreliable (other processes" in readme) == unreliable
    assert ("1.234" in readme) == (not unreliable)


def test_a_name_on_the_hub_stays_as_it_is(drafter: Path, embedded_target: Path):
    readme = write_readme(drafter, "mistralai/Mistral-7B-v0.1", embedded_target)
    for engine in ("vLLM", "SGLang", "TensorRT-LLM"):
        assert " mistralai/Mistral-7B-v0.1 " in code_block(readme, engine)
    assert 'from_pretrained("mistralai/Mistral-7B-v0.1")' in code_block(readme, "Hugging Face")
    assert "On another machine" not in readme.read_text()


def test_the_lines_for_tensorrt_llm_write_its_configuration(
    drafter: Path, embedded_target: Path, tmp_path: Path
):
    """Run the block with a program in the server's place that prints what it is given."""
    program = tmp_path / "bin" / "trtllm-serve"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\ncat "$3"\n')
    program.chmod(0o755)
    block = code_block(write_readme(drafter, "org/name", embedded_target), "TensorRT-LLM")
    path = f"{program.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", block],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    command, _, configuration = done.stdout.partition("\n")
    assert command == "org/name --extra_llm_api_options speculation.yaml"
    assert yaml.safe_load(configuration) == {
        "disable_overlap_scheduler": True,
        "speculative_config": {
            "decoding_type": "DraftTarget",
            "max_draft_len": 4,
            "speculative_model_dir": ".",
        },
    }


def run_block(readme: Path, engine: str) -> str:
    """Run a README's Python lines in its folder, and return what they print."""
    done = subprocess.run(
        [sys.executable, "-c", code_block(readme, engine)],
        cwd=readme.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT) if engine == "Shallow Draft" else ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_lines_for_shallow_draft_run_as_printed(drafter: Path, embedded_target: Path):
    readme = write_readme(drafter, "embedded:target", embedded_target)
    plain = generate(load(embedded_target), "Once upon a time", max_new_tokens=64)
    assert run_block(readme, "Shallow Draft") == plain.text + "\n"


@pytest.mark.long
def test_the_lines_for_hugging_face_run_as_printed(drafter: Path, embedded_target: Path):
    readme = write_readme(drafter, "embedded:target", embedded_target)
    printed = run_block(readme, "Hugging Face")
    target = AutoModelForCausalLM.from_pretrained(embedded_target)
    tokenizer = AutoTokenizer.from_pretrained(embedded_target)
    ids = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    plain = target.generate(ids, max_new_tokens=64)[0]
    text = tokenizer.decode(plain, skip_special_tokens=True)
    # In bfloat16 a near tie may come out either way, which the first tokens are not.
    assert printed.startswith(text[: len(text) // 4]), (printed, text)
    assert not torch.equal(plain, ids[0])
