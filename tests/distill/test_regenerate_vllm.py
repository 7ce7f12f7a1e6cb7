"""Test that chats regenerated through the real vLLM equal those of a local run."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from decoding.models.load import load_target
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.settings import Settings
from distill.config import RegenerateConfig
from distill.regenerate.batches import next_request
from distill.regenerate.checks import read_dialogues
from distill.regenerate.dialogues import Answer, make_answer
from distill.regenerate.exchange import PATHS
from distill.regenerate.resume import read_journal
from jobs.paths import resolve
from tests.decoding.test_real_models import GAP_LIMIT, gap
from tests.support.regeneration import configured, metrics, run

GIVEN = (
    "target.dtype=float32",
    "temperature=0",
    "max_new_tokens=48",
    "data.max_length=400",
    "data.max_samples=12",
    "server_requests=6",
)


@contextmanager
def serve_by_vllm(python: Path, target: Path, log: Path) -> Iterator[str]:
    """Serve a target in float32 on a free port, and return the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "8"]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    environment.pop("PYTHONPATH", None)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def wait_for(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 420
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(address, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"vLLM did not start: {log.read_text()[-3000:]}")


def answers(folder: Path) -> dict[tuple[int, int, int], Answer]:
    found = read_journal(folder / "answers" / "rank_0.jsonl", make_answer)
    return {answer.key: answer for answer in found}


@pytest.mark.engines
def test_vllm_gives_the_chats_of_a_local_run(vllm_python: Path, tmp_path: Path):
    target = resolve("embedded:target")
    chats, local = resolve("embedded:chats"), tmp_path / "local"
    config = configured(target, chats, local, *GIVEN)
    run(config)
    with serve_by_vllm(vllm_python, target, tmp_path / "vllm.log") as address:
        for prompts in PATHS:
            given = (*GIVEN, f"server={address}", f"server_prompts={prompts}")
            run(configured(target, chats, tmp_path / prompts, *given))
        sampled = ("temperature=0.8", "top_k=40", "max_new_tokens=16", f"server={address}")
        run(configured(target, chats, tmp_path / "sampled", *GIVEN, *sampled))
    for prompts in PATHS:
        figures = metrics(tmp_path / prompts)
        assert figures["server_model"] == str(target) and figures["success"] >= 10
        assert figures["as_drawn_share"] is not None, "vLLM returns token ids"
        check_law_1(config, tmp_path / prompts)
    assert metrics(tmp_path / "sampled")["success"] >= 10
    finishes = {answer.finish for answer in answers(tmp_path / "tokens").values()}
    assert finishes == {"stop", "length"}, "both ways to finish are tested"


def check_law_1(config: RegenerateConfig, served: Path) -> None:
    """Check that a chat's answers differ only after a near tie of the target's best tokens."""
    mine, theirs = answers(Path(config.output_dir)), answers(served)
    folder = resolve(config.target.path)
    model, tokenizer = load_target(folder, dtype="float32"), load_tokenizer(folder)
    dialogues, _ = read_dialogues(config)
    equal = 0
    for dialogue in dialogues:
        while request := next_request(dialogue, tokenizer, config):
            left, right = mine[request.key].tokens, theirs[request.key].tokens
            if left != right:
                at = next(i for i, pair in enumerate(zip(left, right)) if pair[0] != pair[1])
                assert gap(model, [*request.ids, *left[:at]], Settings(), 0) < GAP_LIMIT
                break
            dialogue.add_answer(mine[request.key], config)
            equal += 1
    print(f"{equal} of {len(mine)} answers are equal")
    assert equal >= 0.8 * len(mine) > 10
