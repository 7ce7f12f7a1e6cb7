"""Law 1 of every row, and law 2 of a few, on real trained models in float32, as test_real_models.py has it for chains and prompt lookup.

All rows run on the smallest real model, a few on the chat model, whose forwards cost a hundred times as much. What drafts is made of the
target: its first layers, its own with some skipped, and a recurrent head with random weights, whose tokens pass by chance.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from decoding import load
from decoding.loop import Generation, Settings, decode
from decoding.target import Target, load_target

from .rows import BY_NAME, COSTS, ROWS, DrafterRow, Kit
from .test_real_models import chats, check_law, first_layers

pytestmark = pytest.mark.long
PROMPTS = 80  # of 128 tokens: enough for one divergence at a near tie to be fewer than 1 in 10,000 tokens
DRAFTING = [row for row in ROWS if not row.name.startswith("oracle")]
SETTINGS = Settings(max_new_tokens=128, stopping="fixed", costs=COSTS)
SAMPLED = replace(SETTINGS, temperature=1.0, verify="coupled")


@lru_cache
def spoken(folder: Path, sampled: bool) -> tuple[Target, list[list[int]], Settings, list[Generation]]:
    """A target, prompts, settings, and what it says by itself."""
    target, settings = load_target(folder), SAMPLED if sampled else SETTINGS
    if folder.name.startswith("chat"):
        prompts = chats(load(folder).tokenizer, PROMPTS)
    else:
        prompts = [[1, 10 + 6 * number] for number in range(PROMPTS)]
    return target, prompts, settings, decode(target, None, prompts, settings)


def check_row(row: DrafterRow, folder: Path, layers: int, sampled: bool = False) -> None:
    """The law, with a drafter of so many of the target's layers; and that drafts pass where the drafter knows something."""
    target, prompts, settings, plain = spoken(folder, sampled)
    kit = Kit(target, load_target(folder), first_layers(folder, layers).model, [])
    _, drafted = check_law(target, row.make(kit), prompts, settings, plain)
    assert sum(g.accepted for g in drafted) > 0
    knows = not row.name.startswith("recurrent")
    assert sum(g.rounds for g in drafted) < (0.97 if knows else 1.0) * sum(g.rounds for g in plain)


@pytest.mark.parametrize("row", DRAFTING, ids=lambda row: row.name)
def test_stories_keep_law_1(stories260k: Path, row: DrafterRow) -> None:
    check_row(row, stories260k, 3)


@pytest.mark.parametrize("name", ["static_tree", "ouroboros", "self_speculation", "recurrent_with_lookup"])
def test_stories_keep_law_2(stories260k: Path, name: str) -> None:
    check_row(BY_NAME[name], stories260k, 3, sampled=True)


@pytest.mark.parametrize("name", ["ranked_tree", "self_speculation", "recurrent_chain_with_lookup"])
def test_the_chat_model_keeps_law_1(chat24m: Path, name: str) -> None:
    check_row(BY_NAME[name], chat24m, 2)
