"""A drafter's model card with the figures of evaluations, written into its folder."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from decoding.errors import UserError
from decoding.models.folder import CARD, hash_input, read_json
from distill.drafter_folder import format_readme
from eval.report.plots import Plot
from eval.statistics.schema import read_rows, write_rows
from jobs.drafters import CONTROL
from jobs.saved_config import read_config
from scripts import push_to_hub
from scripts.model_card import Options, run
from tests.support import simulated_runs
from tests.support.configurations import configuration
from tests.support.simulated_comparisons import SHALLOW

TRAINED = Path(__file__).parents[1] / "fixtures" / "distill.train" / "finished" / "drafter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a drafter folder as a job writes it."""
    path = Path(shutil.copytree(TRAINED, tmp_path / "drafter"))
    card = read_json(path / CARD) | {"drafter_hash": hash_input(path)}
    card |= {"num_draft_tokens": 3, "target": "owner/target", "license": {"license": "mit"}}
    (path / CARD).write_text(json.dumps(card))
    (path / "README.md").write_text(format_readme(card))
    return path


def measured(folder: Path, home: Path, prompts: int = 26, **changes: object) -> Path:
    """Write a SIMULATED run of eval.run that measured the folder's weights.

    changes: fields of the drafter's rows.
    """
    path = simulated_runs.write(home, SHALLOW, tokens_seen=1000, prompts=prompts)
    rows = [
        replace(row, **changes) if row.drafter in SHALLOW else row  # type: ignore[arg-type]
        for row in read_rows(path / "results.jsonl")
    ]
    write_rows(path / "results.jsonl", rows)
    manifest = read_json(path / "manifest.json")
    for one in read_json(path / "drafters.json").values():
        manifest["inputs"][one["folder"]] = hash_input(folder)
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def shown(folder: Path) -> list[str]:
    """Return the plots that the README shows."""
    return re.findall(r"^!\[.+\]\((.+)\)$", (folder / "README.md").read_text(), re.M)


def test_a_card_is_filled_and_filled_again_and_pushed(folder: Path, tmp_path: Path) -> None:
    own = "\n## Of mine\n\nKept.\n"
    (folder / "README.md").write_text((folder / "README.md").read_text() + own)
    plain, before = ModelCard.load(folder / "README.md"), hash_input(folder)
    assert (plain.data.base_model, plain.data.license) == ("owner/target", "mit")
    assert not plain.data.eval_results, "control: nothing was measured"
    one, two = (measured(folder, tmp_path / name / "run") for name in ("one", "two"))
    for runs in ([one, two], [one]):
        done = run(Options(folder=str(folder), runs=[str(path) for path in runs]))
        assert f"{len(runs)} evaluation{'s' * (len(runs) > 1)}, {len(shown(folder))} plots" in done
        made = ModelCard.load(folder / "README.md")
        assert made.text.count("\n## Measured\n") == made.text.count(own.strip()) == 1
        assert re.search(r"\| \d\.\d\dx \[\d\.\d\d, \d\.\d\d\] \|", made.text), "an interval"
        assert {one.metric_type for one in made.data.eval_results or []} > {"speedup"}
        assert {path.name for path in (folder / "figures").iterdir()} == {
            Path(name).name for name in shown(folder)
        }
    assert hash_input(folder) == before, "the weights are those that the card describes"
    assert run(Options(folder=str(folder), license="apache-2.0")).endswith("0 evaluations, 0 plots")
    made = ModelCard.load(folder / "README.md")
    assert made.data.license == "apache-2.0" and shown(folder), "measurements are kept"
    out = tmp_path / "out"
    push_to_hub.run(push_to_hub.Options(folder=str(folder), repo="a/b", out=str(out)))
    assert shown(out) == shown(folder), "a push takes the card with its plots"
    assert all((out / name).read_bytes() == (folder / name).read_bytes() for name in shown(out))


@pytest.fixture
def _without_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plot, "png", b"")


def filled(folder: Path, *runs: Path) -> ModelCard:
    """Return the folder's card with the figures of these runs."""
    run(Options(folder=str(folder), runs=[str(path) for path in runs]))
    return ModelCard.load(folder / "README.md")


@pytest.mark.usefixtures("_without_drawing")
def test_prompt_lookup_is_the_control_row_of_each_setting(folder: Path, tmp_path: Path) -> None:
    path = measured(folder, tmp_path / "run")
    made = filled(folder, path)
    shown = [line.split(" | ") for line in made.text.splitlines() if line.startswith("| ")][2:]
    rows = [row for row in read_rows(path / "results.jsonl") if row.part == "main"]
    assert [(line[0].split(" (")[0][2:], line[1]) for line in shown] == [
        (row.drafter, row.condition_label)
        for label in dict.fromkeys(row.condition_label for row in rows)
        for row in sorted(rows, key=lambda one: one.drafter == CONTROL)
        if row.condition_label == label
    ]
    assert {line[0] for line in shown} >= {f"| {CONTROL} (no model)"}
    assert f"{CONTROL} is the control of the same run" in made.text
    results = made.data.eval_results or []
    assert results and not any(CONTROL in str(one.metric_name) for one in results)
    write_rows(path / "results.jsonl", [row for row in rows if row.drafter != CONTROL])
    text = filled(folder, path).text
    assert f"| {CONTROL}" not in text and f"no control row of {CONTROL}" in text, "control"


@pytest.mark.usefixtures("_without_drawing")
def test_columns_are_explained_once(folder: Path, tmp_path: Path) -> None:
    runs = [measured(folder, tmp_path / name / "run") for name in ("one", "two")]
    text = filled(folder, *runs).text
    heads = re.findall(r"^\| drafter \| setting \| (.+) \|$", text, re.M)
    assert len(heads) == 2
    for column in heads[0].split(" | "):
        assert text.count(f"\n- `{column.removesuffix(' [95 %]')}`: ") == 1, column


@pytest.mark.usefixtures("_without_drawing")
def test_the_command_of_a_stage_is_written_without_its_file(folder: Path, tmp_path: Path) -> None:
    path = measured(folder, tmp_path / "run")
    manifest = read_json(path / "manifest.json")
    as_given, of_stage = (f"python -m eval.run {words}" for words in ("a=b", "--config-file c"))
    for command in (as_given, of_stage):
        (path / "manifest.json").write_text(json.dumps(manifest | {"command": command}))
        [written] = re.findall(
            r"^```bash\n(python -m eval.run.*)\n```$", filled(folder, path).text, re.M
        )
        assert (written == as_given) == (command == as_given)
    assert "--config-file" not in written and "drafters=" in written
    config = configuration("eval.run", *shlex.split(written)[3:])
    saved = read_config(path / "config.yaml", "")
    assert config.max_prompts == saved["max_prompts"]


@pytest.mark.usefixtures("_without_drawing")
def test_results_of_the_model_index_can_be_told_apart(folder: Path, tmp_path: Path) -> None:
    runs = [measured(folder, tmp_path / name / "run") for name in ("one", "two")]
    for paths in (runs[:1], runs):
        results = filled(folder, *paths).data.eval_results or []
        names = {(one.dataset_name, one.metric_name) for one in results}
        assert len(names) == len(results) == 6 * len(paths)
        assert all("simulated-1, " in name for pair in names for name in map(str, pair))
        settings = ("greedy", "temperature 1, token verification")
        assert {word for word in settings for pair in names if word in str(pair)} == set(settings)
    types = [one.metric_type for one in results]
    assert len(set(types)) < len(types), "control: their types are the same"


@pytest.mark.usefixtures("_without_drawing")
@pytest.mark.parametrize(
    ("prompts", "changes", "words"),
    [
        (26, {"cpu_share": 0.4}, "Other processes used this machine"),
        (26, {"shards_per_device": 2}, "2 processes"),
        (3, {}, "Fewer than 5 prompts"),
        (26, {"headline_prompts": 2}, "Only 2 texts of the target do not loop"),
        (26, {}, ""),  # control
    ],
)
def test_figures_with_a_warning_stay_out_of_the_model_index(
    prompts: int, changes: dict[str, object], words: str, folder: Path, tmp_path: Path
) -> None:
    filled(folder, measured(folder, tmp_path / "before" / "run"))
    made = filled(folder, measured(folder, tmp_path / "run", prompts, **changes))
    assert bool(made.data.eval_results) == (not words), "also those of earlier calls are gone"
    measurements = made.text.partition("## Measured")[2]
    assert f"**{words}" in measurements if words else "**" not in measurements
    assert "| simulated-1 " in measurements, "the text shows them"


@pytest.mark.usefixtures("_without_drawing")
def test_one_disturbed_row_leaves_the_others_in_the_model_index(
    folder: Path, tmp_path: Path
) -> None:
    path = measured(folder, tmp_path / "run")
    rows = read_rows(path / "results.jsonl")
    write_rows(
        path / "results.jsonl",
        [replace(row, cpu_share=0.4) if row.temperature else row for row in rows],
    )
    results = filled(folder, path).data.eval_results or []
    assert results and all("greedy" in str(one.metric_name) for one in results)


def test_wrong_folders_and_runs_are_refused(folder: Path, tmp_path: Path) -> None:
    other = simulated_runs.write(tmp_path / "other", SHALLOW)
    text = (folder / "README.md").read_text()
    with pytest.raises(UserError, match="did not measure the weights"):
        run(Options(folder=str(folder), runs=[str(other)]))
    assert (folder / "README.md").read_text() == text
    with pytest.raises(UserError, match=r"has no README.md, expected a drafter folder"):
        run(Options(folder=str(tmp_path)))
