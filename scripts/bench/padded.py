"""Distillation by a `transformers.Trainer` loop on padded batches and complete logits.

Models, chats, supervised tokens, forward KL and dtype are those of our side. Imports only packages
that gpu.py may import.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainerCallback, TrainingArguments

from training.data.packing import PackedData, Sample, collate
from training.objectives import Distillation

# largest relative difference of the losses, whose bfloat16 products are summed in another order
SAME_LOSS = 0.02


class _Clock(TrainerCallback):
    """Clock of the Trainer's steps, with data loading and without start-up."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(-time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds[-1] += time.perf_counter()


class PaddedDistillation(Trainer):
    """Usual loop: padded batches, complete logits, forward KL on supervised positions."""

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
    """Return the forward KL in nats a supervised token, from complete logits."""
    common = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    with torch.no_grad():
        teacher_BTV = teacher(**common).logits[:, :-1]
    student_BTV = student(**common).logits[:, :-1]
    keep = inputs["supervised"][:, 1:]
    log_q_NV = torch.log_softmax(student_BTV[keep].float(), dim=-1)
    log_p_NV = torch.log_softmax(teacher_BTV[keep].float(), dim=-1)
    return (
        torch.nn.functional.kl_div(log_q_NV, log_p_NV, reduction="sum", log_target=True)
        / keep.sum()
    )


def padded(rows: list[Sample]) -> dict[str, torch.Tensor]:
    """Return a batch padded to its longest row."""
    ids = pad_sequence([torch.from_numpy(row.ids).long() for row in rows], batch_first=True)
    attention = pad_sequence(
        [torch.ones(len(row.ids), dtype=torch.long) for row in rows], batch_first=True
    )
    supervised = pad_sequence([torch.from_numpy(row.mask) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": attention, "supervised": supervised}


def trainer_rate(
    student: Any,
    teacher: Any,
    samples: list[Sample],
    per_step: int,
    steps: int,
    folder: Path,
    device: str,
) -> float:
    """Measure the useful tokens/s of Trainer steps of `per_step` chats, after one for warm-up.

    Both models must use attention `sdpa`.
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
    clock = _Clock()
    trainer = PaddedDistillation(
        student, settings, data_collator=padded, train_dataset=samples, callbacks=[clock]
    )
    trainer.teacher, trainer.counts = teacher, []
    trainer.train()
    return sum(trainer.counts[1:]) / sum(clock.seconds[1:])


@torch.no_grad()
def both_losses(
    student: Any, teacher: Any, samples: list[Sample], longest: int
) -> dict[str, float]:
    """Return both sides' losses on the same chats and weights.

    Expects models with packed attention and leaves them with `sdpa`.
    """
    data = PackedData(samples, longest, 1, 0)
    batch = collate(data.samples, data.rows, longest, teacher.device)
    ours = float(Distillation(student, teacher)(batch)[0]) / data.supervised
    for model in (student, teacher):
        model.set_attn_implementation("sdpa")
    inputs = {name: tensor.to(teacher.device) for name, tensor in padded(samples).items()}
    return {"ours": ours, "trainer": float(padded_loss(student, teacher, inputs))}


def agree(losses: dict[str, float]) -> bool:
    """Return whether both sides compute the same loss except for rounding."""
    return abs(losses["ours"] / losses["trainer"] - 1) <= SAME_LOSS
