"""Dynamic batch loading: rows sampled from named domains by shares that follow held-out figures.

A drafter is judged by its worst domain, and the best mixture changes as training goes on. Shares
change at evaluations only. They follow the gap to reference losses (Sheared-LLaMA, arXiv
2310.06694, section 2.2 and appendix A, algorithm 1) or the gap in held-out acceptance. The latter
is our method: acceptance is a drafter's purpose and needs no reference model.

A step's rows are a pure function of (seed, step, shares so far). A generator keyed by seed and step
samples each row's domain, and every domain has separate shuffled epochs. A checkpoint stores only
the position in each domain and the current shares.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

from decoding.errors import UserError
from decoding.values import check_choice
from training.config import DataConfig
from training.data.packing import PackedData, Sample
from training.data.token_store import JoinedSamples

MIXINGS = ("fixed", "loss", "acceptance")
EXHAUSTED = ("wrap", "stop")
# third word of the sampling key, which differs from the keys of the epochs' orders
_SAMPLING = 1


class MixedData(PackedData):
    """PackedData in which every row belongs to one domain; `samples` are ordered by domain."""

    def __init__(
        self,
        domains: Mapping[str, Sequence[Sample]],
        config: DataConfig,
        rows_per_step: int,
        seed: int,
    ) -> None:
        """Pack the samples of each domain; `config` holds shares, references and rules.

        Raises UserError for a domain without supervised tokens, and with
        data.when_exhausted=stop for one that is too small for the first step.
        """
        self.config = config
        self.domains = {
            name: _pack(name, samples, config.max_length, rows_per_step, seed)
            for name, samples in domains.items()
        }
        ends = accumulate(len(of.samples) for of in self.domains.values())
        self._start = dict(zip(self.domains, chain((0,), ends), strict=False))
        samples = JoinedSamples([of.samples for of in self.domains.values()])
        rows = [self._shift(name, row) for name, of in self.domains.items() for row in of.rows]
        super().__init__(samples, config.max_length, rows_per_step, seed, rows)
        self.load({})
        if self.ended:
            raise UserError(
                f"{self.ended}. Add text to this domain, or lower its share or loop.tokens_per_step"
            )

    def step_rows(self, step: int) -> list[list[int]]:
        """Return the rows of step `step`, which must be the next one, and advance by one step.

        Raises ValueError if steps are not requested in order, once each.
        """
        if step != self.step:
            raise ValueError(
                f"step {step} was requested, but the next one is {self.step}. Load a state first"
            )
        rows = []
        for name in self._sample_domains():
            rows.append(self._shift(name, self.domains[name].row(self.used[name])))
            self.used[name] += 1
        self.step += 1
        return rows

    def state(self) -> dict[str, Any]:
        """Return the next step's number and, by domain, the share, rows used and average gap."""
        return {
            "step": self.step,
            "shares": dict(self.shares),
            "used": dict(self.used),
            "gaps": dict(self.gaps),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; an empty dict restores the start of a run."""
        given = {name: self.config.domains[name].share for name in self.domains}
        usual = {name: share / sum(given.values()) for name, share in given.items()}
        self.step: int = state.get("step", 0)
        self.shares: dict[str, float] = dict(state.get("shares", usual))
        self.used: dict[str, int] = dict(state.get("used", dict.fromkeys(self.domains, 0)))
        self.gaps: dict[str, float] = dict(state.get("gaps", {}))

    @property
    def ended(self) -> str:
        """Return why the next step lacks rows; "" if it does not or data.when_exhausted=wrap."""
        if self.config.when_exhausted == "wrap":
            return ""
        for name, wanted in Counter(self._sample_domains()).items():
            size, used = len(self.domains[name].rows), self.used[name]
            if used + wanted > size:
                return (
                    f"domain '{name}' has {size - used} of its {size} rows left and step "
                    f"{self.step + 1} needs {wanted} (data.when_exhausted=stop; wrap starts a "
                    f"domain again)"
                )
        return ""

    def adapt(self, figures: dict[str, float]) -> dict[str, float]:
        """Update the shares from the figures `loss/NAME` or `acceptance/NAME` of all domains.

        Figures that are not finite leave the shares unchanged, as the loop reports the error.
        Returns `share/NAME` and `rows/NAME` (rows used so far) of every domain.
        """
        if self.config.mixing != "fixed":
            self._update_shares(
                {name: figures[f"{self.config.mixing}/{name}"] for name in self.domains}
            )
        shares = {f"share/{name}": share for name, share in self.shares.items()}
        return shares | {f"rows/{name}": float(rows) for name, rows in self.used.items()}

    def describe(self) -> str:
        """Describe the mixture in one line for the terminal."""
        parts = (
            f"{name} {self.shares[name]:.1%} of {len(of.rows):,} rows ({of.tokens:,} tokens)"
            for name, of in self.domains.items()
        )
        return f"mixture ({self.config.mixing}): {', '.join(parts)}"

    def _update_shares(self, measured: Mapping[str, float]) -> None:
        """Update the shares from the domains' losses or acceptance rates, if all are finite."""
        config = self.config
        if not all(map(math.isfinite, measured.values())):
            return
        if config.mixing == "loss":
            references = {name: config.domains[name].reference for name in self.domains}
            self.gaps = loss_gaps(measured, references, config.clip_gaps)
        else:
            references = {name: config.domains[name].reference_acceptance for name in self.domains}
            keep, now = config.mixing_smoothing, acceptance_gaps(measured, references)
            before = self.gaps or now  # no average before the first gap
            self.gaps = {name: keep * before[name] + (1 - keep) * now[name] for name in now}
        self.shares = update_shares(
            self.shares, self.gaps, config.mixing_rate, config.uniform_share, config.floor_share
        )

    def _sample_domains(self) -> list[str]:
        """Return the domain of each row of the next step."""
        draw = np.random.default_rng([self.seed, self.step, _SAMPLING])
        names = list(self.domains)
        shares = [self.shares[name] for name in names]
        return [names[index] for index in draw.choice(len(names), self.rows_per_step, p=shares)]

    def _shift(self, name: str, row: Sequence[int]) -> list[int]:
        return [self._start[name] + index for index in row]


def loss_gaps(
    losses: Mapping[str, float], references: Mapping[str, float], clip: bool
) -> dict[str, float]:
    """Return loss - reference by domain, in nats per token.

    clip: raise negative gaps to 0, as in the paper's algorithm 1. The published code keeps them, so
    that a domain below its reference loses share.
    """
    gaps = {name: loss - references[name] for name, loss in losses.items()}
    return {name: max(0.0, gap) for name, gap in gaps.items()} if clip else gaps


def acceptance_gaps(
    acceptance: Mapping[str, float], references: Mapping[str, float]
) -> dict[str, float]:
    """Return max(0, reference - acceptance) by domain.

    A reference of 0 stands for the best domain's acceptance rate.
    """
    best = max(acceptance.values())
    return {
        name: max(0.0, (references[name] or best) - alpha) for name, alpha in acceptance.items()
    }


def update_shares(
    shares: Mapping[str, float],
    gaps: Mapping[str, float],
    rate: float,
    uniform: float,
    floor: float,
) -> dict[str, float]:
    """Return the new shares: share x exp(rate x gap), normalised, mixed and raised to a floor.

    uniform: weight of the uniform mixture that is added. floor: smallest share of a domain.
    """
    most = max(gaps.values())  # subtracted from every exponent, where it cancels, to avoid overflow
    grown = {name: share * math.exp(rate * (gaps[name] - most)) for name, share in shares.items()}
    total = sum(grown.values())
    mixed = {
        name: (1 - uniform) * share / total + uniform / len(shares) for name, share in grown.items()
    }
    return raise_to_floor(mixed, floor)


def raise_to_floor(shares: Mapping[str, float], floor: float) -> dict[str, float]:
    """Raise shares below `floor` to it and rescale the others, keeping the sum of 1.

    A floor of 1 / domains or more returns equal shares.
    """
    if floor * len(shares) >= 1:
        return dict.fromkeys(shares, 1 / len(shares))
    low: set[str] = set()
    while True:
        rest = sum(share for name, share in shares.items() if name not in low)
        scale = (1 - floor * len(low)) / rest
        result = {name: floor if name in low else share * scale for name, share in shares.items()}
        below = {name for name, share in result.items() if share < floor and name not in low}
        if not below:
            return result
        low |= below


def check_mixture(data: DataConfig, measured: Sequence[str]) -> None:
    """Raise UserError naming the first invalid setting of a mixture.

    measured: the values of data.mixing whose figures the job measures.
    """
    check_choice("data.mixing", data.mixing, MIXINGS)
    check_choice("data.when_exhausted", data.when_exhausted, EXHAUSTED)
    if not data.domains:
        if data.mixing != "fixed":
            raise UserError(
                f"data.mixing is {data.mixing}, but data.domains is empty. Define the domains, or "
                f"set data.mixing=fixed"
            )
        if data.shares_from:
            raise UserError(
                f"data.shares_from is {data.shares_from}, but data.domains is empty. Define the "
                f"domains, or leave data.shares_from empty"
            )
        return
    if data.mixing not in ("fixed", *measured):
        raise UserError(
            f"data.mixing is {data.mixing}, whose figures this job does not measure. Expected "
            f"{' or '.join(('fixed', *measured))}"
        )
    if data.chats or data.texts or data.held_out_chats or data.held_out_texts:
        raise UserError(
            "data.domains cannot be combined with data.chats, texts, held_out_chats or "
            "held_out_texts. Move these into a domain, or start from data=domains, which has none"
        )
    _check_numbers(data)
    for name in data.domains:
        _check_domain(name, data)


def _check_numbers(data: DataConfig) -> None:
    shares = {name: domain.share for name, domain in data.domains.items()}
    if min(shares.values()) < 0 or not 0 < sum(shares.values()) < math.inf:
        raise UserError(
            f"the shares of data.domains are {shares}, expected 0 or more each and a sum above 0"
        )
    most = 1 / len(shares)
    equal = f"from 0 to {most:.4g}, the equal share of {len(shares)} domains"
    rules = [
        ("mixing_rate", data.mixing_rate > 0, "more than 0"),
        ("mixing_smoothing", 0 <= data.mixing_smoothing < 1, "from 0 to below 1"),
        ("uniform_share", 0 <= data.uniform_share <= 1, "a share from 0 to 1"),
        ("floor_share", 0 <= data.floor_share <= most, equal),
    ]
    for key, valid, expected in rules:
        if not valid:
            raise UserError(f"data.{key} is {vars(data)[key]}, expected {expected}")


def _check_domain(name: str, data: DataConfig) -> None:
    domain, key = data.domains[name], f"data.domains.{name}"
    if not (domain.chats or domain.texts):
        raise UserError(f"{key} is empty. Set its chats or texts, or remove the domain")
    if data.mixing != "fixed" and not (domain.held_out_chats or domain.held_out_texts):
        raise UserError(
            f"{key} has no held-out text, which data.mixing={data.mixing} needs to update its "
            f"share. Set {key}.held_out_chats or {key}.held_out_texts"
        )
    if data.mixing == "loss" and domain.reference <= 0:
        raise UserError(
            f"{key}.reference is {domain.reference:g}, expected a number above 0: the held-out "
            f"loss, in nats per token, that the domain should reach (data.mixing=loss)"
        )
    if not 0 <= domain.reference_acceptance <= 1:
        raise UserError(
            f"{key}.reference_acceptance is {domain.reference_acceptance:g}, expected a rate from "
            f"0 to 1, where 0 stands for the best domain's acceptance"
        )


def _pack(
    name: str, samples: Sequence[Sample], capacity: int, rows_per_step: int, seed: int
) -> PackedData:
    try:
        return PackedData(samples, capacity, rows_per_step, seed)
    except UserError as error:
        raise UserError(f"data.domains.{name}: {error}") from error
