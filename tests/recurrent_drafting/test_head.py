"""The head against a transcription of its equations in every form, and published sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recurrent_drafting.head import HeadConfig, RecurrentHead
from recurrent_drafting.kind import KIND
from tests.support import tiny_heads as tiny
from training.heads.measure import measure


def transcribed(
    weights: dict[str, Tensor], config: HeadConfig, hidden: Tensor, embedded: Tensor
) -> Tensor:
    """Return the logits after each of the embedded tokens [rows, tokens, V], term by term.

    s_0 = 0; s_i = SiLU(W_w e + W_u s + b_u), or s + e; z = [h; s], projected in forms with a
    projection; z <- z + SiLU(A z + a); W z.
    """
    state, found = torch.zeros_like(hidden), []
    for index in range(embedded.shape[1]):
        e = embedded[:, index]
        if config.rnn:
            state = F.silu(
                e @ weights["rnn_w.weight"].T
                + state @ weights["rnn_u.weight"].T
                + weights["rnn_u.bias"]
            )
        else:
            state = state + e
        z = torch.cat([hidden, state], dim=-1)
        if config.exit_dim != 2 * config.hidden_size:
            z = z @ weights["input_proj.weight"].T + weights["input_proj.bias"]
        for block in range(config.num_draft_layers):
            z = z + F.silu(
                z @ weights[f"lm_head.{block}.linear.weight"].T
                + weights[f"lm_head.{block}.linear.bias"]
            )
        found.append(z @ weights[f"lm_head.{config.num_draft_layers}.weight"].T)
    return torch.stack(found, dim=1)


def unrolled(head: RecurrentHead, hidden: Tensor, embedded: Tensor) -> Tensor:
    """Return the logits computed by the head, with one context and one state per token."""
    context, state = head.context(hidden), head.start(embedded[:, 0])
    logits = [head.logits(head.features(context, state))]
    for index in range(1, embedded.shape[1]):
        state = head.advance(state, embedded[:, index])
        logits.append(head.logits(head.features(context, state)))
    return torch.stack(logits, dim=1)


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(7, tiny.HIDDEN, dtype=dtype), torch.randn(7, 5, tiny.HIDDEN, dtype=dtype)


@pytest.mark.parametrize("form", tiny.FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_equal_the_equations(form: str, dtype: torch.dtype):
    head = tiny.head(form, dtype)
    hidden, embedded = given(dtype)
    weights = dict(head.state_dict())
    limits = (
        {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    )
    torch.testing.assert_close(
        unrolled(head, hidden, embedded),
        transcribed(weights, head.config, hidden, embedded),
        **limits,
    )


@pytest.mark.parametrize("form", ["recurrent", "without recurrence"])
def test_the_transcription_rejects_another_head(form: str):
    """Control: the logits differ if the first embedding or the recurrence's bias is scaled."""
    head = tiny.head(form)
    hidden, embedded = given(torch.float64)
    other = torch.cat([embedded[:, :1] * 2, embedded[:, 1:]], dim=1)
    expected = transcribed(dict(head.state_dict()), head.config, hidden, embedded)
    assert not torch.allclose(unrolled(head, hidden, other), expected)
    weights = {
        name: tensor * (0.9 if name == "rnn_u.bias" else 1)
        for name, tensor in head.state_dict().items()
    }
    if head.config.rnn:
        assert not torch.allclose(transcribed(weights, head.config, hidden, embedded), expected)


def test_a_context_serves_several_states_a_row():
    head = tiny.head()
    hidden, embedded = given(torch.float64)
    states = torch.stack([head.start(embedded[:, 0]), head.start(embedded[:, 1])], dim=1)
    both = head.features(head.context(hidden).unsqueeze(1), states)
    for index in range(2):
        torch.testing.assert_close(
            both[:, index], head.features(head.context(hidden), states[:, index])
        )


def test_a_shortlists_indices_are_ids_of_the_target():
    head = tiny.head("shortlist")
    assert head.token_ids_V is not None
    assert head.to_target_ids(torch.tensor([0, 19])).tolist() == head.token_ids_V[[0, 19]].tolist()
    assert tiny.head().to_target_ids(torch.tensor([5])).tolist() == [5]


@pytest.mark.parametrize(
    ("hidden", "blocks", "millions"),
    [
        (4096, 1, 362.8),
        (4096, 2, 429.9),
        (5120, 1, 485.0),
        (5120, 2, 589.8),
        (6656, 1, 691.8),
        (6656, 2, 869.0),
    ],
)
def test_parameters_are_those_of_the_published_table(hidden: int, blocks: int, millions: float):
    config = HeadConfig(
        vocab_size=32000, hidden_size=hidden, exit_dim=2 * hidden, num_draft_layers=blocks
    )
    with torch.device("meta"):
        head = RecurrentHead(config)
    assert round(head.num_parameters / 1e6, 1) == millions
    assert measure(KIND, config, 5, torch.float32).parameters == head.num_parameters


@pytest.mark.parametrize("form", tiny.FORMS)
def test_parameters_by_part_add_up_in_every_form(form: str):
    head = tiny.head(form)
    assert measure(KIND, head.config, 5, torch.float32).parameters == head.num_parameters
