"""The launch line in a drafter folder's README, run by a shell against the real vLLM.

The tier --engines runs all of it, and .ci/run the test of a trained drafter.
"""

import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from scipy.stats import fisher_exact

from decoding import load
from decoding.drafters.chain import ChainDrafter
from decoding.engine import encode
from decoding.loop import decode
from decoding.rounds.settings import Settings
from distill.train import run
from jobs.paths import resolve
from tests.decoding.test_real_models import GAP_LIMIT, gap
from tests.support.configurations import configuration
from tests.support.vllm_server import Answer, code_block, serve
from training.data.readers import read_prompts

pytestmark = pytest.mark.engines
PROMPTS, TOKENS = 32, 64
# Level of each of the two-proportion tests, one for each depth. The texts are equal, so the counts
# differ only by where a text begins and ends.
LEVEL = 0.01
# Some 30 s; bounded, so that a slow machine keeps to its minutes.
TRAINED = ("loop.max_steps=100", "loop.max_seconds=60", "data.max_samples=800")
SETTINGS = Settings(max_new_tokens=TOKENS, stopping="fixed")
Counts = tuple[Sequence[int], Sequence[int]]  # tested and accepted draft tokens, by depth


def write_drafter(folder: Path, *overrides: str) -> Path:
    """Run distill.train on the embedded target; return the drafter's folder."""
    given = ["+experiment=quickstart", "stages=[]", f"output_dir={folder}", *overrides]
    run(configuration("distill.train", *given))
    return folder / "drafter"


def disagreeing_depths(theirs: Counts, ours: Counts) -> list[int]:
    """Return the depths whose conditional acceptance rates differ significantly (Fisher's test)."""
    depths = zip(*theirs, *ours, strict=True)
    return [
        depth
        for depth, (n, accepted, m, also) in enumerate(depths, start=1)
        if fisher_exact([[accepted, n - accepted], [also, m - also]]).pvalue < LEVEL
    ]


def sums(by_depth: Iterable[Sequence[int]], depths: int) -> list[int]:
    """Return the sum of the counts at each of the depths; a list may end before a depth."""
    filled = ([*counts, *[0] * (depths - len(counts))] for counts in by_depth)
    return [sum(counts) for counts in zip(*filled, strict=True)]


def damaged(drafter: Path, folder: Path) -> Path:
    """Copy a drafter, with the two projections before its activation in the wrong order.

    Such a layout error changes acceptance and no text.
    """
    shutil.copytree(drafter, folder)
    weights = load_file(folder / "model.safetensors")
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def check_equal(embedded_target: Path) -> "Check":
    """Return a check that answers are equal, except after a near tie of the target (law 1)."""
    target = load(embedded_target).target

    def check(left: list[Answer], right: list[Answer]) -> None:
        for a, b in zip(left, right, strict=True):
            assert a.prompt == b.prompt and len(a.tokens) == len(b.tokens) == TOKENS
            if a.tokens != b.tokens:
                at = next(i for i in range(TOKENS) if a.tokens[i] != b.tokens[i])
                assert gap(target, a.prompt + a.tokens[:at], SETTINGS, 0) < GAP_LIMIT

    return check


Check = Callable[[list[Answer], list[Answer]], None]


def test_the_launch_line_of_a_trained_drafter_serves(
    embedded_target: Path, vllm_python: Path, tmp_path: Path, check_equal: Check
) -> None:
    """Check the servers of a trained drafter and of no drafter.

    The answers are equal, and the acceptance in the server equals that in our loop, which a drafter
    with a layout error does not have.
    """
    prompts = short_prompts(PROMPTS)
    with serve(plain_line(embedded_target), tmp_path, tmp_path / "plain.log") as plain:
        trained = write_drafter(tmp_path / "run", *TRAINED)  # while the server starts
        moved = tmp_path / "a server" / "my drafter"
        shutil.copytree(trained, moved)
        with serve(vllm_line(moved), moved, tmp_path / "drafted.log") as drafting:
            expected = plain.ask(prompts, TOKENS)
            check_equal(expected, drafting.ask(prompts, TOKENS))
            theirs = drafting.tested_and_accepted()
    assert sum(theirs[1]) > 0

    engine = load(embedded_target)
    ids = [encode(engine, [{"role": "user", "content": prompt}]) for prompt in prompts]
    assert ids == [answer.prompt for answer in expected]

    depths = len(theirs[0])  # the draft length in the launch line, which the training chose

    def ours(folder: Path) -> Counts:
        settings = replace(SETTINGS, num_draft_tokens=depths)
        drafted = decode(engine.target, ChainDrafter(folder), ids, settings)
        for one, answer in zip(drafted, expected, strict=True):
            check_equal([Answer(answer.prompt, one.tokens)], [answer])
        tested = sums((one.tested_by_depth for one in drafted), depths)
        return tested, sums((one.accepted_by_depth for one in drafted), depths)

    found_here = ours(moved)
    print(f"tested and accepted by depth: vLLM {theirs}, ours {found_here}")
    assert not disagreeing_depths(theirs, found_here)
    assert disagreeing_depths(theirs, ours(damaged(moved, tmp_path / "damaged"))), "the control"


def test_the_launch_line_of_an_untrained_drafter_serves(
    embedded_target: Path, vllm_python: Path, tmp_path: Path, check_equal: Check
) -> None:
    """Check that the folder of a dry run serves, so that a user can try serving before training."""
    prompts = short_prompts(8)
    untrained = write_drafter(tmp_path / "dry", "dry_run=true")
    with (
        serve(plain_line(embedded_target), tmp_path, tmp_path / "plain.log") as plain,
        serve(vllm_line(untrained), untrained, tmp_path / "untrained.log") as proposing_nothing,
    ):
        check_equal(plain.ask(prompts, TOKENS), proposing_nothing.ask(prompts, TOKENS))
        tested, _ = proposing_nothing.tested_and_accepted()
    assert tested[0] > 0


def short_prompts(number: int) -> list[str]:
    """Return the first prompts of the embedded set that are short."""
    found = read_prompts(resolve("embedded:prompts"))
    return [prompt.turns[0] for prompt in found if len(prompt.turns[0]) < 400][:number]


def plain_line(target: Path) -> str:
    """Return the line that serves the target without a drafter."""
    return f"vllm serve {shlex.quote(str(target))}"


def vllm_line(folder: Path) -> str:
    """Return the launch line in a folder's README."""
    return code_block(folder / "README.md", "vLLM")
