"""Distillation against a `transformers.Trainer` loop and TRL, in useful (non-padding) tokens/s.

    python scripts/bench/distillation.py target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      chats=$SHALLOW_DRAFT_DATA/data/chat/oasst1_threads.json

The Trainer side pads every batch to its longest row and takes the same forward KL on the same
supervised tokens, and so does TRL's GKD trainer with trl=true. All sides have the same models,
data, dtype, malloc settings, threads and mean number of chats per step, and take turns in one
process.
"""

import copy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decoding.models.text.tokenizer import load_tokenizer
from distill.student import build_student
from jobs.paths import resolve_model
from scripts.bench import common
from scripts.bench.common import BenchOptions, StepRecorder
from scripts.bench.padded import both_losses, trainer_rate
from scripts.bench.trl_gkd import gkd_rate
from scripts.usage import run_script
from training.config import StudentConfig
from training.data.packing import PackedData, Sample
from training.models.build import dtype_of, load_causal_lm
from training.objectives import Distillation, freeze
from training.optimizer_config import OptimizerConfig


@dataclass
class Options(BenchOptions):
    target: str = "embedded:target"  # model folder of the teacher
    chats: str = "embedded:chats"  # ShareGPT file
    layers: int = 1  # layers of the student
    dtype: str = "bfloat16"  # dtype of both sides
    max_length: int = 1024  # maximum length of a chat in tokens, on both sides
    # tokens of a packed step; the Trainer's batches hold as many on average
    tokens_per_step: int = 8192
    steps: int = 6  # optimizer steps per round
    rounds: int = 3  # measured rounds
    trl: bool = False  # measure TRL too, which must be installed
    name: str = "distillation"  # name of the results file


def load_models(chosen: Options) -> tuple[Any, Any]:
    """Return a student and its frozen teacher, with packed attention."""
    dtype = dtype_of(chosen.dtype)
    teacher = freeze(load_causal_lm(resolve_model(chosen.target), dtype)).to(chosen.device)
    student: Any = build_student(StudentConfig(num_hidden_layers=chosen.layers), teacher, dtype)
    return student.to(chosen.device), teacher


def build_our_side(chosen: Options, samples: list[Sample]) -> Callable[[], float]:
    """Return a function that trains a copy with training/loop.py and returns useful tokens/s."""
    student, teacher = load_models(chosen)
    tokens, optimizer = chosen.tokens_per_step, OptimizerConfig(lr=1e-3)
    data = PackedData(samples, chosen.max_length, tokens // chosen.max_length, 0)
    loop = common.loop_config(chosen.steps + 1, tokens, chosen.dtype, optimizer)

    def measure() -> float:
        recorder, module = StepRecorder(), Distillation(copy.deepcopy(student), teacher)
        common.train_steps("ours", module, module.student, data, loop, chosen.device, recorder)
        return recorder.rate()

    return measure


def main() -> None:
    """Compare the losses of both sides, then their useful tokens/s."""
    chosen = common.read_options(Options)
    samples, account = common.read_chat_samples(chosen.target, [chosen.chats], chosen.max_length)
    per_step = max(1, round(chosen.tokens_per_step / (account.tokens / len(samples))))
    student, teacher = load_models(chosen)
    losses = both_losses(student, teacher, samples[:8], chosen.max_length)  # leaves sdpa for below
    common.check_losses(losses["ours"], losses["trainer"])
    with tempfile.TemporaryDirectory() as folder:
        run = (samples, per_step, chosen.steps, Path(folder), chosen.device)
        sides = {
            "ours": build_our_side(chosen, samples),
            "trainer": lambda: trainer_rate(student, teacher, *run),
        }
        if chosen.trl:
            tokenizer = load_tokenizer(resolve_model(chosen.target))
            sides["trl"] = lambda: gkd_rate(student, teacher, tokenizer, *run)
        figures = common.take_turns(sides, chosen.rounds)
    found = {
        "useful_tokens_per_second": common.medians(figures),
        "ours_over": {
            side: common.ratio(figures, "ours", side) for side in sides if side != "ours"
        },
        "chats_per_trainer_step": per_step,
        "loss_on_the_same_chats": losses,
    }
    common.save(chosen.name, chosen, found)


if __name__ == "__main__":
    run_script(main)
