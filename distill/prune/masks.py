"""Hard-concrete masks over the units of a target, constrained to the student's shape.

The method is Sheared-LLaMA's (arXiv 2310.06694). Every unit has a mask z in [0, 1]. Training
samples z from a distribution with a learned logit (Louizos et al. 2018, arXiv 1712.01312). At the
end the units with the highest logits are kept. A quadratic Lagrangian with two multipliers, which
follow gradient ascent, holds the expected share of zeros of each kind at its target. Heads and MLP
units are constrained per layer, so all layers get the same shape. Query heads have masks only if
the student has fewer of them per group.

Shapes: W rows of a mask (1, or one per layer or group), U units of a row.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decoding.errors import UserError
from distill.prune.cut import Cut
from training.models.shapes import target_widths

# Beta of the published code, and of the paper's appendix.
BETA = {"code": 2 / 3, "paper": 0.83}
# The sigmoid is stretched to this range before it is clamped to [0, 1].
LOW, HIGH = -0.1, 1.1
EPSILON = 1e-6
# Maximum absolute value of a logit.
BOUND = math.log(100)
# Mean and standard deviation of the initial logits.
START, SPREAD = 5.0, 0.01
# Maximum target sparsity. With the code's beta, all logits are at their bound at 95.29 %.
REACHABLE = 0.95
# A larger gap from the target sparsity means that the masks are not fully trained.
NEAR = 0.02


class HardConcrete(nn.Module):
    """Masks of one kind, [W, U], of which `keep` per row remain."""

    def __init__(self, rows: int, units: int, keep: int, beta: float) -> None:
        super().__init__()
        self.keep, self.beta = keep, beta
        self.logit_WU = nn.Parameter(
            torch.empty(rows, units).normal_(START, SPREAD).clamp_(-BOUND, BOUND)
        )
        self.multipliers = nn.Parameter(torch.zeros(2))

    @property
    def target_sparsity(self) -> float:
        """Share of the units to remove."""
        return 1 - self.keep / self.logit_WU.shape[1]

    def sample(self, uniform_WU: Tensor) -> Tensor:
        """Return masks in [0, 1], computed from uniform random numbers in (0, 1)."""
        uniform_WU = uniform_WU.clamp(EPSILON, 1 - EPSILON)
        soft_WU = torch.sigmoid((torch.logit(uniform_WU) + self.logit_WU) / self.beta)
        return (soft_WU * (HIGH - LOW) + LOW).clamp(0, 1)

    @torch.no_grad()
    def bound(self) -> None:
        """Clamp the logits in place.

        A clamp in the graph would stop the gradients of clamped logits forever.
        """
        self.logit_WU.clamp_(-BOUND, BOUND)

    def sparsity_W(self) -> Tensor:
        """Return the expected share of zeros in each row: 1 - mean P(z > 0)."""
        edge = self.beta * math.log(-LOW / HIGH)
        nonzero_WU = torch.sigmoid(self.logit_WU - edge).clamp(EPSILON, 1 - EPSILON)
        return 1 - nonzero_WU.mean(1)

    def penalty(self, warm: float) -> Tensor:
        """Return the Lagrangian, the mean over rows of l1 (s - t) + l2 (s - t)^2.

        s: sparsity. t: target sparsity times `warm`, which grows from 0 to 1 in the warm-up. l1,
        l2: multipliers.
        """
        gap_W = self.sparsity_W() - self.target_sparsity * warm
        return (self.multipliers[0] * gap_W + self.multipliers[1] * gap_W.square()).mean()

    def binary(self) -> Tensor:
        """Return 1 for the `keep` highest logits of each row, else 0. Lower indices win ties."""
        order_WU = torch.argsort(self.logit_WU.detach(), dim=1, descending=True, stable=True)
        return torch.zeros_like(self.logit_WU).scatter_(1, order_WU[:, : self.keep], 1.0)

    def margin(self) -> float:
        """Return the smallest gap, over rows, of the lowest kept and the highest removed logit.

        A gap of 0 means that the choice is arbitrary; it is infinite if nothing is removed.
        """
        if self.keep == self.logit_WU.shape[1]:
            return math.inf
        falling_WU = self.logit_WU.detach().sort(dim=1, descending=True).values
        return float((falling_WU[:, self.keep - 1] - falling_WU[:, self.keep]).min())


class Masks(nn.Module):
    """All masks of one target, by kind; a kind that is not cut has none."""

    def __init__(self, student: Any, target: Any, beta: float, seed: int) -> None:
        """Create the masks that cut `target` to `student`, both Hugging Face configurations.

        Raises UserError for a sparsity that the masks cannot reach.
        """
        super().__init__()
        ours, theirs = target_widths(student), target_widths(target)
        layers, groups = target.num_hidden_layers, theirs["num_key_value_heads"]
        self.group_size = theirs["num_attention_heads"] // groups
        kept_group_size = ours["num_attention_heads"] // ours["num_key_value_heads"]
        sizes = {  # rows, units, kept
            "layers": (1, layers, student.num_hidden_layers),
            "hidden": (1, theirs["hidden_size"], ours["hidden_size"]),
            "groups": (layers, groups, ours["num_key_value_heads"]),
            "queries": (layers * groups, self.group_size, kept_group_size),
            "units": (layers, theirs["intermediate_size"], ours["intermediate_size"]),
        }
        self.shape = {kind: (rows, units) for kind, (rows, units, _) in sizes.items()}
        self.seed = seed
        cut = {kind: size for kind, size in sizes.items() if size[1] > size[2]}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.kinds = nn.ModuleDict({kind: HardConcrete(*cut[kind], beta) for kind in cut})
        for kind, masks in self.each():
            refuse_unreachable(kind, masks.target_sparsity, layers, beta)

    def each(self) -> Iterator[tuple[str, HardConcrete]]:
        """Yield each kind with its masks."""
        for kind, masks in self.kinds.items():
            assert isinstance(masks, HardConcrete)
            yield kind, masks

    def sample(self, *place: int) -> dict[str, Tensor]:
        """Sample the masks of every kind; a kind that is not cut gets ones.

        The random numbers depend only on (seed, *place), so a resumed run samples the same masks
        with any number of ranks.
        """
        mixed = np.random.SeedSequence([self.seed, *place]).generate_state(2)
        generator = torch.Generator().manual_seed(int(mixed[0]) << 31 | int(mixed[1]) >> 1)
        found = {}
        for kind, masks in self.each():
            uniform_WU = torch.rand(masks.logit_WU.shape, generator=generator)
            found[kind] = masks.sample(uniform_WU.to(masks.logit_WU.device))
        return self._with_ones(found)

    def binary(self) -> dict[str, Tensor]:
        """Return the binary masks of every kind; a kind that is not cut gets ones."""
        return self._with_ones({kind: masks.binary() for kind, masks in self.each()})

    def _with_ones(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(found.values())).device if found else torch.device("cpu")
        return {
            kind: found.get(kind, torch.ones(shape, device=device))
            for kind, shape in self.shape.items()
        }

    def penalty(self, warm: float) -> Tensor:
        """Return the sum of the penalties of all kinds."""
        total = torch.zeros(())
        for _, masks in self.each():
            total = total.to(masks.logit_WU.device) + masks.penalty(warm)
        return total

    def figures(self) -> dict[str, float]:
        """Return sparsity_gap/KIND, the largest over rows, and margin/KIND for each kind."""
        found = {}
        for kind, masks in self.each():
            gap_W = masks.sparsity_W().detach() - masks.target_sparsity
            found[f"sparsity_gap/{kind}"] = float(gap_W.abs().max())
            found[f"margin/{kind}"] = masks.margin()
        return found

    def cut(self) -> Cut:
        """Return the cut that keeps the units with binary mask 1, without scaling norms."""
        z = {kind: mask.bool().cpu() for kind, mask in self.binary().items()}
        layers = z["layers"][0].nonzero().flatten()
        groups_LK = _kept(z["groups"][layers])
        queries = z["queries"].view(self.shape["layers"][1], -1, self.group_size)[layers]
        chosen_LKG = queries.gather(1, groups_LK[:, :, None].expand(-1, -1, self.group_size))
        return Cut(
            tuple(layers.tolist()),
            z["hidden"][0].nonzero().flatten(),
            groups_LK,
            _kept(chosen_LKG),
            _kept(z["units"][layers]),
            torch.ones(2 * len(layers) + 1),
            self.group_size,
        )


def describe_masks(figures: Mapping[str, float]) -> list[str]:
    """Return the lines of a report on `Masks.figures`, with warnings of unreliable cuts."""
    kinds = [key.partition("/")[2] for key in figures if key.startswith("margin/")]
    gaps, margins = (
        {kind: figures[f"{name}/{kind}"] for kind in kinds} for name in ("sparsity_gap", "margin")
    )
    listed = "; ".join(f"{kind} {gaps[kind]:.2%} off, margin {margins[kind]:.2g}" for kind in kinds)
    lines = []
    if kinds:
        lines.append(
            f"masks (gap from the target sparsity, margin of the logits at the cut): {listed}"
        )
    if off := [kind for kind in kinds if gaps[kind] > NEAR]:
        lines.append(
            f"warning: the masks of {', '.join(off)} are more than {NEAR:.0%} off their target "
            f"sparsity, so the cut removes units that the model still uses. Train longer "
            f"(loop.max_steps, or another bound of the loop)"
        )
    if tied := [kind for kind in kinds if margins[kind] == 0]:
        lines.append(
            f"warning: the choice among {', '.join(tied)} is arbitrary, because kept and removed "
            f"ones have equal logits"
        )
    return lines


def refuse_unreachable(kind: str, sparsity: float, layers: int, beta: float) -> None:
    """Raise UserError for a sparsity above REACHABLE or above the limit set by BOUND.

    kind: kind of the masks. layers: number of the target's layers.
    """
    edge = beta * math.log(-LOW / HIGH)
    most = min(REACHABLE, 1 / (1 + math.exp(-BOUND - edge)))
    if sparsity <= most:
        return
    remedy = "Use a wider shape"
    if kind == "layers":
        between = max(2, round((layers * (1 - sparsity) * layers) ** 0.5))
        remedy = (
            f"Prune in stages (for example with depths=[{between}] in distill.prune, or with a "
            f"smaller prune_largest_cut in an experiment)"
        )
    raise UserError(
        f"mode=l0 would have to remove {sparsity:.1%} of the {kind}, expected {most:.1%} at most, "
        f"because the masks' logits are bounded. {remedy}, or use mode=importance"
    )


def _kept(mask: Tensor) -> Tensor:
    """Return the indices of the ones along the last dimension; rows have equal numbers of ones."""
    count = int(mask.sum(-1).flatten()[0])
    return mask.nonzero()[:, -1].view(*mask.shape[:-1], count)
