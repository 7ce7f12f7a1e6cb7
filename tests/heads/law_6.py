"""Law 6 for any kind of trained head: training equals drafting.

A head that drafts differently from its training still decodes losslessly but accepts fewer tokens.
No other law finds a shift by one, a tap of another layer, or a token that is unknown at the time of
the draft. So the probabilities from which a drafter samples in each round are compared with those
that training computes at the same positions of the same text.

Shapes: C channels, K drafted tokens, N predictions, P positions, V the target's vocabulary.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoding.interfaces import Drafter, Proposal
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from tests.heads.rows import HeadRow
from training.config import StudentConfig
from training.data.packing import PackedBatch, Sample, best_fit, collate
from training.features.states import TargetStates
from training.heads.checkpoint import save_head
from training.heads.evaluation import GreedyChain, HeldOutRows
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.heads.positions import Positions, positions
from training.heads.predicting import PredictingHead, output_layers
from training.models.build import build_llama
from training.objectives import freeze

VOCABULARY, HIDDEN, LAYERS, GAMMA, ROW, TOKENS = 61, 16, 4, 3, 64, 24
CLOSE = {"rtol": 0.0, "atol": 1e-5}  # largest difference of probabilities in float32
PROMPTS = [[3, 5, 8], [1, 60], [40, 2, 9, 11, 30], [7, 7, 20, 4]]


def target() -> Any:
    """Return a small frozen target in float32 whose next token depends on several earlier ones."""
    return copy.deepcopy(_target())


@cache
def _target() -> Any:
    torch.manual_seed(1)
    shape = StudentConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=24,
    )
    base = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "initializer_range": 0.5}
    return freeze(build_llama(shape, torch.float32, **base))


def head_of(row: HeadRow, model: Any) -> Any:
    """Build a head with random weights, large enough that all of its inputs matter."""
    shape = row.shape(model.config)
    generator = torch.Generator().manual_seed(2)
    head: Any = row.kind.empty(shape).requires_grad_(False).eval()
    for parameter in head.parameters():
        parameter.normal_(generator=generator).div_(parameter.shape[-1] ** 0.5)
    if shape.draft_vocab_size:
        chosen = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size]
        head.token_ids_V = chosen.sort().values
    return head


def other_taps(taps: tuple[int, ...]) -> tuple[int, ...]:
    """Return layers one below a head's, or one above for a head that reads the embedding."""
    layers = taps or (LAYERS,)
    return tuple(layer + (1 if 0 in layers else -1) for layer in layers)


def answers(tokens: int) -> list[Sample]:
    """Return PROMPTS with the target's greedy answers of so many tokens, which are supervised."""
    return _answers(tokens, tuple(map(tuple, PROMPTS)))


@cache
def _answers(tokens: int, prompts: tuple[tuple[int, ...], ...]) -> list[Sample]:
    settings = Settings(tokens, num_draft_tokens=GAMMA)
    samples = []
    for prompt, done in zip(prompts, decode(native(_target()), None, prompts, settings)):
        ids = np.asarray([*prompt, *done.tokens], dtype=np.int32)
        samples.append(Sample(ids, np.arange(len(ids)) >= len(prompt)))
    return samples


def native(model: Any, dtype: torch.dtype = torch.float32) -> NativeTarget:
    """Return the target for decoding."""
    return NativeTarget.from_state(
        model.config.to_dict(), model.state_dict(), dtype=dtype, execution="eager"
    )


class StatesOfOneBatch(TargetStates):
    """Hidden states that are computed once for a batch that comes again and again."""

    _of: tuple[PackedBatch, Tensor] | None = None

    def _forward(self, batch: PackedBatch) -> Tensor:
        if self._of is None or self._of[0] is not batch:
            self._of = batch, super()._forward(batch)
        return self._of[1]


def states_of(row: HeadRow, model: Any) -> TargetStates:
    """Return the target's hidden states that the head's training reads."""
    return StatesOfOneBatch(model, taps=row.kind.taps(row.shape(model.config)), final=False)


@dataclass(frozen=True)
class Drafted:
    """The proposal of one row in one round."""

    text: list[int]  # number of tokens before the draft, the tip included
    tokens: list[int]
    q_KV: Tensor  # distribution of each token


def drafts(drafter: Drafter, model: Any, dtype: torch.dtype = torch.float32) -> list[Drafted]:
    """Decode PROMPTS by sampling and return the proposals of all rounds and rows."""
    found: list[Drafted] = []
    propose = drafter.propose

    def watched(sequences_B: Sequence[Sequence[int]], *given: Any) -> Proposal:
        proposal = propose(sequences_B, *given)
        assert proposal.parents_BN is None and (
            proposal.q_BNV is not None or not any(proposal.counts_B)
        ), "law 6 needs a drafter that samples chains"
        for row, count in enumerate(proposal.counts_B):
            if count and proposal.q_BNV is not None:
                tokens = proposal.tokens_BN[row, :count].tolist()
                q_KV = proposal.q_BNV[row, :count].float().clone()
                found.append(Drafted([*sequences_B[row]], tokens, q_KV))
        return proposal

    drafter.propose = watched  # type: ignore[method-assign]
    settings = Settings(TOKENS, temperature=1.0, num_draft_tokens=GAMMA, verify="token", seed=3)
    decode(native(model, dtype), drafter, PROMPTS, settings)
    return found


@cache
def drafts_of(row: HeadRow) -> list[Drafted]:
    """Return the proposals of a row's random head, the same ones for the law and its controls."""
    model = target()
    return drafts(row.drafter(head_of(row, model)), model)


class Wrapped:
    """A kind of head with the predictions of another."""

    def __init__(self, kind: Any) -> None:
        self.kind, self.label, self.outputs = kind, kind.label, kind.outputs
        self.candidates, self.other_layouts = kind.candidates, kind.other_layouts
        self.layer_per_depth = kind.layer_per_depth
        self.reads_context, self.computes_states = kind.reads_context, kind.computes_states
        self.target_depths, self.runs_target = kind.target_depths, kind.runs_target

    def features(
        self,
        head: Any,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        features_NE: Tensor = self.kind.features(head, states, batch, where, states_PC)
        return features_NE

    def draft(self, *given: Any) -> Tensor:
        return self.kind.draft(*given)


@dataclass(frozen=True)
class Predicted:
    """The predictions of a batch in training."""

    where: Positions
    states_PC: Tensor
    q_NV: Tensor

    @property
    def places(self) -> list[tuple[int, int]]:
        """Return (position before the draft, head) of each prediction.

        Positions are indices into the flattened batch.
        """
        begins_N = self.where.kept_P[self.where.drafts_M[self.where.draft_N]]
        return list(zip(begins_N.tolist(), self.where.head_N.tolist(), strict=True))


@torch.no_grad()
def predict(
    kind: PredictingHead,
    head: Any,
    states: TargetStates,
    batch: PackedBatch,
    states_PC: Tensor | None = None,
) -> Predicted:
    """Return the predictions of a batch, computed by training's forward pass.

    states_PC: hidden states to use instead of the target's.
    """
    several = kind.layer_per_depth(head)
    where = positions(batch, GAMMA, uses_teacher=False, grouped=several, context=kind.reads_context)
    if states_PC is None:
        states_PC = states.select_taps(states.read(batch, where))
    features_NE = kind.features(head, states, batch, where, states_PC)
    outputs = output_layers(kind, head, states, where)
    q_NV = torch.softmax(outputs.logits(features_NE, 0, len(features_NE)), dim=-1)
    if head.token_ids_V is not None:
        whole_NV = q_NV.new_zeros(len(q_NV), states.vocab_size)
        q_NV = whole_NV.index_copy(1, head.token_ids_V, q_NV)
    return Predicted(where, states_PC, q_NV)


def check_training_equals_drafting(
    row: HeadRow, states: TargetStates | None = None, label_shift: int = 0
) -> None:
    """Assert that training's predictions are the distributions that the drafter samples from.

    The drafter continues from its state of earlier rounds, while training reads each text from the
    start, with several texts packed into a row.

    For controls, `states` are hidden states other than those that the drafter reads, and
    `label_shift` is the number of positions by which the compared predictions are too early.
    """
    model = target()
    head = head_of(row, model)
    rounds = drafts_of(row)
    assert len(rounds) > 2 * len(PROMPTS), "the law needs rounds after the first"
    samples = [
        Sample(
            np.asarray([*one.text, *one.tokens], dtype=np.int32),
            np.arange(len(one.text) + len(one.tokens)) > 0,
        )
        for one in rounds
    ]
    packed = best_fit([len(sample.ids) for sample in samples], ROW)
    assert len(packed) < len(samples), "the law needs texts that share a row"
    batch = collate(samples, packed, ROW)
    predicted = predict(row.kind, head, states or states_of(row, model), batch)
    numbers = {place: number for number, place in enumerate(predicted.places)}
    for index, indices in enumerate(packed):
        start = index * ROW
        for sample in indices:
            one = rounds[sample]
            before = start + len(one.text) - 2 - row.ahead  # the token before the draft's tip
            for depth in range(len(one.tokens)):
                number = numbers[before - label_shift, row.ahead + depth]
                torch.testing.assert_close(predicted.q_NV[number], one.q_KV[depth], **CLOSE)
            start += len(samples[sample].ids)


def check_nothing_unseen_is_read(row: HeadRow, kind: PredictingHead | None = None) -> None:
    """Assert that predictions depend on earlier tokens and states, and on no later ones.

    A draft knows the target's states up to the token before its tip; with `computes_states`, its
    drafter computes those of the tip and of the drafted tokens too.

    kind: the kind of head that predicts; the controls' read later tokens or states.
    """
    model, kind = target(), kind or row.kind
    head, states = head_of(row, model), states_of(row, model)
    random = np.random.default_rng(0)
    text = Sample(random.integers(0, VOCABULARY, 20).astype(np.int32), np.arange(20) > 0)
    # a row of the batch for each place that is changed
    first, rows = 2, [[index] for index in range(16)]
    changed = []
    for place in range(first, first + len(rows)):
        ids = text.ids.copy()
        ids[place] = (ids[place] + 7) % VOCABULARY
        changed.append(replace(text, ids=ids))
    batch = collate([text] * len(rows), rows, ROW)
    plain = predict(kind, head, states, batch)
    other = predict(kind, head, states, collate(changed, rows, ROW))
    states_PC = plain.states_PC.clone()
    row_P, place_P = plain.where.kept_P // ROW, plain.where.kept_P % ROW
    states_PC[place_P == first + row_P] += 1.0
    moved = predict(kind, head, states, batch, states_PC)
    begin_N, depth_N = torch.tensor(plain.places).T
    changed_N, known_N = first + begin_N // ROW, begin_N % ROW + 1 + depth_N
    seen = {}
    for name, found, last_N in (
        ("token", other, known_N),
        ("state", moved, known_N if kind.computes_states else begin_N % ROW),
    ):
        assert found.places == plain.places
        later_N = changed_N > last_N
        torch.testing.assert_close(found.q_NV[later_N], plain.q_NV[later_N], **CLOSE)
        seen[name] = not torch.allclose(found.q_NV[~later_N], plain.q_NV[~later_N], **CLOSE)
    assert all(seen.values()), f"predictions must depend on something: {seen}"


def check_a_folder_drafts_the_same(row: HeadRow, folder: Path, scale: float = 1.0) -> None:
    """Assert that a head drafts the same after export and reload.

    scale: factor on the parameters of the stored head (1, except in the control).
    """
    model = target()
    head, shape = head_of(row, model), row.shape(model.config)
    before = drafts_of(row)
    for parameter in head.parameters():
        parameter.mul_(scale)
    save_head(row.kind.layout, shape, head, folder)
    after = drafts(row.load(folder), model)
    assert [one.tokens for one in after] == [one.tokens for one in before]
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one.q_KV, other.q_KV, **CLOSE)


def check_the_chain_is_real_decoding(row: HeadRow, kind: PredictingHead | None = None) -> None:
    """Assert that the held-out chain has the counts of greedy decoding for every prompt.

    These are rounds, emitted, accepted and tested tokens.

    kind: the kind of head that drafts the chain; the control's drafts begin a token late.
    """
    model = target()
    head, states = trained(row), states_of(row, model)
    settings = Settings(TOKENS, num_draft_tokens=GAMMA)
    done = decode(native(model), row.drafter(head), PROMPTS, settings)
    assert sum(one.accepted for one in done), "the head must be right sometimes"
    rows = HeldOutRows(states, answers(TOKENS), ROW, torch.device("cpu"))
    chain = GreedyChain(kind or row.kind, head, rows, GAMMA, TOKENS)
    counts = [(one.rounds, len(one.tokens), one.accepted, one.tested) for one in done]
    names = ("rounds", "emitted", "accepted", "tested")
    pairs = zip(names, zip(*chain.counts(), strict=True), zip(*counts, strict=True), strict=True)
    differing = [name for name, found, expected in pairs if found != expected]
    assert not differing, f"the chain differs in {', '.join(differing)}"


@cache
def trained(row: HeadRow) -> Any:
    """Return a row's head after enough training that the tokens of its drafts differ by depth."""
    model = target()
    head = head_of(row, model)
    losses = learn(row, head, states_of(row, model), answers(TOKENS), steps=30)
    assert losses[-1] < losses[0]
    return head


def learn(
    row: HeadRow,
    head: Any,
    states: TargetStates,
    samples: list[Sample],
    depths: int = GAMMA,
    steps: int = 20,
    length: int = ROW,
) -> list[float]:
    """Train a head on samples and return the loss of each step."""
    head.requires_grad_(True)
    loss_config = HeadLossConfig("cross_entropy", predict_n_tokens=depths)
    objective = HeadObjective(row.kind, head, states, loss_config)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    batch = collate(samples, [[index] for index in range(len(samples))], length)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = objective(batch)[0]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    head.requires_grad_(False)
    return losses
