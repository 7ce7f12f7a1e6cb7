"""States of tokens that wait for the next draft are projected as those of the whole text are."""

import pytest
import torch
from torch import Tensor

from heads.block.context import MOST_WAITING, StoredContext
from heads.block.model import BlockHead
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS

ROUNDS_B2 = [(3, 2), (1, 4), (2, 1), (4, 1), (1, 1)]  # accepted tokens and tip, of two rows
CAPACITY = 2 * MOST_WAITING


def stored(context: StoredContext, head: BlockHead) -> list[tuple[Tensor, Tensor]]:
    """Return each row's keys and values of the last layer."""
    rows, config = len(context.lengths_B), head.config
    block = torch.zeros(rows, config.num_kv_heads, config.block_size, config.head_dim)
    keys, values = context.join(config.num_layers - 1, (block, block))
    return [(keys[row, :, :n], values[row, :, :n]) for row, n in enumerate(context.lengths_B)]


@pytest.mark.parametrize("rounds", [len(ROUNDS_B2), 3 * MOST_WAITING // 4])
def test_states_that_wait_are_stored_as_those_of_the_whole_text(rounds: int) -> None:
    row = next(row for row in HEAD_ROWS if row.name == "dflash")
    head = law_6.head_of(row, law_6.target())
    width = head.fc.weight.shape[1]
    context = StoredContext(head, 2, CAPACITY)
    texts: list[list[Tensor]] = [[], []]
    for number in range(rounds):
        counts_B = ROUNDS_B2[number % len(ROUNDS_B2)]
        counts_B = tuple(
            min(pair) for pair in zip(counts_B, (CAPACITY - n for n in context.lengths_B))
        )
        states = torch.randn(2, 4, width)
        for text, taps, count in zip(texts, states, counts_B, strict=True):
            text.append(taps[:count].clone())
        context.append(states, counts_B, wait=True)
        states.zero_()  # as a target whose next forward uses the same memory
    for text, found in zip(texts, stored(context, head), strict=True):
        whole_1TX = torch.cat(text)[None]
        rope = head.rope_tables(whole_1TX.shape[1])
        keys, values = head.context(whole_1TX, rope)[-1]
        torch.testing.assert_close(found, (keys[0], values[0]))
        other = head.context(whole_1TX.roll(1, 1), rope)[-1][0][0]
        assert not torch.allclose(found[0], other), "control: states one token off"
