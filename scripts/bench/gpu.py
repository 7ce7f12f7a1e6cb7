"""Benchmarks for a GPU, in parts planned for under eight minutes.

Parts: `exact` (equality of the tokens), `decode` (speed against the bandwidth of the card), `train`
(distillation against Hugging Face's Trainer), `recurrent` (training and rounds of a recurrent head
of a 7B target), `losses` (memory and time of each loss) and `heads` (training and rounds of
EAGLE-3, DFlash and DSpark of an 8B target).

    python scripts/bench/gpu.py part=decode device=cuda
    python scripts/bench/gpu.py part=exact device=cpu toy=true  # a trial without a GPU
    python scripts/bench/gpu.py part=losses device=meta  # peaks from sizes, without a GPU

It imports only torch, transformers, accelerate, safetensors and numpy, downloads nothing and needs
nothing outside the repository. Every figure is written when it is measured, so an interrupted part
loses none. `scripts/bench/gpu.sh` calls this script.
"""

import importlib
import inspect
import json
import re
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from decoding import devices
from decoding.errors import UserError
from scripts.bench.peak_memory import META

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("exact", "decode", "train", "recurrent", "losses", "heads")
EXECUTIONS = ("graph", "eager", "compiled")


@dataclass
class Options:
    part: str = "exact"  # exact | decode | train | recurrent | losses | heads
    device: str = "cuda"  # cpu | cuda | cuda:N | meta (part losses: memory alone, from sizes)
    toy: bool = False  # small shapes, to test the script
    out: str = "scripts/bench/results"  # folder of gpu_<part>.json
    # a part ends within eight minutes if its last figure takes 80 s at most
    last_start: float = 400.0  # seconds after which no figure starts
    executions: str = "graph,eager,compiled"  # those that part `decode` measures
    only: str = ""  # regular expression of the figures to measure; empty: all


class Figures:
    """Figures of a part, in a JSON file that is complete after each figure."""

    def __init__(self, options: Options) -> None:
        device = torch.device(options.device)
        self.path = ROOT / options.out / f"gpu_{options.part}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.began, self.last_start = time.perf_counter(), options.last_start
        self.only = re.compile(options.only)
        self.failed: list[str] = []
        self.record: dict[str, Any] = {
            "benchmark": f"gpu_{options.part}",
            "options": asdict(options),
            "date": time.strftime("%Y-%m-%d"),
            "card": devices.describe_gpu(device),
            "memory_bytes": devices.memory_bytes(device),
            "torch": torch.__version__,
            "figures": {},
        }
        self.write()

    def add(self, name: str, value: Any) -> None:
        """Add a figure, write the file and print the figure."""
        self.record["figures"][name] = value
        self.record["seconds"] = round(time.perf_counter() - self.began, 1)
        self.write()
        print(f"[{self.record['seconds']:6.1f} s] {name}: {json.dumps(value)}", flush=True)

    def in_time(self, name: str) -> bool:
        """Return whether to measure a figure; record one that is left out for want of time."""
        if not self.only.search(name):
            return False
        if time.perf_counter() - self.began < self.last_start:
            return True
        self.add(name, "left out: the part's time was up")
        return False

    def expect(self, name: str, holds: bool) -> None:
        """Record a failed check; the part continues, and ends with status 1 if one failed."""
        if not holds:
            self.failed.append(name)
            self.record["failed"] = self.failed

    def write(self) -> None:
        """Replace the file in one atomic step."""
        half = self.path.with_suffix(".part")
        half.write_text(json.dumps(self.record, indent=1) + "\n")
        half.replace(self.path)


def usage() -> str:
    """Return the script's docstring, and every option with its default and meaning."""
    docs = dict(re.findall(r"(\w+): .+  # (.+)", inspect.getsource(Options)))
    lines = [f"  {f'{key}={value}':<32}  {docs[key]}" for key, value in asdict(Options()).items()]
    about = (__doc__ or "").strip()
    return "\n".join([about, "", "Options, as KEY=VALUE, with their defaults:", *lines])


def parse(words: list[str]) -> Options:
    """Parse `key=value` words; exit with an error for anything else."""
    kinds = {field.name: field.type for field in fields(Options)}
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in kinds:
            expected = ", ".join(f"{name}=" for name in kinds)
            sys.exit(f"error: '{word}' is not an option, expected one of {expected}")
        if kinds[key] is float:
            given[key] = _seconds(key, value)
        else:
            given[key] = value.lower() == "true" if kinds[key] is bool else value
    options = Options(**given)
    if options.part not in PARTS:
        sys.exit(f"error: part '{options.part}' is unknown, expected one of {', '.join(PARTS)}")
    unknown = {*options.executions.split(",")} - {*EXECUTIONS}
    if unknown:
        names = ", ".join(sorted(unknown))
        sys.exit(f"error: executions has '{names}', expected some of {', '.join(EXECUTIONS)}")
    try:
        re.compile(options.only)
    except re.error as error:
        sys.exit(f"error: only is '{options.only}', expected a regular expression ({error})")
    try:
        if (options.part, options.device) != ("losses", META):
            options.device = devices.device_of(options.device)
    except UserError as error:
        sys.exit(f"error: {error}")
    return options


def _seconds(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        sys.exit(f"error: {key} is '{value}', expected a number of seconds")


def main(words: list[str]) -> int:
    """Run a part and return the exit status, 1 if a check failed; `--help` prints the usage."""
    if {"--help", "-h"} & {*words}:
        print(usage())
        return 0
    options = parse(words)
    figures = Figures(options)
    with torch.inference_mode():
        chosen = {"executions": options.executions.split(",")} if options.part == "decode" else {}
        module = importlib.import_module(f"scripts.bench.gpu_{options.part}")
        module.run(options.device, options.toy, figures, **chosen)
    figures.add("done", not figures.failed)
    for name in figures.failed:
        print(f"FAILED: {name}", file=sys.stderr)
    return 1 if figures.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
