"""The recurrent drafter in numbers, part by part.

    python scripts/bench/recurrent.py part=training target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      \
        "chats=[$SHALLOW_DRAFT_DATA/data/chat/oasst1_threads.json]"

training: supervised tokens a second and peak memory of a step, ours against the published recipe
(scripts/bench/recurrent_training.py), padded to its fixed length and to the longest row of each
batch; same target, head, chats, loss and precision, the sides in turns.

    python scripts/bench/recurrent.py part=drafting head=HEAD target=MODEL \\
      prompts=PROMPTS.jsonl max_prompts=8 name=recurrent_drafting
    python scripts/bench/recurrent.py part=generation head=HEAD target=MODEL \\
      prompts=PROMPTS.jsonl name=recurrent_generation

drafting: what a round costs outside the target's and the head's forwards, in time and in operations
that launch a kernel (scripts/bench/recurrent_rounds.py). generation: speedups by beam width over
our own autoregressive decoding, greedy and at temperature 1, with prompt lookup beside them and
every goal with what was found (scripts/bench/recurrent_generation.py). Each with threads=1 and
threads=2.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decoding.errors import UserError
from scripts.bench import recurrent_generation, recurrent_rounds, recurrent_training
from scripts.bench.common import options, save, save_text


@dataclass
class Options:
    part: str = "training"  # training | drafting | generation
    target: str = "embedded:target"  # model folder
    chats: list[str] = field(default_factory=lambda: ["embedded:chats"])  # ShareGPT files
    num_draft_layers: int = 2  # residual blocks of the head
    heads: int = 5  # predictions of a draft
    # of both sides: the published one keeps float32 weights and computes under autocast
    dtype: str = "bfloat16"
    max_length: int = 2048  # the published recipe pads every chat to it
    # tokens of our packed rows, and chats are cut there on all sides; 0: the target's context, at
    # most max_length
    context: int = 0
    rows: int = 4  # chats of a padded forward
    forwards: int = 2  # padded forwards of an optimizer step; ours take as many supervised tokens
    steps: int = 4  # optimizer steps a round, after one that warms up
    rounds: int = 3  # rounds that count
    head: str = ""  # drafting, generation: folder of the head
    prompts: str = "embedded:prompts"  # drafting, generation: evaluation JSONL
    # of them, besides the sweep's; for generation those whose greedy answer does not loop
    max_prompts: int = 32
    max_new_tokens: int = 64  # of each
    decode_dtype: str = "float32"  # drafting, generation: of the target
    # drafting, generation: of the head; auto: as conf/drafter/recurrent.yaml has it
    head_dtype: str = "auto"
    beam_width: int = 8  # drafting: beams
    # drafting, and generation's comparison of outputs: drafted tokens of a beam
    beam_length: int = 5
    widths: list[int] = field(default_factory=lambda: [1, 4, 10])  # generation: beams
    # generation: drafted tokens of a beam, swept
    lengths: list[int] = field(default_factory=lambda: [2, 3, 4, 5])
    # generation: prompts on which every drafter's best length is found; they are not judged
    sweep_prompts: int = 8
    # generation: beams compared when greedy
    exact_widths: list[int] = field(default_factory=lambda: [1, 4, 10, 45])
    exact_prompts: int = 8  # generation: prompts of that comparison
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # generation
    work: str = ""  # generation: folder of the run, kept; empty: a temporary one
    threads: int = 1  # CPU threads
    device: str = "cpu"  # cpu | cuda
    name: str = "recurrent_training"  # of the results file


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "training": recurrent_training.run,
    "drafting": recurrent_rounds.drafting,
    "generation": recurrent_generation.generation,
}


def main() -> None:
    chosen = options(Options)
    if chosen.part not in PARTS:
        sys.exit(f"error: part is '{chosen.part}', expected one of {', '.join(PARTS)}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = PARTS[chosen.part](chosen)
    save(chosen.name, chosen, found, show=chosen.part != "generation")
    if chosen.part == "generation":
        save_text(chosen.name, recurrent_generation.report(found))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
