"""An engine in a process of its own: real batches, and engines that die, hang or refuse."""

import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from decoding.errors import UserError
from serving.engines.interface import EngineConfig, Method, Sampling
from serving.engines.process import WORKERS, EngineProcess
from serving.engines.registry import ENGINES, python_of
from tests.support import tiny_folders as tiny

PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10]]


def config_of(target: Path, method: Method | None = None) -> EngineConfig:
    return EngineConfig(str(target), "float32", "cpu", 1, 64, 2, method=method or Method())


ANSWERS = """
answers = [{'tokens': p, 'first_token_seconds': None, 'seconds': 1.0} for p in prompts]
return dict(answers=answers, seconds=1.0, rounds=None, drafted=None, accepted=None,
            accepted_by_depth=None)
"""


def start(tmp_path: Path, body: str, timeout: float = 20.0) -> EngineProcess:
    """Start a program that answers a batch with the lines of `body`."""
    program = tmp_path / "worker.py"
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    program.write_text(
        f"import os, sys, time\nsys.path.insert(0, {str(WORKERS)!r})\nfrom channel import serve\n"
        f"def decode(prompts, sampling):\n{lines}\n"
        f"serve(lambda config: ('1.0', decode))\n"
    )
    return EngineProcess(str(program), config_of(tmp_path), tmp_path / "log", timeout=timeout)


def test_what_an_engine_prints_goes_to_its_log_and_not_into_the_answers(tmp_path):
    with start(tmp_path, "print('hello')" + ANSWERS) as engine:
        result = engine.decode(PROMPTS, Sampling(4))
    assert [answer.tokens for answer in result.answers] == PROMPTS
    assert "hello" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('out of memory', file=sys.stderr); os._exit(9)", "ended while .*out of memory"),
        ("os.kill(os.getpid(), 9)", "it ended by SIGKILL while decoding"),
        ("time.sleep(60)", "no reply within 2 s while decoding"),
        ("raise ValueError('a bad drafter')", "ValueError: a bad drafter"),
    ],
)
def test_an_engine_that_dies_hangs_or_refuses_is_an_error_with_its_words(tmp_path, body, words):
    with (
        start(tmp_path, body, timeout=2.0) as engine,
        pytest.raises(UserError, match=f"(?s)the engine failed with autoregressive .*{words}"),
    ):
        engine.decode(PROMPTS, Sampling(4))


def test_an_engine_that_was_killed_while_it_waited_names_the_signal(tmp_path):
    """Check an engine that ends between two batches, as one without memory may."""
    die_later = "import threading; threading.Timer(0.2, os.kill, (os.getpid(), 9)).start()"
    with start(tmp_path, die_later + ANSWERS) as engine:
        engine.decode(PROMPTS, Sampling(4))
        time.sleep(1.0)
        with pytest.raises(UserError, match="it ended by SIGKILL before its turn"):
            engine.decode(PROMPTS, Sampling(4))


def test_an_interpreter_without_the_engine_is_an_error_with_the_install_line():
    if importlib.util.find_spec("vllm"):
        pytest.skip("this interpreter has vLLM")
    with pytest.raises(UserError, match=r"has no module vllm\. Install it with ./scripts"):
        python_of("vllm", {"vllm": sys.executable})


def test_without_gguf_only_the_line_that_installs_it_is_named(monkeypatch):
    """llama.cpp's models are converted in our own process, so no other interpreter helps."""
    monkeypatch.setitem(ENGINES, "llama_cpp", replace(ENGINES["llama_cpp"], module="absent_gguf"))
    with pytest.raises(UserError, match=r"no module absent_gguf\. Install it with pip .*'\.$"):
        python_of("llama_cpp", {})
    with pytest.raises(UserError, match=r"engine_python.llama_cpp is /usr/bin/python3, but .*Rem"):
        python_of("llama_cpp", {"llama_cpp": "/usr/bin/python3"})
    monkeypatch.setenv("SHALLOW_DRAFT_LLAMA_CPP_PYTHON", "/nowhere/python")
    with pytest.raises(UserError, match="SHALLOW_DRAFT_LLAMA_CPP_PYTHON is /nowhere/python"):
        python_of("llama_cpp", {})


@pytest.mark.parametrize("engine", [name for name in ENGINES if not ENGINES[name].runs_here])
def test_the_environment_variable_names_an_interpreter_and_the_setting_overrides_it(
    monkeypatch, engine
):
    """Check that the variable has the engine's name, and that the error names it."""
    variable = f"SHALLOW_DRAFT_{engine.upper()}_PYTHON"
    monkeypatch.setenv(variable, "/nowhere/one")
    with pytest.raises(UserError, match=f"/nowhere/one cannot be run.*{variable}=PATH"):
        python_of(engine, {})
    with pytest.raises(UserError, match="/nowhere/two cannot be run"):
        python_of(engine, {engine: "/nowhere/two"})


@pytest.mark.long
@pytest.mark.parametrize("method", ["autoregressive", "draft_model", "ngram"])
def test_generate_ends_at_stop_tokens_and_counts_what_it_accepts(tmp_path, method):
    tiny.save(tmp_path / "target")
    drafter = str(tmp_path / "target") if method == "draft_model" else ""
    length = 0 if method == "autoregressive" else 3
    config = config_of(tmp_path / "target", Method(method, drafter, length))
    with EngineProcess(ENGINES["hf"].worker, config, tmp_path / "log") as engine:
        free = engine.decode(PROMPTS, Sampling(12, ignore_eos=True))
        stop = free.answers[0].tokens[5]
        ended = engine.decode(PROMPTS, Sampling(12, stop_token_ids=(stop,)))
    assert [len(answer.tokens) for answer in free.answers] == [12, 12]
    first = free.answers[0].tokens
    assert ended.answers[0].tokens == first[: first.index(stop) + 1]
    assert all(0 < a.first_token_seconds <= a.seconds <= free.seconds for a in free.answers)
    if method == "draft_model":  # the target drafts for itself: every token is accepted
        assert free.accepted == free.drafted == sum(free.accepted_by_depth) > 0
        assert free.tested_by_depth == free.accepted_by_depth
        assert free.rounds + free.accepted == 24
    elif method == "ngram":
        assert 0 <= free.accepted < free.drafted
    else:
        assert (free.rounds, free.drafted, free.accepted) == (0, 0, 0)
