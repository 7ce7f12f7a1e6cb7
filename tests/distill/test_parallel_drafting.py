"""Test parallel drafting: its layout, law 6, its loss and held-out figures.

Law 6: what a mask token predicts in training is what the drafter's one forward predicts.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decoding.drafters.parallel import ParallelChain
from decoding.interfaces import Proposal
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from distill.parallel_drafting.held_out import HeldOutParallel
from distill.parallel_drafting.layout import ALL, Document, Layout, Retention, lay_out
from distill.parallel_drafting.objective import ParallelDistillation
from training.bounds import START, Bounds, Place
from training.config import StudentConfig
from training.data.packing import PackedBatch, Sample, best_fit, collate
from training.losses.config import LossConfig
from training.models.build import build_llama
from training.objectives import (
    Distillation,
    LanguageModelling,
    TeacherStates,
    freeze,
    hidden_states,
)

VOCABULARY, ROW, TOKENS, MASK = 40, 48, 4, 39
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
UNEQUAL = "Tensor-likes are not close"
LOSSES = [LossConfig(), LossConfig("tv", temperature=0.8), LossConfig("cross_entropy")]


def model(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny LLaMA with weights large enough that its attention matters."""
    torch.manual_seed(seed)
    shape = StudentConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
    )
    fields = {"initializer_range": 0.3, "max_position_embeddings": 128}
    return build_llama(shape, dtype, vocab_size=VOCABULARY, **fields)


def samples(lengths: tuple[int, ...] = (20, 9, 13, 30), prompt: int = 4) -> list[Sample]:
    random = np.random.default_rng(1)
    return [
        Sample(random.integers(0, MASK, n).astype(np.int32), np.arange(n) >= prompt)
        for n in lengths
    ]


def batch() -> PackedBatch:
    """Return two rows with two documents each; one has two supervised spans."""
    texts = samples()
    texts[3].mask[10:15] = False
    return collate(texts, [[0, 1], [2, 3]], ROW)


def objective(student: Any, retention: Retention = ALL, **given: Any) -> ParallelDistillation:
    teacher = freeze(model(1, student.dtype))
    loss = given.pop("loss", LossConfig())
    given = {"tokens": TOKENS, "seed": 3} | given
    return ParallelDistillation(
        student,
        mask_token=MASK,
        retention=retention,
        loss=loss,
        states=TeacherStates(teacher, 0),
        **given,
    )


def at_step(target: ParallelDistillation, step: int) -> ParallelDistillation:
    target.begin(step, Place(START, Bounds()), [])
    return target


# the layout


def test_anchors_are_nested_and_kept_by_their_shares() -> None:
    retention, texts = Retention(0.7, 0.3), samples((400,) * 4, prompt=100)
    rows = [[index] for index in range(4)]
    layout = lay_out(collate(texts, rows, 400), 6, MASK, retention, (0, 0))
    anchors = layout.tokens_M - layout.depths_M
    before = set(range(4 * 300))
    for depth in range(6):
        found = anchors[layout.depths_M == depth].tolist()
        possible = 4 * (300 - depth)
        assert len(found) == len(set(found)) and before >= {*found}
        assert len(found) == pytest.approx(retention.share(depth) * possible, abs=4)
        before = {*found}
    weights = [float(layout.weights_M[layout.depths_M == depth].sum()) for depth in range(6)]
    assert weights == pytest.approx([4 * 300 / 6] * 6), "each depth has the same weight"


def test_a_depth_needs_supervised_tokens_up_to_its_own() -> None:
    """Check that no prediction crosses the end of an answer or a document."""
    texts = batch()
    layout = lay_out(texts, TOKENS, MASK)
    places = np.flatnonzero(texts.host.supervised_RT)
    for token, depth in zip(layout.tokens.tolist(), layout.depths_M.tolist()):
        assert places[token] - places[token - depth] == depth
    counts = torch.bincount(layout.depths_M).tolist()
    spans = [16, 5, 9, 6, 15]
    assert counts == [sum(max(0, span - depth) for span in spans) for depth in range(TOKENS)]


def test_anchors_depend_on_seed_step_and_row_alone() -> None:
    half = Retention(0.5, 0.5)

    def anchors(rows: list[list[int]], key: tuple[int, ...]) -> list[Any]:
        found = [lay_out(collate(samples(), [row], ROW), 3, MASK, half, key) for row in rows]
        return [(one.positions_S.tolist(), one.tokens.tolist()) for one in found]

    first, second = anchors([[0, 1], [2, 3]], (0, 5))
    assert anchors([[2, 3]], (0, 5)) == [second]
    assert anchors([[0, 1]], (0, 6)) != [first] != anchors([[0, 1]], (1, 5))
    together = lay_out(collate(samples(), [[0, 1], [2, 3]], ROW), 3, MASK, half, (0, 5))
    assert together.positions_S.tolist() == first[0] + second[0]


def test_the_text_is_not_changed_by_its_mask_tokens() -> None:
    """Check that depth 0 predicts what an ordinary forward predicts."""
    student, texts = model(0), batch()
    layout = lay_out(texts, TOKENS, MASK)
    plain_NH = texts.at_supervised(hidden_states(student, texts))
    torch.testing.assert_close(layout.states(student)[layout.depths_M == 0], plain_NH, **CLOSE)


# law 6


def check_training_equals_drafting(change: Callable[[Layout], Layout] = lambda one: one) -> None:
    """Assert that mask tokens predict in training what the drafter samples from.

    change: replaces the layout, in controls.
    """
    student, target = freeze(model(0)), freeze(model(1))
    models = [
        NativeTarget.from_state(one.config.to_dict(), one.state_dict(), dtype=torch.float32)
        for one in (target, student)
    ]
    drafter = ParallelChain(model=models[1], tokens=TOKENS, mask_token=MASK)
    drafts: list[tuple[list[int], list[int], torch.Tensor]] = []
    propose = drafter.propose

    def watched(sequences_B: Any, *given: Any) -> Proposal:
        proposal = propose(sequences_B, *given)
        for row, count in enumerate(proposal.counts_B):
            if count:
                assert proposal.q_BNV is not None
                tokens = proposal.tokens_BN[row, :count].tolist()
                drafts.append(([*sequences_B[row]], tokens, proposal.q_BNV[row, :count].clone()))
        return proposal

    drafter.propose = watched  # type: ignore[method-assign]
    prompts = [[3, 5, 7, 9], [11], [2, 2, 30, 4, 8, 1]]
    sampled = Settings(14, temperature=1.0, num_draft_tokens=TOKENS, verify="token", seed=3)
    decode(models[0], drafter, prompts, sampled)
    assert len(drafts) > 2 * len(prompts), "the law needs rounds after the first"
    texts = []
    for text, tokens, _ in drafts:
        ids = np.asarray([*text, *tokens], dtype=np.int32)
        texts.append(Sample(ids, np.arange(len(ids)) >= len(text)))
    rows = best_fit([len(text.ids) for text in texts], ROW)
    assert len(rows) < len(texts), "the law needs texts that share a row"
    layout = change(lay_out(collate(texts, rows, ROW), TOKENS, MASK))
    with torch.no_grad():
        q_MV = torch.softmax(student.lm_head(layout.states(student)), -1)
    lengths = [len(drafts[index][1]) for row in rows for index in row]
    tips = np.cumsum([0, *lengths[:-1]])
    for tip, index in zip(tips.tolist(), (index for row in rows for index in row)):
        at = (layout.tokens_M - layout.depths_M == tip).nonzero()[:, 0]
        torch.testing.assert_close(q_MV[at], drafts[index][2], **CLOSE)


def test_law_6_training_equals_drafting() -> None:
    check_training_equals_drafting()


def test_control_a_shifted_position_is_found_out() -> None:
    def shifted(layout: Layout) -> Layout:
        late = (layout.ids_S == MASK).long()
        return replace(layout, positions_S=layout.positions_S + late)

    with pytest.raises(AssertionError, match=UNEQUAL):
        check_training_equals_drafting(shifted)


def test_control_mask_tokens_that_see_others_are_found_out() -> None:
    def leaking(layout: Layout) -> Layout:
        def open_masks(one: Document) -> Document:
            visible_ES = one.visible_ES.clone()
            visible_ES[:, one.length :] = True
            return Document(one.length, visible_ES)

        return replace(layout, documents=[*map(open_masks, layout.documents)])

    with pytest.raises(AssertionError, match=UNEQUAL):
        check_training_equals_drafting(leaking)


def test_control_a_mask_token_that_sees_the_next_token_is_found_out() -> None:
    def ahead(layout: Layout) -> Layout:
        def with_next(one: Document) -> Document:
            visible_ES = one.visible_ES.clone()
            visible_ES[:, 1 : one.length] |= one.visible_ES[:, : one.length - 1]
            return Document(one.length, visible_ES)

        return replace(layout, documents=[*map(with_next, layout.documents)])

    with pytest.raises(AssertionError, match=UNEQUAL):
        check_training_equals_drafting(ahead)


# the loss


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_the_loss_is_the_mean_over_depths_of_mean_losses(loss: LossConfig) -> None:
    """Compare value and gradient with the loss of each depth, computed from separate forwards.

    A forward of one text and the mask tokens of one anchor is an ordinary causal one.
    """
    student, texts = model(0, torch.float64), batch()
    total, metrics = objective(student, loss=loss)(texts)
    total.backward()
    found = student.lm_head.weight.grad.clone(), student.model.embed_tokens.weight.grad.clone()
    student.zero_grad()
    plain = LanguageModelling if loss.name == "cross_entropy" else Distillation
    teacher = freeze(model(1, torch.float64))
    separate = (student,) if plain is LanguageModelling else (student, teacher, loss)
    supervised, expected, chances = 0, [], []
    for row in texts.rows:
        sums = torch.zeros(TOKENS, 3, dtype=torch.float64)
        for index in row:
            text = samples()[index]
            if index == 3:
                text.mask[10:15] = False
            for depth in range(TOKENS):
                for anchor in np.flatnonzero(text.mask[1:]):
                    if text.mask[anchor + 1 : anchor + depth + 2].sum() < depth + 1:
                        continue
                    masked = text.ids[: anchor + depth + 2].copy()
                    masked[anchor + 1 : anchor + 1 + depth] = MASK
                    value, chance = _one(plain, separate, text, masked, anchor + depth)
                    sums[depth] += torch.stack((value, chance.detach()[0], torch.ones(())))
        count = sums[0, 2]
        expected.append((sums[:, 0] / sums[:, 2]).mean() * count)
        chances.append(sums[:, 1].detach() / sums[:, 2].detach() * count)
        supervised += int(count)
    assert supervised == texts.supervised
    torch.testing.assert_close(total, sum(expected), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(metrics.double(), sum(chances), rtol=1e-6, atol=1e-6)
    sum(expected).backward()  # type: ignore[union-attr]
    for gradient, weight in zip(found, (student.lm_head, student.model.embed_tokens)):
        # transformers computes norms in float32
        torch.testing.assert_close(gradient, weight.weight.grad, rtol=1e-4, atol=1e-5)


def _one(
    kind: Any, given: tuple[Any, ...], text: Sample, masked: np.ndarray, place: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and metric of the last prediction of a text with mask tokens.

    The teacher reads the text without mask tokens.
    """
    only = np.arange(len(masked)) == place + 1
    student = collate([Sample(masked, only)], [[0]], len(masked))
    if kind is LanguageModelling:
        value, metric = kind(*given)(student)
        return value, metric.double()
    whole = collate([Sample(text.ids[: len(masked)], only)], [[0]], len(masked))

    class Fixed(TeacherStates):
        def __call__(self, _: PackedBatch) -> torch.Tensor:
            return self._read(whole)

    value, metric = kind(*given, Fixed(given[1], 0))(student)
    return value, metric.double()


def test_a_batch_equals_its_rows_and_an_empty_one_has_no_loss() -> None:
    target = at_step(objective(model(0, torch.float64), Retention(0.5, 0.3)), 2)
    texts = batch()
    parts = [target(texts.row(index)) for index in range(2)]
    for whole, one, other in zip(target(texts), *parts):
        torch.testing.assert_close(whole, one + other, rtol=1e-10, atol=1e-10)
    loss, metrics = target(collate(samples(), [[]], ROW))
    loss.backward()
    assert loss.item() == 0 and metrics.tolist() == [0] * TOKENS
    assert len(target.metric_names) == TOKENS


@pytest.mark.long
def test_mask_tokens_learn_what_can_be_known() -> None:
    """Train on a chain whose next token is known with probability 0.9.

    The token that is d + 1 places ahead is then known with probability 0.9^(d + 1).
    """
    torch.manual_seed(0)
    shape = StudentConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, intermediate_size=128
    )
    student = build_llama(shape, torch.float32, vocab_size=MASK + 1)
    learner = objective(student, Retention(0.7, 0.2), loss=LossConfig("cross_entropy"))
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3, betas=(0.9, 0.95))
    random = np.random.default_rng(0)
    following = random.permutation(MASK)
    found = []
    for step in range(150):
        ids = random.integers(0, MASK, (16, 64)).astype(np.int32)
        known = random.random(ids.shape) < 0.9
        for place in range(1, 64):
            after = following[ids[:, place - 1]]
            ids[:, place] = np.where(known[:, place], after, ids[:, place])
        texts = [Sample(row, np.arange(64) >= 1) for row in ids]
        packed = collate(texts, [[index] for index in range(16)], 64)
        optimizer.zero_grad()
        loss, metrics = at_step(learner, step)(packed)
        (loss / packed.supervised).backward()
        optimizer.step()
        found.append((metrics / packed.supervised).tolist())
    # a token of the rest is right by chance with probability 1 / 39
    assert np.mean(found[-30:], axis=0) == pytest.approx([0.9, 0.81, 0.73, 0.66], abs=0.06)


# held-out figures


def test_held_out_rounds_are_those_of_greedy_decoding() -> None:
    """Check the counts of a student that is right at times; one that is never right as control."""
    target, student = freeze(model(1)), model(1)
    prompts = [[3, 5, 7, 9], [11], [2, 2, 30, 4, 8, 1]]
    native = NativeTarget.from_state(target.config.to_dict(), target.state_dict())
    plain = decode(native, None, prompts, Settings(24))
    answers = []
    for prompt, done in zip(prompts, plain, strict=True):
        ids = np.asarray([*prompt, *done.tokens], dtype=np.int32)
        answers.append(Sample(ids, np.arange(len(ids)) >= len(prompt)))
    learner = objective(student)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    texts = collate(answers, [[0], [1], [2]], ROW)
    for _ in range(30):
        optimizer.zero_grad()
        learner(texts)[0].backward()
        optimizer.step()
    state = NativeTarget.from_state(student.config.to_dict(), student.state_dict())
    drafter = ParallelChain(model=state, tokens=TOKENS, mask_token=MASK)
    done = decode(native, drafter, prompts, Settings(24, num_draft_tokens=TOKENS))
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    options = {"tokens": TOKENS, "mask_token": MASK, "max_new_tokens": 24}
    held_out = HeldOutParallel(student, target, answers, ROW, 0.0, **options)
    _, survival_ATK = held_out.evaluate_chain()
    rounds = held_out.walk(survival_ATK)
    order = [index for one in held_out.batches for row in one.rows for index in row]
    assert rounds.rounds_A.tolist() == [done[index].rounds for index in order]
    accepted = np.zeros(TOKENS)
    for one in done:
        accepted[: len(one.accepted_by_depth)] += one.accepted_by_depth
    assert rounds.accepted_AK.sum(0).tolist() == accepted.tolist()
    assert accepted[1:].sum() > 0, "mask tokens must be right at times"
    figures = held_out()
    assert (
        figures["score"]
        == figures["block_efficiency"]
        == pytest.approx(sum(len(one.tokens) for one in done) / sum(one.rounds for one in done))
    )
    wrong = HeldOutParallel(freeze(model(7)), target, answers, ROW, 0.0, **options)()
    assert wrong["block_efficiency"] < figures["block_efficiency"]
