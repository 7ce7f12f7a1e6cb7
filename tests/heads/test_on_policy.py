"""On-policy rows of heads: the loss of a plain loop, drafts as in drafting, and no other change.

Shapes: K heads, M drafts, V vocabulary.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from decoding.errors import UserError
from decoding.interfaces import Proposal
from decoding.loop import decode
from decoding.rounds.settings import Settings
from jobs.interrupts import Interrupted
from recurrent_drafting.predictions import PREDICTIONS
from recurrent_drafting.train import run
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS, HeadRow
from tests.support import tiny_heads as tiny
from tests.support.head_runs import configured, records
from tests.support.host_waits import Waits
from tests.support.interrupted_data import stop_after_step
from training.bounds import START, Bounds, Place
from training.data.packing import PackedBatch, Sample, best_fit, collate
from training.features.states import TargetStates
from training.heads import train as job
from training.heads.checks import on_policy_rules
from training.heads.loss_config import D_PACE, HeadLossConfig
from training.heads.objective import HeadObjective
from training.heads.on_policy import OnPolicyRows
from training.losses.eager import d_pace, overlap, p_and_q, row_losses
from training.losses.heads import chunked_sample
from training.objectives import hidden_states
from training.on_policy import OnPolicyOptions, ShareSchedule

TARGET = law_6.target().config
READING = [
    pytest.param(row, id=row.name) for row in HEAD_ROWS if row.kind.reads_tokens(row.shape(TARGET))
]
GREEDY = {"share": 1.0, "temperature": 0.0}


def objective_of(form: str, options: dict[str, Any], batch: PackedBatch, **loss: Any) -> Any:
    """Return the objective of a tiny head at step 3, whose rows are those of the batch."""
    settings = HeadLossConfig(**({"name": "forward_kl", "predict_n_tokens": tiny.HEADS} | loss))
    own = OnPolicyRows(OnPolicyOptions(**options), len(batch.rows), seed=5)
    made = HeadObjective(PREDICTIONS, tiny.head(form), TargetStates(tiny.target()), settings, own)
    made.begin(3, Place(START, Bounds()), batch.rows)
    return made


def last_state(target: Any, ids: Sequence[int]) -> Tensor:
    """Return the target's state after a text, from one forward over it alone."""
    text = Sample(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))
    return hidden_states(target, collate([text], [[0]], len(ids)))[0, -1]


def loss_of_a_plain_loop(
    head: Any, target: Any, documents: list[Sample], loss: HeadLossConfig, *, scores_text: bool
) -> Tensor:
    """Return the loss in which each greedy draft, and each score of it, is computed alone.

    scores_text: for the control, the target scores the text's tokens instead of the drafted ones.
    """
    table, lm_head, heads = target.get_input_embeddings().weight, target.lm_head.weight, tiny.HEADS
    listed = None if head.token_ids_V is None else head.token_ids_V
    total = torch.zeros((), dtype=torch.float64)
    for document in documents:
        ids = document.ids.tolist()
        for t in range(len(ids) - 2):
            read, state, each = [ids[t + 1]], None, {}
            chances = torch.zeros(1, heads, dtype=torch.float64)
            hidden = last_state(target, ids[: t + 1])
            for i in range(min(heads, len(ids) - t - 2)):
                e = table[read[-1]][None]
                state = head.start(e) if state is None else head.advance(state, e)
                logits = head.logits(head.features(head.context(hidden[None]), state))[0]
                if document.mask[t + 2 + i]:
                    after = ids[t + 1 : t + 2 + i] if scores_text else read
                    teacher = last_state(target, [*ids[: t + 1], *after]) @ lm_head.T
                    each[i] = row_losses(loss, logits[None], teacher[None], None, listed)[0]
                    p_and = p_and_q(loss, logits.detach()[None], teacher[None], listed)
                    chances[0, i] = float(overlap(*p_and))
                read.append(int(head.to_target_ids(logits.argmax())))
            weights = [loss.decay**i for i in range(heads)]
            if loss.depth_weights == D_PACE:
                present = torch.tensor([[i in each for i in range(heads)]])
                weights = d_pace(chances, present, loss.d_pace_alpha)[0].tolist()
            total = total + sum(weights[i] * one for i, one in each.items())
    return total


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        ("recurrent", {"decay": 0.7, "temperature": 1.5}),
        ("shortlist", {"name": "lk", "depth_weights": "d_pace"}),
        ("without recurrence", {"name": "jsd", "teacher_temperature": 0.8}),
    ],
)
def test_loss_and_gradient_equal_a_plain_loops(form: str, loss: dict[str, Any]) -> None:
    documents, target = tiny.samples(4), tiny.target()
    objective = objective_of(form, GREEDY, batch := tiny.packed(documents), **loss)
    found = objective(batch)[0]
    given = (objective.head, target, documents, objective.loss)
    expected = loss_of_a_plain_loop(*given, scores_text=False)
    torch.testing.assert_close(found, expected)
    weights = list(objective.head.parameters())
    for mine, plain in zip(
        torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights)
    ):
        torch.testing.assert_close(mine, plain)
        assert mine.abs().sum() > 0
    control = float(loss_of_a_plain_loop(*given, scores_text=True).detach())
    assert abs(control - float(expected.detach())) > 1e-3, (
        "control: scores after the text's tokens differ"
    )


# ----------------------------------------------------------------------- training equals drafting
def greedy_chains(row: HeadRow, model: Any, head: Any) -> list[tuple[list[int], list[int]]]:
    """Decode greedily; return the text before each draft, with its tip, and the drafted tokens."""
    drafter, found = row.kind.chain_drafter(head), []
    propose = drafter.propose

    def watched(sequences_B: Sequence[Sequence[int]], *given: Any) -> Proposal:
        proposal = propose(sequences_B, *given)
        for text, tokens, count in zip(
            sequences_B, proposal.tokens_BN.tolist(), proposal.counts_B, strict=True
        ):
            found.append(([*text], tokens[:count]))
        return proposal

    drafter.propose = watched  # type: ignore[method-assign]
    decode(law_6.native(model), drafter, law_6.PROMPTS, Settings(20, num_draft_tokens=law_6.GAMMA))
    return found


@pytest.mark.parametrize("row", READING)
def test_a_head_drafts_in_training_as_it_does_in_decoding(row: HeadRow) -> None:
    """Check each chain of a decoding drafter against the training drafts at its place.

    Control: the drafts one position earlier are others.
    """
    model = law_6.target()
    head, states = law_6.head_of(row, model), law_6.states_of(row, model)
    rounds = [one for one in greedy_chains(row, model, head) if len(one[1]) == law_6.GAMMA]
    assert len(rounds) > 2 * len(law_6.PROMPTS)
    # the texts go on otherwise
    texts = [np.asarray([*text, *[0] * law_6.GAMMA], dtype=np.int32) for text, _ in rounds]
    samples = [Sample(ids, np.arange(len(ids)) > 0) for ids in texts]
    own = OnPolicyRows(OnPolicyOptions(**GREEDY), 1, seed=0)
    early, length = 0, 4 * law_6.ROW
    for packed in best_fit([len(ids) for ids in texts], length):
        batch = collate(samples, [packed], length)
        where = own.draft(row.kind, head, states, batch, law_6.GAMMA + 1).where
        places_M = where.kept_P[where.drafts_M]
        by_place = dict(zip(places_M.tolist(), where.tokens_MK.tolist(), strict=True))
        start = 0
        for index in packed:
            text, tokens = rounds[index]
            tip = start + len(text) - 1
            assert by_place[tip - 1] == [text[-1], *tokens]
            early += by_place.get(tip - 2, [0])[1:] == tokens
            start += len(texts[index])
    assert early < len(rounds), "control"


def test_drafts_are_sampled_from_the_heads_distribution() -> None:
    """Check that evenly spread uniforms give every token its share, at a temperature of 0.7."""
    torch.manual_seed(0)
    features_1E, weight_VE = torch.randn(1, 4).double(), torch.randn(7, 4).double()
    count = 100_000
    uniforms_N = (torch.arange(count).double() + 0.5) / count
    found_N = chunked_sample(features_1E.expand(count, 4), weight_VE, 0.7, uniforms_N)
    p_V = torch.softmax(features_1E @ weight_VE.T / 0.7, dim=-1)[0]
    shares_V = torch.bincount(found_N, minlength=7).double() / count
    torch.testing.assert_close(shares_V, p_V, rtol=0, atol=2e-5)
    other_V = torch.softmax(features_1E @ weight_VE.T, dim=-1)[0]
    assert (shares_V - other_V).abs().max() > 1e-2, "control: temperature 1 is another distribution"


# ------------------------------------------------------------------------------- rows of a step
def test_rows_do_not_depend_on_their_batch_and_noise_changes_with_the_step() -> None:
    """Check what makes ranks and resumed runs train alike, with sampled drafts."""
    batch = tiny.packed(tiny.samples())
    assert len(batch.rows) > 2
    objective = objective_of("recurrent", {"share": 0.5}, batch)
    drafted, others = objective.on_policy.split(batch)
    assert drafted == list(range(len(batch.rows)))[-len(drafted) :] and others
    together = objective(batch)
    apart = [objective(batch.row(index)) for index in range(len(batch.rows))]
    torch.testing.assert_close(together[0], sum(loss for loss, _ in apart))
    torch.testing.assert_close(together[1], sum(sums for _, sums in apart))
    assert torch.equal(objective(batch)[0], together[0])
    objective.begin(4, Place(START, Bounds()), batch.rows)
    assert not torch.equal(objective(batch)[0], together[0])


def test_a_share_of_0_changes_no_bit() -> None:
    batch = tiny.packed(tiny.samples())
    plain = tiny.objective(tiny.head(), tiny.target(), name="forward_kl")
    found = []
    for objective in (plain, objective_of("recurrent", {"share": 0.0}, batch)):
        loss, _ = objective(batch)
        found.append([loss, *torch.autograd.grad(loss, list(objective.head.parameters()))])
    assert all(map(torch.equal, *found))
    some = objective_of("recurrent", {"share": 0.5}, batch)(batch)[0]
    assert not torch.equal(some, found[0][0]), "control"


def test_rows_without_a_prediction_add_nothing() -> None:
    short = Sample(np.array([1, 2], dtype=np.int32), np.array([False, True]))
    batch = collate([short], [[0]], tiny.ROW)
    objective = objective_of("recurrent", GREEDY, batch)
    loss, sums = objective(batch)
    loss.backward()
    assert loss.item() == 0 and not sums.any()
    assert all(one.grad is not None for one in objective.head.parameters())


def test_drafting_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tiny.packed(tiny.samples())
    objective, waits = objective_of("recurrent", {"share": 0.5}, batch), Waits()
    with waits.counting(monkeypatch), profile(activities=[ProfilerActivity.CPU]) as seen:
        objective(batch)[0].backward()
    reads = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item"}
    assert waits.stray == [] and not reads & {event.key for event in seen.key_averages()}


def test_the_share_rises_over_the_warm_up() -> None:
    schedule = ShareSchedule(OnPolicyOptions(0.5, start=2, warmup_steps=4), 8)
    assert [schedule.rows_in(step) for step in range(9)] == [0, 0, 0, 2, 2, 4, 4, 4, 4]


# ------------------------------------------------------------------------------------------- job
OWN = ["loss.name=forward_kl", "on_policy.share=0.5", "on_policy.warmup_steps=2"]


@pytest.mark.long
def test_a_job_resumes_bit_for_bit_and_its_card_names_the_share(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = tmp_path / "straight"
    run(configured(tiny_target, straight, *OWN))
    card = json.loads((straight / "drafter" / "drafter_card.json").read_text())
    assert card["data"]["on_policy"]["share"] == 0.5
    assert "on 50% on-policy rows" in (straight / "drafter" / "README.md").read_text()
    stopped, read = tmp_path / "stopped", job.training_data
    with monkeypatch.context() as patch:
        patch.setattr(job, "training_data", lambda *given: stop_after_step(read(*given), 3))
        with pytest.raises(Interrupted):
            run(configured(tiny_target, stopped, *OWN))
    run(configured(tiny_target, stopped, *OWN))
    whole, resumed = (
        load_file(folder / "drafter" / "model.safetensors") for folder in (straight, stopped)
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    losses, again = (
        [record["loss"] for record in records(folder) if "loss" in record]
        for folder in (straight, stopped)
    )
    assert losses == again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["loss.name=cross_entropy"], "learns tokens of a text"),
        (["loss.name=continuations"], "learns tokens of a text"),
        (["loss.name=mixture", "loss.parts={lk: 1, cross_entropy: 1}"], "learns tokens of a text"),
        (["states.cache=memory"], "drafts other tokens in every step"),
        (["parallel=zero3"], "the ranks of a sharded target cannot read different drafts"),
        (["parallel=fsdp"], "the ranks of a sharded target cannot read different drafts"),
        (["on_policy.share=1.5"], "a share from 0 .off. to 1"),
        (["on_policy.temperature=-1"], "temperature is -1.0, expected 0"),
        (["on_policy.start=-1"], "start is -1, expected 0 or more"),
    ],
)
def test_what_has_no_on_policy_rows_is_refused(
    changes: list[str], message: str, tiny_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"on_policy.*{message}"):
        run(configured(tiny_target, tmp_path, *OWN, *changes))


def test_heads_that_read_no_tokens_have_none(tiny_target: Path, tmp_path: Path) -> None:
    config = configured(tiny_target, tmp_path, *OWN)
    fits, expected = on_policy_rules(config, reads_tokens=False)["on_policy.share"]
    assert not fits and "none of whose predictions reads a token that it drafts" in expected
    assert on_policy_rules(config, reads_tokens=True)["on_policy.share"][0], "control"
