"""Distillation with `transformers.Trainer`, which benchmarks compare with distill.train.

It pads every batch and computes complete logits. Models, chats, supervised tokens, forward KL and
dtype are the same on both sides. The module imports only packages that gpu.py may import.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainerCallback, TrainingArguments

from training.data.packing import PackedData, Sample, collate
from training.objectives import Distillation

# largest relative difference of the losses, whose bfloat16 products are summed in another order
SAME_LOSS = 0.02


class StepClock(TrainerCallback):
    """Clock of the Trainer's steps, without start-up and the loading of batches."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(-time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds[-1] += time.perf_counter()


class PaddedDistillation(Trainer):
    """Trainer with the usual distillation: padded batches, complete logits, forward KL."""

    teacher: Any
    counts: list[int]  # tokens of every step without padding

    def training_step(self, model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        self.counts.append(int(inputs["attention_mask"].sum()))
        loss = super().training_step(model, inputs, *given, **named)
        # waits for the device, as a loop that records its loss does
        loss.item()
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        return padded_loss(model, self.teacher, inputs)


def padded_loss(student: Any, teacher: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the forward KL in nats per supervised token, from complete logits.

    inputs: `input_ids`, `attention_mask` and `supervised`, each [B, T].
    """
    text = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    with torch.no_grad():
        teacher_BTV = teacher(**text).logits[:, :-1]
    student_BTV = student(**text).logits[:, :-1]
    keep = inputs["supervised"][:, 1:]
    log_q_NV = torch.log_softmax(student_BTV[keep].float(), dim=-1)
    log_p_NV = torch.log_softmax(teacher_BTV[keep].float(), dim=-1)
    return F.kl_div(log_q_NV, log_p_NV, reduction="sum", log_target=True) / keep.sum()


def pad_rows(rows: Sequence[Sample], length: int = 0) -> dict[str, torch.Tensor]:
    """Return a batch padded to `length` tokens, or to its longest row if that is longer."""
    ids = [torch.from_numpy(row.ids).long() for row in rows]
    columns = {
        "input_ids": ids,
        "attention_mask": [torch.ones_like(row) for row in ids],
        "supervised": [torch.from_numpy(row.mask) for row in rows],
    }
    batch = {name: pad_sequence(column, batch_first=True) for name, column in columns.items()}
    missing = max(0, length - batch["input_ids"].shape[1])
    return {name: F.pad(tensor, (0, missing)) for name, tensor in batch.items()}


def trainer_rate(
    student: Any,
    teacher: Any,
    samples: list[Sample],
    per_step: int,
    steps: int,
    folder: Path,
    device: str,
) -> float:
    """Return the tokens/s of Trainer steps over `per_step` chats each; padding does not count.

    The first step is a warm-up. Both models must use attention `sdpa`.
    """
    settings = TrainingArguments(
        str(folder),
        max_steps=steps + 1,
        per_device_train_batch_size=per_step,
        remove_unused_columns=False,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        use_cpu=device == "cpu",
        disable_tqdm=True,
        logging_strategy="no",
    )
    clock = StepClock()
    trainer = PaddedDistillation(
        student, settings, data_collator=pad_rows, train_dataset=samples, callbacks=[clock]
    )
    trainer.teacher, trainer.counts = teacher, []
    trainer.train()
    return sum(trainer.counts[1:]) / sum(clock.seconds[1:])


@torch.no_grad()
def both_losses(
    student: Any, teacher: Any, samples: list[Sample], longest: int
) -> dict[str, float]:
    """Return the losses of distill.train and of the Trainer on the same chats and weights.

    longest: tokens of a packed row. Expects models with packed attention, and leaves them with
    `sdpa`.
    """
    data = PackedData(samples, longest, 1, 0)
    batch = collate(data.samples, data.rows, longest, teacher.device)
    ours = float(Distillation(student, teacher)(batch)[0]) / data.supervised
    for model in (student, teacher):
        model.set_attn_implementation("sdpa")
    inputs = {name: tensor.to(teacher.device) for name, tensor in pad_rows(samples).items()}
    return {"ours": ours, "trainer": float(padded_loss(student, teacher, inputs))}


def agree(ours: float, theirs: float) -> bool:
    """Return whether two losses are equal except for rounding."""
    return abs(ours / theirs - 1) <= SAME_LOSS
