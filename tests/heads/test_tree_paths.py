"""Trees of heads hold the chain that the head drafts, which law 6 compares with training.

The likeliest child of the likeliest child, and so on, is the greedy chain of the same text.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from decoding.interfaces import Proposal
from decoding.loop import decode
from decoding.rounds.settings import Settings
from heads.block.drafter import BlockDrafter
from heads.block.kind import KIND as BLOCK
from heads.eagle.drafter import EagleDrafter
from heads.eagle.kind import FIRST, KIND
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS, HeadRow

PLAIN = ("dflash", "jetspec")  # trees are for blocks without a correction
ROWS = [row for row in HEAD_ROWS if row.kind in (KIND, FIRST) or row.name in PLAIN]


def drafter(row: HeadRow, head: Any, shape: str) -> EagleDrafter | BlockDrafter:
    if row.kind is BLOCK:
        return BlockDrafter(head=head, shape=shape, children="top_k")
    return EagleDrafter(head=head, shape=shape, children="top_k")


def likeliest_path(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the tokens of the first child of the tip, its first child, and so on."""
    path, node = [], -1
    while node in parents:
        node = list(parents).index(node)
        path.append(tokens[node])
    return path


def paths_by_text(one: EagleDrafter | BlockDrafter) -> dict[tuple[int, ...], list[int]]:
    """Decode greedily; return the drafted chain, or a tree's likeliest path, of every text."""
    found: dict[tuple[int, ...], list[int]] = {}
    propose = one.propose

    def watched(texts_B: Sequence[Sequence[int]], *given: Any) -> Proposal:
        proposal = propose(texts_B, *given)
        for row, count in enumerate(proposal.counts_B):
            tokens = proposal.tokens_BN[row, :count].tolist()
            parents = range(-1, count - 1)
            if proposal.parents_BN is not None:
                parents = proposal.parents_BN[row, :count].tolist()
            found[tuple(texts_B[row])] = likeliest_path(tokens, parents)
        return proposal

    one.propose = watched  # type: ignore[method-assign]
    settings = Settings(law_6.TOKENS, num_draft_tokens=law_6.GAMMA)
    decode(law_6.native(law_6.target()), one, law_6.PROMPTS, settings)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_tree_holds_the_chain(row: HeadRow) -> None:
    head = law_6.head_of(row, law_6.target())
    chains, trees = (paths_by_text(drafter(row, head, shape)) for shape in ("chain", "tree"))
    shared = chains.keys() & trees.keys()
    compared = [(chains[text], trees[text]) for text in shared if trees[text]]
    assert len(compared) > 10 and max(len(tree) for _, tree in compared) > 1
    assert all(tree == chain[: len(tree)] for chain, tree in compared)
    other = copy.deepcopy(head)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    wrong = paths_by_text(drafter(row, other, "tree"))
    assert any(
        wrong[text] != chains[text][: len(wrong[text])] for text in chains.keys() & wrong.keys()
    ), "the control: another head's trees"
