"""The settings of drafters, with draft lengths by batch size, that `vllm serve` reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.parallel import ParallelChain
from decoding.drafters.prompt_lookup import PromptLookup, SuffixLookup
from decoding.engine import load
from decoding.errors import UserError
from decoding.interfaces import Drafter
from distill.drafter_folder import launch_lines
from heads.registry import kind_in
from scripts.bench.vllm_file import KEY, format_file, speculative_config
from tests.heads.published import saved

TABLE = [[1, 2, 4], [3, 8, 0]]
LAYERS = 40  # of the target


def head(folder: Path, name: str) -> tuple[Drafter, Path]:
    """Return a random head of a row, and its folder."""
    row, written = saved(folder / name, name)
    kind = kind_in(written)
    drafter = row.kind.drafter(
        kind.load(written), kind.read_shape(written), row.kind.config(), False
    )
    return drafter, written


def parallel(folder: Path, target: Path, **more: Any) -> tuple[Drafter, Path]:
    """Return a copy of the target that drafts four tokens in one forward, and its folder."""
    folder.mkdir()
    for file in target.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    config |= {"pard_token": 6, "num_parallel_tokens": 4, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return ParallelChain(model=load(target).target, tokens=4, mask_token=6), folder


def test_the_file_has_what_vllm_reads(tiny_target: Path) -> None:
    found = speculative_config(PromptLookup(), None, TABLE, LAYERS)
    sizes = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    expected = {"method": "ngram", **sizes, "num_speculative_tokens": 4, KEY: TABLE}
    assert found == expected
    text = format_file(found, str(tiny_target))
    assert text.startswith(f"# vllm serve {tiny_target} --config ")
    read = yaml.safe_load(text)  # vLLM passes a nested value on as JSON
    assert json.loads(json.dumps(read)) == {"speculative-config": expected}
    engine = load(tiny_target, tiny_target)
    assert isinstance(engine.drafter, ChainDrafter)
    chain = speculative_config(engine.drafter, tiny_target, TABLE, LAYERS)
    assert chain.pop("model") == str(tiny_target)
    assert chain == {"method": "draft_model", "num_speculative_tokens": 4, KEY: TABLE}


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_methods_that_vllm_tests_with_a_table_get_one(name: str, tmp_path: Path) -> None:
    found = speculative_config(*head(tmp_path, name), TABLE, LAYERS)
    assert (found["method"], found[KEY]) == (name, TABLE)


def test_no_draft_of_the_file_is_longer_than_a_block(tmp_path: Path) -> None:
    drafter, folder = head(tmp_path, "dflash")
    kind = kind_in(folder)
    block = kind.longest_draft(kind.read_shape(folder))
    assert block is not None and block > 1
    table = [[1, 1, block + 3], [2, 2, 1], [3, 8, 0]]
    found = speculative_config(drafter, folder, table, LAYERS)
    assert found["num_speculative_tokens"] == block
    assert found[KEY] == [[1, 1, block], [2, 2, 1], [3, 8, 0]], "a control: shorter ones stay"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("medusa", {"method": "medusa"}),
        ("p_eagle", {"method": "eagle3", "parallel_drafting": True}),
    ],
)
def test_a_constant_length_needs_no_table(
    name: str, method: dict[str, Any], tmp_path: Path
) -> None:
    drafter, folder = head(tmp_path, name)
    found = speculative_config(drafter, folder, [[1, 2, 2], [3, 8, 2]], LAYERS)
    assert found == method | {"model": str(folder), "num_speculative_tokens": 2}
    lookup = speculative_config(PromptLookup(), None, [[1, 8, 3]], LAYERS)
    assert lookup["num_speculative_tokens"] == 3 and KEY not in lookup


@pytest.mark.parametrize("name", ["medusa", "p_eagle"])
@pytest.mark.parametrize("table", [TABLE, [[1, 2, 3], [3, 8, 2]]])
def test_a_table_that_vllm_would_end_with_an_error_is_refused(
    name: str, table: list[list[int]], tmp_path: Path
) -> None:
    """vLLM's Medusa asserts one number of tokens, and its P-EAGLE lays out the largest."""
    drafter, folder = head(tmp_path, name)
    words = f"vLLM drafts a constant number of tokens with {drafter.name} .* has {KEY}=.* Choose"
    with pytest.raises(UserError, match=words):
        speculative_config(drafter, folder, table, LAYERS)


def test_a_model_that_drafts_in_one_pass_has_the_method_of_its_launch_line(
    tiny_target: Path, tmp_path: Path
) -> None:
    drafter, folder = parallel(tmp_path / "parallel", tiny_target)
    found = speculative_config(drafter, folder, [[1, 8, 6]], LAYERS)
    line = launch_lines("target", 4, parallel=True)["vLLM"]
    assert found == json.loads(line.split("'")[1]) | {"model": str(folder)}
    assert found["parallel_drafting"] is True and found["num_speculative_tokens"] == 4
    with pytest.raises(UserError, match=f"constant number of tokens with {drafter.name}"):
        speculative_config(drafter, folder, TABLE, LAYERS)
    small = parallel(tmp_path / "small", tiny_target, draft_vocab_size=8)
    with pytest.raises(UserError, match="does not read the draft vocabulary of 8 tokens"):
        speculative_config(*small, [[1, 8, 4]], LAYERS)


def test_what_vllm_does_not_run_is_named(tiny_target: Path) -> None:
    with pytest.raises(UserError, match="vLLM does not run suffix_lookup"):
        speculative_config(SuffixLookup(), None, TABLE, LAYERS)
    with pytest.raises(UserError, match="no number of rows gains from prompt_lookup"):
        speculative_config(PromptLookup(), None, [[1, 8, 0]], LAYERS)
