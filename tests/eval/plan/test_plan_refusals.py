"""Settings that `eval.plan` refuses, and its dry run."""

import json
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from eval.plan.costs import FILE
from eval.plan.job import run
from jobs.config import TargetConfig
from tests.support.plans import NAMES, config


def other_architecture(home: Path) -> Path:
    folder = home / "gpt2"
    folder.mkdir(exist_ok=True)
    values = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 11}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown head": ({"heads": ["egale3"]}, "'egale3' is no kind of head.*nearest is 'eagle3'"),
    "a head twice": ({"heads": ["medusa", "medusa"]}, "medusa would be planned twice"),
    "a wider model": ({"widths": [64]}, "student.hidden_size is 64, expected at most"),
    "an odd shape": ({"shapes": ["bush"]}, "shapes is .*bush.*one or more of chain, tree, paral"),
    "parallel heads": ({"shapes": ["parallel"], "depths": []}, "parallel is for pruned models al"),
    "one parallel token": (
        {"shapes": ["parallel"], "max_draft_tokens": 1},
        "max_draft_tokens is 1, expected 2 or more with shapes=parallel",
    ),
    "no tree size": ({"shapes": ["tree"], "tree_nodes": []}, "tree_nodes is .*one or more numbers"),
    "a tree of one node": ({"shapes": ["tree"], "tree_nodes": [1, 8]}, "each 2 or more"),
    "a tree twice": ({"shapes": ["tree"], "tree_nodes": [8, 8]}, "medusa tree of 8 would be plan"),
    "a large tree": (
        {"shapes": ["tree"], "tree_nodes": [400]},
        "holds 256 tokens, of which drafts need 420. Lower max_draft_tokens, or tree_nodes",
    ),
    "no drafter": ({"heads": [], "depths": []}, "combine to no drafter"),
    "no layer": ({"depths": [0]}, "depths is .*expected whole numbers from 1 up"),
    "a large batch": ({"batch_size": 10**8}, "rows of 90 tokens.*are free. Lower batch_size"),
    "a long context": ({"context": 250}, "context is 250, expected at most 190"),
    "a speedup of 0": ({"speedups": [0.0]}, "speedups is .*expected one or more numbers above 0"),
    "a slow training": ({"assumed_tflops": -1.0}, "assumed_tflops is -1.*0 for this machine's"),
    "a cold temperature": ({"temperature": -1.0}, "temperature is -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_are_refused_before_anything_is_measured(
    name: str, home: Path, tmp_path: Path
):
    changes, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        run(config(home, "", **{"output_dir": str(tmp_path / "refused"), **changes}))
    assert not (tmp_path / "refused").exists()


def test_the_default_context_is_what_a_small_target_holds(home: Path, tmp_path: Path):
    small = {"heads": ["medusa"], "depths": [], "output_dir": str(tmp_path)}
    run(config(home, "", context=0, **small))
    (line,) = (tmp_path / FILE).read_text().splitlines()
    assert json.loads(line)["conditions"]["context"] == 190, "a control: 191 and more are refused"
    with pytest.raises(UserError, match="context is 191, expected at most 190"):
        run(config(home, "", context=191, **small))


def test_a_target_of_another_architecture_is_refused(home: Path, tmp_path: Path):
    target = TargetConfig(path=str(other_architecture(tmp_path)), device="cpu")
    with pytest.raises(UserError, match="of the family 'gpt2', expected one of llama"):
        run(config(home, "", output_dir=str(tmp_path / "refused"), target=target))


def test_a_dry_run_writes_nothing(home: Path, tmp_path: Path, capsys: Any):
    run(config(home, "", output_dir=str(tmp_path / "dry"), dry_run=True, training_tokens=10**6))
    assert not (tmp_path / "dry").exists()
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)
    assert "would measure 4 drafters" in out
