"""llama.cpp and OpenVINO run our models: our text in float32, our acceptance."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import decoding
from decoding.errors import UserError
from decoding.models.text.tokenizer import load_tokenizer
from decoding.models.text.tokenizer_repair import encoder, probes_of
from decoding.rounds.ties import top_two_gap
from serving.engines import conversion
from serving.engines.interface import BatchResult, EngineConfig, Method, Sampling
from serving.engines.process import EngineProcess
from serving.engines.registry import ENGINES, python_of

TOKENS, DRAFTS = 48, 4
QUESTIONS = (
    "def add(a, b):",
    "Write a function that reverses a list.",
    "What does sorted() return?",
    "How is a file opened?",
)
METHODS = ("autoregressive", "draft_model", "ngram")
Start = Callable[[str, str, int], EngineProcess]


def found(find: Callable[[], str]) -> str:
    """Return a program of an engine; skip with the line that installs it if there is none."""
    try:
        return find()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory, embedded_target: Path) -> Path:
    """Return a drafter: the target with noise on its weights, which agrees with it often."""
    folder = tmp_path_factory.mktemp("noisy")
    for file in embedded_target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * 0.3
            weights[name] = (weight.float() + noise).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def prompts(embedded_target: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(embedded_target)
    return [
        tokenizer(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )["input_ids"]
        for text in QUESTIONS
    ]


@pytest.fixture(scope="module", params=["llama_cpp", "openvino"])
def start(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    embedded_target: Path,
    noisy: Path,
) -> Start:
    """Return the function that starts an engine for a method, a dtype and a batch size."""
    cache, engine = tmp_path_factory.mktemp("cache"), request.param
    python = found(lambda: python_of(engine, {}))
    if engine == "llama_cpp":
        found(lambda: str(conversion.llama_server()))

    def process(method: str, dtype: str, batch_size: int) -> EngineProcess:
        drafter = str(noisy) if method == "draft_model" else ""
        asked = Method(method, drafter, 0 if method == "autoregressive" else DRAFTS)
        config = EngineConfig(str(embedded_target), dtype, "cpu", 1, 256, batch_size, method=asked)
        ready, variables = conversion.prepare(engine, config, cache, python)
        log = cache / f"{method}.log"
        return EngineProcess(ENGINES[engine].worker, ready, log, python, environment=variables)

    return process


def decode(engine: EngineProcess, prompts: list[list[int]], **more: object) -> list[BatchResult]:
    rows, sampling = engine.config.batch_size, replace(Sampling(TOKENS), **more)
    return [engine.decode(prompts[at : at + rows], sampling) for at in range(0, len(prompts), rows)]


def check_equal(target: Path, prompts: list[list[int]], results: list[BatchResult]) -> None:
    """Check law 1: tokens differ from ours only where the target's two best are a near tie."""
    ours = decoding.load(target)
    answers = [answer.tokens for result in results for answer in result.answers]
    for prompt, tokens in zip(prompts, answers, strict=True):
        expected = decoding.generate(
            ours, prompt, max_new_tokens=len(tokens), temperature=0.0, stop_token_ids=()
        ).tokens
        if tokens == expected:
            continue
        at = next(i for i, pair in enumerate(zip(tokens, expected)) if len(set(pair)) == 2)
        logits = reference_logits(target, prompt + expected[:at])
        assert top_two_gap(logits) < 1e-4, (at, tokens, expected)


def reference_logits(target: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


@pytest.mark.engines
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_float32_text_is_ours(
    start: Start, embedded_target: Path, prompts: list[list[int]], method: str, batch_size: int
) -> None:
    with start(method, "float32", batch_size) as engine:
        results = decode(engine, prompts, ignore_eos=True)
    assert all(len(answer.tokens) == TOKENS for one in results for answer in one.answers)
    check_equal(embedded_target, prompts, results)


@pytest.mark.engines
def test_acceptance_of_a_drafter_is_near_ours(
    start: Start, embedded_target: Path, noisy: Path, prompts: list[list[int]]
) -> None:
    stops = (2,)
    with start("draft_model", "float32", 1) as engine:
        results = decode(engine, prompts, stop_token_ids=stops)
    engine_ours = decoding.load(embedded_target, noisy)
    ours = [
        decoding.generate(
            engine_ours,
            prompt,
            max_new_tokens=TOKENS,
            temperature=0.0,
            stop_token_ids=stops,
            stopping="fixed",
            num_draft_tokens=DRAFTS,
        ).stats
        for prompt in prompts
    ]
    drafted = sum(one.drafted or 0 for one in results)
    accepted = sum(one.accepted or 0 for one in results)
    rate = sum(sum(one.accepted_by_depth) for one in ours) / sum(one.drafted for one in ours)
    assert 0.1 < accepted / drafted < 0.95
    assert accepted / drafted == pytest.approx(rate, abs=0.1)


@pytest.mark.engines
def test_control_a_damaged_model_is_not_ours(
    start: Start, embedded_target: Path, noisy: Path, prompts: list[list[int]]
) -> None:
    with start("autoregressive", "float32", 4) as engine:
        results = decode(engine, prompts, ignore_eos=True)
    with pytest.raises(AssertionError):
        check_equal(noisy, prompts, results)


@pytest.mark.engines
def test_an_answer_ends_with_its_end_token_and_sampling_follows_its_seed(
    start: Start, prompts: list[list[int]]
) -> None:
    with start("autoregressive", "float32", 4) as engine:
        (ended,) = decode(engine, prompts, stop_token_ids=(2,), temperature=1.0, seed=3)
        (again,) = decode(engine, prompts, stop_token_ids=(2,), temperature=1.0, seed=3)
        (other,) = decode(engine, prompts, stop_token_ids=(2,), temperature=1.0, seed=4)
    for answer in ended.answers:
        assert 2 not in answer.tokens[:-1]
        assert answer.tokens[-1] == 2 or len(answer.tokens) == TOKENS
    texts = [[answer.tokens for answer in one.answers] for one in (ended, again, other)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.engines
def test_a_method_that_an_engine_lacks_is_named(start: Start) -> None:
    with pytest.raises(UserError, match="method medusa is not run in"):
        start("medusa", "float32", 1)


@pytest.mark.engines
def test_sampling_with_drafts_is_refused_where_its_rule_is_unknown(
    start: Start, prompts: list[list[int]], request: pytest.FixtureRequest
) -> None:
    if "openvino" not in request.node.name:
        pytest.skip("llama.cpp accepts the drafter's likeliest token with the target's probability")
    with (
        start("draft_model", "float32", 1) as engine,
        pytest.raises(UserError, match="measured at temperature 0 only"),
    ):
        decode(engine, prompts, temperature=1.0)


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, embedded_target: Path
) -> Iterator[Callable[[str, dict[str, object]], dict[str, object]]]:
    """Yield a function that posts to llama.cpp's server with the embedded target."""
    program = found(lambda: str(conversion.llama_server()))
    model = conversion.gguf_of(embedded_target, "float32", tmp_path_factory.mktemp("served"))
    port = "18437"
    command = [program, "-m", model, "--port", port, "-c", "256", "-t", "1", "--fit", "off"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def post(path: str, body: dict[str, object]) -> dict[str, object]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        for _ in range(300):
            try:
                return dict(json.load(urllib.request.urlopen(request)))
            except (urllib.error.URLError, ConnectionError):  # still loading
                time.sleep(0.1)
        raise AssertionError("the server did not start")

    try:
        yield post
    finally:
        server.terminate()
        server.wait()


@pytest.mark.engines
def test_llama_cpp_has_our_token_ids_and_template(
    served: Callable[[str, dict[str, object]], dict[str, object]], embedded_target: Path
) -> None:
    tokenizer = load_tokenizer(embedded_target)
    encode = encoder(tokenizer)
    for text in probes_of(tokenizer):
        reply = served("/tokenize", {"content": text, "parse_special": True})
        assert reply["tokens"] == encode(text), text
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok"}]
    chat.append({"role": "user", "content": "Again"})
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    reply = served("/apply-template", {"messages": chat})
    assert reply["prompt"] in (text, str(text).removeprefix("<s>"))  # the server adds it then


def test_engines_that_are_not_installed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SERVER", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"Run ./scripts/engines/llama_cpp.sh"):
        conversion.llama_server()
    with pytest.raises(UserError, match=r"Install it with ./scripts/engines/openvino.sh"):
        python_of("openvino", {"openvino": str(tmp_path / "none")})


def test_a_model_is_converted_once_for_each_content(tmp_path: Path, tiny_target: Path) -> None:
    pytest.importorskip("gguf")
    folder, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(tiny_target, folder)
    config = EngineConfig(str(folder), "float32", "cpu", 1, 64, 1)
    first = conversion.for_llama_cpp(config, cache)
    written = Path(first.target).stat().st_mtime_ns
    again = conversion.for_llama_cpp(
        replace(config, method=Method("draft_model", str(folder))), cache
    )
    assert again.target == again.method.drafter == first.target
    assert Path(first.target).stat().st_mtime_ns == written
    assert conversion.gguf_of(folder, "bfloat16", cache) != Path(first.target)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: weight + 1 for name, weight in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    assert conversion.for_llama_cpp(config, cache).target != first.target
    assert conversion.prepare("vllm", config, cache, "") == (config, {})


def test_a_failed_export_is_reported_with_the_words_of_the_exporter(
    tmp_path: Path, tiny_target: Path
) -> None:
    out, python = tmp_path / "out", tmp_path / "bin" / "python"
    with pytest.raises(UserError, match="optimum-intel, which exports to OpenVINO, is not install"):
        conversion.export_openvino(tiny_target, out, python)
    python.parent.mkdir()
    (python.parent / "optimum-cli").write_text("#!/bin/sh\necho no such layer; exit 3\n")
    (python.parent / "optimum-cli").chmod(0o755)
    with pytest.raises(UserError, match=r"cannot be exported to OpenVINO.*\n  no such layer"):
        conversion.export_openvino(tiny_target, out, python)
    out.mkdir()
    with pytest.raises(UserError, match="exists already. Delete it"):
        conversion.export_openvino(tiny_target, out, python)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "out"]
