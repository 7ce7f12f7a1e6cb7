"""The layout probe names the layer or the place by which a head is read wrongly, for every head."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decoding.errors import UserError
from scripts import check_head
from scripts.usage import run_script
from tests.heads import law_6
from tests.heads.rows import FIRST, HEAD_ROWS, HeadRow
from tests.support import tiny_folders
from tests.support.tiers import tiered
from training.data.packing import PackedBatch, Sample
from training.draft_vocabulary import choose_tokens
from training.features.states import TargetStates
from training.features.taps import Layers
from training.heads.checkpoint import save_head
from training.heads.positions import Positions
from training.heads.probe import (
    LEAST_GAIN,
    Probe,
    Reading,
    check_reading,
    choose_layout,
    describe_doubt,
    probe,
)
from training.models.build import load_causal_lm
from training.objectives import freeze

# Slots without a change to the layers learn too little of a random target.
LEARNING = [row for row in HEAD_ROWS if row.name not in ("sdsat", "sdsat in one forward")]
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def texts() -> list[Sample]:
    """Return the target's answers to the prompts of law 6."""
    return law_6.answers(2 * law_6.TOKENS)


def trained(row: HeadRow) -> tuple[Any, Any, Layers, list[Sample]]:
    """Return a target, a head that has learned its texts, the head's layers, and the texts."""
    model = law_6.target()
    head, samples, shape = law_6.head_of(row, model), texts(), row.shape(model.config)
    if head.token_ids_V is not None:
        head.token_ids_V = choose_tokens(samples, law_6.VOCABULARY, len(head.token_ids_V), False)
    states = law_6.states_of(row, model)
    for _ in range(3):
        depths = min(row.kind.longest_draft(shape) or law_6.GAMMA, law_6.GAMMA)
        law_6.learn(row, head, states, samples, depths)
    return model, head, row.kind.taps(shape), samples


@pytest.mark.parametrize(
    ("name", "sizes"), [("medusa", {"num_heads": 1}), ("dflash", {"block_size": 2})]
)
def test_a_head_that_drafts_one_token_is_read(name: str, sizes: dict[str, int]) -> None:
    row = next(row for row in HEAD_ROWS if row.name == name)
    short = replace(row, shape=lambda target: replace(row.shape(target), **sizes))
    model, head, taps, samples = trained(short)
    check_reading(probe(row.kind, head, taps, model, samples, CPU, 1), "HEAD")
    wrong = law_6.other_taps(taps)
    with pytest.raises(UserError, match="HEAD is read in the wrong layout.*one layer later"):
        check_reading(probe(row.kind, head, wrong, model, samples, CPU, 1), "HEAD")


class Later(law_6.Wrapped):
    """A kind of head whose predictions are those of the next place, as with another layout."""

    def features(
        self,
        head: Any,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        """Return the features of the draft that begins one place later."""
        features_NE = super().features(head, states, batch, where, states_PC)
        places = {
            place: number
            for number, place in enumerate(
                zip(where.draft_N.tolist(), where.head_N.tolist(), strict=True)
            )
        }
        later = [
            places.get((draft + 1, depth), number) for (draft, depth), number in places.items()
        ]
        return features_NE[torch.tensor(later)]


@pytest.mark.parametrize("row", tiered(LEARNING, FIRST), ids=lambda row: row.name)
def test_layers_and_slots_one_off_are_named_and_the_right_ones_accepted(row: HeadRow) -> None:
    model, head, taps, samples = trained(row)
    right = probe(row.kind, head, taps, model, samples, CPU)
    check_reading(right, "HEAD")
    wrong, order = law_6.other_taps(taps), "earlier" if 0 in taps else "later"
    with pytest.raises(UserError, match=f"HEAD is read in the wrong layout.*one layer {order}"):
        check_reading(probe(row.kind, head, wrong, model, samples, CPU), "HEAD")
    with pytest.raises(UserError, match="HEAD is read in the wrong layout.*one place later"):
        check_reading(probe(Later(row.kind), head, taps, model, samples, CPU), "HEAD")


@pytest.mark.parametrize("row", tiered(HEAD_ROWS, FIRST), ids=lambda row: row.name)
def test_a_head_that_no_reading_explains_is_refused(row: HeadRow) -> None:
    model = law_6.target()
    head, taps = law_6.head_of(row, model), row.kind.taps(row.shape(model.config))
    found: Probe = probe(row.kind, head, taps, model, texts(), CPU)
    with pytest.raises(UserError, match="no reading of its taps and slots explains"):
        check_reading(found, "HEAD")


@pytest.mark.parametrize(
    ("gain", "noise", "warned", "refused"),
    [
        (-1.2 * LEAST_GAIN, 0.01, False, False),
        (0.8 * LEAST_GAIN, 0.01, True, False),
        (1.2 * LEAST_GAIN, 0.01, False, True),
    ],
)
def test_a_small_gain_of_a_neighbouring_layer_is_a_warning(
    gain: float, noise: float, warned: bool, refused: bool
) -> None:
    random = np.random.default_rng(0)
    log_q_N = random.normal(-2, 1, 400)
    more_N = random.normal(0, noise, 400)
    other = Reading(1, 0, 0.5, log_q_N + gain + more_N - more_N.mean())
    found = Probe([Reading(0, 0, 0.5, log_q_N), other], commonest=0.1)
    assert found.is_misread is refused
    if refused:
        with pytest.raises(UserError, match="one layer later"):
            check_reading(found, "HEAD")
    else:
        check_reading(found, "HEAD")
    words = describe_doubt(found)
    assert bool(words) is warned
    if warned:
        assert "0.040 nats a token more likely if its taps are read one layer later" in words
        assert "Compare the numbers of its layers" in words


@pytest.mark.parametrize(
    ("gain", "noise", "is_clear"),
    [
        (-1.2 * LEAST_GAIN, 0.01, True),  # the control: the folder's layers are better
        (-0.8 * LEAST_GAIN, 0.01, False),
        (-1.2 * LEAST_GAIN, 2.0, False),  # less than three standard errors
        (0.8 * LEAST_GAIN, 2.0, False),
    ],
)
def test_neighbouring_layers_that_are_as_good_are_a_warning(
    gain: float, noise: float, is_clear: bool
) -> None:
    random = np.random.default_rng(0)
    log_q_N, more_N = random.normal(-2, 1, 400), random.normal(0, noise, 400)
    other = Reading(-1, 0, 0.5, log_q_N + gain + more_N - more_N.mean())
    found = Probe([Reading(0, 0, 0.5, log_q_N), other], commonest=0.1)
    check_reading(found, "HEAD")
    words = describe_doubt(found)
    assert bool(words) is not is_clear
    if words:
        assert f"by {gain:+.3f} if its taps are read one layer earlier" in words
        assert "may be numbered one off" in words
    both = Probe([*found.readings, Reading(1, 0, 0.5, log_q_N), Reading(0, 1, 0.5, log_q_N)], 0.1)
    words = describe_doubt(both)
    assert "by +0.000 if its taps are read one layer later" in words, "another place is no layer"
    assert ("one layer earlier" in words) is not is_clear


@pytest.mark.parametrize(("gain", "noise"), [(0.8 * LEAST_GAIN, 0.01), (0.5, 4.0), (0.5, 0.01)])
def test_a_layout_is_chosen_only_if_it_is_surely_better(gain: float, noise: float) -> None:
    """Check a small difference, an unsure one, and the control, a large and sure one."""
    random = np.random.default_rng(0)
    log_q_N, more_N = random.normal(-2, 1, 400), random.normal(0, noise, 400)
    other = Reading(0, 0, 0.5, log_q_N + gain + more_N - more_N.mean(), "anchor_first")
    one_place = Reading(0, 1, 0.5, log_q_N + 2)  # better, but no layout
    found = Probe([Reading(0, 0, 0.5, log_q_N), one_place, other], commonest=0.1)
    if (gain, noise) == (0.5, 0.01):
        assert choose_layout(found, "HEAD") == "anchor_first"
        return
    words = f"blocks of HEAD explain .* alike: they differ by {gain:.3f} nats a token in 400 pred"
    with pytest.raises(UserError, match=words):
        choose_layout(found, "HEAD")


def test_a_draft_vocabulary_that_lacks_the_text_is_named() -> None:
    row = next(row for row in HEAD_ROWS if row.name == "recurrent with a draft vocabulary")
    model, head, taps, samples = trained(row)
    counts = np.bincount(
        np.concatenate([sample.ids for sample in samples]), minlength=law_6.VOCABULARY
    )
    head.token_ids_V = torch.from_numpy(np.sort(np.argsort(counts)[:20]))
    found = probe(row.kind, head, taps, model, samples[:1], CPU)
    with pytest.raises(UserError, match="few of the tokens"):
        check_reading(found, "HEAD")


HEAD = ROOT / "tests/fixtures/recurrent_drafting.train/finished/drafter"


@pytest.mark.parametrize(
    ("head", "target", "words"),
    [
        (
            HEAD,
            "tests/fixtures/target",
            "no reading of its taps and slots explains",
        ),  # after a few steps
        (HEAD, "assets/target", "hidden_size is 192 in the target and 12 in the head"),
        (ROOT / "assets/target", "assets/target", "holds no head of a known kind"),
        ("nowhere", "assets/target", "nowhere"),
    ],
)
def test_the_script_names_what_is_wrong(
    head: Path | str,
    target: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["check_head.py", str(head), str(ROOT / target)])
    with pytest.raises(SystemExit) as stopped:
        run_script(check_head.main)
    assert words in " ".join(str(stopped.value.code).split())
    if "reading" in words:
        assert "6 tensors, all expected, with the right shapes" in capsys.readouterr().out


def test_the_script_accepts_a_trained_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = next(row for row in HEAD_ROWS if row.name == "medusa")
    target = tiny_folders.save(tmp_path / "target")
    model = freeze(load_causal_lm(target, torch.float32))
    head = row.kind.empty(row.shape(model.config))
    states, whole = law_6.states_of(row, model), check_head.write_texts(target)
    samples = [Sample(one.ids[-law_6.ROW :], one.mask[-law_6.ROW :]) for one in whole]
    for _ in range(3):
        law_6.learn(row, head, states, samples)
    save_head(row.kind.layout, row.shape(model.config), head, tmp_path / "head")
    config = json.loads((tmp_path / "head/config.json").read_text()) | {"surprise": 1}
    (tmp_path / "head/config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", ["check_head.py", str(tmp_path / "head"), str(target)])
    check_head.main()
    printed = capsys.readouterr().out
    assert "keys of config.json that are not read: surprise" in printed
    assert "as stored, its predictions agree with" in printed
