"""Benchmarks of the recurrent drafter: training, the parts of a round, and speedups.

    python scripts/bench/recurrent.py part=training target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      "chats=[$SHALLOW_DRAFT_DATA/data/chat/oasst1_threads.json]"
    python scripts/bench/recurrent.py part=drafting head=HEAD target=MODEL \\
      prompts=PROMPTS.jsonl max_prompts=8 name=recurrent_drafting
    python scripts/bench/recurrent.py part=generation head=HEAD target=MODEL \\
      prompts=PROMPTS.jsonl name=recurrent_generation

training: supervised tokens/s and peak memory of a step against the published recipe
(recurrent_training.py), padded to its fixed length and to the longest row of each batch; same
target, head, chats, loss and precision, sides in turn. drafting: time and kernel launches of a
round outside the target's and the head's forwards (recurrent_rounds.py). generation: speedups by
beam width over autoregressive decoding, greedy and at temperature 1, with prompt lookup as control
and every goal (recurrent_generation.py). Run each with threads=1 and threads=2.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import common, recurrent_generation, recurrent_rounds, recurrent_training
from scripts.bench.common import BenchOptions
from scripts.usage import run_script


@dataclass
class Options(BenchOptions):
    part: str = "training"  # training | drafting | generation
    target: str = "embedded:target"  # model folder
    chats: list[str] = field(default_factory=lambda: ["embedded:chats"])  # ShareGPT files
    num_draft_layers: int = 2  # residual blocks of the head
    heads: int = 5  # predictions of a draft
    # dtype of both sides; the published side has float32 weights and computes under autocast
    dtype: str = "bfloat16"
    max_length: int = 2048  # length that the published recipe pads every chat to
    # tokens of our packed rows; longer chats are cut on all sides. 0: the target's context, at most
    # max_length
    context: int = 0
    rows: int = 4  # chats in a padded forward
    forwards: int = 2  # padded forwards in a step; our step has as many supervised tokens
    steps: int = 4  # optimizer steps per round, after one for warm-up
    rounds: int = 3  # measured rounds
    head: str = ""  # drafting, generation: folder of the head
    prompts: str = "embedded:prompts"  # drafting, generation: evaluation JSONL
    # prompts besides those of the sweep; generation skips those whose greedy answer loops
    max_prompts: int = 32
    max_new_tokens: int = 64  # tokens of an answer
    decode_dtype: str = "float32"  # drafting, generation: dtype of the target
    # drafting, generation: dtype of the head; auto is explained in conf/drafter/recurrent.yaml
    head_dtype: str = "auto"
    beam_width: int = 8  # drafting: number of beams
    beam_length: int = 5  # drafting, and comparison of outputs: drafted tokens of a beam
    widths: list[int] = field(default_factory=lambda: [1, 4, 10])  # generation: numbers of beams
    # generation: drafted tokens of a beam, swept
    lengths: list[int] = field(default_factory=lambda: [2, 3, 4, 5])
    # generation: prompts that choose every drafter's length; results leave them out
    sweep_prompts: int = 8
    # generation: numbers of beams whose greedy output is compared with the target's
    exact_widths: list[int] = field(default_factory=lambda: [1, 4, 10, 45])
    exact_prompts: int = 8  # generation: prompts for that comparison
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # generation
    work: str = ""  # generation: folder of the run; empty: a temporary one
    threads: int = 1  # CPU threads
    name: str = "recurrent_training"  # name of the results file


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "training": recurrent_training.run,
    "drafting": recurrent_rounds.measure_drafting,
    "generation": recurrent_generation.measure_generation,
}


def main() -> None:
    """Run one part and save its figures."""
    chosen = common.read_options(Options, part=PARTS)
    found = PARTS[chosen.part](chosen)
    common.save(chosen.name, chosen, found, show=chosen.part != "generation")
    if chosen.part == "generation":
        common.save_text(chosen.name, recurrent_generation.report(found))


if __name__ == "__main__":
    run_script(main)
