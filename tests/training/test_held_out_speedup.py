"""Test held-out predictions: walks against real decoding, frozen costs, and what they select."""

import copy
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distill.train
import recurrent_drafting.train
from decoding.costs.prediction import Costs
from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from distill.acceptance import HeldOutAcceptance
from jobs.config import ParallelConfig
from tests.distill.test_train import configured
from tests.support import tiny_heads as tiny
from tests.support.head_runs import configured as head_configured
from tests.training.test_loop import loop, make_data, make_model
from training.bounds import Progress
from training.config import HeldOutConfig
from training.data.packing import Sample
from training.held_out.costs import FILE, freeze_costs
from training.held_out.rounds import chain_survival, walk
from training.held_out.speedup import SpeedupPrediction, describe_prediction
from training.loop import fit
from training.parallel.strategy import Parallel

TOKENS = 20
PROMPTS = [[3, 5, 8], [1], [40, 2, 9, 11, 30], [7, 7], [12, 50], [33, 4, 4]]
COSTS = Costs(0.1, {n: 1 + 0.02 * (n - 1) for n in range(1, 7)}, overhead=0.05)
ROUND = RoundCosts(0.25, (1.0, 1.25, 1.5))


def as_target(model: Any) -> NativeTarget:
    return NativeTarget.from_state(
        model.config.to_dict(), model.state_dict(), dtype=torch.float64, execution="eager"
    )


def disturbed(model: Any, amount: float) -> Any:
    """Return a copy of the model that often, but not always, agrees with it."""
    student = copy.deepcopy(model)
    torch.manual_seed(3)
    for parameter in student.parameters():
        parameter.data += amount * torch.randn_like(parameter)
    return student


@pytest.mark.parametrize("stopped", [False, True], ids=["by length", "by a stop token"])
def test_predicted_block_efficiency_equals_greedy_decoding(stopped: bool):
    """Check that a prediction equals tau of real drafting at the predicted length.

    Control: another student has another tau.
    """
    teacher, options = tiny.target(), {}
    plain = decode(as_target(teacher), None, PROMPTS, Settings(TOKENS))
    if stopped:
        options = {"stop_token_ids": (plain[2].tokens[6],)}
        plain = decode(as_target(teacher), None, PROMPTS, Settings(TOKENS, **options))
    samples = []
    for prompt, one in zip(PROMPTS, plain, strict=True):
        ids = np.array(prompt + one.tokens, dtype=np.int32)
        samples.append(Sample(ids, np.arange(len(ids)) >= len(prompt)))
    predicted = []
    for amount in (0.02, 0.06):
        student = disturbed(teacher, amount)
        prediction = SpeedupPrediction(COSTS, TOKENS, 5)
        figures = HeldOutAcceptance(student, teacher, samples, tiny.ROW, 0.0, prediction)()
        length = int(figures["predicted_draft_length"])
        done = decode(
            as_target(teacher),
            ChainDrafter(model=as_target(student)),
            PROMPTS,
            Settings(TOKENS, num_draft_tokens=length, **options),
        )
        tau = sum(len(one.tokens) for one in done) / sum(one.rounds for one in done)
        assert 1 < tau < length + 1
        assert figures["predicted_block_efficiency"] == tau
        assert figures["score"] == figures["predicted_speedup"] == tau / COSTS.round(length)
        predicted.append(tau)
    assert predicted[0] > predicted[1]


def test_expected_rounds_under_sampling_equal_the_closed_form():
    """Check expected rounds over all texts of a target without memory, against a recursion.

    In the recursion every draft is accepted with probability sum_v min(p, q). Control: the
    probability of a token instead of the acceptance of a token that was emitted.
    """
    p, q, tokens, gamma = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6]), 5, 2
    alpha = float(np.minimum(p, q).sum())
    rounds = [0.0] * (tokens + gamma + 2)  # expected rounds that emit the last n tokens
    for n in range(1, tokens + 1):
        room = min(gamma, n - 1)
        ends = [alpha**k * (1 - alpha) for k in range(room)] + [alpha**room]
        rounds[n] = 1 + sum(chance * rounds[n - 1 - k] for k, chance in enumerate(ends))

    def expected(chances_V: np.ndarray) -> float:
        texts = list(itertools.product(range(3), repeat=tokens))
        chances = [torch.from_numpy(chances_V[list(text)]) for text in texts]
        found = walk(chain_survival(chances, gamma), [tokens] * len(texts), gamma, tokens)
        weights = np.array([np.prod(p[list(text)]) for text in texts])
        return float((weights * found.rounds_A).sum())

    assert expected(np.minimum(1, q / p)) == pytest.approx(rounds[tokens], rel=1e-12)
    assert abs(expected(np.minimum(p, q)) - rounds[tokens]) > 0.1


def test_the_predicted_speedup_selects_another_checkpoint_than_acceptance(tmp_path: Path):
    """Check the best checkpoint of a run whose drafts become less accepted, but better spread.

    The token after a rejected draft comes from the target, so one rejection among accepted drafts
    costs nothing, and each of several in a row costs a round. Control: acceptance as the score.
    """
    in_a_row = torch.tensor([1.0] * 11 + [0.0] * 9)
    spread = torch.tensor([1.0, 0.0] * 10)
    prediction = SpeedupPrediction(COSTS, 20, 5)

    def select(folder: Path, by: str) -> Progress:
        chances = iter([in_a_row, spread])

        def evaluate() -> dict[str, float]:
            chances_T = next(chances)
            figures = prediction.figures(chain_survival([chances_T], 5), [20])
            figures["acceptance"] = float(chances_T.mean())
            return figures | {"score": figures[by]}

        module, config = make_model(), loop(2, eval_every=1)
        parallel = Parallel(ParallelConfig(), "cpu")
        return fit("t", module, module.model, make_data(), config, parallel, folder, None, evaluate)

    progress = select(tmp_path / "speedup", "predicted_speedup")
    assert progress.best_step == 2
    assert progress.best["predicted_speedup"] == pytest.approx(2 / COSTS.round(1))
    assert select(tmp_path / "acceptance", "acceptance").best_step == 1


def test_a_prediction_from_unreliable_costs_is_not_shown():
    """Check the words of an evaluation, and that the figure still selects a checkpoint."""
    survival = chain_survival([torch.tensor([1.0, 0.0] * 10)], 5)
    reliable = SpeedupPrediction(COSTS, 20, 5).figures(survival, [20])
    doubted = replace(COSTS, unreliable="other processes used the processors")
    found = SpeedupPrediction(doubted, 20, 5).figures(survival, [20])
    assert found["score"] == reliable["score"]
    assert re.search(r"predicted \d\.\d\dx at length 1", describe_prediction(reliable))
    assert re.search(r"predicted unreliable at length 1", describe_prediction(found))


def test_costs_are_measured_once_and_refused_elsewhere(tmp_path: Path):
    facts = {"hardware": {"cpu": "one", "threads": 2}, "drafter": {"num_hidden_layers": 1}}
    measured, calls = HeldOutConfig(costs="measured"), []

    def measure() -> RoundCosts:
        calls.append(1)
        return ROUND

    frozen = tmp_path / FILE
    for _ in range(2):
        assert freeze_costs(measured, frozen, facts, measure) == ROUND
    assert len(calls) == 1, "a resumed run reads the file"
    named = HeldOutConfig(costs=str(frozen))
    assert freeze_costs(named, tmp_path / "copy.json", facts, measure) == ROUND
    elsewhere = {"hardware": {"cpu": "other", "threads": 2}, "drafter": {"num_hidden_layers": 2}}
    with pytest.raises(
        UserError,
        match="drafter.num_hidden_layers is 1 there and 2 here; hardware.cpu is 'one' there and "
        "'other' here",
    ):
        freeze_costs(named, tmp_path / "third.json", elsewhere, measure)
    assert len(calls) == 1 and not (tmp_path / "third.json").exists()
    frozen.write_text(frozen.read_text()[:-20])
    with pytest.raises(UserError, match="Delete it to measure the costs again"):
        freeze_costs(measured, frozen, facts, measure)


BRIEF = ["loop.max_steps=2", "loop.eval_every=1", "loop.keep_every=1", "held_out.cost_seconds=0.01"]
MEASURED = "held_out.costs=measured"


@pytest.fixture(scope="module")
def measured(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    distill.train.run(configured(tiny_target, folder, *BRIEF, MEASURED))
    return folder


def looks(folder: Path) -> list[dict[str, float]]:
    """Return the records of evaluations with a prediction."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [one for one in records if "held_out_predicted_speedup" in one]


def check_records(folder: Path, evaluations: int) -> None:
    """Check that the best evaluation is on the card and in the manifest."""
    card = json.loads((folder / "drafter" / "drafter_card.json").read_text())
    metrics = json.loads((folder / "manifest.json").read_text())["metrics"]
    assert len(looks(folder)) == evaluations
    best = max(looks(folder), key=lambda one: one["held_out_predicted_speedup"])
    for found in (card["acceptance"], metrics):
        assert found["selected_by"] == "predicted_speedup"
        assert found["predicted_speedup"] == best["held_out_predicted_speedup"]
        assert found["predicted_block_efficiency"] >= 1
    costs = RoundCosts.read(json.loads((folder / FILE).read_text())["costs"])
    assert card["cost_ratio"] == pytest.approx(costs.t_draft_ms / costs.target_ms(1))
    assert card["num_draft_tokens"] == best["held_out_predicted_draft_length"]
    assert f"cost ratio {card['cost_ratio']:.3f}" in (folder / "drafter" / "README.md").read_text()
    assert metrics["best_step"] == best["step"]


def test_training_selects_by_measured_costs(measured: Path, tiny_target: Path, tmp_path: Path):
    """Check the records of a run with measured costs, and equal figures with the same file."""
    check_records(measured, evaluations=2)
    distill.train.run(
        configured(tiny_target, tmp_path, *BRIEF, f"held_out.costs={measured / FILE}")
    )
    assert looks(tmp_path) == looks(measured)


def test_a_drafter_folder_has_the_draft_length_of_its_costs(
    measured: Path, tiny_target: Path, tmp_path: Path
):
    """Check the card, README and generation settings, where forwards over more than two tokens
    take ten times as long.
    """
    file = json.loads((measured / FILE).read_text())
    widths = len(file["costs"]["t_target_ms"])
    file["costs"] |= {"t_draft_ms": 0.125, "t_target_ms": [1.0, 1.0, *[10.0] * (widths - 2)]}
    file["costs"] |= {"overhead_ms": 0.0, "plain_overhead_ms": 0.0}
    (tmp_path / "costs.json").write_text(json.dumps(file))
    costs, run = f"held_out.costs={tmp_path / 'costs.json'}", tmp_path / "run"
    distill.train.run(configured(tiny_target, run, *BRIEF, costs))
    check_records(run, evaluations=2)
    folder = run / "drafter"
    card = json.loads((folder / "drafter_card.json").read_text())
    assert (card["num_draft_tokens"], card["cost_ratio"]) == (1, 0.125)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["num_assistant_tokens"] == 1
    assert '"num_speculative_tokens": 1}' in (folder / "README.md").read_text()


def test_costs_of_a_student_need_the_native_backend(tiny_target: Path, tmp_path: Path):
    with pytest.raises(UserError, match="held_out.costs.*target.backend=hf"):
        distill.train.run(configured(tiny_target, tmp_path, MEASURED, "target.backend=hf"))


def test_any_checkpoint_can_be_exported(measured: Path, tiny_target: Path):
    """Check that the export of the best checkpoint equals the run's drafter.

    Control: the other checkpoint has other weights and figures.
    """

    def weights(folder: Path) -> bytes:
        return (folder / "model.safetensors").read_bytes()

    best = json.loads((measured / "manifest.json").read_text())["metrics"]["best_step"]
    before = (measured / "manifest.json").read_bytes()
    for step in (1, 2):
        name = f"checkpoint={measured}/checkpoints/step_00000{step}"
        folder = distill.train.run(configured(tiny_target, measured / "unused", name))
        assert folder == measured / "exports" / f"step_00000{step}"
        assert (weights(folder) == weights(measured / "drafter")) == (step == best)
        card = json.loads((folder / "drafter_card.json").read_text())["acceptance"]
        assert card["predicted_speedup"] == looks(measured)[step - 1]["held_out_predicted_speedup"]
    assert (measured / "manifest.json").read_bytes() == before
    assert not (measured / "unused").exists()
    missing = f"checkpoint={measured}/checkpoints/step_000009"
    with pytest.raises(UserError, match="not a complete checkpoint.* has step_000001, step_000002"):
        distill.train.run(configured(tiny_target, measured / "unused", missing))
    of_a_head = head_configured(tiny_target, measured / "unused", name)
    with pytest.raises(UserError, match=r"belongs to a run of distill.train.*python -m distill"):
        recurrent_drafting.train.run(of_a_head)


def test_a_head_selects_by_the_costs_of_its_chain(tiny_target: Path, tmp_path: Path):
    brief = [*BRIEF, MEASURED, "held_out.max_prompts=2", "loss.predict_n_tokens=3"]
    recurrent_drafting.train.run(head_configured(tiny_target, tmp_path, *brief))
    check_records(tmp_path, evaluations=2)
    best = json.loads((tmp_path / "manifest.json").read_text())["metrics"]["best_step"]
    name = f"checkpoint={tmp_path}/checkpoints/step_00000{best}"
    folder = recurrent_drafting.train.run(head_configured(tiny_target, tmp_path / "unused", name))
    assert (folder / "model.safetensors").read_bytes() == (
        tmp_path / "drafter" / "model.safetensors"
    ).read_bytes()
