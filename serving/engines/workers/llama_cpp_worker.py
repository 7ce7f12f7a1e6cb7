"""Decode with llama.cpp's server, which this program starts on a loopback port.

Target and drafter are GGUF files. The environment variable LLAMA_SERVER names the server's program.
"""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from channel import Decode, serve

# by dtype: the type of keys and values in the cache
CACHE = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
LOOKUP = 3  # tokens of the n-gram that is looked up
START_SECONDS = 600
_COUNTERS = re.compile(
    r'^llamacpp:spec_decode_num_(\w+)_total(?:\{position="(\d+)"\})? (\S+)$', re.MULTILINE
)


def start(config: dict[str, Any]) -> tuple[str, Decode]:
    """Start the server and return its version and decoder."""
    program = os.environ["LLAMA_SERVER"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--host", "127.0.0.1", "--port", str(port), *options(config)]
    print(" ".join(command), file=sys.stderr, flush=True)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
    client = Client(f"http://127.0.0.1:{port}", config)
    client.wait(server)
    found = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return (found.stderr + found.stdout).split("\n")[0].removeprefix("version: "), client.decode


def options(config: dict[str, Any]) -> list[str]:
    """Return the server's options for a configuration."""
    method, rows, threads = config["method"], config["batch_size"], config["threads"]
    cache, layers = CACHE[config["dtype"]], "99" if config["device"] == "cuda" else "0"
    common = [
        *("--model", config["target"], "--threads", threads, "--gpu-layers", layers),
        *("--ctx-size", rows * config["max_length"], "--parallel", rows, "--no-kv-unified"),
        *("--cache-type-k", cache, "--cache-type-v", cache),
        # no memory of earlier prompts, no smaller context than asked for, counters of drafting
        *("--cache-ram", 0, "--fit", "off", "--metrics"),
    ]
    drafts = method["num_draft_tokens"]
    if method["name"] == "draft_model":
        common += [
            *("--spec-type", "draft-simple", "--spec-draft-model", method["drafter"]),
            *("--spec-draft-n-max", drafts, "--spec-draft-ngl", layers),
            *("--spec-draft-type-k", cache, "--spec-draft-type-v", cache),
        ]
    elif method["name"] == "ngram":
        common += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", LOOKUP]
        common += ["--spec-ngram-simple-size-m", drafts]
    elif method["name"] != "autoregressive":
        raise ValueError(f"method {method['name']} is not run in llama.cpp")
    return [str(option) for option in common]


class Client:
    """Requests to a running server."""

    def __init__(self, address: str, config: dict[str, Any]) -> None:
        """Keep the server's address and the configuration."""
        self.address, self.config = address, config
        self.threads = ThreadPoolExecutor(config["batch_size"])

    def wait(self, server: "subprocess.Popen[bytes]") -> None:
        """Wait until the server has loaded its models, or raise RuntimeError if it ends."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {server.returncode}")
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=10):
                    return
            except (urllib.error.URLError, ConnectionError):  # not yet there, or still loading
                time.sleep(0.1)
        raise RuntimeError(f"llama-server was not ready within {START_SECONDS} s")

    def decode(self, prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any]:
        """Decode prompts together, as parallel requests."""
        before, began = self._counters(), time.monotonic()
        answers = list(
            self.threads.map(
                lambda row: self._answer(row, prompts[row], sampling, began), range(len(prompts))
            )
        )
        seconds, after = time.monotonic() - began, self._counters()
        counts = {key: after[key] - before.get(key, 0) for key in after}
        depths = 0 if self.config["method"]["name"] == "autoregressive" else self._depths(counts)
        return {
            "answers": answers,
            "seconds": seconds,
            "rounds": counts["drafts"],
            "drafted": counts["draft_tokens"],
            "accepted": counts["accepted_tokens"],
            "accepted_by_depth": [counts.get(f"per_pos{i}", 0) for i in range(depths)],
        }

    def _depths(self, counts: dict[str, int]) -> int:
        """Return the greatest length of a proposal."""
        found = sum(key.startswith("per_pos") for key in counts)
        return max(found, int(self.config["method"]["num_draft_tokens"]))

    def _answer(
        self, row: int, prompt: list[int], sampling: dict[str, Any], began: float
    ) -> dict[str, Any]:
        """Return the fields of an Answer.

        The server always stops at the end tokens of the model's file (its ignore_eos forbids
        them), so a row that goes beyond one is continued by another request, which finds the tokens
        before it in the row's cache.
        """
        stops = set() if sampling["ignore_eos"] else set(sampling["stop_token_ids"])
        tokens: list[int] = []
        while len(tokens) < sampling["max_new_tokens"] and not (tokens and tokens[-1] in stops):
            reply = self._post("/completion", self._request(row, prompt, tokens, sampling))
            found = reply["tokens"]
            ends = [found.index(stop) + 1 for stop in stops if stop in found]
            tokens += found[: min(ends, default=len(found))]
            if reply["truncated"] or not found:
                raise RuntimeError(
                    f"row {row} stopped after {len(tokens)} of {sampling['max_new_tokens']} "
                    f"tokens, as max_length is {self.config['max_length']}"
                )
        # the server does not report when it wrote the first token
        seconds = time.monotonic() - began
        return {"tokens": tokens, "first_token_seconds": None, "seconds": seconds}

    def _request(
        self, row: int, prompt: list[int], tokens: list[int], sampling: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the body of a request that continues the tokens of a row."""
        return {
            "prompt": prompt + tokens,
            "n_predict": sampling["max_new_tokens"] - len(tokens),
            "temperature": sampling["temperature"],
            "top_k": sampling["top_k"],
            "top_p": sampling["top_p"],
            "samplers": ["temperature", "top_k", "top_p"],
            # a continued row must not repeat the random numbers of its beginning
            "seed": (sampling["seed"] + row + 7919 * len(tokens)) % 2**31,
            "id_slot": row,
            "cache_prompt": bool(tokens),
            "return_tokens": True,
        }

    def _post(self, path: str, values: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.address + path, json.dumps(values).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"llama-server: {error.read().decode(errors='replace')}") from error

    def _counters(self) -> dict[str, int]:
        """Return the server's counts of drafting since its start.

        Keys: drafts (verified proposals), draft_tokens, accepted_tokens, per_pos0, per_pos1, ...
        """
        with urllib.request.urlopen(f"{self.address}/metrics") as reply:
            found = _COUNTERS.findall(reply.read().decode())
        return {
            f"per_pos{place}" if place else name: int(float(count)) for name, place, count in found
        }


def _end_with_parent() -> None:
    """Let the kernel end the server when this program ends, even if it is killed (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    serve(start)
