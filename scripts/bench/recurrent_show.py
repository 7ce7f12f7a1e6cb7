"""Comparisons of recurrent heads over the same seeds, prompts and seconds of training.

    python scripts/bench/recurrent_show.py target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      prompts=$SHALLOW_DRAFT_DATA/data/eval/alpaca_eval.jsonl \\
      "chats=[$SHALLOW_DRAFT_DATA/data/chat/oasst1_threads.json]"

Parts: `recurrence` (with and without), `losses` (hard labels, the paper's distillation on the
target's continuations, distillation on its answers, forward KL, LK, training-time test), `data`
(the given chats, and answers of the target, under both losses), `starts` (warm start and
zero-initialised blocks, on and off), `shape` (beam width x length with the heads of the side
`raced`), `pruned` (the same heads against the target cut to a few layers and distilled for the same
time). The first four compare block efficiency, the last two also speed.

Parts and seeds such as `parts=[losses] seeds=[0]` may run in separate calls: with the same settings
and `work`, the tables include all earlier ones.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import distill.regenerate.job
from distill.config import RegenerateConfig
from jobs.config import TargetConfig
from jobs.files import write_text
from jobs.paths import resolve
from recurrent_drafting.checkpoint import save_head
from scripts.bench import common
from scripts.bench import recurrent_tables as tables
from scripts.bench.common import BenchOptions
from scripts.bench.part_journal import PartJournal
from scripts.bench.recurrent_generation import race_drafters, write_prompts
from scripts.bench.recurrent_sides import BASE, SIDES, Bench, Objective
from scripts.usage import run_script
from training.config import DataConfig
from training.data.packing import PackedData
from training.data.readers import read_chats
from training.drafter_folder import write_model

# part -> side -> the side that it is compared with
TRAINED = {
    "recurrence": {"without recurrence": BASE},
    "losses": dict.fromkeys(
        ("continuations", "distillation", "forward KL", "LK", "training-time test"), BASE
    ),
    "data": {"distillation": BASE, "forward KL, answered": "forward KL"},
    "starts": dict.fromkeys(("warm start alone", "zero blocks alone", "as published"), BASE),
}
PARTS = (*TRAINED, "shape", "pruned")
HELD_OUT = 0.1  # share of the chats that is held out to prune by


@dataclass
class Options(BenchOptions):
    target: str = "embedded:target"  # model folder
    chats: list[str] = field(default_factory=lambda: ["embedded:chats"])  # ShareGPT files
    # held-out evaluation prompts; those whose greedy answer loops are skipped
    prompts: str = "embedded:prompts"
    parts: list[str] = field(default_factory=lambda: [*PARTS])  # comparisons
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])  # each runs every side once
    seconds: float = 20.0  # seconds of training of every run
    max_chats: int = 400  # chats sampled from the files, which the target answers
    answer_tokens: int = 128  # maximum length of the target's answers to train on
    answer_temperature: float = 1.0  # temperature of the target's answers
    num_draft_layers: int = 2  # residual blocks of the head
    heads: int = 5  # predictions of a draft, and tokens of a chain
    max_length: int = 512  # tokens of a packed row
    tokens_per_step: int = 2048  # tokens of an optimizer step
    lr: float = 1e-3  # peak learning rate of heads
    dtype: str = "bfloat16"  # dtype of training
    max_prompts: int = 32  # held-out prompts
    max_new_tokens: int = 64  # tokens of an answer
    decode_dtype: str = "float32"  # dtype of target and drafters while decoding
    widths: list[int] = field(default_factory=lambda: [1, 4, 10])  # shape: numbers of beams
    lengths: list[int] = field(default_factory=lambda: [2, 3, 5])  # shape: drafted tokens of a beam
    shape_temperatures: list[float] = field(default_factory=lambda: [0.0])  # shape: temperatures
    raced: str = "forward KL"  # shape, pruned: side whose heads decode
    # shape, pruned: number of held-out prompts that are decoded and timed one by one
    race_prompts: int = 8
    race_width: int = 10  # pruned: maximum beams of the heads; width and length follow the costs
    race_length: int = 4  # pruned: maximum draft length of heads and pruned drafters
    # pruned: numbers of layers to keep; the fastest drafter is compared
    pruned_layers: list[int] = field(default_factory=lambda: [1, 2])
    # pruned: choice of layers, as importance.choice of distill.prune
    pruned_choice: str = "even"
    pruned_probe_steps: int = 10  # pruned: steps of a candidate's distillation
    pruned_sequences: int = 128  # pruned: rows that are scored
    pruned_lr: float = 3e-3  # pruned: peak learning rate
    work: str = "runs/bench"  # folder of all files; a call with the same settings continues there
    name: str = "recurrent_show"  # name of the results files


def sample_chats(chosen: Options, work: Path) -> dict[str, Path]:
    """Write the sampled chats, `found` to train on and `held_out` to prune by; return the files."""
    chats, _ = read_chats([resolve(path) for path in chosen.chats], max_bad=0.1)
    sampled = random.Random(0).sample(chats, min(chosen.max_chats, len(chats)))
    cut = max(1, round(HELD_OUT * len(sampled)))
    files = {"found": work / "found.json", "held_out": work / "held_out.json"}
    for file, part in zip(files.values(), (sampled[cut:], sampled[:cut]), strict=True):
        if not file.is_file():
            records = [{"id": chat.id, "messages": chat.messages} for chat in part]
            write_text(file, json.dumps(records))
    return files


def answer_chats(chosen: Options, found: Path, work: Path) -> Path:
    """Write the chats of `found` with the target's answers, and return the path of the result."""
    return distill.regenerate.job.run(
        RegenerateConfig(
            job="distill.regenerate",
            output_dir=str(work / "answered"),
            threads=chosen.threads,
            target=TargetConfig(
                path=chosen.target, dtype=chosen.decode_dtype, device=chosen.device
            ),
            data=DataConfig(chats=[str(found)], max_length=chosen.max_length, max_bad=1.0),
            temperature=chosen.answer_temperature,
            max_new_tokens=chosen.answer_tokens,
        )
    )


class Show:
    """Runs of all chosen parts, seed by seed."""

    def __init__(self, chosen: Options) -> None:
        self.chosen = chosen
        self.journal = PartJournal(chosen.work, chosen, ("parts", "seeds"))
        self.work = self.journal.folder
        pairs = {
            side: against
            for part, of in TRAINED.items()
            if part in chosen.parts
            for side, against in of.items()
        }
        decoded = [chosen.raced] if {"shape", "pruned"} & {*chosen.parts} else []
        self.sides = list(dict.fromkeys([*pairs.values(), *decoded, *pairs]))
        files = sample_chats(chosen, self.work)
        if any(SIDES[side].answered for side in self.sides):
            files["answered"] = answer_chats(chosen, files["found"], self.work)
        self.bench = Bench(chosen, files)

    def run(self) -> dict[str, Any]:
        """Run the parts that the journal lacks; return all figures, earlier ones included."""
        for seed in self.chosen.seeds:
            for side in self.sides:
                self._figures(side, seed, self.head, side)
            if "pruned" in self.chosen.parts:
                for layers in self.chosen.pruned_layers:
                    self._figures(f"pruned {layers}", seed, self.student, layers)
            for part, race in (("shape", self.shape), ("pruned", self.pruned)):
                if part in self.chosen.parts:
                    self._figures(part, seed, race)
        return self.save()

    def _figures(
        self, name: str, seed: int, make: Callable[..., dict[str, Any]], *given: Any
    ) -> None:
        self.journal.figures({"of": name, "seed": seed}, make, *given, seed)
        self.save()

    def save(self) -> dict[str, Any]:
        """Write and return the figures and tables so far."""
        figures = {
            f"{part['of']}/{part['seed']}": found
            for part, found in self.journal.all()
            if "of" in part
        }
        found = {"figures": figures, "tables": tables.report(self.chosen, figures, TRAINED)}
        common.save(self.chosen.name, self.chosen, found, show=False)
        return found

    def _train(
        self, name: str, make: Callable[[], Objective], data: PackedData, lr: float
    ) -> tuple[Any, dict[str, Any]]:
        """Train for about chosen.seconds; return the trained module, the steps and the seconds.

        The steps of a name are timed once, so that all its seeds take the same number of steps.
        """
        pace = self.journal.figures(
            {"pace of": name}, lambda: {"seconds": self.bench.time_step(make, data, lr)}
        )
        steps = max(1, round(self.chosen.seconds / pace["seconds"]))
        made = make()
        seconds = sum(self.bench.train(made, data, steps, lr))
        return made[1], {"steps": steps, "seconds": seconds}

    def head(self, name: str, seed: int) -> dict[str, Any]:
        """Train a side's head and measure it; write it if later parts decode with it."""
        bench, side = self.bench, SIDES[name]
        data = bench.data(side.answered, seed)
        make = partial(bench.head_objective, side, seed)
        head, found = self._train(name, make, data, self.chosen.lr)
        if name == self.chosen.raced:
            save_head(head, self.head_folder(seed))
        epochs = found["steps"] / data.steps_per_epoch
        return {**found, "epochs": epochs, **bench.block_efficiency(head, seed)}

    def student(self, layers: int, seed: int) -> dict[str, Any]:
        """Distil into the cut target for about chosen.seconds, and write the drafter."""
        bench, make = self.bench, partial(self.bench.student_objective, layers)
        cut_seconds = bench.students[layers][1]
        data = bench.data(False, seed)
        student, found = self._train(f"pruned {layers}", make, data, self.chosen.pruned_lr)
        write_model(student, bench.folder, self.pruned_folder(layers, seed), torch.float32)
        return {**found, "cut_seconds": cut_seconds}

    def head_folder(self, seed: int) -> Path:
        """Return the folder of a seed's head, for decoding."""
        return self.work / "heads" / f"raced_{seed}"

    def pruned_folder(self, layers: int, seed: int) -> Path:
        """Return the folder of a seed's pruned drafter."""
        return self.work / "pruned" / f"{layers}_{seed}"

    def _head_drafter(self, seed: int, **options: Any) -> dict[str, Any]:
        folder, dtype = str(self.head_folder(seed)), self.chosen.decode_dtype
        return {"use": "recurrent", "folder": folder, "dtype": dtype, **options}

    def shape(self, seed: int) -> dict[str, Any]:
        """Decode with a seed's head at every beam width and length."""
        chosen, drafter = self.chosen, partial(self._head_drafter, seed, by_cost=False)
        heads = [drafter(beam_width=n, name=f"{n} beams") for n in chosen.widths]
        temperatures = chosen.shape_temperatures
        given = (f"shape_{seed}", seed, heads, temperatures, chosen.lengths)
        return {"generations": self._race(*given, prompt_lookup_control=False)}

    def pruned(self, seed: int) -> dict[str, Any]:
        """Decode with a seed's head, whose beams follow the costs, and with pruned drafters."""
        chosen = self.chosen
        drafter = partial(self._head_drafter, seed, by_cost=True, beam_width=chosen.race_width)
        picked = drafter(children="top_k", name="head, picked")
        sampled = drafter(children="sampled", name="head, drawn")
        students = [
            {"use": str(self.pruned_folder(layers, seed)), "name": f"pruned {layers}"}
            for layers in chosen.pruned_layers
        ]
        found = []
        for temperature, heads in ((0.0, [picked]), (1.0, [picked, sampled])):
            name, drafters = f"pruned_{seed}_T{temperature:g}", [*heads, *students]
            found += self._race(name, seed, drafters, [temperature], [chosen.race_length])
        return {"generations": found}

    def _race(
        self,
        name: str,
        seed: int,
        drafters: list[dict[str, Any]],
        temperatures: list[float],
        lengths: list[int],
        **fields: Any,
    ) -> list[dict[str, Any]]:
        """Decode held-out prompts with all drafters and without one, interleaved by eval.run.

        Returns the counts and seconds of every generation. lengths: draft lengths. fields: further
        fields of eval.run's configuration.
        """
        prompts = [prompt for prompt, _, _ in self.bench.held_out][: self.chosen.race_prompts]
        file = write_prompts(self.work / "race_prompts.jsonl", prompts)
        folder = self.work / "races" / name
        race_drafters(
            self.chosen,
            folder,
            file,
            drafters,
            seed=seed,
            temperatures=temperatures,
            num_draft_tokens=lengths,
            sweep=[],
            sweep_prompts=0,
            max_prompts=len(prompts),
            **fields,
        )
        return tables.read_generations(folder)


def main() -> None:
    """Run the chosen parts, and write the tables of all parts."""
    chosen = common.read_options(Options, parts=PARTS, raced=SIDES)
    common.save_text(chosen.name, Show(chosen).run()["tables"])


if __name__ == "__main__":
    run_script(main)
