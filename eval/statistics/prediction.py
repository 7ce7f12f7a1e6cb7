"""Predictions from counts and costs: tokens a round, speedup, the best draft length, and whether
drafting can pay at all.

Words (the same in every table): alpha_k is the share of the draft tokens at depth k that pass, of
those that are tested at all (the k-1 before them passed); gamma is the number of draft tokens a
round; tau is tokens emitted per target forward; c = t_draft / t_target(1); V(n) = t_target(n) /
t_target(1); o is the rest of a round over t_target(1), and o_1 the same of an autoregressive step.
A round emits E(gamma) tokens and costs gamma c + V(gamma + 1) + o target forwards; without a
drafter a token costs 1 + o_1 of them:

    speedup(gamma) = E(gamma) (1 + o_1) / (gamma c + V(gamma + 1) + o)

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2211.17192,
section 3), with V measured instead of taken as 1, and o and o_1 instead of 0. Leaving o_1 out would
hold the loop's own costs against the drafter alone, and call drafters useless that are not.

Legend: D depths of a chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


def survival(alpha_D: Sequence[float | None], gamma: int) -> list[float]:
    """P(the first k draft tokens all pass) for k = 1 .. gamma: the running product of alpha.

    A depth without a measured alpha takes the deepest measured one before it (acceptance is nearly
    flat in depth). Raises ValueError when no depth was measured.
    """
    passed, last, rows = 1.0, None, []
    for depth in range(gamma):
        last = alpha_D[depth] if depth < len(alpha_D) and alpha_D[depth] is not None else last
        if last is None:
            raise ValueError("no acceptance was measured at depth 1")
        passed *= last
        rows.append(passed)
    return rows


def expected_tokens(alpha_D: Sequence[float | None], gamma: int) -> float:
    """E(gamma) = 1 + sum over k <= gamma of alpha_1 ... alpha_k: tokens a round emits, the bonus
    token included.
    """
    return 1.0 + sum(survival(alpha_D, gamma))


def expected_tokens_iid(alpha_all: float, gamma: int) -> float:
    """E(gamma) = (1 - alpha^(gamma+1)) / (1 - alpha), the closed form when alpha is the same at
    every depth.
    """
    if alpha_all == 1.0:
        return gamma + 1.0
    return (1.0 - alpha_all ** (gamma + 1)) / (1.0 - alpha_all)


CHEAP = 0.03  # of a target step: a draft step below it is no cost to save


@dataclass(frozen=True)
class Costs:
    """Measured costs of a round in units of t_target(1)."""

    # c; for a drafter that proposes in one pass, its seconds a round over t_target(1)
    cost_ratio: float
    V: Mapping[int, float]  # n -> t_target(n) / t_target(1), n new tokens
    overhead: float = 0.0  # o
    baseline_overhead: float = 0.0  # o_1
    one_pass: bool = False  # the proposal costs c whatever gamma is
    # Per round, by draft length, as measured. Empty: gamma of each, as a chain that always drafts
    # has.
    # verified: fewer where nothing was offered, more for trees
    nodes: Mapping[int, float] = field(default_factory=dict)
    # of the drafter: fewer where the model need not run for every token
    steps: Mapping[int, float] = field(default_factory=dict)
    overlapped: bool = False  # PEARL's schedule: the lanes run at the same time
    # longest draft (of trees: depth) to consider; None: all whose verification was timed
    deepest: int | None = None
    # a stopping rule chooses them: what was measured is of that cap, and says nothing of others
    own_lengths: bool = False

    def V_at(self, width: float) -> float:
        """V, linear between measured widths. Raises ValueError outside of them: V is not flat and
        has jumps.
        """
        widths = sorted(self.V)
        if not widths[0] <= width <= widths[-1]:
            raise ValueError(
                f"V({width:g}) was not measured (measured: {widths[0]} .. {widths[-1]})"
            )
        return float(np.interp(width, widths, [self.V[n] for n in widths]))

    def draft(self, gamma: float) -> float:
        """Cost of proposing gamma tokens."""
        return self.cost_ratio if self.one_pass else _between(self.steps, gamma) * self.cost_ratio

    def verify(self, gamma: float) -> float:
        """Cost of the target forward over the proposal and the token before it."""
        return self.V_at(1 + _between(self.nodes, gamma))

    def round(self, gamma: float) -> float:
        """gamma c + V(gamma + 1) + o."""
        return self.draft(gamma) + self.verify(gamma) + self.overhead

    @property
    def gammas(self) -> range:
        """The draft lengths whose verification was timed."""
        longest = self.deepest or int(max(self.V)) - 1
        if self.own_lengths:
            return range(longest, longest + 1)
        return range(
            1,
            max(
                g
                for g in range(1, longest + 1)
                if g == 1 or 1 + _between(self.nodes, g) <= max(self.V)
            )
            + 1,
        )


def _between(by_gamma: Mapping[int, float], gamma: float) -> float:
    """The value at gamma: linear from (0, 0) through the measured ones, and on in proportion; gamma
    itself where none was measured.
    """
    if not by_gamma:
        return gamma
    last = max(by_gamma)
    if gamma > last:
        return by_gamma[last] * gamma / last
    lengths = sorted(by_gamma)
    return float(np.interp(gamma, [0, *lengths], [0.0, *(by_gamma[length] for length in lengths)]))


def pearl_round(alpha_all: float, gamma: int, costs: Costs) -> tuple[float, float]:
    """(tokens, cost in target steps) of PEARL's mean round, at an acceptance that is the same at
    every depth.

    A pre-verify round yields a token and leads to post-verify with probability alpha; a post-verify
    round tests gamma tokens and stays there if all pass. In the long run post-verify's share is
    alpha / (1 + alpha - alpha^gamma), and a round yields (1 - alpha^gamma) / ((1 - alpha) (1 +
    alpha - alpha^gamma)) tokens. Each costs its longer lane and what does not overlap.
    """
    whole = alpha_all**gamma
    post = alpha_all / (1.0 + alpha_all - whole)
    tokens = (1.0 - post) + post * (
        gamma if alpha_all == 1.0 else (1.0 - whole) / (1.0 - alpha_all)
    )
    draft = costs.draft(gamma)
    lanes = (1.0 - post) * max(draft, costs.V_at(1)) + post * max(draft, costs.V_at(gamma))
    return tokens, lanes + costs.overhead


def mean_round(alpha_D: Sequence[float | None], gamma: int, costs: Costs) -> tuple[float, float]:
    """(tokens, cost in target steps) of a round."""
    if costs.overlapped:
        return pearl_round(survival(alpha_D, 1)[0], gamma, costs)
    return expected_tokens(alpha_D, gamma), costs.round(gamma)


def predicted_speedup(alpha_D: Sequence[float | None], gamma: int, costs: Costs) -> float:
    """E(gamma) (1 + o_1) / (gamma c + V(gamma + 1) + o), or the same of `pearl_round`."""
    tokens, cost = mean_round(alpha_D, gamma, costs)
    return tokens * (1.0 + costs.baseline_overhead) / cost


def best_gamma(alpha_D: Sequence[float | None], costs: Costs) -> tuple[int, float]:
    """(gamma, predicted speedup) of the best draft length among those whose V was measured; ties to
    the shorter.
    """
    return max(
        ((g, predicted_speedup(alpha_D, g, costs)) for g in costs.gammas),
        key=lambda pair: (pair[1], -pair[0]),
    )


def breakeven_alpha(gamma: int, costs: Costs) -> float | None:
    """The alpha, equal at all depths, at which this gamma neither wins nor loses; None when alpha =
    1 loses too.

    Bisection on E(gamma) (1 + o_1) = cost of the round; E is increasing in alpha.
    """
    cost = costs.round(gamma) / (1.0 + costs.baseline_overhead)
    if cost > gamma + 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens_iid(middle, gamma) < cost else (low, middle)
    return high


def iso_cost_ratio(speedup: float, alpha_all: float, costs: Costs) -> float:
    """The cost ratio c at which a chain with this alpha at all depths just reaches `speedup`, each
    at its own best gamma.

    The formula on top solved for c, max over gamma of (E(gamma) (1 + o_1) / speedup - V(gamma + 1)
    - o) / gamma: any cheaper drafter is faster. Not above 0 where no drafter with this alpha gets
    there. V, o and o_1 are those of `costs`, whose own c is not looked at.
    """
    return max(
        (
            expected_tokens_iid(alpha_all, gamma) * (1.0 + costs.baseline_overhead) / speedup
            - costs.verify(gamma)
            - costs.overhead
        )
        / gamma
        for gamma in costs.gammas
    )


@dataclass(frozen=True)
class Verdict:
    """Whether drafting can pay, from measured alpha_k, V, c and o alone."""

    helps: bool
    gamma: int  # the best draft length, also where it loses
    speedup: float  # predicted at that gamma
    text: str


def verdict(alpha_D: Sequence[float | None], costs: Costs) -> Verdict:
    """No gamma can help when max over gamma of the predicted speedup <= 1; else the best gamma; and
    why, in words.
    """
    gamma, speedup = best_gamma(alpha_D, costs)
    tokens, cost = mean_round(alpha_D, gamma, costs)
    doubt = (
        ""
        if costs.overhead >= 0
        else ", noise of the clock"
        if costs.overhead > -0.05
        else ", so the parts were timed on a slower machine"
    )
    rest = f"the rest {costs.overhead:.2f}{doubt}"
    together = ", at the same time" if costs.overlapped else ""
    bill = (
        f"a round{'' if costs.own_lengths else f' at gamma={gamma}'} yields {tokens:.2f} tokens "
        f"and costs {cost:.2f} target steps (drafting {costs.draft(gamma):.2f}, verifying "
        f"{costs.verify(gamma):.2f}{together}, {rest}), where one token without a drafter costs "
        f"{1 + costs.baseline_overhead:.2f}"
    )
    if costs.own_lengths:
        return Verdict(speedup > 1.0, gamma, speedup, f"by the formula {speedup:.2f}x: {bill}")
    if speedup > 1.0:
        return Verdict(
            True, gamma, speedup, f"the formula's best is gamma={gamma}, {speedup:.2f}x: {bill}"
        )
    if costs.overlapped:
        return Verdict(
            False,
            gamma,
            speedup,
            f"no gamma can help (best {speedup:.2f}x): {bill}; try the serial schedule",
        )
    need = breakeven_alpha(gamma, costs)
    if need is None:
        remedy = "even a drafter that is always right would lose at these costs"
    else:
        remedy = f"at these costs it would break even at alpha {need:.2f}"
    if costs.draft(1) > CHEAP:
        remedy += "; or make a draft step cheaper"
    return Verdict(
        False, gamma, speedup, f"no gamma can help (best {speedup:.2f}x): {bill}; {remedy}"
    )
