"""Beam search against a plain transcription, its memory, and the distributions of samples."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from recurrent_drafting import sampled_beams
from recurrent_drafting.beams import Beams, Frontier, Step, TopBeams, search
from recurrent_drafting.head import RecurrentHead
from recurrent_drafting.sampled_beams import SampledBeams
from scripts.bench.operations import Operations
from tests.decoding.row_kinds.recurrent import random_head
from tests.support.tiers import tiered
from tests.support.toy_heads import exact_head, markov

TARGET = markov(symbols=12)
TIPS_B = torch.tensor([3, 7, 7])


def hidden_states() -> Tensor:
    return torch.randn(
        len(TIPS_B),
        TARGET.hidden_size,
        generator=torch.Generator().manual_seed(2),
        dtype=torch.float64,
    )


def sampling_chooser(rows: int, vocab_size: int = TARGET.vocab_size) -> TokenChooser:
    """Return a chooser that samples tokens, in its first round."""
    chooser = TokenChooser(Warper(1.0), "token", 5, vocab_size, TARGET.device)
    chooser.begin(list(range(rows)), [0] * rows, [4] * rows, 8)
    return chooser


def plain_beams(
    head: RecurrentHead, row: int, length: int, width: int, num_continued: int = 99
) -> set[tuple[int, ...]]:
    """Return the best paths of the published search, computed one beam at a time.

    Each step takes the best `width` of all continuations of the best `num_continued` beams.
    """
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        grown = []
        for score, path in beams[:num_continued]:
            state = head.start(TARGET.embed(TIPS_B[row]))
            for token in path:
                state = head.advance(state, TARGET.embed(torch.tensor(token)))
            features = head.features(head.context(hidden_states()[row]), state)
            scores_V = head.logits(features).log_softmax(-1)
            ids = head.to_target_ids(torch.arange(len(scores_V))).tolist()
            grown += [(score + s, (*path, token)) for s, token in zip(scores_V.tolist(), ids)]
        beams = sorted(grown, reverse=True)[:width]
    return {path for _, path in beams}


def paths_of(beams: Beams, row: int) -> list[tuple[int, ...]]:
    """Return the paths of a row's beams after the last step, best first."""
    found = []
    for beam in range(beams.steps[-1].tokens_BW.shape[1]):
        path: list[int] = []
        for step in reversed(beams.steps):
            path.insert(0, int(step.tokens_BW[row, beam]))
            beam = int(step.parents_BW[row, beam])
        found.append(tuple(path))
    return found


@pytest.mark.parametrize(
    "fields", [{}, {"draft_vocab_size": 9}, {"rnn": False}], ids=["whole", "shortlist", "sum"]
)
@pytest.mark.parametrize(("length", "width"), [(1, 5), (3, 1), (4, 4), (3, 9)])
def test_beams_equal_those_of_the_plain_search(
    length: int, width: int, fields: dict[str, int]
) -> None:
    head = random_head(TARGET, scale=4.0, **fields)
    if head.token_ids_V is not None:
        head.token_ids_V = torch.tensor([0, 1, 3, 4, 6, 7, 8, 10, 11])
    for scored in (False, True):
        choose = TopBeams(head, width, scored=scored)
        beams = search(head, TARGET.embed, TIPS_B, hidden_states(), length, choose)
        for row in range(len(TIPS_B)):
            assert set(paths_of(beams, row)) == plain_beams(head, row, length, width)


def test_scores_are_log_probabilities_at_the_targets_temperature() -> None:
    head = exact_head(TARGET)
    beams = search(head, TARGET.embed, TIPS_B, hidden_states(), 3, TopBeams(head, 4, 0.7))
    log_probs_VV = (TARGET.table_VVV[0] / 0.7).log_softmax(-1)
    scores_BW = beams.steps[-1].scores_BW
    assert scores_BW is not None
    for row, tip in enumerate(TIPS_B.tolist()):
        for path, score in zip(paths_of(beams, row), scores_BW[row].tolist()):
            steps = zip((tip, *path), path)
            assert score == pytest.approx(
                sum(log_probs_VV[before, after].item() for before, after in steps)
            )


def test_the_search_ends_when_no_beam_continues() -> None:
    head = random_head(TARGET)
    steps: list[Step] = []

    def narrow(step: Step) -> Frontier | None:
        steps.append(step)
        return Frontier(step.scores_BW) if len(steps) < 2 else None

    beams = search(head, TARGET.embed, TIPS_B, hidden_states(), 6, TopBeams(head, 3), narrow)
    assert len(beams.steps) == len(steps) == 2
    assert beams.num_started == 1 + 3


@pytest.mark.parametrize("named", [False, True])
def test_a_narrowed_search_continues_from_the_chosen_beams(named: bool) -> None:
    """Check that a narrowed search continues only from the chosen beams.

    These are the first beams or, if `named`, listed beams in any order. Back pointers refer to all
    beams of the previous step in both cases.
    """
    head, width, num_continued, length = random_head(TARGET, scale=4.0), 5, 2, 3
    rows = []

    def narrow(step: Step) -> Frontier | None:
        assert step.scores_BW is not None
        if not named:
            return Frontier(step.scores_BW[:, :num_continued])
        beams_BP = torch.tensor([[1, 0]]).expand(len(TIPS_B), num_continued)
        return Frontier(step.scores_BW.gather(1, beams_BP), beams_BP)

    def counted(logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
        rows.append(logits_BPV.shape[1])
        return TopBeams(head, width)(logits_BPV, scores_BP, step)

    beams = search(head, TARGET.embed, TIPS_B, hidden_states(), length, counted, narrow)
    assert rows == [1, num_continued, num_continued] and beams.num_started == sum(rows)
    for row in range(len(TIPS_B)):
        assert set(paths_of(beams, row)) == plain_beams(head, row, length, width, num_continued)
    assert plain_beams(head, 0, length, width, num_continued) != plain_beams(
        head, 0, length, width
    ), "the control: narrowing matters"


class Largest(TorchDispatchMode):
    """Dispatch mode that records the size of the largest tensor that any operation creates."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor) and not func.is_view:
                self.numbers = max(self.numbers, tensor.numel())
        return out


@pytest.mark.parametrize("drawn", tiered([False, True], [True]))
def test_the_search_never_waits_and_creates_nothing_larger_than_logits(drawn: bool) -> None:
    """Check that a search never waits for the device, and that its largest tensor is [B, W, V].

    So no tensor spans several steps. The head's features and blocks are as wide as V here.
    """
    length, width, V = 5, 4, 600
    target = markov(symbols=V)
    head = random_head(target, scale=4.0, exit_dim=V)
    chooser = sampling_chooser(3, V)
    hidden_BH = torch.zeros(3, V, dtype=torch.float64)
    with Largest() as largest, Operations() as operations:
        choose = SampledBeams(head, width, length, 3, chooser) if drawn else TopBeams(head, width)
        search(head, target.embed, TIPS_B, hidden_BH, length, choose)
    assert operations.waits == 0
    assert largest.numbers == 3 * width * V


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 9}], ids=["whole", "shortlist"])
@pytest.mark.parametrize("candidates", [2, 64])
def test_samples_come_from_the_proposed_distributions(
    candidates: int, fields: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that each child is a candidate or was sampled from the tail of all other tokens.

    Children of a node are distinct, and its candidates and tail add up to probability 1.
    """
    monkeypatch.setattr(sampled_beams, "CANDIDATES", candidates)
    head, width, tails = random_head(TARGET, scale=2.0, **fields), 4, 0
    if head.token_ids_V is not None:
        head.token_ids_V = torch.tensor([0, 1, 3, 4, 6, 7, 8, 10, 11])
    draws = SampledBeams(head, width, 3, len(TIPS_B), sampling_chooser(len(TIPS_B)))
    beams = search(head, TARGET.embed, TIPS_B, hidden_states(), 3, draws)
    tokens_BM, parents_BM, rows = draws.nodes(beams)
    assert rows.tail_BPV is not None
    ids_BPK, tail_BP = rows.ids_BPK[:, :, :-1], rows.tail_BPV.sum(-1)
    assert ids_BPK.shape[2] == min(max(candidates, width), head.config.num_drafted - 1)
    assert torch.allclose(rows.probs_BPK.sum(-1), torch.ones_like(tail_BP))
    assert torch.allclose(rows.probs_BPK[:, :, -1], tail_BP)
    assert not rows.tail_BPV.gather(2, ids_BPK).any()
    for row in range(len(TIPS_B)):
        pairs = list(zip(parents_BM[row].tolist(), tokens_BM[row].tolist()))
        assert len(set(pairs)) == len(pairs), "sampled without replacement"
        assert [pairs[step * width][0] for step in range(3)] == [-1, 0, width], (
            "the first node's first child is in the tree"
        )
        for parent, token in pairs:
            if token not in ids_BPK[row, parent + 1].tolist():
                assert (
                    token == rows.ids_BPK[row, parent + 1, -1]
                    and rows.tail_BPV[row, parent + 1, token] > 0
                )
                tails += 1
    assert tails or candidates > 2


def test_siblings_are_in_the_order_of_their_clocks() -> None:
    """Check that a node's children are in the order of their exponential clocks.

    So first children are distributed as q, and second children as q without the first.
    """
    head, rows = exact_head(TARGET), 2000
    draws = SampledBeams(head, 3, 1, rows, sampling_chooser(rows))
    tips_B = torch.full((rows,), 3)
    (step,) = search(
        head, TARGET.embed, tips_B, torch.zeros(rows, 12, dtype=torch.float64), 1, draws
    ).steps
    q_V = TARGET.table_VVV[0, 3].softmax(-1)
    found_V = step.tokens_BW[:, 0].bincount(minlength=12) / rows
    assert (found_V - q_V).abs().max() < 0.05
    best = int(q_V.argmax())
    second_V = step.tokens_BW[step.tokens_BW[:, 0] == best, 1].bincount(minlength=12).double()
    expected_V = q_V.index_fill(0, torch.tensor([best]), 0.0) / (1 - q_V[best])
    assert (second_V / second_V.sum() - expected_V).abs().max() < 0.08


def test_the_number_of_siblings_is_independent_of_their_tokens() -> None:
    """Check that first children are distributed as q, with or without a second child.

    This holds because the number of children is settled before their tokens.
    """
    head, rows = exact_head(TARGET), 4000
    tips_B = torch.full((rows,), 3)
    hidden_BH = torch.zeros(rows, TARGET.hidden_size, dtype=torch.float64)
    draws = SampledBeams(head, 4, 2, rows, sampling_chooser(rows))
    beams = search(head, TARGET.embed, tips_B, hidden_BH, 2, draws)
    first, second = beams.steps
    # the first child of the first node
    first_B1 = second.parents_BW.eq(0).long().argmax(1, keepdim=True)
    tested = 0
    for token in range(TARGET.vocab_size):
        for has_second in (False, True):
            among_B = (first.tokens_BW[:, 0] == token) & (
                (second.parents_BW.eq(0).sum(1) > 1) == has_second
            )
            children = second.tokens_BW.gather(1, first_B1)[among_B, 0]
            if len(children) < 200:
                continue
            tested += 1
            found_V = torch.bincount(children, minlength=TARGET.vocab_size) / len(children)
            expected_V = TARGET.table_VVV[0, token].softmax(-1)
            assert (found_V - expected_V).abs().max() < 5 * (0.25 / len(children)) ** 0.5
    assert tested > 3
