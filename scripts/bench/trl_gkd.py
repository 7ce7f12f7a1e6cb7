"""Distillation with TRL's GKD trainer, which scripts/bench/distillation.py compares with ours.

TRL is no requirement of the project: `pip install trl` beside it. The trainer gets our tokens and
supervised positions, never generates (lmbda=0) and takes the forward KL (beta=0), on complete
logits of batches that are padded to their longest row.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from decoding.errors import UserError
from scripts.bench.padded import StepClock, pad_rows
from training.data.packing import Sample

IGNORED = -100  # label of a position without loss


def label_rows(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return a padded batch of rows with `ids` and `mask`, in TRL's columns."""
    batch = pad_rows([Sample(np.array(row["ids"]), np.array(row["mask"])) for row in rows])
    labels = batch["input_ids"].masked_fill(~batch.pop("supervised"), IGNORED)
    # prompts are read for generation alone
    return {**batch, "labels": labels, "prompts": batch["input_ids"][:, :1]}


def gkd_rate(
    student: Any,
    teacher: Any,
    tokenizer: Any,
    samples: list[Sample],
    per_step: int,
    steps: int,
    folder: Path,
    device: str,
) -> float:
    """Return the tokens/s of GKD steps over `per_step` chats each; padding does not count.

    The first step is a warm-up. Both models must use attention `sdpa`. Raises UserError without
    TRL.
    """
    try:
        from trl.experimental.gkd import GKDConfig, GKDTrainer
    except ImportError as error:
        raise UserError(
            f"trl=true, but TRL is not installed here ({error}). Install it with `pip install trl` "
            f"in this environment, or set trl=false"
        ) from error
    settings = GKDConfig(
        str(folder),
        max_steps=steps + 1,
        per_device_train_batch_size=per_step,
        learning_rate=1e-3,
        lmbda=0.0,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        use_cpu=device == "cpu",
        bf16=False,  # the models have their dtype
        disable_tqdm=True,
        logging_strategy="no",
    )
    clock, counts = StepClock(), []

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = label_rows(rows)
        counts.append(int(batch["attention_mask"].sum()))
        return batch

    trainer = GKDTrainer(
        model=student,
        teacher_model=teacher,
        args=settings,
        data_collator=collate,
        train_dataset=Dataset.from_list(
            [{"ids": sample.ids, "mask": sample.mask} for sample in samples]
        ),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    return sum(counts[1 : len(clock.seconds)]) / sum(clock.seconds[1:])
