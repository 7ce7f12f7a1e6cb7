"""Chats of every form, a target whose answers end soon, and runs of distill.regenerate."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from distill.config import RegenerateConfig
from distill.regenerate.job import run
from tests.support.configurations import configuration
from tests.support.forks import Fork

CHATS = [
    {"id": "one", "conversations": [("human", "def add(a, b):"), ("gpt", "return a + b")]},
    {
        "id": "two",
        "conversations": [
            ("system", "Be brief."),
            ("human", "x"),
            ("gpt", "y"),
            ("human", "z"),
            ("gpt", "w"),
        ],
    },
    {
        "id": "begun",
        "conversations": [
            ("gpt", "Hello!"),
            ("human", "def f(x):"),
            ("gpt", "pass"),
            ("human", "and g?"),
        ],
    },
    {"id": "open", "conversations": [("human", "a request that nobody answered")]},
    {
        "id": "twice",
        "conversations": [("human", "first"), ("human", "second"), ("gpt", "one"), ("gpt", "more")],
    },
    {
        "id": "long",
        "conversations": [
            ("human", f"part {n}") if n % 2 == 0 else ("gpt", "ok") for n in range(7)
        ],
    },
]


def write_chats(
    path: Path, chats: list[dict[str, Any]] | None = None, lines: tuple[str, ...] = ()
) -> Path:
    """Write a ShareGPT file with one chat per line, and return its path.

    chats: None writes CHATS. lines: further lines, written unchanged.
    """
    records = []
    for chat in CHATS if chats is None else chats:
        turns = [{"from": role, "value": text} for role, text in chat["conversations"]]
        records.append(json.dumps({**chat, "conversations": turns}))
    path.write_text("".join(line + "\n" for line in (*records, *lines)), encoding="utf-8")
    return path


def with_stops(target: Path, folder: Path, every: int = 64) -> Path:
    """Copy a target to `folder`; its stop tokens are 2 and every `every`-th token from 100 on."""
    shutil.copytree(target, folder)
    file = folder / "generation_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "eos_token_id": [2, *range(100, 2048, every)]}))
    return folder


def configured(target: Path, chats: Path, folder: Path, *overrides: str) -> RegenerateConfig:
    """Compose a configuration in float64, in which near ties do not occur."""
    return configuration("distill.regenerate", *arguments(target, chats, folder, *overrides))


def arguments(target: Path, chats: Path, folder: Path, *overrides: str) -> list[str]:
    """Return the overrides of a small run; further ones are appended."""
    return [
        f"target.path={target}",
        "target.dtype=float64",
        "target.device=cpu",
        f"data.chats=[{chats}]",
        "data.max_length=256",
        "max_new_tokens=16",
        "on_length=go_on",
        "batch_size=3",
        f"output_dir={folder}",
        *overrides,
    ]


def regenerated(target: Path, chats: Path, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run the job, and return the records of its output."""
    found: list[dict[str, Any]] = json.loads(
        run(configured(target, chats, folder, *overrides)).read_text()
    )
    return found


def metrics(folder: Path) -> dict[str, Any]:
    """Return the metrics in a run folder's manifest."""
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["metrics"]
    return found


def start(home: Path, folder: Path, *overrides: str, fork_children: bool = False) -> Fork:
    """Start the job in a process, on the target and the chats in `home`."""
    given = arguments(home / "target", home / "chats.jsonl", folder, *overrides)
    return Fork("distill.regenerate", *given, fork_children=fork_children)


def wait_for_answers(process: Fork, journal: Path, count: int) -> None:
    """Wait until a journal holds `count` answers. Raises AssertionError if the process ends."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if journal.is_file() and journal.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.005)
    raise AssertionError(f"ended with {process.poll()}: {process.communicate()}")
