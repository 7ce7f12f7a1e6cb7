"""Sides of recurrent_show.py: heads and pruned students, their training and block efficiency.

Every side differs from `base` in one setting, or in those that its name lists. All are trained for
equal seconds: a side's step is timed first, and as many steps as fit run under a complete
learning-rate schedule. The target's states are computed in every step.

A head is judged by its block efficiency on each prompt, decoding with a chain: greedily, and at
temperature 1 with sampled drafts under token verification.
"""

import copy
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from decoding.engine import Engine, load
from decoding.loop import decode
from decoding.rounds.settings import Settings
from jobs.paths import resolve, resolve_model
from recurrent_drafting.build import head_config
from recurrent_drafting.config import HeadShapeConfig
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import RecurrentHead
from recurrent_drafting.kind import KIND
from recurrent_drafting.predictions import PREDICTIONS
from scripts.bench.common import StepRecorder, loop_config, train_steps
from scripts.bench.recurrent_generation import Answered, find_prompts_without_loops
from scripts.bench.students import StudentOptions, Students, prune_config
from training.config import DataConfig, StudentConfig
from training.data.from_config import read_samples
from training.data.packing import PackedData, Sample
from training.data.readers import read_prompts
from training.features.states import TargetStates
from training.heads.build import initialize_head, start_head
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.models.build import dtype_of, load_causal_lm
from training.objectives import Distillation, freeze
from training.optimizer_config import OptimizerConfig

PACE_STEPS = 5  # steps that time a side; the first one is a warm-up


@dataclass(frozen=True)
class Side:
    """Initialisation, loss and data of a head."""

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

Objective = tuple[Any, Any]  # a loss, and the part of it that is trained


class Bench:
    """Target for training and for decoding, chats, and held-out answers, shared by all runs."""

    def __init__(self, chosen: Any, files: dict[str, Path]) -> None:
        """Store the options. files: chats `found`, `answered` by the target, and `held_out`."""
        self.chosen, self.files = chosen, files
        self.folder, self.dtype = resolve_model(chosen.target), dtype_of(chosen.dtype)
        self.device = torch.device(chosen.device)

    @cached_property
    def engine(self) -> Engine:
        """The target for decoding."""
        return load(self.folder, device=self.chosen.device, dtype=self.chosen.decode_dtype)

    @cached_property
    def target(self) -> Any:
        """The frozen target for training."""
        return freeze(load_causal_lm(self.folder, self.dtype)).to(self.device)

    @cached_property
    def states(self) -> TargetStates:
        """The target's hidden states, computed when a batch is read."""
        states = TargetStates(self.target)
        states.move_to(self.device)
        return states

    @cached_property
    def held_out(self) -> list[Answered]:
        """Prompts whose greedy answer does not loop, with ids and answers."""
        prompts, chosen = read_prompts(resolve(self.chosen.prompts)), self.chosen
        most = chosen.max_new_tokens
        return find_prompts_without_loops(self.engine, prompts, chosen.max_prompts, most)[1]

    @cached_property
    def _samples(self) -> dict[str, Sequence[Sample]]:
        found = {}
        for name, file in self.files.items():
            config = DataConfig(chats=[str(file)], max_length=self.chosen.max_length, max_bad=1.0)
            if name != "held_out":
                found[name] = read_samples(self.engine.tokenizer, config, "train")
        return found

    def data(self, answered: bool, seed: int) -> PackedData:
        """Return the given chats, or those answered by the target, in packed rows."""
        samples, length = self._samples["answered" if answered else "found"], self.chosen.max_length
        return PackedData(samples, length, max(1, self.chosen.tokens_per_step // length), seed)

    def head_objective(self, side: Side, seed: int) -> Objective:
        """Return a side's loss and its untrained head."""
        torch.manual_seed(seed)
        chosen = self.chosen
        shape = HeadShapeConfig(
            num_draft_layers=chosen.num_draft_layers,
            rnn=side.rnn,
            warm_start=side.warm_start,
            zero_blocks=side.zero_blocks,
        )
        lm_head_VH = self.target.get_output_embeddings().weight.detach()
        config = head_config(shape, self.target.config)
        head = start_head(KIND, shape, config)
        initialize_head(KIND, shape, head, lm_head_VH)
        head = head.to(self.device, self.dtype)
        loss = HeadLossConfig(side.loss, predict_n_tokens=chosen.heads, own_tokens=side.own_tokens)
        return HeadObjective(PREDICTIONS, head, self.states, loss), head

    @cached_property
    def students(self) -> dict[int, tuple[Any, float]]:
        """Number of layers -> the target cut by importance, and the seconds of the cut."""
        chosen, students, found = self.chosen, Students(), {}
        options = StudentOptions(
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
                shape = StudentConfig(num_hidden_layers=layers)
                config = prune_config(options, shape, 0, Path(place))
                config.importance.choice = chosen.pruned_choice
                context = students.context(config)
                found[layers] = students.cut(context)[0].cpu(), sum(context.seconds.values())
        return found

    def student_objective(self, layers: int) -> Objective:
        """Return the distillation into a copy of the cut target, and the copy."""
        student = copy.deepcopy(self.students[layers][0]).to(self.device, self.dtype)
        return Distillation(student, self.target), student

    def time_step(self, make: Callable[[], Objective], data: PackedData, lr: float) -> float:
        """Return the median seconds of a step, after one for warm-up."""
        return statistics.median(self.train(make(), data, PACE_STEPS, lr)[1:])

    def train(self, made: Objective, data: PackedData, steps: int, lr: float) -> list[float]:
        """Train in place and return the seconds of every step."""
        recorder, tokens = StepRecorder(), data.rows_per_step * data.capacity
        optimizer = OptimizerConfig(lr=lr, warmup_steps=max(1, steps // 10), final_lr=0.0)
        loop = loop_config(steps, tokens, self.chosen.dtype, optimizer)
        train_steps("train", *made, data, loop, self.chosen.device, recorder)
        return recorder.seconds()

    def block_efficiency(self, head: RecurrentHead, seed: int) -> dict[str, list[tuple[int, int]]]:
        """Decode the held-out prompts with a chain; return the (tokens, rounds) of each.

        Keys: `greedy`, and `sampled` for temperature 1.
        """
        engine, prompts = self.engine, [ids for _, ids, _ in self.held_out]
        copied = copy.deepcopy(head).float().requires_grad_(False).eval()
        drafter = RecurrentDrafter(head=copied, beam_width=1, children="sampled")
        found = {}
        for way, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            settings = Settings(
                self.chosen.max_new_tokens,
                temperature=temperature,
                num_draft_tokens=self.chosen.heads,
                seed=seed,
                stop_token_ids=engine.stop_token_ids,
            )
            made = decode(engine.target, drafter, prompts, settings)
            found[way] = [(len(one.tokens), one.rounds) for one in made]
        return found
