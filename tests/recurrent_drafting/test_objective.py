"""The objective against a plain loop over documents, positions and heads.

Also packing, training-time test, memory, and waits for the device.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from decoding import devices
from decoding.errors import UserError
from recurrent_drafting.head import RecurrentHead
from recurrent_drafting.predictions import PREDICTIONS
from scripts.bench.peak_memory import peak_bytes
from tests.support import tiny_heads as tiny
from tests.support.host_waits import Waits
from tests.support.tiers import tiered
from training.data.packing import Sample, best_fit, collate
from training.features.states import TargetStates
from training.heads import predicting
from training.heads.loss_config import D_PACE, HeadLossConfig
from training.heads.objective import HeadObjective
from training.heads.positions import check_predictions, positions
from training.losses.config import uses_teacher
from training.losses.eager import d_pace, overlap, p_and_q, row_losses
from training.losses.heads import chunked_argmax
from training.objectives import hidden_states


@cache
def continue_plainly(number: int, t: int) -> list[int]:
    """Return the tiny target's greedy continuation of a document after position t.

    It has HEADS + 1 tokens, each computed by one forward of the complete text.
    """
    target, ids = tiny.target(), tiny.samples()[number].ids[: t + 1].tolist()
    for _ in range(tiny.HEADS + 1):
        one = Sample(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))
        ids.append(
            int(
                (
                    hidden_states(target, collate([one], [[0]], len(ids)))[0, -1]
                    @ target.lm_head.weight.T
                ).argmax()
            )
        )
    return ids[t + 1 :]


def predict_plainly(
    head: RecurrentHead, target: Any, documents: list[Sample], loss: HeadLossConfig
) -> tuple[Tensor, list[int]]:
    """Return the weighted loss, and the number of predictions of each head.

    Each document, position and head is computed alone.
    """
    total, counts = torch.zeros((), dtype=torch.float64), [0] * loss.predict_n_tokens
    table, lm_head = target.get_input_embeddings().weight, target.lm_head.weight
    for number, document in enumerate(documents):
        ids = torch.from_numpy(document.ids.astype(np.int64))
        hidden = hidden_states(target, collate([document], [[0]], len(ids)))[0]
        for t in range(len(ids)):
            own, behind = bool(loss.own_tokens), ids[t + 1 :].tolist()
            if loss.name == "continuations" and document.mask[t + 2 :].any():
                behind = continue_plainly(number, t)
            state, taken, each, chances = None, -1, {}, torch.zeros(1, loss.predict_n_tokens)
            for i in range(loss.predict_n_tokens):
                if t + 2 + i >= len(ids):
                    break
                taken = behind[i] if not own or i == 0 else taken
                e = table[taken][None]
                state = head.start(e) if state is None else head.advance(state, e)
                logits = head.logits(head.features(head.context(hidden[t][None]), state))[0]
                taken = int(head.to_target_ids(logits.argmax()))
                if not document.mask[t + 2 + i]:
                    continue
                counts[i] += 1
                each[i], chances[0, i] = one_loss(
                    head, logits, behind[i + 1], hidden[t + 1 + i] @ lm_head.T, loss
                )
            weights = [loss.decay**i for i in range(loss.predict_n_tokens)]
            if loss.depth_weights == D_PACE:
                present = torch.tensor([[i in each for i in range(loss.predict_n_tokens)]])
                weights = d_pace(chances, present, loss.d_pace_alpha)[0].tolist()
            total = total + sum(weights[i] * one for i, one in each.items())
    return total, counts


def one_loss(
    head: RecurrentHead, logits: Tensor, label: int, targets: Tensor, loss: HeadLossConfig
) -> tuple[Tensor, float]:
    """Return the loss of one prediction and its chance of acceptance."""
    listed = range(tiny.VOCABULARY) if head.token_ids_V is None else head.token_ids_V.tolist()
    index = list(listed).index(label) if label in listed else -1
    plain = HeadLossConfig("cross_entropy") if loss.name == "continuations" else loss
    shortlist = torch.tensor(list(listed))
    given = (plain, logits[None], targets[None], torch.tensor([index]), shortlist)
    each = row_losses(*given)[0] + logits.sum() * 0
    if uses_teacher(plain):
        return each, float(
            overlap(*p_and_q(plain, logits.detach()[None], targets.detach()[None], shortlist))
        )
    return each, float(logits.detach().softmax(dim=-1)[index]) if index >= 0 else 0.0


CASES: list[tuple[str, dict[str, Any]]] = [
    *((form, {}) for form in tiny.FORMS),
    ("recurrent", {"name": "forward_kl", "decay": 0.7, "temperature": 1.5}),
    ("shortlist", {"name": "forward_kl"}),
    ("projected", {"name": "lk", "decay": 0.8}),
    ("shortlist", {"name": "lk"}),
    ("without recurrence", {"name": "lk_hybrid"}),
    ("recurrent", {"name": "jsd", "temperature": 1.5, "teacher_temperature": 0.8}),
    ("shortlist", {"name": "mixture", "parts": {"lk": 0.5, "cross_entropy": 1.5}}),
    ("shortlist", {"depth_weights": "d_pace", "d_pace_alpha": 0.2}),
    ("recurrent", {"name": "lk_hybrid", "depth_weights": "d_pace"}),
    ("recurrent", {"own_tokens": 1.0}),
    ("shortlist", {"own_tokens": 1.0, "name": "lk"}),
    ("recurrent", {"name": "continuations", "decay": 0.8}),
    ("shortlist", {"name": "continuations", "own_tokens": 1.0}),
]
# The other cases combine the forms of heads and losses otherwise.
QUICK = [
    *((form, {}) for form in tiny.FORMS),
    ("recurrent", {"name": "lk_hybrid", "depth_weights": "d_pace"}),
    ("shortlist", {"own_tokens": 1.0, "name": "lk"}),
    ("recurrent", {"name": "continuations", "decay": 0.8}),
]


@pytest.mark.parametrize(("form", "given"), tiered(CASES, QUICK))
def test_the_loss_and_its_gradient_equal_a_plain_loops(form: str, given: dict[str, Any]):
    target, head, documents = tiny.target(), tiny.head(form), tiny.samples()
    objective = tiny.objective(head, target, **given)
    loss, sums = objective(tiny.packed(documents))
    expected, counts = predict_plainly(head, target, documents, objective.loss)
    torch.testing.assert_close(loss, expected)
    names = dict(head.named_parameters())
    ours = torch.autograd.grad(loss, list(names.values()))
    theirs = torch.autograd.grad(expected, list(names.values()))
    for name, mine, plain in zip(names, ours, theirs):
        torch.testing.assert_close(mine, plain, msg=name)
        assert mine.abs().sum() > 0, f"{name} is trained"
    assert len(sums) == len(objective.metric_names) == 2 * tiny.HEADS
    assert all(0 <= float(value) <= count for value, count in zip(sums[: tiny.HEADS], counts))


def test_nothing_is_predicted_across_documents():
    """Check that packed rows give the loss of separate documents.

    Control: a batch that forgets where documents end gives another loss.
    """
    target, head, documents = tiny.target(), tiny.head(), tiny.samples()
    objective = tiny.objective(head, target)
    together = objective(tiny.packed(documents))[0]
    apart = sum(objective(collate([one], [[0]], tiny.ROW))[0] for one in documents)
    torch.testing.assert_close(together, apart)
    merged = tiny.packed(documents)
    # only the host's copy: attention keeps the documents apart
    merged.host.documents_RT[:] = (merged.host.documents_RT > 0).astype(np.int64)
    assert abs(float((objective(merged)[0] - apart).detach())) > 1e-3


def test_positions_are_those_of_supervised_tokens():
    documents = tiny.samples()
    batch = tiny.packed(documents)
    where = positions(batch, tiny.HEADS, uses_teacher=True)
    wanted = [
        sum(int(one.mask[t + 2 + i]) for one in documents for t in range(len(one.ids) - 2 - i))
        for i in range(tiny.HEADS)
    ]
    assert where.counts_K == wanted
    flat = where.kept_P[where.drafts_M[where.draft_N]]
    assert torch.equal(batch.ids_RT.flatten()[flat + 2 + where.head_N], where.labels_N)
    assert torch.equal(where.kept_P[where.targets_N], flat + 1 + where.head_N)
    assert torch.equal(where.targets_N, where.targets_N.sort().values)
    assert where.targets_N.tolist() == where.targets.tolist()
    assert torch.equal(where.kept_P, where.kept_P.unique())
    assert sum(where.kept_R) == len(where.kept_P)
    documents_F = batch.documents_RT.flatten()
    assert torch.equal(documents_F[flat], documents_F[flat + 2 + where.head_N])
    few = positions(batch, tiny.HEADS, uses_teacher=False)
    assert len(few.kept_P) == len(few.drafts_M) < len(where.kept_P)


def test_own_tokens_are_a_share_that_changes_from_step_to_step():
    batch = collate([Sample(np.arange(400, dtype=np.int32) % 61, np.arange(400) > 0)], [[0]], 400)
    own = [positions(batch, 3, False, 0.3, (0, step)).own_O.tolist() for step in range(20)]
    drafts = len(positions(batch, 3, False).drafts_M)
    assert 0.25 < sum(map(len, own)) / (20 * drafts) < 0.35
    assert own[0] != own[1]
    assert own[4] == positions(batch, 3, False, 0.3, (0, 4)).own_O.tolist()
    assert not len(positions(batch, 3, False).own_O)
    assert len(positions(batch, 3, False, 1.0).own_O) == drafts


@pytest.mark.parametrize("form", ["recurrent", "projected", "shortlist"])
def test_own_tokens_are_computed_only_for_their_drafts(form: str, monkeypatch: pytest.MonkeyPatch):
    """Check that own tokens change the drafts that take them, and no others.

    A draft has the features of a run in which all drafts take own tokens, or none. No logits are
    computed for drafts without own tokens.
    """
    states, head, batch = TargetStates(tiny.target()), tiny.head(form), tiny.packed(tiny.samples())
    made: list[int] = []

    def counted(features_NE: Tensor, weight_VE: Tensor) -> Tensor:
        made.append(len(features_NE))
        return chunked_argmax(features_NE, weight_VE)

    monkeypatch.setattr(predicting, "chunked_argmax", counted)
    found = []
    for share in (0.0, 1.0, 0.5):
        where = positions(batch, tiny.HEADS, False, share)
        found.append(PREDICTIONS.features(head, states, batch, where, states(batch, where)))
    none_NE, all_NE, some_NE = found
    own_N1 = torch.isin(where.draft_N, where.own_O)[:, None]
    torch.testing.assert_close(some_NE, torch.where(own_N1, all_NE, none_NE))
    assert not torch.allclose(all_NE, none_NE), "own tokens must change the loss"
    drafts, few = len(where.drafts_M), len(where.own_O)
    assert 0 < few < drafts
    assert made == [drafts] * (tiny.HEADS - 1) + [few] * (tiny.HEADS - 1)


def test_a_share_of_own_tokens_gives_another_loss_than_all_or_none():
    target, head, batch = tiny.target(), tiny.head(), tiny.packed(tiny.samples())
    losses = [
        float(tiny.objective(head, target, own_tokens=share)(batch)[0].detach())
        for share in (0.0, 0.5, 1.0)
    ]
    assert len({round(loss, 6) for loss in losses}) == 3


def test_the_target_gets_no_gradient_and_is_outside_the_objective():
    target, head = tiny.target(), tiny.head()
    objective = tiny.objective(head, target, name="lk")
    assert {id(parameter) for parameter in objective.parameters()} == {
        id(parameter) for parameter in head.parameters()
    }
    objective(tiny.packed(tiny.samples()))[0].backward()
    assert all(
        parameter.grad is None and not parameter.requires_grad for parameter in target.parameters()
    )
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_an_empty_batch_has_zero_loss_and_gradients():
    head = tiny.head()
    objective = tiny.objective(head, tiny.target())
    loss, sums = objective(collate([], [[]], tiny.ROW))
    loss.backward()
    assert loss.item() == 0 and not sums.any()
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in head.parameters()
    )


def test_texts_without_a_prediction_are_refused():
    short = Sample(np.array([1, 2], dtype=np.int32), np.array([False, True]))
    with pytest.raises(UserError, match="zero supervised positions for 4 heads in 2 samples"):
        check_predictions([short, short], 4)
    check_predictions(tiny.samples(), 4)


LOSSES = [{}, {"name": "lk"}, {"own_tokens": 0.5}, {"name": "continuations"}]


def micro_batch(objective: HeadObjective, device: str = "cpu") -> None:
    """Run a micro-batch from samples to gradients, as the loop does."""
    documents = tiny.samples(3)
    rows = best_fit([len(one.ids) for one in documents], tiny.ROW)
    objective(collate(documents, rows, tiny.ROW, device))[0].backward()


@pytest.mark.parametrize("given", LOSSES)
def test_a_micro_batch_never_waits_and_is_copied_with_its_positions(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Check that a micro-batch never waits for the device: rows and indices are copied once each.

    No value is read, and no tensor has a size that only the device knows. Controls: a batch in
    pageable memory and `item` are detected.
    """
    objective, sent, copies = (
        tiny.objective(tiny.head(), tiny.target(), **given),
        devices.copy_to_device,
        [],
    )
    reads = {
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::item",
        "aten::masked_select",
        "aten::is_nonzero",
    }

    def counted(host: Tensor, device: torch.device) -> Tensor:
        copies.append(host.numel())
        return sent(host, device)

    def seen(step: Callable[[], Any]) -> tuple[list[str], set[str]]:
        waits = Waits()
        with waits.counting(monkeypatch), profile(activities=[ProfilerActivity.CPU]) as found:
            step()
        assert waits.meant == 0
        return waits.stray, reads & {event.key for event in found.key_averages()}

    monkeypatch.setattr(devices, "copy_to_device", counted)
    assert seen(lambda: micro_batch(objective)) == ([], set())
    assert len(copies) == 2, "the rows, then the indices computed from them"
    batch = tiny.packed(tiny.samples(3))
    assert seen(lambda: objective(batch)[0].item()) == (
        ["item"],
        {"aten::item", "aten::_local_scalar_dense"},
    )
    assert seen(lambda: torch.from_numpy(batch.host.documents_RT).to("cpu"))[0] == [
        "torch.from_numpy"
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("given", LOSSES)
def test_a_micro_batch_never_waits_in_sync_debug_mode(given: dict[str, Any]):
    target, head = tiny.target().to("cuda"), tiny.head().to("cuda")
    objective = tiny.objective(head, target, **given)
    micro_batch(objective, "cuda")  # libraries allocate their workspaces
    with devices.no_waiting(torch.device("cuda")):
        micro_batch(objective, "cuda")


def test_no_tensor_spans_heads_and_vocabulary():
    """Check that a step needs far less memory than all logits (heads, rows, tokens, vocabulary).

    Control: an eager loss in float32 needs more memory than all logits.
    """
    vocabulary, rows, length, heads = 8192, 4, 128, 5
    torch.manual_seed(0)
    made = RecurrentHead(
        tiny.HeadConfig(vocab_size=vocabulary, hidden_size=8, exit_dim=16, num_draft_layers=1)
    )
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 4,
        "intermediate_size": 8,
    }
    model = tiny.freeze(
        tiny.build_llama(
            tiny.StudentConfig(**shape),
            torch.float32,
            vocab_size=vocabulary,
            max_position_embeddings=length,
        )
    )
    documents = [
        Sample(np.arange(length, dtype=np.int32), np.arange(length) > 0) for _ in range(rows)
    ]
    batch = collate(documents, [[i] for i in range(rows)], length)
    loss = HeadLossConfig("cross_entropy", predict_n_tokens=heads)
    objective = HeadObjective(PREDICTIONS, made, TargetStates(model), loss)
    whole = heads * rows * length * vocabulary * 4

    def eager_loss() -> Tensor:
        hidden, ids = hidden_states(model, batch), batch.ids_RT
        logits, state = [], torch.zeros_like(hidden)
        for i in range(heads):
            state = made.advance(state, objective.states.embed(torch.roll(ids, -1 - i, dims=1)))
            logits.append(made.logits(made.features(made.context(hidden), state)))
        return torch.stack(logits).logsumexp(-1).sum()

    objective(batch)[0].backward()  # buffers that are kept
    assert peak_bytes(lambda: eager_loss().backward()) > whole  # the control
    chunk = 1024 * vocabulary * 4
    assert peak_bytes(lambda: objective(batch)[0].backward()) < 5 * chunk + whole / 8
