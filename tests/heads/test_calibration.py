"""Calibration of confidences: fits of known temperatures, their use in drafting, and bad values."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from heads.block.checkpoint import load_head
from heads.block.drafter import BlockDrafter
from heads.block.layouts import SERVED
from heads.block.model import BlockHead
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from tests.support.block_heads import random_block, sizes_of
from tests.support.tiny_targets import hf_model, native_of, random_prompts
from training.data.packing import Sample, collate
from training.features.states import TargetStates
from training.heads import checkpoint
from training.heads.calibration import Calibration
from training.heads.evaluation import HeldOutRows
from training.heads.temperatures import (
    AFTER,
    BEFORE,
    LEAST_DRAFTS,
    Drafts,
    calibrate,
    calibration_error,
    confidences,
    describe_calibration,
    fit_temperatures,
    mean_error,
    predict_survival,
    read_temperatures,
)
from training.held_out.rounds import walk
from training.objectives import hidden_states

TRUE = [2**0.5, 0.5, 1.0, 2.0]  # temperatures of the grid
ONES = [1.0] * 4
ROW = next(row for row in HEAD_ROWS if row.name == "dspark")
SIZES = {"vocab_size": 11, "hidden_size": 6, "target_layers": 8}


def synthetic(
    temperatures: list[float], seed: int, drafts: int = 20000, chances: bool = False
) -> Drafts:
    """Return drafts whose tokens are accepted with the chances at these temperatures.

    chances: they survive with the chance itself, without the noise of a sample.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (drafts, len(temperatures))
    logits_MK = 1.5 + 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    accepted_MK = (logits_MK / torch.tensor(temperatures, dtype=torch.float64)).sigmoid()
    if not chances:
        uniforms_MK = torch.rand(shape, generator=generator, dtype=torch.float64)
        accepted_MK = (uniforms_MK < accepted_MK).double()
    known_MK = torch.rand(drafts, 1, generator=generator) * 9 > torch.arange(shape[1])
    return Drafts(logits_MK, accepted_MK.cumprod(1), known_MK, torch.arange(drafts) // 50)


def error_of(drafts: Drafts, temperatures: list[float]) -> float:
    return mean_error(predict_survival(drafts.logits_MK, temperatures), drafts)


# ------------------------------------------------------------------------------------ the fit


def test_the_error_is_the_distance_of_bins():
    predicted = torch.tensor([0.1, 0.1, 0.9, 0.9], dtype=torch.float64)
    observed = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert calibration_error(predicted, observed) == pytest.approx((0.8 + 0.2) / 4)
    assert calibration_error(observed, observed) == calibration_error(predicted[:0], observed[:0])


@pytest.mark.parametrize("true", [TRUE, ONES, TRUE[::-1]], ids=str)
def test_the_fit_recovers_known_temperatures(true: list[float]):
    fitted = fit_temperatures(synthetic(true, 1, chances=True))
    assert fitted == true
    other = synthetic(true, 2, chances=True)
    assert error_of(other, fitted) < 1e-12
    assert (error_of(other, ONES) > 0.02) is (true != ONES)


@pytest.mark.parametrize("true", [TRUE, TRUE[::-1]], ids=str)
def test_the_fit_reduces_the_error_of_other_drafts(true: list[float]):
    """Check it on samples of accepted tokens, from which temperatures follow only roughly."""
    fitted = fit_temperatures(synthetic(true, 1))
    assert np.abs(np.log2(fitted) - np.log2(true)).max() <= 2 / 8 + 1e-9
    other = synthetic(true, 2)
    assert error_of(other, fitted) < min(0.012, error_of(other, ONES) / 2)
    assert error_of(other, fitted[::-1]) > error_of(other, ONES) / 2, "each depth has its own"


@pytest.mark.parametrize("drafts", [2000, LEAST_DRAFTS - 1])
def test_a_depth_that_few_drafts_reach_has_no_temperature(drafts: int):
    found = synthetic([0.25] * 4, 1, drafts)
    if drafts > LEAST_DRAFTS:
        assert fit_temperatures(found)[2] != 1.0, "the control"
    found.survived_MK[:, 1:] = 0.0  # no draft survives to the third token
    fitted = fit_temperatures(found)
    assert fitted[2:] == [1.0, 1.0]
    assert (fitted[0] != 1.0) is (drafts > LEAST_DRAFTS)


def test_calibrated_confidences_stay_as_they_are():
    other = synthetic(ONES, 2)
    error = error_of(other, ONES)
    assert abs(error_of(other, fit_temperatures(synthetic(ONES, 1))) - error) < 0.003


def test_a_temperature_depends_on_no_later_depth_and_on_known_tokens_alone():
    drafts = synthetic(TRUE, 1, 2000)
    fitted = fit_temperatures(drafts)
    later = replace(drafts, survived_MK=drafts.survived_MK * torch.tensor([1, 1, 1, 0]))
    assert fit_temperatures(later)[:3] == fitted[:3] and fit_temperatures(later)[3] != fitted[3]
    hidden = replace(drafts, survived_MK=drafts.survived_MK.where(drafts.known_MK, 1.0))
    assert fit_temperatures(hidden) == fitted
    seen = replace(hidden, known_MK=torch.ones_like(drafts.known_MK))
    assert fit_temperatures(seen) != fitted, "the control"


def test_the_error_after_is_that_of_other_answers():
    """Check it where answers are alike, and where what fits one half does not fit the other."""
    figures = calibrate(synthetic(TRUE, 3))
    assert figures[AFTER] < min(0.012, figures[BEFORE] / 2)
    assert read_temperatures(figures) == tuple(fit_temperatures(synthetic(TRUE, 3)))
    bold, shy = synthetic([0.25] * 4, 4), synthetic([4.0] * 4, 5)
    unlike = Drafts(
        *(torch.cat(pair) for pair in zip(vars(bold).values(), vars(shy).values(), strict=True))
    )
    halves = torch.arange(40000) // 20000
    figures = calibrate(replace(unlike, answers_M=halves))
    assert figures[AFTER] > figures[BEFORE]
    assert f"{figures[AFTER]:.2%} with temperatures" in describe_calibration(figures)
    assert describe_calibration({}) == "" and read_temperatures({}) == ()


def test_without_drafts_nothing_changes():
    none = synthetic(TRUE, 1, 0)
    assert fit_temperatures(none) == ONES
    assert calibrate(none)[AFTER] == 0
    one = replace(synthetic(TRUE, 1, 50), answers_M=torch.zeros(50, dtype=torch.long))
    figures = calibrate(one)
    assert figures[AFTER] == figures[BEFORE], "no other answers to fit"


# ------------------------------------------------------------------------- held-out evaluation


def answers_of(temperature: float) -> tuple[Any, NativeTarget, list[Sample], list[Any]]:
    """Return a target, the same for decoding, and its answers to prompts as samples and traces."""
    model = law_6.target()
    native = NativeTarget.from_state(
        model.config.to_dict(), model.state_dict(), dtype=torch.float32, execution="eager"
    )
    settings = Settings(16, num_draft_tokens=law_6.GAMMA, temperature=temperature)
    done = decode(native, None, law_6.PROMPTS, settings)
    samples = []
    for prompt, one in zip(law_6.PROMPTS, done, strict=True):
        ids = np.asarray([*prompt, *one.tokens], dtype=np.int32)
        samples.append(Sample(ids, np.arange(len(ids)) >= len(prompt)))
    return model, native, samples, done


def survival_of(drafts: Drafts, answers: int) -> np.ndarray:
    """Return survival_ATK of all tips of the answers."""
    rows = [
        drafts.survived_MK[(drafts.answers_M == number) & drafts.known_MK[:, 0]]
        for number in range(answers)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).numpy()


def test_greedy_drafts_survive_as_in_decoding():
    model, native, samples, _ = answers_of(0.0)
    head, states = law_6.head_of(ROW, model), law_6.states_of(ROW, model)
    law_6.learn(ROW, head, states, samples)
    rows = HeldOutRows(states, samples, law_6.ROW, torch.device("cpu"))
    evaluation = Calibration(ROW.kind, head, rows, law_6.GAMMA, 0.0)
    drafts = evaluation.collect()
    assert drafts.survived_MK.any() and not drafts.survived_MK.all()
    lengths = [int(one.mask.sum()) for one in samples]
    found = walk(survival_of(drafts, len(samples)), lengths, law_6.GAMMA, 16)
    settings = Settings(16, num_draft_tokens=law_6.GAMMA)
    done = decode(native, ROW.drafter(head), law_6.PROMPTS, settings)
    assert found.rounds_A.tolist() == [one.rounds for one in done]
    assert found.accepted_AK.sum(1).tolist() == [one.accepted for one in done]
    assert evaluation().keys() == {
        BEFORE,
        AFTER,
        *(f"calibration/temperature{k}" for k in range(3)),
    }


@pytest.mark.parametrize("vocabulary", [0, 20])
def test_sampled_answers_survive_with_the_ratio_of_probabilities(vocabulary: int):
    """Compare with min(1, q / p) of full softmaxes, one answer at a time."""
    model, _, samples, _ = answers_of(0.8)
    row = replace(ROW, shape=lambda target: replace(ROW.shape(target), draft_vocab_size=vocabulary))
    head, states = law_6.head_of(row, model), law_6.states_of(row, model)
    rows = HeldOutRows(states, samples, law_6.ROW, torch.device("cpu"))
    found = Calibration(row.kind, head, rows, law_6.GAMMA, 0.8).collect()
    for number, one in enumerate(samples):
        expected = _expected(row, head, states, model, one, 0.8)
        chosen = found.select((found.answers_M == number) & found.known_MK[:, 0])
        assert len(expected) == len(chosen.survived_MK) == int(one.mask.sum())
        for known_K, survived_K, wanted in zip(
            chosen.known_MK, chosen.survived_MK, expected, strict=True
        ):
            assert int(known_K.sum()) == len(wanted)
            np.testing.assert_allclose(survived_K[: len(wanted)], wanted, rtol=1e-4, atol=1e-7)


def _expected(
    row: Any, head: Any, states: TargetStates, model: Any, one: Sample, temperature: float
) -> list[list[float]]:
    """Return the survival of drafts from each tip of an answer, up to its end."""
    ids = torch.from_numpy(one.ids).long()
    batch = collate([one], [[0]], law_6.ROW)
    predicted = law_6.predict(row.kind, head, states, batch)
    with torch.no_grad():
        p_TV = (model.lm_head(hidden_states(model, batch)[0]) / temperature).softmax(-1)
    q_NV = (predicted.q_NV.log() / temperature).softmax(-1)
    ratios = {
        (before, depth): float(q_V[ids[before + 2 + depth]])
        / float(p_TV[before + 1 + depth, ids[before + 2 + depth]])
        for (before, depth), q_V in zip(predicted.places, q_NV, strict=True)
    }
    found = []
    for before in sorted({before for before, _ in ratios if (before, 0) in ratios}):
        known = [depth for depth in range(law_6.GAMMA) if (before, depth) in ratios]
        chances = [min(1.0, ratios[before, depth]) for depth in known]
        found.append(np.cumprod(chances).tolist())
    return found


# --------------------------------------------------------------------------------- drafting


def drafted(head: BlockHead, **options: Any) -> list[Any]:
    target = native_of(hf_model("llama", layers=2))
    done = decode(target, BlockDrafter(head=head, **options), random_prompts(4), Settings(24))
    return [(one.tokens, one.trace) for one in done]


def confident(**fields: Any) -> BlockHead:
    target = native_of(hf_model("llama", layers=2))
    return random_block(sizes_of(target), correction="markov", rank=4, confidence=True, **fields)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_temperatures_of_one_change_no_bit(dtype: torch.dtype):
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).mul(4).to(dtype)
    assert torch.equal(confidences(logits, torch.ones(6, dtype=dtype)), logits.sigmoid())
    plain = drafted(confident().to(dtype), stop_below=0.3)
    assert drafted(confident(temperatures=(1.0,) * 6).to(dtype), stop_below=0.3) == plain
    hot = drafted(confident(temperatures=(8.0,) * 6).to(dtype), stop_below=0.3)
    assert hot != plain and [tokens for tokens, _ in hot] == [tokens for tokens, _ in plain]


def test_the_target_reads_no_token_that_a_confidence_drops():
    """Check the width of the verifying forwards, and that a pass that keeps nothing is counted."""
    target, prompts = native_of(hf_model("llama", layers=2)), random_prompts(1)
    head, settings = confident(), Settings(40, temperature=1.0)
    whole, some, none = (
        decode(target, BlockDrafter(head=head, stop_below=least), prompts, settings)[0]
        for least in (0.0, 0.3, 0.9999)
    )
    assert 0 == none.drafted < some.drafted < whole.drafted, "the control"
    for done in (whole, some, none):
        assert done.verified == done.drafted and done.draft_steps >= done.rounds - 1 > 0
    rows, drafter = random_prompts(3), BlockDrafter(head=head, stop_below=0.3)
    batch = decode(target, drafter, rows, settings)
    assert [one.tokens for one in batch] == [
        decode(target, drafter, [row], settings, request_ids=[n])[0].tokens
        for n, row in enumerate(rows)
    ]
    # A row of a batch is read as far as the longest one, and no further than whole drafts are.
    assert all(one.drafted <= one.verified < whole.verified for one in batch)


# ------------------------------------------------------------------------------------ folders


def save(head: BlockHead, folder: Path) -> Path:
    checkpoint.save_head(SERVED, head.config, head, folder, torch.float64)
    return folder


def test_temperatures_are_stored_beside_the_published_keys(tmp_path: Path):
    fitted = (0.5, 1.0, 2**0.125, 2.0, 1.0, 8.0)
    folder = save(random_block(SIZES, confidence=True, temperatures=fitted), tmp_path / "a")
    plain = save(random_block(SIZES, confidence=True), tmp_path / "b")
    configs = [json.loads((one / "config.json").read_text()) for one in (folder, plain)]
    assert configs[0]["dflash_config"].pop("confidence_temperatures") == list(fitted)
    assert configs[0] == configs[1], "a folder without temperatures is the published one"
    assert load_head(folder).config.temperatures == fitted
    assert load_head(plain).config.temperatures == ()


@pytest.mark.parametrize(
    "values",
    [[1.0] * 5, [1.0] * 7, [], [1.0] * 5 + [0], [1.0] * 5 + [-1.0], 1.0, [1.0] * 5 + [True]]
    + [[1.0] * 5 + [each] for each in (float("nan"), float("inf"), "1", None)],
    ids=str,
)
def test_bad_temperatures_are_refused(values: Any, tmp_path: Path):
    folder = save(random_block(SIZES, confidence=True), tmp_path / "head")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["dflash_config"]["confidence_temperatures"] = values
    file.write_text(json.dumps(config))
    with pytest.raises(
        UserError, match="confidence_temperatures is .*, expected 6 numbers above 0"
    ):
        load_head(folder)
    config["dflash_config"]["confidence_temperatures"] = [1.0] * 6
    file.write_text(json.dumps(config))
    load_head(folder)
    config["dflash_config"]["enable_confidence_head"] = False
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="expected none in a head without a confidence"):
        load_head(folder)
