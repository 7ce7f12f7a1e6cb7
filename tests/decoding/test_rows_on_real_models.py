"""Law 1 of every row, and law 2 of some, on real trained models in float32.

All rows run on the smallest real model, and a few on the chat model, whose forwards cost a hundred
times as much. The drafters are the target's first layers, the target without some layers, and a
recurrent head fitted to the target's output by least squares. Chains and prompt lookup are tested
in test_real_models.py.

Shapes: N tokens, H hidden size, E = 2 H.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from decoding import load
from decoding.interfaces import Target
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from recurrent_drafting.head import RecurrentHead

from .row_kinds.recurrent import random_head
from .rows import BY_NAME, COSTS, ROWS, DrafterRow, Kit
from .test_real_models import chats, check_law, first_layers

pytestmark = pytest.mark.long
# of 128 tokens, so that one divergence at a near tie is fewer than 1 in 10,000 tokens
PROMPTS = 80
# rows that repeat another with other options run before releases alone
DRAFTING = [
    pytest.param(row, id=row.name, marks=[pytest.mark.exhaustive] if row.slow else [])
    for row in ROWS
    if not row.name.startswith("oracle")
]
# rows whose heads know bigram targets alone, and are random on others
RANDOM = ("dflash", "dflash2", "dspark_by_cost", "block_tree", "p_eagle")
RANDOM += ("specdiff", "specdiff_sampled", "sdsat_one_forward", "sdsat_one_forward_low_rank")
RANDOM += ("parallelspec", "domino", "block_tree_by_cost")
SETTINGS = Settings(max_new_tokens=128, stopping="fixed", costs=COSTS)
SAMPLED = replace(SETTINGS, temperature=1.0, verify="coupled")


@lru_cache
def spoken(
    folder: Path, sampled: bool
) -> tuple[Target, list[list[int]], Settings, list[Generation]]:
    """Return a target, prompts, settings and the target's autoregressive generations."""
    target, settings = load_target(folder), SAMPLED if sampled else SETTINGS
    if folder.name.startswith("chat"):
        prompts = chats(load(folder).tokenizer, PROMPTS)
    else:
        prompts = [[1, 10 + 6 * number] for number in range(PROMPTS)]
    return target, prompts, settings, decode(target, None, prompts, settings)


@lru_cache
@torch.inference_mode()
def fitted_head(folder: Path, sampled: bool) -> RecurrentHead:
    """Return a recurrent head without blocks, fitted to the target's autoregressive text.

    Least squares maps [h; s_1], the hidden state and the head's first state, to the target's next
    hidden state; the target's output layer maps this to logits.
    """
    target, prompts, _, plain = spoken(folder, sampled)
    head = random_head(target, num_draft_layers=0)
    known, next_ = [], []
    for prompt, said in zip(prompts, plain, strict=True):
        tokens_1N = torch.tensor([[*prompt, *said.tokens]])
        target.open(1, tokens_1N.shape[1])
        hidden_NH = target.features(tokens_1N)[0].double()
        states_NH = head.start(target.embed(tokens_1N)[0].double())
        known.append(torch.cat((hidden_NH[:-1], states_NH[1:]), -1))
        next_.append(hidden_NH[1:])
    guess_EH = torch.linalg.lstsq(torch.cat(known), torch.cat(next_)).solution
    head.output.copy_(target.lm_head(guess_EH.float()).T)
    return head


def check_row(row: DrafterRow, folder: Path, layers: int, sampled: bool = False) -> None:
    """Check the law with a draft model of the target's first `layers`, and that rounds are saved.

    Rows with random heads save none.

    sampled: checks law 2 instead of law 1.
    """
    target, prompts, settings, plain = spoken(folder, sampled)
    kit = Kit(
        target,
        load_target(folder),
        first_layers(folder, layers).model,
        [],
        fitted_head(folder, sampled),
        [[*prompt, *said.tokens] for prompt, said in zip(prompts, plain, strict=True)],
    )
    _, drafted = check_law(target, row.make(kit), prompts, settings, plain)
    if row.name in RANDOM:
        return
    assert sum(g.rounds for g in drafted) < 0.97 * sum(g.rounds for g in plain)


@pytest.mark.parametrize("row", DRAFTING)
def test_stories_keep_law_1(stories260k: Path, row: DrafterRow) -> None:
    check_row(row, stories260k, 3)


@pytest.mark.parametrize(
    "name", ["static_tree", "ouroboros", "self_speculation", "recurrent_with_lookup"]
)
def test_stories_keep_law_2(stories260k: Path, name: str) -> None:
    check_row(BY_NAME[name], stories260k, 3, sampled=True)


# One test, so that the autoregressive text is decoded once.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("names", "sampled"),
    [
        pytest.param(("chain", "ranked_tree"), False, id="chains_and_a_tree"),
        *(
            pytest.param((name,), False, id=name)
            for name in ("prompt_lookup", "self_speculation", "recurrent_chain_with_lookup")
        ),
        pytest.param(("chain", "prompt_lookup"), True, id="chains_sampled"),
    ],
)
def test_the_chat_model_keeps_laws_1_and_2(
    chat24m: Path, names: tuple[str, ...], sampled: bool
) -> None:
    for name in names:
        check_row(BY_NAME[name], chat24m, 2, sampled)
