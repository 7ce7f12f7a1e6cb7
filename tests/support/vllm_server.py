"""A real vLLM server, started by a line of a README, and the `openai` client that asks it."""

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("SHALLOW_DRAFT_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
# Exact comparisons need float32; compiling would take longer than all requests.
OPTIONS = "--dtype float32 --enforce-eager --host 127.0.0.1"
STARTING_SECONDS = 300.0
# Cache of 1 GiB, threads on any core, and no requests to other hosts.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
# Runs in .venv-vllm, which has the client: reads {"url", "prompts", "max_tokens", "at_once"}, and
# writes the token ids of each prompt and its answer.
CLIENT = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from openai import OpenAI

given = json.load(sys.stdin)
client = OpenAI(base_url=given["url"], api_key="none", max_retries=0)
model = client.models.list().data[0].id


def ask(prompt):
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=given["max_tokens"],
        temperature=0.0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )


for reply in ThreadPoolExecutor(given["at_once"]).map(ask, given["prompts"]):
    print(json.dumps([reply.prompt_token_ids, reply.choices[0].token_ids]))
"""


def code_block(readme: Path, engine: str) -> str:
    """Return the code block under an engine's name in a drafter folder's README."""
    found = re.findall(
        rf"^\*\*{engine}\*\*[^\n]*\n\n```\w+\n(.*?)\n```$", readme.read_text(), re.M | re.S
    )
    (block,) = found
    return str(block)


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt, as the server rendered it, and of its answer."""

    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Server:
    """A server that may still be starting."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> None:
        """Wait until the server answers; raise AssertionError with its log if it does not."""
        deadline = time.monotonic() + STARTING_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"vLLM did not start:\n{self.log.read_text()[-4000:]}")

    def ask(self, prompts: Sequence[str], max_tokens: int, at_once: int = 1) -> list[Answer]:
        """Return greedy answers of `max_tokens` tokens through the `openai` client.

        at_once: requests that are sent together.
        """
        self.wait()
        asked = {"url": f"{self.url}/v1", "prompts": [*prompts]}
        asked |= {"max_tokens": max_tokens, "at_once": at_once}
        done = subprocess.run(
            [PYTHON, "-c", CLIENT],
            input=json.dumps(asked),
            env=_environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return [Answer(*json.loads(line)) for line in done.stdout.splitlines()]

    def tested_and_accepted(self) -> tuple[list[int], list[int]]:
        """Return the numbers of tested and of accepted draft tokens at each depth so far."""
        with urllib.request.urlopen(f"{self.url}/metrics") as page:
            text = page.read().decode()
        value = r"\{[^}\n]*\} ([\d.e+]+)$"
        name = "^vllm:spec_decode_num_"
        (drafts,) = re.findall(f"{name}drafts_total{value}", text, re.M)
        accepted = re.findall(f"{name}accepted_tokens_per_pos_total{value}", text, re.M)
        counts = [round(float(one)) for one in accepted]
        return [round(float(drafts)), *counts[:-1]], counts


def _environment() -> dict[str, str]:
    """Return this process's variables for programs of .venv-vllm."""
    kept: dict[str, Any] = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**kept, **ENVIRONMENT, "PATH": f"{PYTHON.parent}:{os.environ['PATH']}"}


@contextmanager
def serve(line: str, folder: Path, log: Path, options: str = OPTIONS) -> Iterator[Server]:
    """Run a `vllm serve` line with a shell in a folder, with further options; end it afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"{line} {options} --port {port}"],
            cwd=folder,
            env=_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a server and the processes that it started; its group is its own."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    with suppress(ProcessLookupError):  # all of them ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
