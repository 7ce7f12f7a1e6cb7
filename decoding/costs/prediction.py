"""The speedup formula: tokens per round, the best draft length, and whether drafting can pay.

alpha_k is the acceptance rate at depth k: accepted over tested draft tokens, given that the k - 1
tokens before were accepted. gamma is the draft length, c is t_draft / t_target(1), and V(n) is
t_target(n) / t_target(1). o is the rest of a round over t_target(1), and o_1 the rest of an
autoregressive step over t_target(1). A round emits E(gamma) tokens and costs gamma c + V(gamma + 1)
+ o target steps; without a drafter a token costs 1 + o_1:

    speedup(gamma) = E(gamma) (1 + o_1) / (gamma c + V(gamma + 1) + o)

Source: Leviathan et al. 2023 (arXiv 2211.17192, section 3), with V, o and o_1 measured instead of
1, 0 and 0. Without o_1 the loop's own costs would count against the drafter alone.

Shapes: D depths of a chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from decoding.interfaces import RoundCosts


def survival(alpha_D: Sequence[float | None], gamma: int) -> list[float]:
    """Return P(the first k draft tokens are accepted) for k = 1 .. gamma.

    A depth without a measured alpha takes the alpha of the nearest measured depth above it, as
    acceptance is nearly flat in depth. Raises ValueError if depth 1 was not measured.
    """
    accepted, last, products = 1.0, None, []
    for depth in range(gamma):
        last = alpha_D[depth] if depth < len(alpha_D) and alpha_D[depth] is not None else last
        if last is None:
            raise ValueError("no acceptance was measured at depth 1")
        accepted *= last
        products.append(accepted)
    return products


def expected_tokens(alpha_D: Sequence[float | None], gamma: int) -> float:
    """Return E(gamma), the expected tokens per round, the bonus token included.

    It is 1 plus the sum over k <= gamma of alpha_1 ... alpha_k. With the same alpha at all depths
    this is (1 - alpha^(gamma + 1)) / (1 - alpha).
    """
    return 1.0 + sum(survival(alpha_D, gamma))


@dataclass(frozen=True)
class Costs:
    """Measured costs of a round in units of t_target(1)."""

    # c; for a drafter that proposes in one pass, its seconds per round over t_target(1)
    cost_ratio: float
    V: Mapping[int, float]  # n -> t_target(n) / t_target(1), n new tokens
    overhead: float = 0.0  # o
    baseline_overhead: float = 0.0  # o_1
    one_pass: bool = False  # the proposal costs c, whatever gamma is
    # Mean verified nodes and draft steps of a round, by draft length; empty: gamma of each, as in a
    # chain. There are fewer nodes if some rounds propose nothing, and more in trees.
    nodes: Mapping[int, float] = field(default_factory=dict)
    steps: Mapping[int, float] = field(default_factory=dict)
    overlapped: bool = False  # PEARL's schedule: the lanes run at the same time
    deepest: int | None = None  # longest draft or deepest tree to consider; None: all timed ones
    policy_lengths: bool = False  # a stopping policy chooses lengths, up to `deepest` alone
    unreliable: str = ""  # why a prediction is unreliable, as a clause; empty: it is reliable

    @classmethod
    def of_chain(cls, costs: RoundCosts, one_pass: bool) -> Costs:
        """Return the costs of a chain, from a round's measured milliseconds.

        one_pass: whether `costs.t_draft_ms` is the time of a complete draft.
        """
        t_1 = costs.target_ms(1)
        return cls(
            costs.t_draft_ms / t_1,
            {n: ms / t_1 for n, ms in enumerate(costs.t_target_ms, start=1)},
            overhead=costs.overhead_ms / t_1,
            baseline_overhead=costs.plain_ms / t_1 - 1.0,
            one_pass=one_pass,
            unreliable=costs.unreliable,
        )

    def V_at(self, width: float) -> float:
        """Return V(width), interpolated linearly between measured widths.

        Raises ValueError for a width outside the measured range, where V may jump.
        """
        widths = sorted(self.V)
        if not widths[0] <= width <= widths[-1]:
            raise ValueError(
                f"V({width:g}) was not measured (measured: {widths[0]} .. {widths[-1]})"
            )
        return float(np.interp(width, widths, [self.V[n] for n in widths]))

    def draft(self, gamma: float) -> float:
        """Return the cost of drafting to length gamma."""
        return (
            self.cost_ratio if self.one_pass else _interpolate(self.steps, gamma) * self.cost_ratio
        )

    def verify(self, gamma: float) -> float:
        """Return the cost of the target forward over the proposal and the token before it."""
        return self.V_at(1 + _interpolate(self.nodes, gamma))

    def round(self, gamma: float) -> float:
        """Return the cost of a round; for a chain it is gamma c + V(gamma + 1) + o."""
        return self.draft(gamma) + self.verify(gamma) + self.overhead

    @property
    def gammas(self) -> list[int]:
        """The draft lengths to consider, from 1 on.

        They end at `deepest` and at the widest timed forward. Under a stopping policy the longest
        one alone is considered.
        """
        longest = self.deepest or max(self.V) - 1
        if self.policy_lengths:
            return [longest]
        timed = [g for g in range(1, longest + 1) if 1 + _interpolate(self.nodes, g) <= max(self.V)]
        return timed or [1]


def _interpolate(by_gamma: Mapping[int, float], gamma: float) -> float:
    """Return the value at gamma, or gamma itself if no values were measured.

    Values are interpolated linearly from (0, 0) on, and proportional to gamma beyond the last one.
    """
    if not by_gamma:
        return gamma
    last = max(by_gamma)
    if gamma > last:
        return by_gamma[last] * gamma / last
    lengths, values = zip(*sorted({0: 0.0, **by_gamma}.items()))
    return float(np.interp(gamma, lengths, values))


def pearl_round(alpha: float, gamma: int, costs: Costs) -> tuple[float, float]:
    """Return (tokens, cost in target steps) of PEARL's mean round, at the same alpha at all depths.

    A pre-verify round emits one token and leads to post-verify with probability alpha. A
    post-verify round tests gamma tokens and stays in that phase if all are accepted. The stationary
    share of post-verify is alpha / (1 + alpha - alpha^gamma). A round costs its longer lane plus
    the rest.
    """
    complete = alpha**gamma
    post = alpha / (1.0 + alpha - complete)
    tokens = (1.0 - post) + post * expected_tokens([alpha], gamma - 1)
    draft = costs.draft(gamma)
    lanes = (1.0 - post) * max(draft, costs.V_at(1)) + post * max(draft, costs.V_at(gamma))
    return tokens, lanes + costs.overhead


def chain_speedup(tokens: float, gamma: int, costs: Costs) -> float:
    """Return the speedup of a chain that emits `tokens` tokens per round at draft length gamma."""
    return tokens * (1.0 + costs.baseline_overhead) / costs.round(gamma)


def predicted_speedup(alpha_D: Sequence[float | None], gamma: int, costs: Costs) -> float:
    """Return the predicted speedup at draft length gamma.

    With overlapped costs it is the speedup of PEARL, with alpha_1 at all depths.
    """
    if costs.overlapped:
        tokens, cost = pearl_round(survival(alpha_D, 1)[0], gamma, costs)
        return tokens * (1.0 + costs.baseline_overhead) / cost
    return chain_speedup(expected_tokens(alpha_D, gamma), gamma, costs)


def best_gamma(alpha_D: Sequence[float | None], costs: Costs) -> tuple[int, float]:
    """Return the draft length with the largest predicted speedup, and this speedup.

    Ties go to the shorter one.
    """
    return max(
        ((gamma, predicted_speedup(alpha_D, gamma, costs)) for gamma in costs.gammas),
        key=lambda pair: (pair[1], -pair[0]),
    )


def breakeven_alpha(gamma: int, costs: Costs, speedup: float = 1.0) -> float | None:
    """Return the alpha, equal at all depths, at which the predicted speedup is `speedup`.

    Overlap is ignored. Returns None if the speedup is lower even at alpha = 1. The search is a
    bisection, as E increases with alpha.
    """
    tokens = speedup * costs.round(gamma) / (1.0 + costs.baseline_overhead)
    if tokens > gamma + 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens([middle], gamma) < tokens else (low, middle)
    return high


def needed_alpha(speedup: float, costs: Costs) -> tuple[float, int] | None:
    """Return the smallest alpha, equal at all depths, that reaches a speedup, and its draft length.

    Returns None if no draft length reaches it even at alpha = 1. Ties go to the shorter draft.
    """
    found = [(breakeven_alpha(gamma, costs, speedup), gamma) for gamma in costs.gammas]
    return min(((alpha, gamma) for alpha, gamma in found if alpha is not None), default=None)


def iso_cost_ratio(speedup: float, alpha: float, costs: Costs) -> float:
    """Return the largest c at which a chain with this alpha at all depths reaches `speedup`.

    It is the solution of the formula for c at the best gamma; the c of `costs` is ignored. The
    result is at most 0 if no drafter with this alpha reaches the speedup.
    """
    budget = (1.0 + costs.baseline_overhead) / speedup
    return max(
        (expected_tokens([alpha], gamma) * budget - costs.verify(gamma) - costs.overhead) / gamma
        for gamma in costs.gammas
    )


@dataclass(frozen=True)
class Verdict:
    """A verdict on whether drafting can pay, from measured alpha_k, V, c and o alone."""

    helps: bool
    gamma: int  # the best draft length, even if it loses
    speedup: float  # predicted at that gamma
    text: str


def verdict(alpha_D: Sequence[float | None], costs: Costs) -> Verdict:
    """Return the verdict: drafting helps if the best draft length's predicted speedup exceeds 1."""
    gamma, speedup = best_gamma(alpha_D, costs)
    found = f"predicted {speedup:.2f}x"
    if not costs.policy_lengths:
        found = f"best gamma={gamma}, {found}"
    if speedup > 1.0:
        return Verdict(True, gamma, speedup, found)
    if costs.policy_lengths:
        return Verdict(False, gamma, speedup, f"no gain ({found})")
    text = f"no gamma can help ({found})"
    if not costs.overlapped:
        need = breakeven_alpha(gamma, costs)
        text += "; even alpha 1 would lose" if need is None else f"; break-even alpha {need:.2f}"
    return Verdict(False, gamma, speedup, text)
