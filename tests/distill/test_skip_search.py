"""Test the search for skipped sub-layers: its choice, its costs, and resume."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from decoding.costs.timing import Parts
from decoding.drafters.self_speculation import SelfSpeculation, read_skips
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.models.native.skips import Skips
from decoding.rounds.settings import Settings
from distill import skip_search
from distill.config import SkipSearchConfig
from distill.skip_search import SubLayerCosts, measure_sub_layers
from tests.support.configurations import configuration
from training.config import StudentConfig
from training.drafter_folder import write_model
from training.models.build import build_llama

IDLE = {("attention", 1), ("mlp", 1), ("mlp", 2)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, embedded_target: Path) -> Path:
    """Write a model of four layers, with three sub-layers that add nothing; return its folder."""
    shape = StudentConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
    )
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    model = build_llama(
        shape,
        torch.float32,
        vocab_size=2048,
        max_position_embeddings=512,
        initializer_range=0.3,
        **ends,
    )
    with torch.no_grad():
        for kind, layer in IDLE:
            block = model.model.layers[layer]
            (block.self_attn.o_proj if kind == "attention" else block.mlp.down_proj).weight.zero_()
    folder = tmp_path_factory.mktemp("idle")
    write_model(model, embedded_target, folder, torch.float32)
    return folder


def configured(target: Path, folder: Path, *more: str) -> SkipSearchConfig:
    small = ["held_out.max_prompts=4", "held_out.max_new_tokens=16", "max_skips=5"]
    given = [f"target.path={target}", f"output_dir={folder}", *small, *more]
    return configuration("distill.skip_search", *given)


@pytest.fixture(scope="module")
def found(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    skip_search.run(configured(target, folder))
    return folder


def test_useless_sub_layers_are_skipped_first_without_loss_of_acceptance(found: Path):
    path = [json.loads(line) for line in (found / "search.jsonl").open()]
    assert {(step["kind"], step["layer"]) for step in path[:3]} == IDLE
    assert [step["acceptance"] for step in path[:3]] == pytest.approx([1.0] * 3, abs=1e-5)
    assert max(step["acceptance"] for step in path[3:]) < 0.999


def test_predicted_acceptance_holds_in_decoding(found: Path, target: Path):
    (found / "idle.json").write_text(json.dumps({"attention": [1], "mlp": [1, 2]}))
    model = load_target(target, dtype="float64")
    settings = Settings(max_new_tokens=24, temperature=1.0, num_draft_tokens=3, seed=3)
    drafted = decode(model, SelfSpeculation(found / "idle.json"), [[1, 5, 9], [1, 7]], settings)
    assert all(sum(g.accepted_by_depth) == sum(g.tested_by_depth) > 0 for g in drafted)


def test_the_output_has_its_figures_and_is_not_written_twice(
    found: Path, target: Path, capsys: pytest.CaptureFixture[str]
):
    artefact = json.loads((found / "skips.json").read_text())
    assert artefact.keys() == {
        "attention",
        "mlp",
        "target",
        "acceptance",
        "speedup",
        "gamma",
        "temperature",
    }
    assert skip_search.run(configured(target, found)) == found / "skips.json"
    assert "finished before" in capsys.readouterr().out


def test_an_interrupted_search_finds_the_same_path(found: Path, target: Path, tmp_path: Path):
    lines = (found / "search.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "search.jsonl").write_text("".join(lines[:2]))
    (tmp_path / "costs.json").write_text((found / "costs.json").read_text())
    skip_search.run(configured(target, tmp_path))
    again = [json.loads(line) for line in (tmp_path / "search.jsonl").open()]
    assert [(step["kind"], step["layer"]) for step in again] == [
        (step["kind"], step["layer"]) for step in map(json.loads, lines)
    ]


def test_a_parallel_target_is_refused(target: Path, tmp_path: Path):
    with pytest.raises(
        UserError, match="target.parallel is layers .*Only eval.run splits the target"
    ):
        skip_search.run(
            configured(target, tmp_path, "target.parallel=layers", "target.processes=2")
        )
    assert not any(tmp_path.iterdir())


def test_a_dry_run_prints_the_cost(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    skip_search.run(configured(target, tmp_path, "dry_run=true"))
    assert "8 sub-layers" in (output := capsys.readouterr().out)
    assert "forward passes over the target's answers" in output
    assert json.loads((tmp_path / "skips.json").read_text())["dry_run"], (
        "a placeholder marked as such"
    )
    skip_search.run(configured(target, tmp_path))
    assert "dry_run" not in json.loads((tmp_path / "skips.json").read_text())


def test_invalid_skips_are_refused(target: Path, tmp_path: Path):
    with pytest.raises(UserError, match="is not a skip set"):
        read_skips(tmp_path)
    model = load_target(target)
    for drafter, words in (
        (SelfSpeculation(attention=[4]), "skips layer 4, but .* has layers 0 to 3"),
        (SelfSpeculation(), "skips nothing"),
    ):
        with pytest.raises(UserError, match=words):
            decode(model, drafter, [[1, 2]], Settings())
    with pytest.raises(UserError, match="Use target.backend=native"):
        decode(
            load_target(target, backend="hf"), SelfSpeculation(attention=[1]), [[1, 2]], Settings()
        )


class Clocked:
    """Fake target whose step time is the sum of known times of the sub-layers that it runs."""

    num_layers, attention_ms, mlp_ms, bare_ms = 12, 0.2, 0.1, 0.5

    def __init__(self, skips: Skips | None = None) -> None:
        self.skips = skips or Skips()

    def open(self, *sizes: int) -> None:
        """Do nothing, because no forward pass runs."""

    def partial(self, skips: Skips) -> "Clocked":
        return Clocked(skips)

    @property
    def step_ms(self) -> float:
        kept = self.num_layers - len(self.skips.attention), self.num_layers - len(self.skips.mlp)
        return self.bare_ms + kept[0] * self.attention_ms + kept[1] * self.mlp_ms


def costs_at(paces: Sequence[float], file: Path, monkeypatch: pytest.MonkeyPatch) -> SubLayerCosts:
    """Measure the costs with each timing multiplied by the next of `paces`."""
    left = iter(paces)

    def timed(
        target: Clocked, drafter: None, prompt: list[int], *, widths: Iterable[int], **_: int
    ) -> Parts:
        pace = next(left)
        return Parts(
            None, {n: pace * target.step_ms * (1 + 0.05 * (n - 1)) for n in widths}, len(prompt), 1
        )

    monkeypatch.setattr(skip_search, "time_parts", timed)
    return measure_sub_layers(Clocked(), [1, 2, 3], file)  # type: ignore[arg-type]


EVERY = tuple(range(12))
CUTS = [Skips(EVERY[:a], EVERY[:m]) for a in (0, 3, 11, 12) for m in (0, 5, 10, 12) if a + m <= 22]
CONTROL = Skips(attention=EVERY[1:]), Skips(mlp=EVERY[1:])


def test_measured_costs_do_not_depend_on_the_pace_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that costs are exact even if the machine is slow for whole windows or one timing.

    A second measurement reads them from the file.
    """
    paces = [3.0] * 4 + [1.0] * 4 + [1.0, 1.0, 9.0, 1.0] + [1.0] * 4 + [2.0] * 4
    costs = costs_at(paces, tmp_path / "costs.json", monkeypatch)
    assert (costs.attention_ms, costs.mlp_ms, costs.bare_ms) == pytest.approx((0.2, 0.1, 0.5))
    for skips in CUTS:
        assert costs.draft_ms(skips) == pytest.approx(Clocked(skips).step_ms)
    assert measure_sub_layers(Clocked(), [1], tmp_path / "costs.json") == costs, (
        "read from the file"
    )  # type: ignore[arg-type]


def test_predictions_never_exceed_the_possible_speedup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that predictions stay possible if the machine's pace changes at every timing.

    No draft step takes less time than one without sub-layers, and no speedup exceeds the nine
    tokens of a round.
    """
    apart = 0
    for seed in range(30):
        dice = random.Random(seed)
        paces = [dice.uniform(0.4, 2.5) for _ in range(20)]
        costs = costs_at(paces, tmp_path / f"{seed}.json", monkeypatch)
        for skips in CUTS:
            assert costs.draft_ms(skips) >= costs.bare_ms >= 0
            assert costs.speedup(1.0, skips)[0] <= 9, "eight draft tokens and the bonus token"
        # Control: at the paces of the first window, the savings of both kinds add up to more than
        # the total.
        complete, *cut = (
            pace * Clocked(skips).step_ms for pace, skips in zip(paces, (Skips(), *CONTROL))
        )
        apart += sum(complete - one for one in cut) > complete
    assert apart > 3
