"""Held-out evaluation: the chain against real decoding, and accuracies against all logits."""

from typing import Any

import numpy as np
import pytest
import torch

from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import RecurrentHead
from recurrent_drafting.predictions import PREDICTIONS
from tests.support import tiny_heads as tiny
from training.data.packing import Sample, collate
from training.features.states import TargetStates
from training.heads.evaluation import GreedyChain, HeadAccuracy, HeldOutRows, combine
from training.held_out.rounds import match_survival, walk
from training.objectives import hidden_states

DRAFT, TOKENS = 3, 14
CPU = torch.device("cpu")
PROMPTS = [[3, 5, 8], [1], [40, 2, 9, 11, 30], [7, 7]]


def decoded(
    model: Any, head: RecurrentHead | None, stops: tuple[int, ...] = ()
) -> list[Generation]:
    """Decode the prompts greedily by the native backend in float64.

    head: drafts chains; None decodes without a drafter.
    """
    target = NativeTarget.from_state(
        model.config.to_dict(), model.state_dict(), dtype=torch.float64, execution="eager"
    )
    drafter = None if head is None else RecurrentDrafter(head=head, beam_width=1)
    return decode(
        target, drafter, PROMPTS, Settings(TOKENS, num_draft_tokens=DRAFT, stop_token_ids=stops)
    )


def samples_of(done: list[Generation], later: int = 0) -> list[Sample]:
    """Return prompts and answers as samples.

    later: number of answer tokens that count as part of the prompt.
    """
    found = []
    for prompt, one in zip(PROMPTS, done, strict=True):
        ids = np.array(prompt + one.tokens, dtype=np.int32)
        found.append(Sample(ids, np.arange(len(ids)) >= len(prompt) + later))
    return found


def trained_head(form: str, answers: list[Sample]) -> RecurrentHead:
    """Return a head trained on the answers for twelve steps, so that it is often right."""
    head, target = tiny.head(form), tiny.target()
    objective = tiny.objective(head, target)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    batch = collate(answers, [[i] for i in range(len(answers))], tiny.ROW)
    for _ in range(12):
        optimizer.zero_grad()
        objective(batch)[0].backward()
        optimizer.step()
    return head


@pytest.mark.parametrize("stopped", [False, True], ids=["by length", "by a stop token"])
@pytest.mark.parametrize("form", ["recurrent", "without recurrence", "shortlist"])
def test_the_walk_equals_real_decoding_round_by_round(form: str, stopped: bool):
    target = tiny.target()
    stops = (decoded(target, None)[2].tokens[6],) if stopped else ()
    plain = decoded(target, None, stops)
    head = trained_head(form, samples_of(plain))
    done = decoded(target, head, stops)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    assert stopped == any(one.finish == "stop" for one in done)
    states = TargetStates(target)
    rows, late_rows = (
        HeldOutRows(states, samples_of(plain, later=later), tiny.ROW, CPU) for later in (0, 1)
    )
    chain = GreedyChain(PREDICTIONS, head, rows, DRAFT, TOKENS)
    assert chain.counts() == [
        (one.rounds, len(one.tokens), one.accepted, one.tested) for one in done
    ]
    rounds, emitted, accepted, tested = map(sum, zip(*chain.counts()))
    assert accepted > 0, "the head must be right sometimes"
    figures = chain()
    assert figures["block_efficiency"] == pytest.approx(emitted / rounds)
    assert figures["acceptance"] == pytest.approx(accepted / tested)
    assert figures["score"] == figures["block_efficiency"]
    # The control: as if the prefill gave the first token.
    late = GreedyChain(PREDICTIONS, head, late_rows, DRAFT, TOKENS - 1)
    assert [one[0] for one in late.counts()] != [one.rounds for one in done]


def test_perfect_and_useless_drafts_have_their_closed_forms():
    """Check a walk's numbers of rounds, of tokens, and of accepted and tested tokens.

    The drafts are perfect or useless. The answer ends at the limit, or at a stop token before a
    limit of 30 tokens.
    """

    def counts(right: int, tokens: int, limit: int) -> tuple[int, int, int, int]:
        survival_1TK = match_survival([np.full(tokens, right)], DRAFT)
        one = walk(survival_1TK, [tokens], DRAFT, limit)
        found = (one.rounds_A, one.emitted_A, one.accepted_AK, one.tested_AK)
        return tuple(int(each.sum()) for each in found)

    perfect, useless = DRAFT, 0
    assert counts(perfect, 16, 16) == (4, 16, 12, 12)
    assert counts(perfect, 16, 30) == (4, 16, 12, 12)
    assert counts(useless, 16, 16) == (16, 16, 0, 15)
    assert counts(useless, 16, 30) == (16, 16, 0, 16)
    assert counts(perfect, 3, 3) == (1, 3, 2, 2)
    assert counts(perfect, 3, 30) == (1, 3, 3, 3)
    assert counts(useless, 1, 1) == (1, 1, 0, 0)


def test_accuracies_are_ranks_among_all_logits():
    target, head, documents = tiny.target(), tiny.head(), tiny.samples()
    rows = HeldOutRows(TargetStates(target), documents, tiny.ROW, CPU)
    figures = HeadAccuracy(PREDICTIONS, head, rows, tiny.HEADS, 4)()
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
                    order = head.logits(head.features(head.context(hidden[t][None]), state))[
                        0
                    ].argsort(descending=True)
                    rank = order.tolist().index(int(one.ids[t + 2 + i]))
                    counts[i] += 1
                    right[i, rank:] += 1
    assert len(figures) == tiny.HEADS * 4
    for i in range(tiny.HEADS):
        for k in range(4):
            assert figures[f"accuracy/redrafter{i}_top{k + 1}"] == pytest.approx(
                right[i, k] / counts[i]
            )


def test_the_last_score_selects_the_checkpoint():
    evaluate = combine(
        [lambda: {"a": 1.0, "score": 1.0}, lambda: {"b": 2.0}, lambda: {"score": 3.0}]
    )
    assert evaluate() == {"a": 1.0, "b": 2.0, "score": 3.0}
