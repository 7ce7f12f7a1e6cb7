"""The rules `greedy` and `coupled`, on chains and trees: accept what equals the target's choice.

The target chooses a token at every node, and the walk continues through the child that equals it.
Both rules keep the target's distribution; with a given seed, `coupled` also emits the tokens that
the target alone would sample.

Shapes: B rows, N drafted tokens, V vocabulary. Logits have one node more than the proposal: the tip
comes first.
"""

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Outcome, Proposal, Readback, ancestors
from decoding.verification.nodes import tested


def greedy(
    logits_BNV: Tensor,
    proposal: Proposal | None,
    chooser: Chooser,
    readback: Readback = devices.read,
) -> Outcome:
    """Accept drafted tokens while they equal the target's argmax."""
    return follow(devices.argmax(logits_BNV), proposal, readback)


def coupled(
    logits_BNV: Tensor,
    proposal: Proposal | None,
    chooser: Chooser,
    readback: Readback = devices.read,
) -> Outcome:
    """Accept drafted tokens while they equal the target's sample under the shared noise."""
    depths_BN = None
    if proposal is not None and proposal.parents_BN is not None:
        depths_BN = torch.nn.functional.pad(ancestors(proposal.parents_BN).sum(-1), (1, 0))
        depths_BN.clamp_(max=chooser.depths - 1)  # deeper nodes are not verified
    return follow(chooser.race(logits_BNV, 0, depths_BN), proposal, readback)


def follow(choices_BN: Tensor, proposal: Proposal | None, readback: Readback) -> Outcome:
    """Accept drafted tokens while they equal the target's choices.

    choices_BN: the target's token after the tip and after each drafted token, (B, N + 1).
    """
    if proposal is None:
        (choices,) = readback(choices_BN)
        return Outcome(choices, None, [0] * len(choices), [0] * len(choices))
    if proposal.parents_BN is not None:
        choices, drafted, parents = readback(choices_BN, proposal.tokens_BN, proposal.parents_BN)
        return _follow_tree(choices, drafted, parents, proposal)
    choices, drafted = readback(choices_BN, proposal.tokens_BN)
    accepted_B = [
        next((n for n in range(count) if row[n] != wanted[n]), count)
        for row, wanted, count in zip(drafted, choices, proposal.counts_B, strict=True)
    ]
    tokens_B = [row[: accepted + 1] for row, accepted in zip(choices, accepted_B, strict=True)]
    return Outcome(tokens_B, None, accepted_B, tested(accepted_B, proposal.counts_B))


def _follow_tree(
    choices: list[list[int]], drafted: list[list[int]], parents: list[list[int]], proposal: Proposal
) -> Outcome:
    tokens_B, paths_B, tested_B = [], [], []
    for wanted, tokens, parent_of, count in zip(
        choices, drafted, parents, proposal.counts_B, strict=True
    ):
        path: list[int] = []
        tip = -1
        while True:
            children = [n for n in range(count) if parent_of[n] == tip]
            match = next((n for n in children if tokens[n] == wanted[tip + 1]), None)
            if match is None:
                break
            path.append(match)
            tip = match
        paths_B.append(path)
        tokens_B.append([wanted[node + 1] for node in [-1, *path]])
        tested_B.append(len(path) + bool(children))
    return Outcome(
        tokens_B, paths_B, [len(path) for path in paths_B], tested_B, proposal.drafted(parents)
    )
