"""Sides of recurrent_show.py: heads and pruned students, their training and their acceptance.

Every side differs from `base` in one thing, or in what its name says. All are trained for equal
seconds: a side's step is timed first, and its number of steps fills the seconds, with the complete
schedule of the learning rate. The target's states are computed in every step.

A head is judged by its block efficiency by prompt: greedy, of a chain on the target's own answers
(training/heads/evaluation.py); sampled, by real decoding with sampled chains, tested by p / q.
"""

import copy
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decoding.engine import Engine, load
from decoding.loop import decode
from decoding.rounds.settings import Settings
from jobs.paths import resolve
from recurrent_drafting.build import head_config
from recurrent_drafting.config import HeadShapeConfig
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import RecurrentHead
from recurrent_drafting.kind import KIND
from recurrent_drafting.predictions import PREDICTIONS
from scripts.bench.common import StepRecorder, loop_config, train_steps
from scripts.bench.recurrent_generation import Answered, prompts_without_loops
from scripts.bench.students import StudentOptions, Students, prune_config
from training.config import DataConfig, StudentConfig
from training.data.from_config import read_samples
from training.data.packing import PackedData, Sample
from training.data.readers import read_prompts
from training.features.states import TargetStates
from training.heads.build import build_head
from training.heads.evaluation import GreedyChain
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.models.build import dtype_of, load_causal_lm
from training.objectives import Distillation, freeze
from training.optimizer_config import OptimizerConfig

PACE_STEPS = 5  # steps of a side's timing, the first of which is a warm-up


@dataclass(frozen=True)
class Side:
    """Start of a head and what it learns from."""

    rnn: bool = True
    warm_start: str = "state"
    zero_blocks: bool = True
    loss: str = "cross_entropy"
    own_tokens: float = 0.0
    # trains on the target's answers to the chats' requests instead of the given ones
    answered: bool = False


BASE = "base"
SIDES = {
    BASE: Side(),
    "without recurrence": Side(rnn=False),
    "continuations": Side(loss="continuations"),
    "distillation": Side(answered=True),
    "forward KL": Side(loss="forward_kl"),
    "LK": Side(loss="lk"),
    "training-time test": Side(own_tokens=0.5),
    "forward KL, answered": Side(loss="forward_kl", answered=True),
    "warm start alone": Side(zero_blocks=False),
    "zero blocks alone": Side(warm_start="none"),
    "as published": Side(warm_start="none", zero_blocks=False),
}

Objective = tuple[Any, Any]  # a loss of batches, and the module of it that is trained


class Bench:
    """Target (to train on and to decode with), chats and held-out answers that all runs share."""

    def __init__(self, chosen: Any, files: dict[str, Path]) -> None:
        """Keep the options. files: chats `found`, `answered` by the target, and `held_out`."""
        self.chosen, self.files = chosen, files
        self.folder, self.dtype = resolve(chosen.target), dtype_of(chosen.dtype)

    @cached_property
    def engine(self) -> Engine:
        return load(self.folder, device=self.chosen.device, dtype=self.chosen.decode_dtype)

    @cached_property
    def target(self) -> Any:
        return freeze(load_causal_lm(self.folder, self.dtype)).to(self.chosen.device)

    @cached_property
    def states(self) -> TargetStates:
        states = TargetStates(self.target)
        states.move_to(torch.device(self.chosen.device))
        return states

    @cached_property
    def held_out(self) -> list[Answered]:
        """Prompts whose greedy answer does not loop, with ids and answers."""
        prompts, chosen = read_prompts(resolve(self.chosen.prompts)), self.chosen
        most = chosen.max_new_tokens
        return prompts_without_loops(self.engine, prompts, chosen.max_prompts, most)[1]

    @cached_property
    def chain(self) -> GreedyChain:
        answers = []
        for _, ids, answer in self.held_out:
            mask = np.arange(len(ids) + len(answer)) >= len(ids)
            answers.append(Sample(np.asarray([*ids, *answer], dtype=np.int32), mask))
        longest = max(len(one.ids) for one in answers)
        head, chosen = (
            RecurrentHead(head_config(HeadShapeConfig(), self.target.config)),
            self.chosen,
        )
        capacity, device = max(longest, chosen.max_length), torch.device(chosen.device)
        return GreedyChain(
            PREDICTIONS,
            head,
            self.states,
            answers,
            chosen.heads,
            chosen.max_new_tokens,
            capacity,
            device,
        )

    def data(self, answered: bool, seed: int) -> PackedData:
        """Return the chats in packed rows."""
        rows = max(1, self.chosen.tokens_per_step // self.chosen.max_length)
        return PackedData(
            self._samples["answered" if answered else "found"], self.chosen.max_length, rows, seed
        )

    @cached_property
    def _samples(self) -> dict[str, list[Sample]]:
        given = {
            name: DataConfig(
                chats=[str(self.files[name])], max_length=self.chosen.max_length, max_bad=1.0
            )
            for name in ("found", "answered")
            if name in self.files
        }
        return {
            name: read_samples(self.engine.tokenizer, data, "train") for name, data in given.items()
        }

    def head(self, side: Side, seed: int) -> RecurrentHead:
        """Return an untrained head."""
        torch.manual_seed(seed)
        shape = HeadShapeConfig(
            num_draft_layers=self.chosen.num_draft_layers,
            rnn=side.rnn,
            warm_start=side.warm_start,
            zero_blocks=side.zero_blocks,
        )
        lm_head_VH = self.target.get_output_embeddings().weight.detach()
        config = head_config(shape, self.target.config)
        head = build_head(KIND, shape, config, lm_head_VH, [], show=False)
        return head.to(self.chosen.device, self.dtype)

    def head_objective(self, side: Side, seed: int) -> Objective:
        """Return a side's loss and its head."""
        head = self.head(side, seed)
        loss = HeadLossConfig(
            side.loss, predict_n_tokens=self.chosen.heads, own_tokens=side.own_tokens
        )
        return HeadObjective(PREDICTIONS, head, self.states, loss), head

    @cached_property
    def students(self) -> dict[int, tuple[Any, float]]:
        """Number of layers -> the target cut by importance, and the seconds of the cut."""
        chosen, students, found = self.chosen, Students(), {}
        wanted = StudentOptions(
            device=chosen.device,
            target=chosen.target,
            chats=[str(self.files["found"])],
            held_out_chats=[str(self.files["held_out"])],
            max_length=chosen.max_length,
            tokens_per_step=chosen.tokens_per_step,
            steps=chosen.pruned_probe_steps,
            probe_steps=chosen.pruned_probe_steps,
            sequences=chosen.pruned_sequences,
            lr=chosen.pruned_lr,
            dtype=chosen.dtype,
            cache_mb=0,
        )
        with tempfile.TemporaryDirectory() as place:
            for layers in chosen.pruned_layers:
                config = prune_config(
                    wanted, StudentConfig(num_hidden_layers=layers), 0, Path(place)
                )
                config.importance.choice = chosen.pruned_choice
                context = students.context(config)
                found[layers] = students.cut(context)[0].cpu(), sum(context.seconds.values())
        return found

    def student_objective(self, layers: int) -> Objective:
        """Return the distillation into a copy of the cut target."""
        student = copy.deepcopy(self.students[layers][0]).to(self.chosen.device, self.dtype)
        return Distillation(student, self.target), student

    def time_step(self, make: Callable[[], Objective], data: PackedData, lr: float) -> float:
        """Return the median seconds of a step."""
        return statistics.median(self.train(make(), data, PACE_STEPS, lr)[1:])

    def train(self, made: Objective, data: PackedData, steps: int, lr: float) -> list[float]:
        """Train in place and return the seconds of every step."""
        recorder, tokens = StepRecorder(), data.rows_per_step * data.capacity
        optimizer = OptimizerConfig(lr=lr, warmup_steps=max(1, steps // 10), final_lr=0.0)
        loop = loop_config(steps, tokens, self.chosen.dtype, optimizer)
        train_steps("train", *made, data, loop, self.chosen.device, recorder)
        return recorder.seconds()

    @torch.no_grad()
    def block_efficiency(self, head: RecurrentHead, seed: int) -> dict[str, list[tuple[int, int]]]:
        """Return (tokens, rounds) of every held-out prompt, `greedy` and `sampled`."""
        self.chain.head = head.eval()
        greedy = [(emitted, rounds) for rounds, emitted, _, _ in self.chain.counts()]
        drafter = RecurrentDrafter(
            head=copy.deepcopy(head).float().requires_grad_(False), beam_width=1, children="sampled"
        )
        settings = Settings(
            self.chosen.max_new_tokens,
            temperature=1.0,
            num_draft_tokens=self.chosen.heads,
            seed=seed,
            stop_token_ids=self.engine.stop_token_ids,
        )
        done = decode(self.engine.target, drafter, [ids for _, ids, _ in self.held_out], settings)
        return {"greedy": greedy, "sampled": [(len(one.tokens), one.rounds) for one in done]}
