"""The comparison of shapes at toy size: a second call continues, unequal bytes are refused."""

import json
from pathlib import Path

import pytest

from decoding.errors import UserError
from scripts.bench import common, depth_width
from scripts.bench.depth_width import Options, check_equal_bytes, parse_shape

SHAPES = ["1:32:4:2:48", "2:32:4:2:16"]


def test_shapes_with_unequal_bytes_are_refused(tiny_target: Path):
    """Check that bytes count the head and the layers, and may differ by at most 3 %.

    The first two shapes have 2,048 x 32 + 7,744 and 2,048 x 32 + 2 x 4,672 weights of 2 bytes.
    """
    target = str(tiny_target)
    assert check_equal_bytes(Options(target=target, shapes=SHAPES)) == {
        SHAPES[0]: 2 * 73_280,
        SHAPES[1]: 2 * 74_880,
    }
    with pytest.raises(
        UserError, match="2:32:4:2:48 reads .* 1:32:4:2:48 reads .* they may differ by 3%"
    ):
        check_equal_bytes(Options(target=target, shapes=[SHAPES[0], "2:32:4:2:48"]))
    # both are near the third shape, but not near each other
    with pytest.raises(UserError, match="3:32:4:2:4 reads .* 1:32:4:2:48 reads "):
        check_equal_bytes(Options(target=target, shapes=[SHAPES[1], SHAPES[0], "3:32:4:2:4"]))
    with pytest.raises(UserError, match="need different layers or hidden sizes, found 1x32, 1x32"):
        check_equal_bytes(Options(target=target, shapes=[SHAPES[0], "1:32:4:2:47"]))
    with pytest.raises(UserError, match="shape '1:32' is not LAYERS:HIDDEN"):
        parse_shape("1:32")


@pytest.mark.long
def test_speeds_are_measured_in_a_later_call(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    given = [
        f"target={tiny_target}",
        f"shapes={SHAPES}",
        "steps=2",
        "probe_steps=0",
        "tokens_per_step=512",
    ]
    given += [
        "sequences=16",
        "max_prompts=10",
        "max_new_tokens=6",
        "sweep=[2]",
        "temperatures=[0.0]",
        "threads=1",
    ]

    def figures(*more: str) -> dict:
        monkeypatch.setattr("sys.argv", ["depth_width.py", *given, f"work={tmp_path}/work", *more])
        depth_width.main()
        return json.loads((tmp_path / "depth_width.json").read_text())["figures"]

    students = figures("seeds=[0]", "executions=[]")
    assert {name: set(of) for name, of in students["acceptance"].items()} == {
        "1x32": {"0"},
        "2x32": {"0"},
    }
    assert students["rows"] == {}
    both = figures("seeds=[0]", "executions=['native eager']")
    assert both["acceptance"] == students["acceptance"], "from the journal"
    (rows,) = both["rows"]["native eager"].values()
    assert {row["drafter"] for row in rows} == {"1x32", "2x32", "prompt_lookup"} and all(
        row["speedup"] > 0 for row in rows
    )
    assert figures("seeds=[0]", "executions=[]", "max_prompts=9")["rows"] == {}, (
        "other prompts, the same students"
    )
    assert both["over_first"]["speedup"]["native eager"]["2x32"]["T=0"]["seeds"] == 1
