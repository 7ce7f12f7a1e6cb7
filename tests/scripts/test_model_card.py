"""A drafter's model card with the figures of evaluations, written into its folder."""

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from decoding.errors import UserError
from decoding.models.folder import CARD, hash_input, read_json
from distill.drafter_folder import format_readme
from scripts import push_to_hub
from scripts.model_card import Options, run
from tests.support import simulated_runs
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


def measured(folder: Path, home: Path) -> Path:
    """Write a SIMULATED run of eval.run that measured the folder's weights."""
    path = simulated_runs.write(home, SHALLOW, tokens_seen=1000)
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
        assert f"{len(runs)} evaluations, {len(shown(folder))} plots" in done
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


def test_wrong_folders_and_runs_are_refused(folder: Path, tmp_path: Path) -> None:
    other = simulated_runs.write(tmp_path / "other", SHALLOW)
    text = (folder / "README.md").read_text()
    with pytest.raises(UserError, match="did not measure the weights"):
        run(Options(folder=str(folder), runs=[str(other)]))
    assert (folder / "README.md").read_text() == text
    with pytest.raises(UserError, match=r"has no README.md, expected a drafter folder"):
        run(Options(folder=str(tmp_path)))
