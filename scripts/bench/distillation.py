"""Distillation, ours against a `transformers.Trainer` loop: useful (non-padding) tokens a second,
same models, data, loss and dtype.

    python scripts/bench/distillation.py target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      chats=$SHALLOW_DRAFT_DATA/data/chat/oasst1_threads.json

The Trainer side pads every batch to its longest row and takes the same forward KL on the same
supervised tokens; both sides see the same number of chats a step on average, use the same malloc
settings and threads, and take turns in one process.
"""

import copy
import logging
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import AutoModelForCausalLM

from decoding.models.text.tokenizer import load_tokenizer
from distill.student import build_student
from jobs.config import ParallelConfig
from jobs.paths import resolve
from scripts.bench.common import options, ratio, save, take_turns
from scripts.bench.padded import agree, both_losses, trainer_rate
from training.config import LoopConfig, StudentConfig
from training.data.packing import PackedData, Sample
from training.data.readers import read_chats
from training.data.samples import chat_samples
from training.loop import fit
from training.models.build import dtype_of, load_causal_lm
from training.objectives import Distillation, freeze
from training.optimizer_config import OptimizerConfig
from training.parallel.strategy import Parallel


@dataclass
class Options:
    target: str = "embedded:target"  # model folder of the teacher
    chats: str = "embedded:chats"  # ShareGPT file
    layers: int = 1  # layers of the student
    dtype: str = "bfloat16"  # of both sides
    max_length: int = 1024  # chats are cut here on both sides
    # ours; the Trainer takes as many chats as hold that many tokens on average
    tokens_per_step: int = 8192
    steps: int = 6  # optimizer steps a round
    rounds: int = 3  # rounds that count
    threads: int = 2  # CPU threads
    device: str = "cpu"  # cpu | cuda
    name: str = "distillation"  # of the results file


def trainer_side(chosen: Options, samples: list[Sample], per_step: int, folder: Path) -> Any:
    """A function that runs `steps` Trainer steps and returns useful tokens a second."""
    dtype = dtype_of(chosen.dtype)
    teacher = freeze(
        AutoModelForCausalLM.from_pretrained(
            resolve(chosen.target), trust_remote_code=False, dtype=dtype, attn_implementation="sdpa"
        )
    ).to(chosen.device)
    student = build_student(StudentConfig(num_hidden_layers=chosen.layers), teacher, dtype)
    student.set_attn_implementation("sdpa")
    return lambda: trainer_rate(
        student, teacher, samples, per_step, chosen.steps, folder, chosen.device
    )


def our_side(chosen: Options, samples: list[Sample], folder: Path) -> Any:
    """A function that runs `steps` steps of our loop and returns useful tokens a second."""
    dtype = dtype_of(chosen.dtype)
    teacher = freeze(load_causal_lm(resolve(chosen.target), dtype)).to(chosen.device)
    student = build_student(StudentConfig(num_hidden_layers=chosen.layers), teacher, dtype)
    data = PackedData(samples, chosen.max_length, chosen.tokens_per_step // chosen.max_length, 0)
    rounds = 0

    def side() -> float:
        nonlocal rounds
        rounds += 1
        config = LoopConfig(
            max_steps=chosen.steps + 1,
            tokens_per_step=chosen.tokens_per_step,
            micro_batch_tokens=chosen.tokens_per_step,
            eval_every=0,
            checkpoint_every=0,
            dtype=chosen.dtype,
            optimizer=OptimizerConfig(lr=1e-3),
        )
        clock = _Records()
        module = Distillation(copy.deepcopy(student), teacher)
        with tempfile.TemporaryDirectory(dir=folder) as run:
            fit(
                "ours",
                module,
                module.student,
                data,
                config,
                Parallel(ParallelConfig(), chosen.device),
                Path(run),
                clock,
                lambda: {"score": 0.0},
            )
        return statistics.harmonic_mean(clock.rates[1:])

    return side


def losses(chosen: Options, samples: list[Sample]) -> dict[str, float]:
    """Both sides' loss on the same chats and weights. Ends the benchmark where they differ: it
    would compare two things.
    """
    dtype = dtype_of(chosen.dtype)
    teacher = freeze(load_causal_lm(resolve(chosen.target), dtype)).to(chosen.device)
    student: Any = build_student(StudentConfig(num_hidden_layers=chosen.layers), teacher, dtype)
    student.to(chosen.device)
    found = both_losses(student, teacher, samples[:8], chosen.max_length)
    if not agree(found):
        sys.exit(
            f"error: the two sides' losses on the same chats are {found['ours']:.4f} and "
            f"{found['trainer']:.4f}: they do not compute the same"
        )
    return found


class _Records:
    """Stands in for the tracker: keeps tokens a second of every step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def rewind(self, step: int) -> None:
        self.rates.clear()

    def log(self, step: int, values: dict[str, Any]) -> None:
        if "tokens_per_second" in values:
            self.rates.append(values["tokens_per_second"])


def main() -> None:
    chosen = options(Options)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = load_tokenizer(resolve(chosen.target))
    chats, _ = read_chats([resolve(chosen.chats)])
    samples, account = chat_samples(tokenizer, chats, "auto", chosen.max_length, "answers")
    print(account.line("chats"), file=sys.stderr)
    per_step = max(1, round(chosen.tokens_per_step / (account.tokens / len(samples))))
    same = losses(chosen, samples)
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            "ours": our_side(chosen, samples, Path(folder)),
            "trainer": trainer_side(chosen, samples, per_step, Path(folder)),
        }
        figures = take_turns(sides, chosen.rounds)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    save(
        chosen.name,
        chosen,
        {
            "useful_tokens_per_second": medians,
            "ours_over_trainer": ratio(figures, "ours", "trainer"),
            "chats_per_trainer_step": per_step,
            "loss_on_the_same_chats": same,
        },
    )


if __name__ == "__main__":
    main()
