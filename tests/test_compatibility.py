"""Files of an earlier version resume, load, draft and compare with the same results.

Jobs of that version wrote tests/fixtures, which no later version can write again. Tests work on a
copy. Each comparison has a control: a changed byte or number must make it fail.

Weights must be equal bit for bit on the processor and PyTorch version that wrote them. Elsewhere a
difference of 1e-6 is allowed, as other vector units add in another order. Decoding runs in float64,
so tokens and rounds are equal on every machine.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.support import snapshots
from tests.support.tiers import tiered

pytestmark = pytest.mark.usefixtures("undrawn")
TRAINING = ("distill.train", "recurrent_drafting.train")
WEIGHTS = "drafter/model.safetensors"
ELSEWHERE = 1e-6  # allowed difference on other processors, relative to a tensor's largest weight
INVENTORY = json.loads((snapshots.FIXTURES / "inventory.json").read_text())


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the fixtures, and make the copy the working folder."""
    folder = tmp_path / "fixtures"
    shutil.copytree(snapshots.FIXTURES, folder)
    monkeypatch.chdir(folder)
    return folder


def rerun(job: str, run: str) -> None:
    """Run a job on a saved configuration."""
    assert snapshots.run_command(job, "--config-file", f"{run}/config.yaml") == 0


def file_contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of a run, except its configuration and lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("config.yaml", ".lock")
    }


def mark_unfinished(run: Path) -> None:
    """Mark a finished run as unfinished."""
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["artefacts"]
    (run / "manifest.json").write_text(json.dumps({**manifest, "finished": False}))


def is_from_this_machine(run: Path) -> bool:
    """Return whether this processor and this PyTorch version wrote a run's manifest."""
    manifest = json.loads((run / "manifest.json").read_text())
    cpuinfo = Path("/proc/cpuinfo")
    here = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return (
        manifest["hardware"]["cpu"] in here
        and manifest["versions"]["torch"] == torch.__version__.partition("+")[0]
    )


def check_resumed(job: str) -> None:
    """Resume a stopped training run, and check its weights and metrics against a finished run's."""
    stopped, finished = Path(job, "stopped"), Path(job, "finished")
    before = (stopped / "metrics.jsonl").read_bytes()
    rerun(job, str(stopped))
    assert (stopped / "metrics.jsonl").read_bytes().startswith(before), "the run began at step 0"
    expected_lines, found_lines = (
        snapshots.json_lines(run / "metrics.jsonl") for run in (finished, stopped)
    )
    assert len(found_lines) == len(expected_lines)
    for old, new in zip(expected_lines, found_lines, strict=True):
        old.pop("tokens_per_second", None)
        shared = {key: value for key, value in new.items() if key in old}  # figures may be added
        # Rounding errors of norms are larger than those of weights.
        assert not snapshots.differences(old, shared, tolerance=10 * ELSEWHERE)
    best = [
        json.loads((run / "manifest.json").read_text())["metrics"]["best_step"]
        for run in (finished, stopped)
    ]
    assert best[0] == best[1] == snapshots.json_lines(finished / "metrics.jsonl")[-1]["step"]
    expected, found = load_file(finished / WEIGHTS), load_file(stopped / WEIGHTS)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        if is_from_this_machine(finished):
            assert torch.equal(found[name], tensor), name
        else:
            torch.testing.assert_close(
                found[name], tensor, rtol=0, atol=ELSEWHERE * max(1.0, float(tensor.abs().max()))
            )


@pytest.mark.parametrize("job", TRAINING)
def test_a_stopped_training_resumes_to_the_same_weights(job: str, copied: Path):
    assert len(snapshots.json_lines(copied / job / "stopped/metrics.jsonl")) > 0
    check_resumed(job)


def flip_byte(checkpoint: Path) -> None:
    """Damage a checkpoint, so that it is skipped and the run starts from step 0."""
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_state(checkpoint: Path) -> None:
    """Change the weights of a checkpoint, and update their hashes."""
    state = checkpoint / "state.json"
    values = json.loads(state.read_text())
    for name in ("model.safetensors", "optimizer.safetensors"):
        tensors = load_file(checkpoint / name)
        moved = {key: 1.001 * one if one.ndim > 1 else one for key, one in tensors.items()}
        save_file(moved, checkpoint / name)
        values["hashes"][name] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    state.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("job", "change"),
    tiered(product(TRAINING, (flip_byte, change_state)), [(TRAINING[0], change_state)]),
)
def test_control_a_training_from_another_state_fails_the_check(
    job: str, change: Callable[[Path], None], copied: Path
):
    (checkpoint,) = (copied / job / "stopped/checkpoints").iterdir()
    change(checkpoint)
    with pytest.raises(AssertionError):
        check_resumed(job)


@pytest.mark.long
@pytest.mark.parametrize("job", TRAINING)
def test_a_training_from_its_start_gives_the_same_weights(job: str, copied: Path):
    stopped = copied / job / "stopped"
    shutil.rmtree(stopped / "checkpoints")
    (stopped / "metrics.jsonl").write_text("")
    check_resumed(job)


@pytest.mark.parametrize("job", [*TRAINING, "eval.run"])
def test_a_finished_run_is_skipped(job: str, copied: Path):
    run = copied / (job if job == "eval.run" else f"{job}/finished")
    before = file_contents(run)
    rerun(job, str(run.relative_to(copied)))
    assert file_contents(run) == before


def test_control_a_finished_run_with_a_changed_byte_is_not_skipped(
    copied: Path, capsys: pytest.CaptureFixture[str]
):
    file = copied / "distill.train/finished" / WEIGHTS
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    rerun("distill.train", "distill.train/finished")
    assert file.read_bytes() != before[:-1] + bytes([before[-1] ^ 1])
    assert "model.safetensors" in capsys.readouterr().out


def current_answers() -> list[dict[str, Any]]:
    """Return the cases of answers.json with newly generated answers."""
    from decoding import load
    from decoding.interfaces import RoundCosts
    from jobs.aliases import current_costs

    costs = json.loads(Path("eval.run/costs.json").read_text())
    by_cost = RoundCosts.read(
        current_costs(next(one for key, one in costs.items() if key.startswith("chain,")))
    )
    prompts = [line["turns"][0] for line in snapshots.json_lines(Path("prompts.jsonl"))][:2]
    found, engines = [], {}
    for case in json.loads(Path("answers.json").read_text()):
        drafter, settings = case["drafter"], case["settings"]
        if drafter not in engines:
            engines[drafter] = load("target", drafter, dtype="float64")
        more = {"costs": by_cost} if case["by_cost"] else {}
        found.append(
            {**case, "answers": snapshots.answered(engines[drafter], prompts, {**settings, **more})}
        )
    return found


def test_load_generates_the_same_tokens_in_the_same_rounds(copied: Path):
    expected = json.loads(Path("answers.json").read_text())
    assert {str(case["drafter"]) for case in expected} >= {
        "None",
        "prompt_lookup",
        "distill.train/finished/drafter",
    }
    assert any(sum(answer["accepted_by_depth"]) for case in expected for answer in case["answers"])
    assert not snapshots.differences(
        without_planned_lengths(expected), without_planned_lengths(current_answers())
    )


def without_planned_lengths(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases, without the fields of LENGTHS where the planner chooses draft lengths."""
    return [
        {
            **case,
            "answers": [
                {key: value for key, value in answer.items() if key not in snapshots.LENGTHS}
                for answer in case["answers"]
            ],
        }
        if case["by_cost"]
        else case
        for case in cases
    ]


def test_control_another_drafter_needs_other_rounds(copied: Path):
    expected = json.loads(Path("answers.json").read_text())
    file = copied / "distill.train/finished" / WEIGHTS
    tensors = {
        name: -tensor if name.startswith("lm_head") else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    found = current_answers()
    assert snapshots.differences(expected, found)
    greedy = [
        [case["answers"] for case in side if "temperature" not in case["settings"]]
        for side in (expected, found)
    ]
    tokens = [[[answer["tokens"] for answer in case] for case in side] for side in greedy]
    assert tokens[0] == tokens[1], "the output does not depend on the drafter"


def test_control_a_changed_token_is_found():
    expected = json.loads((snapshots.FIXTURES / "answers.json").read_text())
    changed = json.loads(json.dumps(expected))
    changed[-1]["answers"][-1]["tokens"][-1] += 1
    assert len(snapshots.differences(expected, changed)) == 1


def measure_again(run: str) -> Path:
    """Measure an evaluation again with its saved costs, and return its folder."""
    folder = Path(run)
    for name in ("results.jsonl", "records.jsonl", "parts.jsonl", "report.html"):
        (folder / name).unlink(missing_ok=True)
    rerun("eval.run", run)
    return folder


PLANNED = {"chain", "head by cost"}  # drafters whose draft lengths the planner chooses


def test_a_resumed_evaluation_drafts_the_same_tokens(copied: Path):
    """Check tokens and counts, apart from draft lengths that the planner chooses."""
    run = copied / "eval.run"
    expected = snapshots.without_lengths(snapshots.drafted(run), PLANNED)
    rows = snapshots.without_lengths(snapshots.counted(run), PLANNED)
    fields = snapshots.row_fields(run)
    assert any(one["drafter"] == "head" and sum(one["accepted_by_depth"]) for one in expected)
    mark_unfinished(run)
    measure_again("eval.run")
    found = snapshots.without_lengths(snapshots.drafted(run), PLANNED)
    assert not snapshots.differences(expected, found)
    found = snapshots.without_lengths(snapshots.counted(run), PLANNED)
    assert not snapshots.differences(rows, found)
    assert not snapshots.lost(fields, snapshots.row_fields(run))
    assert not snapshots.lost(INVENTORY["row_fields"], snapshots.row_fields(run))


@pytest.mark.long
def test_control_other_costs_change_the_drafts(copied: Path):
    run = copied / "eval.run"
    mark_unfinished(run)
    measure_again("eval.run")
    expected = snapshots.drafted(run)
    costs = json.loads((run / "costs.json").read_text())
    for one in costs.values():
        one["t_draft_ms"] *= 50
        one["t_draft_by_beams_ms"] = [[beams, 50 * ms] for beams, ms in one["t_draft_by_beams_ms"]]
    (run / "costs.json").write_text(json.dumps(costs))
    mark_unfinished(run)
    measure_again("eval.run")
    changed = {
        place.partition(".")[0] for place in snapshots.differences(expected, snapshots.drafted(run))
    }
    names = {expected[int(place.strip("[]"))]["drafter"] for place in changed}
    assert names == PLANNED


def compare(*more: str) -> list[dict[str, Any]]:
    """Run eval.compare on the evaluation, and return the rows of comparison.jsonl."""
    given = ["runs=[eval.run]", "bootstrap_resamples=50", "prompts=all", "output_dir=compared"]
    assert snapshots.run_command("eval.compare", *given, *more) == 0
    return snapshots.json_lines(Path("compared", "comparison.jsonl"))


def check_compared() -> None:
    """Check a comparison's rows against its evaluation's and the earlier version's statistics."""
    rows, about = (
        snapshots.json_lines(Path("eval.run/results.jsonl")),
        json.loads(Path("comparison.json").read_text()),
    )
    found = compare()
    place = ("drafter", "temperature", "num_draft_tokens")
    of_row = {tuple(row[key] for key in place): row for row in rows if row["part"] == "main"}
    assert len(found) == len(about) == len(of_row)
    for line, before in zip(found, about, strict=True):
        row = of_row[tuple(line[key] for key in place)]
        expected = {**row, **before}
        assert not snapshots.differences(
            expected, {key: line.get(key, "absent") for key in expected}
        )


def test_a_comparison_keeps_the_rows_of_an_evaluation(copied: Path):
    check_compared()


def slow_down(run: Path) -> str:
    """Double the time of one generation in the records, and return the file's name."""
    file = run / "records.jsonl"
    lines = [
        {key: value for key, value in line.items() if key != "crc32"}
        for line in snapshots.json_lines(file)
    ]
    slow = next(line for line in lines if line["drafter"] == "head")
    slow["decode_seconds"] *= 2
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file.name


@pytest.mark.long
def test_control_a_changed_figure_fails_the_comparison(copied: Path):
    file = copied / "eval.run" / slow_down(copied / "eval.run")
    manifest = json.loads((copied / "eval.run/manifest.json").read_text())
    manifest["artefacts"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (copied / "eval.run/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(AssertionError):
        check_compared()


def test_measured_costs_lead_to_the_same_decisions():
    from decoding.interfaces import RoundCosts
    from jobs.aliases import current_costs

    for name, one in json.loads((snapshots.FIXTURES / "costs.json").read_text()).items():
        assert not snapshots.differences(
            one["decisions"], snapshots.decisions(RoundCosts.read(current_costs(one["costs"])))
        ), name
        changed = {**one["costs"], "t_draft_ms": 1.01 * one["costs"]["t_draft_ms"]}
        assert snapshots.differences(
            one["decisions"], snapshots.decisions(RoundCosts.read(current_costs(changed)))
        ), name


def test_class_paths_of_a_saved_configuration_load(
    copied: Path, capsys: pytest.CaptureFixture[str]
):
    """Check the inventory's class paths in a dry run, and that an unknown path is an error."""
    file = copied / "class_paths/config.yaml"
    config = yaml.safe_load(file.read_text())
    paths = {entry["_target_"] for entry in config["drafters"]}
    assert paths == set(INVENTORY["class_paths"])
    file.write_text(yaml.safe_dump({**config, "dry_run": True}))
    rerun("eval.run", "class_paths")
    (line,) = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith("drafters:")
    )
    assert line == f"drafters: {', '.join(entry['name'] for entry in config['drafters'])}"
    config["drafters"][0]["_target_"] += "OfNoVersion"
    file.write_text(yaml.safe_dump({**config, "dry_run": True}))
    assert snapshots.run_command("eval.run", "--config-file", str(file)) == 2


@pytest.mark.long
@pytest.mark.parametrize("run", ["class_paths", "class_path_of_a_worker"])
def test_class_paths_of_a_saved_configuration_draft_the_same_tokens(run: str, copied: Path):
    """Check tokens and counts, except counts that a planner or, in a worker, the clock decides."""
    expected = json.loads((copied / run / "drafted.json").read_text())
    found = snapshots.drafted(measure_again(run))
    if run == "class_path_of_a_worker":
        expected, found = (
            [{"tokens": one["tokens"]} for one in side] for side in (expected, found)
        )
    else:
        planned = {"by cost", "chain with lookup"}
        expected, found = (snapshots.without_lengths(side, planned) for side in (expected, found))
    assert not snapshots.differences(expected, found)
