"""Drafting, verification and the commit launch few kernels outside the two models."""

from typing import Any

import pytest
import torch

from decoding.loop import prefill_batch
from decoding.models.native.model import NativeTarget
from decoding.rounds.batch import Batch
from decoding.rounds.settings import Settings
from decoding.verification import device_tree, token_tree
from recurrent_drafting.drafter import RecurrentDrafter
from scripts.bench.operations import Operations
from tests.decoding.row_kinds.recurrent import random_head
from tests.support.tiers import tiered
from tests.support.tiny_targets import hf_model, native_of, random_prompts

MOST = 150  # the published code: about 1,300 of 3,900
WIDTH, LENGTH = 8, 5


def opened(
    rule: str,
    layers: int = 2,
    rows: int = 1,
    length: int = LENGTH,
    children: str = "top_k",
    dtype: torch.dtype = torch.float64,
    **warper: Any,
) -> tuple[Batch, Operations]:
    """Return a batch after three rounds, and a counter of operations outside its models.

    dtype: the head's dtype; the target has float64.
    """
    target = native_of(hf_model("llama", layers=layers))
    drafter = RecurrentDrafter(
        head=random_head(target, 3.0).to(dtype), beam_width=WIDTH, children=children
    )
    sampled = {} if rule == "greedy" else {"temperature": 1.0, "verify": rule, **warper}
    settings = Settings(max_new_tokens=100, num_draft_tokens=length, **sampled)  # type: ignore[arg-type]
    batch = prefill_batch(target, drafter, random_prompts(rows, seed=6), settings)
    operations = Operations()
    operations.leave_out(target, "forward")
    operations.leave_out(drafter, "embed")
    operations.leave_out(
        drafter.head, "start", "advance", "context", "features", "logits", "to_target_ids"
    )
    with torch.inference_mode():
        for _ in range(3):
            batch.round()
    return batch, operations


def max_operations(batch: Batch, operations: Operations, rounds: int = 6) -> int:
    """Return the largest number of operations in any of the next rounds."""
    most = 0
    with torch.inference_mode():
        for _ in range(rounds):
            operations.counts.clear()
            with operations:
                batch.round()
            most = max(most, operations.total)
    return most


@pytest.mark.parametrize("rows", [1, 4])
def test_a_greedy_round_has_few_operations_outside_the_models(rows: int) -> None:
    batch, operations = opened("greedy", rows=rows)
    most = max_operations(batch, operations)
    assert 20 < most <= MOST, operations.counts


def test_operations_do_not_grow_with_the_target_and_little_with_the_length() -> None:
    deep = max_operations(*opened("greedy", layers=6))
    shallow = max_operations(*opened("greedy", layers=2))
    longer = max_operations(*opened("greedy", length=LENGTH + 3))
    assert deep == shallow
    assert shallow < longer <= MOST


TRUNCATING = {"temperature": 0.7, "top_k": 12, "top_p": 0.9}


@pytest.mark.parametrize("dtype", tiered([torch.float64, torch.bfloat16], [torch.bfloat16]))
@pytest.mark.parametrize(
    ("rule", "children", "length", "warper"),
    [
        ("coupled", "top_k", LENGTH, {}),
        ("token", "top_k", LENGTH + 3, TRUNCATING),
        ("token", "sampled", LENGTH, {"temperature": 0.7}),
        ("token", "sampled", LENGTH, TRUNCATING),
        ("token", "sampled", LENGTH, {"temperature": 0.7, "min_p": 0.1}),
    ],
)
def test_a_sampled_round_has_few_operations_outside_the_models(
    rule: str,
    children: str,
    length: int,
    warper: dict[str, float],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that a sampled round, verified as on a GPU, has at most MOST operations.

    It has four rows, which need a few more operations than one.
    """
    monkeypatch.setattr(token_tree, "token", device_tree.token)
    batch, operations = opened(
        rule, children=children, rows=4, length=length, dtype=dtype, **warper
    )
    assert max_operations(batch, operations) <= MOST, operations.counts


def test_a_cache_commit_moves_only_accepted_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a commit moves no more nodes than were accepted.

    Its indices cover the longest accepted path and the tip. A path that is already in place moves
    nothing.
    """
    batch, _ = opened("greedy", rows=4)
    moved: list[tuple[int, int]] = []
    original = NativeTarget._move

    def move(self: NativeTarget, src_BL: torch.Tensor, dst_BL: torch.Tensor) -> None:
        moved.append((dst_BL.shape[1], int((src_BL != dst_BL).sum())))
        original(self, src_BL, dst_BL)

    monkeypatch.setattr(NativeTarget, "_move", move)
    with torch.inference_mode():
        for _ in range(12):
            before = [row.generation.accepted for row in batch.rows]
            rows = list(batch.rows)
            moves = len(moved)
            batch.round()
            accepted = [row.generation.accepted - old for row, old in zip(rows, before)]
            for width, changed in moved[moves:]:
                assert width == 1 + max(accepted)
                assert changed <= sum(accepted)
    assert moved, "no branch other than the first was ever accepted"


def test_control_the_counter_counts_operations_outside_models() -> None:
    """Control: operations outside the models are counted; views and those inside are not."""
    head = random_head(native_of(hf_model("llama", layers=1)))
    operations = Operations()
    operations.leave_out(head, "start")
    x_BH = torch.randn(2, 32, dtype=torch.float64)
    with operations:
        head.start(x_BH)
        y_BH = x_BH.view(2, 32)[:1].expand(4, 32).reshape(-1)
        (y_BH * 2 + 1).sum().item()
    assert operations.counts["aten.mul.Tensor"] == operations.counts["aten.add.Tensor"] == 1
    assert operations.counts["aten.sum.default"] == 1
    assert not any("linear" in name or "mm" in name or "silu" in name for name in operations.counts)
    assert operations.waits == 1
