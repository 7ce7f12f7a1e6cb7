"""Python files in a model folder do not run unless the user trusts the folder."""

import ast
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import decoding
from decoding.errors import UserError
from decoding.models.load import load_target
from jobs.config import TargetConfig
from recurrent_drafting.generate import run as generate
from serving.config import GenerateConfig
from tests.support.small_jobs import JOBS, configured
from tests.support.tiers import tiered

pytestmark = pytest.mark.usefixtures("undrawn")
ROOT = Path(__file__).resolve().parent.parent
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizerFast

Path({written!r}).write_text("the folder's code ran")


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(LlamaTokenizerFast):
    pass
"""


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Return the file that the folder's Python writes when it runs."""
    return tmp_path / "written"


@pytest.fixture
def folder(
    tiny_target: Path, tmp_path: Path, trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return a model folder whose own Python defines its model type.

    Standard input answers yes to every question.
    """
    own = tmp_path / "own"
    shutil.copytree(tiny_target, own)
    (own / "code.py").write_text(CODE.format(written=str(trace_file)))
    config = json.loads((own / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    (own / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((own / "tokenizer_config.json").read_text())
    tokenizer |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "code.OwnTokenizer"]},
    }
    (own / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return own


def job_on_folder(name: str, *overrides: str) -> Callable[[Path, Path, Path], object]:
    """Return a function that runs a job on the folder with own Python.

    Its arguments: that folder, the tiny target and the run folder.
    """
    return lambda own, tiny, out: JOBS[name].run(configured(name, own, out, *overrides))


def job_on_another_target(
    name: str, key: str, *overrides: str
) -> Callable[[Path, Path, Path], object]:
    """Return a function that runs a job on the tiny target, with the other folder under a key."""
    return lambda own, tiny, out: JOBS[name].run(
        configured(name, tiny, out, f"{key}={own}", *overrides)
    )


def chat(own: Path, out: Path, **fields: object) -> None:
    """Run the generate job on a folder."""
    (out.parent / "prompts.jsonl").write_text('{"id": "a", "turns": ["Hi"]}\n')
    config = GenerateConfig(
        job="recurrent_drafting.generate",
        target=TargetConfig(path=str(own), device="cpu"),
        prompts=str(out.parent / "prompts.jsonl"),
        max_new_tokens=2,
    )
    generate(GenerateConfig(**{**vars(config), **fields}))


WAYS: dict[str, Callable[[Path, Path, Path], object]] = {
    **{
        f"{name}, {dry}": job_on_folder(name, f"dry_run={dry}")
        for name in JOBS
        for dry in ("true", "false")
    },
    "eval.run, hf": job_on_folder("eval.run", "target.backend=hf"),
    "distill.regenerate, hf": job_on_folder("distill.regenerate", "target.backend=hf"),
    "distill.train from a folder": job_on_another_target(
        "distill.train", "student.path", "student.init=folder"
    ),
    "its dry run": job_on_another_target(
        "distill.train", "student.path", "student.init=folder", "dry_run=true"
    ),
    "distill.pretrain from a folder": job_on_another_target("distill.pretrain", "init_from"),
    "generate": lambda own, tiny, out: chat(own, out),
    "generate, hf": lambda own, tiny, out: chat(
        own, out, target=TargetConfig(str(own), backend="hf", device="cpu")
    ),
    "generate with its tokenizer": lambda own, tiny, out: chat(tiny, out, tokenizer=str(own)),
    "generate with it as a drafter": lambda own, tiny, out: chat(
        tiny, out, drafter={"use": str(own)}
    ),
    "decoding.load": lambda own, tiny, out: decoding.load(own),
    "decoding.load, hf": lambda own, tiny, out: decoding.load(own, backend="hf"),
    "decoding.load as a drafter": lambda own, tiny, out: decoding.load(tiny, own),
    "load_target": lambda own, tiny, out: load_target(own, backend="hf"),
}
del WAYS["eval.compare, true"], WAYS["eval.compare, false"]  # it reads runs, not a folder
WAYS["a drafter of eval.run"] = lambda own, tiny, out: JOBS["eval.run"].run(
    configured("eval.run", tiny, out, f"drafters=[{own}]")
)


@pytest.mark.parametrize(
    "way", tiered(WAYS, lambda way: not way.endswith(", false") or way.startswith("eval.run"))
)
def test_python_of_a_model_folder_does_not_run(
    way: str, folder: Path, trace_file: Path, tiny_target: Path, tmp_path: Path
):
    with pytest.raises(UserError) as error:
        WAYS[way](folder, tiny_target, tmp_path / "run")
    # Jobs for one model family name that family.
    words = (
        "trust_remote_code",
        "model_type is 'own', expected 'llama'",
        "model_type 'own' is not one of the native",
    )
    assert any(one in str(error.value) for one in words)
    assert "huggingface.co" not in str(error.value) and "`" not in str(error.value), (
        "the message of transformers"
    )
    assert not trace_file.exists()


def test_control_python_of_a_trusted_folder_runs(
    folder: Path,
    trace_file: Path,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Check that trusted Python runs in eval.run, and that jobs that make drafters refuse trust."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    tokenizer = json.loads((tiny_target / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    # Only the target is trusted, not the folders of its drafters.
    trusted = ["target.backend=hf", "target.trust_remote_code=true", "drafters=[prompt_lookup]"]
    JOBS["eval.run"].run(configured("eval.run", folder, tmp_path / "run", *trusted))
    assert trace_file.read_text() == "the folder's code ran"
    for name in (
        "distill.train",
        "distill.prune",
        "distill.skip_search",
        "recurrent_drafting.train",
    ):
        with pytest.raises(
            UserError, match=r"target.trust_remote_code is true, expected false, as this job"
        ):
            JOBS[name].run(
                configured(name, tiny_target, tmp_path / name, "target.trust_remote_code=true")
            )


def test_every_auto_class_gets_trust_remote_code():
    """Check every call, since transformers asks on standard input without this argument."""
    asked = []
    for package in (
        "decoding",
        "training",
        "distill",
        "recurrent_drafting",
        "heads",
        "serving",
        "eval",
        "scripts",
    ):
        for file in (ROOT / package).rglob("*.py"):
            text = file.read_text()
            for node in ast.walk(ast.parse(text)) if "Auto" in text else ():
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                owner = ast.unparse(node.func.value)
                if owner.startswith("Auto") and node.func.attr in (
                    "from_pretrained",
                    "from_config",
                ):
                    given = {keyword.arg for keyword in node.keywords}
                    if "trust_remote_code" not in given:
                        asked.append(f"{file}:{node.lineno}")
    assert not asked
