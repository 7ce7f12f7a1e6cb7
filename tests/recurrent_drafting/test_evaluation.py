"""Block efficiency of the walked chain against rounds decoded one by one, and accuracies against whole logits."""

import numpy as np
import pytest
import torch

from recurrent_drafting.evaluation import GreedyChain, HeadAccuracy, Looks, walk
from recurrent_drafting.head import RecurrentHead
from recurrent_drafting.states import TargetStates
from tests.recurrent_drafting import tiny
from training.objectives import hidden_states
from training.packing import Sample, collate

DRAFT = 3
CPU = torch.device("cpu")


def answered(target: object, prompts: list[list[int]], tokens: int) -> list[Sample]:
    """The target's greedy answers."""
    found = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(tokens):
            batch = collate([Sample(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))], [[0]], len(ids))
            ids.append(int((hidden_states(target, batch)[0, -1] @ target.lm_head.weight.T).argmax()))
        found.append(Sample(np.array(ids, dtype=np.int32), np.arange(len(ids)) >= len(prompt)))
    return found


def decoded(head: RecurrentHead, target: object, answer: Sample) -> tuple[int, int, int, int]:
    """(rounds, emitted, accepted, tested) of speculative decoding by hand: draft, look at the target's own argmax, keep what agrees."""
    ids = answer.ids.tolist()
    first, table = int(np.argmax(answer.mask)), target.get_input_embeddings().weight
    rounds = emitted = accepted = tested = 0
    tip = first
    while tip < len(ids) - 1:
        seen = np.array(ids[: tip + 1], dtype=np.int32)
        batch = collate([Sample(seen, np.ones(len(seen), dtype=bool))], [[0]], len(seen))
        context = head.context(hidden_states(target, batch)[0, tip - 1][None])
        state = head.start(table[ids[tip]][None])
        right = 0
        for number in range(min(DRAFT, len(ids) - 1 - tip)):
            drafted = int(head.to_target_ids(head.logits(head.features(context, state)).argmax()))
            tested += 1
            if drafted != ids[tip + 1 + number]:
                break
            right += 1
            state = head.advance(state, table[drafted][None])
        gained = min(right + 1, len(ids) - 1 - tip)
        rounds, emitted, accepted = rounds + 1, emitted + gained, accepted + right
        tip += gained
    return rounds, emitted, accepted, tested


def leaning(form: str, answers: list[Sample]) -> RecurrentHead:
    """A head that is often right: it learns the answers a little."""
    head, target = tiny.head(form), tiny.target()
    objective = tiny.objective(head, target)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    batch = collate(answers, [[i] for i in range(len(answers))], tiny.ROW)
    for _ in range(12):
        optimizer.zero_grad()
        objective(batch)[0].backward()
        optimizer.step()
    return head


@pytest.mark.parametrize("form", ["recurrent", "without recurrence", "shortlist"])
def test_the_walk_is_speculative_decoding_round_by_round(form: str):
    target = tiny.target()
    answers = answered(target, [[3, 5, 8], [1], [40, 2, 9, 11, 30]], 14)
    head = leaning(form, answers)
    chain = GreedyChain(head, TargetStates(target), answers, DRAFT, tiny.ROW, CPU)
    figures, by_hand = chain(), [decoded(head, target, answer) for answer in answers]
    assert chain.counts() == by_hand
    rounds, emitted, accepted, tested = map(sum, zip(*by_hand))
    assert accepted > 0, "the test is of no use with a head that is never right"
    assert figures["block_efficiency"] == pytest.approx(emitted / rounds)
    assert figures["acceptance"] == pytest.approx(accepted / tested)
    assert figures["score"] == figures["block_efficiency"]


def test_perfect_and_useless_drafts_have_their_closed_forms():
    answer = np.arange(20) >= 4  # 16 tokens, the first from the prefill
    assert walk(np.full(20, DRAFT), answer, DRAFT) == (4, 15, 12, 12)
    assert walk(np.zeros(20, dtype=int), answer, DRAFT)[:3] == (15, 15, 0)
    assert walk(np.zeros(5, dtype=int), np.arange(5) >= 4, DRAFT) == (0, 0, 0, 0)


def test_accuracies_are_ranks_among_whole_logits():
    target, head, documents = tiny.target(), tiny.head(), tiny.samples()
    figures = HeadAccuracy(head, TargetStates(target), documents, tiny.HEADS, 4, tiny.ROW, CPU)()
    right, counts = np.zeros((tiny.HEADS, 4)), np.zeros(tiny.HEADS)
    table = target.get_input_embeddings().weight
    for one in documents:
        hidden = hidden_states(target, collate([one], [[0]], len(one.ids)))[0]
        for t in range(len(one.ids)):
            state = None
            for i in range(tiny.HEADS):
                if t + 2 + i >= len(one.ids):
                    break
                e = table[int(one.ids[t + 1 + i])][None]
                state = head.start(e) if state is None else head.advance(state, e)
                if one.mask[t + 2 + i]:
                    order = head.logits(head.features(head.context(hidden[t][None]), state))[0].argsort(descending=True)
                    rank = order.tolist().index(int(one.ids[t + 2 + i]))
                    counts[i] += 1
                    right[i, rank:] += 1
    assert len(figures) == tiny.HEADS * 4
    for i in range(tiny.HEADS):
        for k in range(4):
            assert figures[f"accuracy/redrafter{i}_top{k + 1}"] == pytest.approx(right[i, k] / counts[i])


def test_the_last_score_chooses():
    looks = Looks([lambda: {"a": 1.0, "score": 1.0}, lambda: {"b": 2.0}, lambda: {"score": 3.0}])
    assert looks() == {"a": 1.0, "b": 2.0, "score": 3.0}
