"""Initial heads: shapes, warm starts, zero blocks, shortlists, and heads of another target."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from decoding.errors import UserError
from recurrent_drafting.build import shape_rules
from recurrent_drafting.checkpoint import save_head
from recurrent_drafting.config import HeadShapeConfig, HeadTrainConfig
from recurrent_drafting.head import HeadConfig, RecurrentHead
from recurrent_drafting.kind import KIND
from tests.support import tiny_heads as tiny
from training.data.packing import Sample
from training.draft_vocabulary import choose_tokens
from training.heads.build import initialize_head, shape_of, start_head
from training.heads.config import describe_overridden

H, V = tiny.HIDDEN, tiny.VOCABULARY


def built(
    shape: HeadShapeConfig, samples: list[Sample] | None = None
) -> tuple[RecurrentHead, torch.Tensor]:
    torch.manual_seed(0)
    lm_head = torch.randn(V, H)
    config = shape_of(KIND, HeadTrainConfig(head=shape), tiny.target().config)
    refused = [
        f"{key}: {expected}" for key, (ok, expected) in shape_rules(shape, config).items() if not ok
    ]
    if refused:
        raise UserError("; ".join(refused))
    head, size = start_head(KIND, shape, config), config.draft_vocab_size
    ids = choose_tokens(samples or [], V, size, show=False) if size and not shape.path else None
    if not shape.path:
        initialize_head(KIND, shape, head, lm_head, ids)
    return head, lm_head


def logits(head: RecurrentHead, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return head.logits(head.features(head.context(hidden), state))


def test_default_weights_are_pytorchs_as_published():
    head, _ = built(HeadShapeConfig())
    assert head.config == HeadConfig(
        vocab_size=V, hidden_size=H, exit_dim=2 * H, num_draft_layers=2, rnn=True
    )
    for name, tensor in head.named_parameters():
        bound = (H if name.startswith("rnn") else 2 * H) ** -0.5
        assert float(tensor.detach().abs().max()) <= bound
        assert tensor.numel() < 100 or float(tensor.detach().std()) == pytest.approx(
            bound / 3**0.5, rel=0.2
        )


def test_zero_blocks_are_the_identity_and_still_learn():
    head, _ = built(HeadShapeConfig(zero_blocks=True))
    hidden, state = torch.randn(2, 5, H)
    features = head.features(head.context(hidden), state)
    torch.testing.assert_close(features, torch.cat([hidden, state], dim=-1))
    logits(head, hidden, state).square().sum().backward()
    gradient = head.lm_head[0].linear.weight.grad
    assert gradient is not None and gradient.abs().sum() > 0


@pytest.mark.parametrize("exit_dim", [0, H])
@pytest.mark.parametrize("draft_vocab_size", [0, 7])
@pytest.mark.parametrize("half", ["hidden", "state"])
def test_a_warm_start_is_the_targets_lm_head_on_its_half(
    half: str, draft_vocab_size: int, exit_dim: int
):
    shape = HeadShapeConfig(
        warm_start=half,
        zero_blocks=True,
        draft_vocab_size=draft_vocab_size,
        exit_dim=exit_dim,
        num_draft_layers=1,
    )
    head, lm_head = built(shape, tiny.samples(40))
    hidden, state = torch.randn(2, 5, H)
    expected = (hidden if half == "hidden" else state) @ lm_head.T
    if head.token_ids_V is not None:
        expected = expected[:, head.token_ids_V]
    torch.testing.assert_close(logits(head, hidden, state), expected)


def test_a_warm_start_of_both_halves_adds_them():
    head, lm_head = built(HeadShapeConfig(warm_start="both", zero_blocks=True))
    hidden, state = torch.randn(2, 5, H)
    torch.testing.assert_close(logits(head, hidden, state), (hidden + state) @ lm_head.T)


def test_a_shortlist_holds_the_tokens_of_most_answers():
    ids = np.array([50, 9, 9, 9, 4, 4, 60, 60, 3, 2], dtype=np.int32)
    mask = np.array([False, True, True, True, True, True, False, True, True, True])
    head, _ = built(HeadShapeConfig(draft_vocab_size=4), [Sample(ids, mask)])
    assert head.token_ids_V is not None
    assert head.token_ids_V.tolist() == [2, 3, 4, 9], (
        "50 and one 60 are not in answers; ties go to smaller ids"
    )
    assert head.output.shape == (4, 2 * H)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            HeadShapeConfig(warm_start="warm"),
            r"head.warm_start: none \| hidden \| state \| both for a head",
        ),
        (
            HeadShapeConfig(warm_start="state", exit_dim=24),
            r"head.warm_start: none for a head of width \(exit_dim\) 24",
        ),
        (HeadShapeConfig(warm_start="both", exit_dim=H), r"none \| hidden \| state for a head"),
        (HeadShapeConfig(draft_vocab_size=-1), "draft_vocab_size: 1 or more, or 0 for all"),
        (HeadShapeConfig(num_draft_layers=-1), "num_draft_layers: 0 to 64"),
    ],
)
def test_impossible_starts_are_refused(shape: HeadShapeConfig, words: str):
    with pytest.raises(UserError, match=words):
        built(shape)


def test_a_head_continues_from_its_folder_with_the_folders_shape(tmp_path: Path):
    save_head(tiny.head("without recurrence", torch.float32), tmp_path)
    head, _ = built(HeadShapeConfig(path=str(tmp_path), rnn=True, num_draft_layers=5))
    assert not head.config.rnn and head.config.num_draft_layers == 2
    assert all(parameter.requires_grad for parameter in head.parameters())
    assert torch.equal(head.output, tiny.head("without recurrence", torch.float32).output)


def test_options_that_a_folder_overrides_are_named(tmp_path: Path):
    config = tiny.head("without recurrence", torch.float32).config
    asked = HeadShapeConfig(path="HEAD", num_draft_layers=5, rnn=False, zero_blocks=True)
    assert describe_overridden(asked, config).endswith(
        "which replace head.num_draft_layers=5, head.zero_blocks=True"
    )
    assert not describe_overridden(HeadShapeConfig(path="HEAD", num_draft_layers=2), config)


@pytest.mark.parametrize(("name", "size"), [("hidden_size", 24), ("vocab_size", 67)])
def test_a_head_of_a_target_of_other_sizes_is_refused(name: str, size: int, tmp_path: Path):
    save_head(tiny.head(dtype=torch.float32), tmp_path)
    sizes = {"hidden_size": H, "vocab_size": V}
    other = AutoConfig.for_model("llama", num_attention_heads=1, **(sizes | {name: size}))
    with pytest.raises(UserError, match=f"has {name} {sizes[name]}, but the target has {size}"):
        shape_of(KIND, HeadTrainConfig(head=HeadShapeConfig(path=str(tmp_path))), other)
