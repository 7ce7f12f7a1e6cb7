"""The other side of the distillation benchmarks: a `transformers.Trainer` loop that pads every
batch to its longest row and takes whole logits.

Same models, chats, supervised tokens, forward KL and dtype as ours. Imports nothing that a bare
machine with a GPU lacks.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainerCallback, TrainingArguments

from training.data.packing import PackedData, Sample, collate
from training.objectives import Distillation

# share by which the sides' losses may differ: their bfloat16 products are summed in another order
SAME_LOSS = 0.02


class _Clock(TrainerCallback):
    """Seconds of the Trainer's steps, data loading included, start-up not."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(-time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds[-1] += time.perf_counter()


class PaddedDistillation(Trainer):
    """The usual loop: padded batches, whole logits, forward KL on the supervised positions."""

    teacher: Any
    counts: list[int]  # tokens of every step, padding not counted

    def training_step(self, model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        self.counts.append(int(inputs["attention_mask"].sum()))
        loss = super().training_step(model, inputs, *given, **named)
        # as a loop that records its loss does: without the wait a step on a GPU ends before its
        # work
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
    """Forward KL in nats a supervised token, from whole logits."""
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
    """A batch padded to its longest row."""
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
    """Useful tokens a second of `steps` Trainer steps of `per_step` chats, after one that warms up.
    Both models take attention `sdpa`.
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
    """Both sides' loss on the same chats and weights. The models come with packed attention, and
    leave with `sdpa`.
    """
    data = PackedData(samples, longest, 1, 0)
    batch = collate(data.samples, data.rows, longest, teacher.device)
    ours = float(Distillation(student, teacher)(batch)[0]) / data.supervised
    for model in (student, teacher):
        model.set_attn_implementation("sdpa")
    inputs = {name: tensor.to(teacher.device) for name, tensor in padded(samples).items()}
    return {"ours": ours, "trainer": float(padded_loss(student, teacher, inputs))}


def agree(losses: dict[str, float]) -> bool:
    """Whether the two sides compute the same, but for rounding."""
    return abs(losses["ours"] / losses["trainer"] - 1) <= SAME_LOSS
