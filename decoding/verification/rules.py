"""Verification rules: which drafted tokens are kept, and which token follows them.

Each rule is one function (target logits, proposal, chooser, readback) -> Outcome, batched over rows
with their own draft counts. `greedy` and `coupled` let the target choose a token at every node and
follow the children that equal it; `token` tests drawn tokens one by one by p/q (Leviathan et al.
2023, arXiv 2211.17192, Algorithm 1), `block` all of them together (Sun et al. 2025, arXiv
2403.10444); both take q for a point mass where the proposal has none. All keep the target's
distribution; `coupled` also keeps its very tokens. On a GPU a round waits once for what they
decided: `greedy` and `coupled` read the target's choices, `token` and `block` have twins that do
(decoding/verification/device_chain.py for chains, decoding/verification/device_tree.py for trees).

Shapes: B rows, N drafted tokens, V vocabulary. Logits have one node more than the proposal: the tip
comes first.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from decoding import devices
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Outcome, Proposal, Readback, ancestors
from decoding.sampling import noise
from decoding.sampling.warpers import draw
from decoding.verification import device_chain, device_tree
from decoding.verification.tail_rejection import among_candidates

Rule = Callable[[Tensor, Proposal | None, Chooser, Readback], Outcome]


def check_rule(verify: str, temperature: float, capabilities: Capabilities, name: str) -> None:
    """Raise UserError for a rule that cannot verify what a drafter of this name proposes; greedy
    decoding follows trees whatever `verify` is.
    """
    if verify == "block" and temperature > 0 and capabilities.shape == "tree":
        raise UserError(
            f"drafter {name} proposes trees, and verify=block tests chains: take verify=token or "
            f"verify=coupled, or a drafter of chains (of beams a single one, beam_width=1)."
        )


def greedy(
    logits_BNV: Tensor, proposal: Proposal | None, chooser: Chooser, read: Readback = devices.read
) -> Outcome:
    """Keep drafted tokens that are the target's argmax."""
    return follow(logits_BNV.argmax(-1), proposal, read)


def coupled(
    logits_BNV: Tensor, proposal: Proposal | None, chooser: Chooser, read: Readback = devices.read
) -> Outcome:
    """Keep drafted tokens that are the target's own sample under the shared noise."""
    depths_BN = None
    if proposal is not None and proposal.parents_BN is not None:
        depths_BN = torch.nn.functional.pad(ancestors(proposal.parents_BN).sum(-1), (1, 0))
        depths_BN.clamp_(max=chooser.depths - 1)  # what lies deeper rides along and is not verified
    return follow(chooser.race(logits_BNV, 0, depths_BN), proposal, read)


def follow(choices_BN: Tensor, proposal: Proposal | None, read: Readback) -> Outcome:
    """Walk from the tip to the child that equals the target's choice, as long as there is one."""
    if proposal is None:
        (choices,) = read(choices_BN)
        return Outcome(choices, None, [0] * len(choices), [0] * len(choices))
    if proposal.parents_BN is not None:
        choices, drafted, parents = read(choices_BN, proposal.tokens_BN, proposal.parents_BN)
        return _follow_tree(choices, drafted, parents, proposal)
    choices, drafted = read(choices_BN, proposal.tokens_BN)
    accepted_B = [
        next((n for n in range(count) if row[n] != wanted[n]), count)
        for row, wanted, count in zip(drafted, choices, proposal.counts_B, strict=True)
    ]
    tokens_B = [
        wanted[: accepted + 1] for wanted, accepted in zip(choices, accepted_B, strict=True)
    ]
    return Outcome(tokens_B, None, accepted_B, _tested(accepted_B, proposal.counts_B))


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


def _tested(accepted_B: Sequence[int], counts_B: Sequence[int]) -> list[int]:
    return [
        accepted + (accepted < count) for accepted, count in zip(accepted_B, counts_B, strict=True)
    ]


def token(
    logits_BNV: Tensor, proposal: Proposal | None, chooser: Chooser, read: Readback = devices.read
) -> Outcome:
    """Keep x drawn from q with probability min(1, p(x) / q(x)); after the first failure draw from
    max(p - q, 0).

    A proposal without q is a point mass: keep x with probability p(x), else draw from p without x.
    In a tree siblings are tested in turn, each against what the failed ones left (recursive
    rejection, Yang et al. 2024, arXiv 2401.06706, section 3.2).
    """
    if proposal is not None and proposal.parents_BN is not None:
        if devices.runs_ahead(logits_BNV.device):
            return device_tree.token(logits_BNV, proposal, chooser, read)
        return _recursive(logits_BNV, proposal, chooser)
    probs_BNV = chooser.warper.probs(logits_BNV)
    B = len(probs_BNV)
    if proposal is None:
        (next_B,) = read(
            draw(probs_BNV[:, 0], [chooser.uniform(b, 0, noise.BONUS) for b in range(B)])
        )
        return Outcome([[token] for token in next_B], None, [0] * B, [0] * B)
    if devices.runs_ahead(probs_BNV.device):
        return device_chain.token(probs_BNV, proposal, chooser, read)
    counts_B, drafted = proposal.counts_B, proposal.tokens_BN.tolist()
    p_BN, q_BN = _probabilities(probs_BNV, proposal)
    accepted_B = []
    for b, count in enumerate(counts_B):
        passed = (
            chooser.uniform(b, n, noise.ACCEPT) * q_BN[b][n] < p_BN[b][n] for n in range(count)
        )
        accepted_B.append(next((n for n, kept in enumerate(passed) if not kept), count))
    weights_BV = _final_weights(probs_BNV, proposal, accepted_B)
    purposes = [
        noise.BONUS if accepted == count else noise.RESIDUAL
        for accepted, count in zip(accepted_B, counts_B)
    ]
    uniforms = [chooser.uniform(b, accepted_B[b], purposes[b]) for b in range(B)]
    next_B = draw(weights_BV, uniforms).tolist()
    tokens_B = [[*drafted[b][: accepted_B[b]], next_B[b]] for b in range(B)]
    return Outcome(tokens_B, None, accepted_B, _tested(accepted_B, counts_B))


def _recursive(logits_BNV: Tensor, proposal: Proposal, chooser: Chooser) -> Outcome:
    """`token` on a tree whose siblings were drawn without replacement, or are point masses. Logits
    are warped where the walk comes by.
    """
    assert proposal.parents_BN is not None
    drafted, parents = proposal.tokens_BN.tolist(), proposal.parents_BN.tolist()
    paths_B: list[list[int]] = [[] for _ in drafted]
    tested_B, next_B = [0] * len(drafted), [0] * len(drafted)
    going, depth = list(range(len(drafted))), 0
    while going:
        at_R = [paths_B[b][-1] + 1 if paths_B[b] else 0 for b in going]
        rows_RV = logits_BNV[going, at_R] if len(drafted) > 1 else logits_BNV[:, at_R[0]]
        ended, weights = [], []
        for b, node, p_V in zip(going, at_R, chooser.warper.probs(rows_RV), strict=True):
            children = [n for n in range(proposal.counts_B[b]) if parents[b][n] == node - 1]
            uniform = partial(_test_number, chooser, b, depth)
            if proposal.q_top is not None and children:
                passed, left_V = among_candidates(
                    children, drafted[b], p_V, *proposal.q_top.at(b, node), uniform
                )
            else:
                q_V = (
                    proposal.q_BNV[b, children[0]]
                    if children and proposal.q_BNV is not None
                    else None
                )
                passed, left_V = _one_by_one(children, drafted[b], p_V, q_V, uniform)
            tested_B[b] += bool(children)
            if passed is None:
                ended.append((b, noise.RESIDUAL if children else noise.BONUS))
                weights.append(left_V)
            else:
                paths_B[b].append(passed)
        if ended:
            drawn = draw(
                torch.stack(weights), [chooser.uniform(b, depth, purpose) for b, purpose in ended]
            ).tolist()
            for (b, _), token in zip(ended, drawn, strict=True):
                next_B[b] = token
        going, depth = [b for b in going if len(paths_B[b]) > depth], depth + 1
    tokens_B = [[*(drafted[b][n] for n in path), next_B[b]] for b, path in enumerate(paths_B)]
    return Outcome(tokens_B, paths_B, [len(path) for path in paths_B], tested_B)


def _test_number(chooser: Chooser, row: int, depth: int, node: int) -> float:
    return chooser.uniform(row, depth, noise.ACCEPT, node)


def _one_by_one(
    children: list[int],
    tokens: list[int],
    p_V: Tensor,
    q_V: Tensor | None,
    uniform: Callable[[int], float],
) -> tuple[int | None, Tensor]:
    """The first child that passes, and what those before it left of p: p and q are made anew after
    every failure. q_V: None for point masses.
    """
    failed: set[int] = set()
    for child in children:
        token = tokens[child]
        if token in failed:  # nothing was drawn there (`sampling.draw_different`)
            continue
        p, q = p_V[token].item(), 1.0 if q_V is None else q_V[token].item()
        if uniform(child) * q < p and q > 0:
            return child, p_V
        p_V, q_V = _after_failure(p_V, q_V, token)
        failed.add(token)
    return None, p_V


def _after_failure(p_V: Tensor, q_V: Tensor | None, token: int) -> tuple[Tensor, Tensor | None]:
    """p and q that the next sibling is tested by: what q left of p, and q without the
    failed token.
    """
    without_V = p_V.clone() if q_V is None else q_V.clone()
    without_V[token] = 0.0
    residual_V = without_V if q_V is None else (p_V - q_V).clamp_(min=0)
    total = residual_V.sum()
    # p = q up to rounding: see `_final_weights`
    residual_V = residual_V / total if total > 0 else p_V
    return residual_V, None if q_V is None else without_V / without_V.sum().clamp(min=1e-30)


def block(
    logits_BNV: Tensor, proposal: Proposal | None, chooser: Chooser, read: Readback = devices.read
) -> Outcome:
    """Keep the longest beginning of the chain that passes a test of its own; never shorter on
    average than `token`'s.

    With w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)) and s_i = sum_x max(w_i p(x | x_1..i) - q(x
    | x_1..i), 0), the first i tokens pass with probability h_i = s_i / (s_i + 1 - w_i), all of them
    with h_gamma = w_gamma (Sun et al. 2025, arXiv 2403.10444, Algorithm 2). The longest that passes
    is kept; then max(w_i p - q, 0) is drawn from, or p after the whole chain.
    """
    if proposal is None:
        return token(logits_BNV, None, chooser, read)
    if proposal.parents_BN is not None:
        raise ValueError(
            "verify=block tests chains; a tree needs a rule that updates the residual between "
            "siblings"
        )
    probs_BNV = chooser.warper.probs(logits_BNV)
    q_BNV = _dense(proposal, probs_BNV)
    if devices.runs_ahead(probs_BNV.device):
        return device_chain.block(probs_BNV, q_BNV, proposal, chooser, read)
    counts_B, drafted = proposal.counts_B, proposal.tokens_BN.tolist()
    # w_0 .. w_N
    w_BN = [_running_ratios(*pair) for pair in zip(*_probabilities(probs_BNV, proposal))]
    weights_BN1 = torch.tensor(w_BN, dtype=probs_BNV.dtype, device=probs_BNV.device)[:, :-1, None]
    # of w_i p over q after i tokens, i < N
    surplus_BNV = (weights_BN1 * probs_BNV[:, :-1] - q_BNV).clamp_(min=0)
    s_BN = surplus_BNV.sum(-1).tolist()
    accepted_B = []
    for b, count in enumerate(counts_B):
        # The uniforms are independent, so it does not matter that a longer beginning is asked
        # first.
        passed = (
            chooser.uniform(b, i - 1, noise.ACCEPT) <= _chance(s_BN[b], w_BN[b], i, count)
            for i in range(count, 0, -1)
        )
        accepted_B.append(next((count - n for n, kept in enumerate(passed) if kept), 0))
    weights_BV = at_nodes(probs_BNV, accepted_B)
    failed = [b for b, count in enumerate(counts_B) if accepted_B[b] < count]
    if failed:
        residual_FV = at_nodes(surplus_BNV[failed], [accepted_B[b] for b in failed])
        # w p = q up to rounding leaves no residual, and the failed test was one of probability
        # zero: then p itself is right.
        keep_F1 = residual_FV.sum(-1, keepdim=True) > 0
        weights_BV = weights_BV.clone()
        weights_BV[failed] = torch.where(keep_F1, residual_FV, weights_BV[failed])
    purposes = [
        noise.BONUS if accepted == count else noise.RESIDUAL
        for accepted, count in zip(accepted_B, counts_B)
    ]
    uniforms = [
        chooser.uniform(b, accepted, purpose)
        for b, (accepted, purpose) in enumerate(zip(accepted_B, purposes))
    ]
    next_B = draw(weights_BV, uniforms).tolist()
    tokens_B = [[*drafted[b][:accepted], next_B[b]] for b, accepted in enumerate(accepted_B)]
    return Outcome(tokens_B, None, accepted_B, _tested(accepted_B, counts_B))


def _running_ratios(p_N: Sequence[float], q_N: Sequence[float]) -> list[float]:
    """w_0 = 1 and w_i = min(1, w_(i-1) p_i / q_i) for i = 1 .. N. A padded node (q = 0) counts as
    ratio 0.
    """
    ratios = [1.0]
    for p, q in zip(p_N, q_N, strict=True):
        ratios.append(min(1.0, ratios[-1] * p / q) if q > 0 else 0.0)
    return ratios


def _chance(s_N: Sequence[float], w_N: Sequence[float], i: int, count: int) -> float:
    """h_i of `block`."""
    if i == count:
        return w_N[i]
    rest = s_N[i] + 1 - w_N[i]
    return s_N[i] / rest if rest > 0 else 1.0


def _dense(proposal: Proposal, probs_BNV: Tensor) -> Tensor:
    """q of every drafted token over the vocabulary; a point mass where the proposal has none."""
    if proposal.q_BNV is not None:
        return proposal.q_BNV
    return torch.zeros_like(probs_BNV[:, :-1]).scatter_(-1, proposal.tokens_BN[:, :, None], 1.0)


def _probabilities(
    probs_BNV: Tensor, proposal: Proposal
) -> tuple[list[list[float]], list[list[float]]]:
    """p and q of each drafted token."""
    tokens_BN1 = proposal.tokens_BN[:, :, None]
    p_BN = probs_BNV[:, :-1].gather(-1, tokens_BN1).squeeze(-1).tolist()
    if proposal.q_BNV is None:
        return p_BN, [[1.0] * len(row) for row in p_BN]
    return p_BN, proposal.q_BNV.gather(-1, tokens_BN1).squeeze(-1).tolist()


def _final_weights(probs_BNV: Tensor, proposal: Proposal, accepted_B: list[int]) -> Tensor:
    """Unnormalised distribution of the token after the accepted ones: p, or the residual where a
    test failed.
    """
    failed = [b for b, count in enumerate(proposal.counts_B) if accepted_B[b] < count]
    weights_BV = at_nodes(probs_BNV, accepted_B)
    if not failed:
        return weights_BV
    # a slice is a view, a list a copy
    rows = slice(None) if len(failed) == len(accepted_B) else failed
    nodes = [accepted_B[b] for b in failed]
    p_FV = weights_BV[rows]
    if proposal.q_BNV is None:
        tokens_F1 = at_nodes(proposal.tokens_BN[rows], nodes)[:, None]
        residual_FV = p_FV.scatter(1, tokens_F1, 0.0)
    else:
        residual_FV = (p_FV - at_nodes(proposal.q_BNV[rows], nodes)).clamp_(min=0)
    # p = q up to rounding leaves no residual, and the failed test was one of probability zero: then
    # p itself is right.
    residual_FV = torch.where(residual_FV.sum(-1, keepdim=True) > 0, residual_FV, p_FV)
    if len(failed) == len(accepted_B):
        return residual_FV
    weights_BV = weights_BV.clone()
    weights_BV[rows] = residual_FV
    return weights_BV


def at_nodes(values_BN: Tensor, nodes_B: list[int]) -> Tensor:
    """values_BN[b, nodes_B[b]] for each row; a view for one row."""
    if len(nodes_B) == 1:
        return values_BN[:, nodes_B[0]]
    index_B = devices.tensor(nodes_B, values_BN.device)
    return values_BN[torch.arange(len(nodes_B), device=values_BN.device), index_B]


RULES: dict[str, Rule] = {"greedy": greedy, "token": token, "block": block, "coupled": coupled}
