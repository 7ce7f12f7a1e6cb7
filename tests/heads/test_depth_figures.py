"""Figures by depth equal those of whole distributions, one answer at a time, and of decoding."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS, HeadRow
from training.data.packing import Sample, collate
from training.features.states import TargetStates
from training.heads.depth_figures import COVERAGE, TAU, DepthFigures
from training.heads.evaluation import GREEDY, GreedyChain, HeldOutRows
from training.objectives import hidden_states

ROWS = {row.name: row for row in HEAD_ROWS}
CHECKED = (
    "recurrent with a draft vocabulary",
    "medusa",
    "eagle3",
    "p_eagle with a draft vocabulary",
    "dflash2",
    "dspark",
    "early exit",
    "sdsat",
)
K, CPU = law_6.GAMMA, torch.device("cpu")


def rows_of(states: TargetStates, samples: list[Sample]) -> HeldOutRows:
    return HeldOutRows(states, samples, law_6.ROW, CPU)


def native(model: Any) -> NativeTarget:
    return NativeTarget.from_state(
        model.config.to_dict(), model.state_dict(), dtype=torch.float32, execution="eager"
    )


def answers_of(model: Any, temperature: float) -> tuple[list[Sample], list[Any]]:
    """Return the target's answers as samples, and as they were decoded."""
    settings = Settings(16, num_draft_tokens=K, temperature=temperature)
    done = decode(native(model), None, law_6.PROMPTS, settings)
    samples = []
    for prompt, one in zip(law_6.PROMPTS, done, strict=True):
        ids = np.asarray([*prompt, *one.tokens], dtype=np.int32)
        samples.append(Sample(ids, np.arange(len(ids)) >= len(prompt)))
    return samples, done


def expected(
    row: HeadRow, head: Any, states: TargetStates, samples: list[Sample], temperature: float
) -> dict[str, float]:
    """Return the figures from the whole distributions of each answer alone."""
    sums: dict[str, np.ndarray] = {}

    def add(name: str, depth: int, value: float) -> None:
        sums.setdefault(name, np.zeros(K))[depth] += value

    for one in samples:
        ids, batch = torch.from_numpy(one.ids).long(), collate([one], [[0]], law_6.ROW)
        predicted = law_6.predict(row.kind, head, states, batch)
        with torch.no_grad():
            p_logits_TV = states.target.lm_head(hidden_states(states.target, batch)[0])
        p_TV = (p_logits_TV / temperature).softmax(-1)
        places = dict(zip(predicted.places, predicted.q_NV.log(), strict=True))
        for before in sorted({before for before, depth in places if depth == 0}):
            reached = 1.0
            for depth in range(K):
                shift = depth if row.kind.computes_states else 0
                log_q_V = places.get((before + shift, depth - shift))
                if log_q_V is None:
                    break
                q_V, p_V = (log_q_V / temperature).softmax(-1), p_TV[before + 1 + depth]
                best, token = int(p_V.argmax()), int(ids[before + 2 + depth])
                above = int((log_q_V > log_q_V[best]).sum()) if log_q_V[best] > -99 else 99
                overlap = float(torch.minimum(p_V, q_V).sum())
                add("known", depth, 1)
                add("covered", depth, float(p_V[q_V > 0].sum()))
                add("tested", depth, reached)
                add("sampled", depth, reached * overlap)
                add("overlap", depth, overlap)
                add("argmax_match", depth, above < 1)
                add("recall_top4", depth, above < 4)
                add("recall_top8", depth, above < 8)
                reached *= min(1.0, float(q_V[token]) / float(p_V[token]))
    found = {TAU: 1 + float((sums["sampled"] / sums["known"]).sum())}
    if head.token_ids_V is not None:
        found[COVERAGE] = sums["covered"][0] / sums["known"][0]
    for depth in range(K):
        found[f"sampled_acceptance/{depth + 1}"] = sums["sampled"][depth] / sums["tested"][depth]
        found[f"mean_overlap/{depth + 1}"] = sums["overlap"][depth] / sums["known"][depth]
        for name in ("argmax_match", "recall_top4", "recall_top8"):
            found[f"{name}/{depth + 1}"] = sums[name][depth] / sums["known"][depth]
    return found


@pytest.mark.parametrize("name", CHECKED)
def test_figures_are_those_of_whole_distributions(name: str) -> None:
    row, model = ROWS[name], law_6.target()
    head, (samples, _) = law_6.head_of(row, model), answers_of(model, 0.8)
    states = law_6.states_of(row, model)
    found = DepthFigures(row.kind, head, rows_of(states, samples), K, 0.8)()
    wanted = expected(row, head, states, samples, 0.8)
    unconditional = {key: wanted.pop(key) for key in [*wanted] if key.startswith("mean_overlap")}
    compared = {key: found[key] for key in wanted}
    assert compared == pytest.approx(wanted, rel=1e-4)
    assert 1 <= found[TAU] <= K + 1
    deepest = found[f"sampled_acceptance/{K}"]
    if name != "early exit":
        assert deepest != pytest.approx(unconditional[f"mean_overlap/{K}"]), "the control"
    if row.kind.candidates(head) is not None:
        assert f"recall_top{head.config.candidates}/1" in found
    if head.token_ids_V is not None:
        assert found[f"sampled_acceptance/{K}"] < found[COVERAGE] < 0.9
    assert (COVERAGE in found) is (head.token_ids_V is not None)
    if row.kind.target_depths:  # the draft is the target's own token
        own = [found[f"{figure}/1"] for figure in ("sampled_acceptance", "argmax_match")]
        assert own == pytest.approx([1, 1], rel=1e-5)


def test_the_wrong_states_have_other_figures() -> None:
    row, model = ROWS["eagle3"], law_6.target()
    head, (samples, _) = law_6.head_of(row, model), answers_of(model, 0.0)
    right, wrong = law_6.states_of(row, model), TargetStates(model, taps=(1, 2, 3), final=False)
    assert right.layers != wrong.layers
    found = [
        DepthFigures(row.kind, head, rows_of(states, samples), K, 0.0)()
        for states in (right, wrong)
    ]
    assert found[0] != found[1] and found[0].keys() == found[1].keys()


@pytest.mark.parametrize("name", ["dspark", "dflash2", "early exit"])
def test_greedy_acceptance_by_depth_is_that_of_decoding(name: str) -> None:
    row, model = ROWS[name], law_6.target()
    head, (samples, _) = law_6.head_of(row, model), answers_of(model, 0.0)
    states = law_6.states_of(row, model)
    law_6.learn(row, head, states, samples)
    figures = GreedyChain(row.kind, head, rows_of(states, samples), K, 16)()
    settings = Settings(16, num_draft_tokens=K)
    done = decode(native(model), row.drafter(head), law_6.PROMPTS, settings)
    accepted, tested = (
        np.sum([np.pad(getattr(one, field), (0, K))[:K] for one in done], axis=0)
        for field in ("accepted_by_depth", "tested_by_depth")
    )
    wanted = {f"{GREEDY}/{k + 1}": accepted[k] / tested[k] for k in range(K) if tested[k]}
    assert {key: value for key, value in figures.items() if "/" in key} == pytest.approx(wanted)
    assert 0 < figures[f"{GREEDY}/1"] < 1
    if row.kind.candidates(head) is not None:  # control: without the selector
        base = copy.deepcopy(head)
        base.correction = None
        found = GreedyChain(row.kind, base, rows_of(states, samples), K, 16)()
        assert found["score"] != pytest.approx(figures["score"])
