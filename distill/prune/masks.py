"""Hard-concrete masks over the parts of a target, constrained to the student's shape.

The method is Sheared-LLaMA's (arXiv 2310.06694). Every unit has a mask z in [0, 1]. It is sampled
during training (Louizos et al. 2018, arXiv 1712.01312); at the end the units with the highest
logits are kept. A quadratic Lagrangian with two ascending multipliers holds the expected share of
zeros of each kind of mask at its target. Heads and MLP units are constrained per layer, so that all
layers get the same shape. Key/value groups have masks, and query heads within them only if the
student has fewer per group.

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

# Published code, and appendix of the paper.
BETA = {"code": 2 / 3, "paper": 0.83}
# The sigmoid is stretched to this range before it is clamped to [0, 1].
LOW, HIGH = -0.1, 1.1
EPSILON = 1e-6
# Maximum absolute value of a logit.
BOUND = math.log(100)
# Mean and standard deviation of the initial logits.
START, SPREAD = 5.0, 0.01
# Maximum target sparsity. At 95.29 % and the code's beta, all logits reach their bound.
REACHABLE = 0.95
# A larger gap from the target sparsity means that the masks are not fully trained.
NEAR = 0.02


class HardConcrete(nn.Module):
    """Masks of one kind, [W, U], which keep `keep` units per row."""

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
        """Return masks in [0, 1] from uniform numbers in (0, 1)."""
        uniform_WU = uniform_WU.clamp(EPSILON, 1 - EPSILON)
        soft_WU = torch.sigmoid((torch.logit(uniform_WU) + self.logit_WU) / self.beta)
        return (soft_WU * (HIGH - LOW) + LOW).clamp(0, 1)

    @torch.no_grad()
    def bound(self) -> None:
        """Clamp the logits in place; a clamp in the graph would stop their gradients for good."""
        self.logit_WU.clamp_(-BOUND, BOUND)

    def sparsity_W(self) -> Tensor:
        """Return the expected share of zeros in each row: 1 - mean P(z > 0)."""
        edge = self.beta * math.log(-LOW / HIGH)
        nonzero_WU = torch.sigmoid(self.logit_WU - edge).clamp(EPSILON, 1 - EPSILON)
        return 1 - nonzero_WU.mean(1)

    def penalty(self, warm: float) -> Tensor:
        """Return the Lagrangian, the mean over rows of l1 (s - t) + l2 (s - t)^2.

        s is the sparsity and t the target sparsity times `warm`.
        """
        gap_W = self.sparsity_W() - self.target_sparsity * warm
        return (self.multipliers[0] * gap_W + self.multipliers[1] * gap_W.square()).mean()

    def binary(self) -> Tensor:
        """Return 1 for the `keep` highest logits of each row, else 0; lower indices win ties."""
        order_WU = torch.argsort(self.logit_WU.detach(), dim=1, descending=True, stable=True)
        return torch.zeros_like(self.logit_WU).scatter_(1, order_WU[:, : self.keep], 1.0)

    def margin(self) -> float:
        """Return the smallest gap over rows between the last kept and the first removed logit.

        A gap of 0 means that the choice is arbitrary.
        """
        if self.keep == self.logit_WU.shape[1]:
            return math.inf
        falling_WU = self.logit_WU.detach().sort(dim=1, descending=True).values
        return float((falling_WU[:, self.keep - 1] - falling_WU[:, self.keep]).min())


class Masks(nn.Module):
    """All kinds of masks of one target; kinds that are not cut have none."""

    def __init__(self, student: Any, target: Any, beta: float, seed: int) -> None:
        """Create the masks for two Hugging Face configurations.

        Raises UserError for a sparsity that the masks cannot reach.
        """
        super().__init__()
        ours, theirs = target_widths(student), target_widths(target)
        layers, groups = target.num_hidden_layers, theirs["num_key_value_heads"]
        self.a_group = theirs["num_attention_heads"] // groups
        kept_a_group = ours["num_attention_heads"] // ours["num_key_value_heads"]
        sizes = {  # rows, units, kept
            "layers": (1, layers, student.num_hidden_layers),
            "hidden": (1, theirs["hidden_size"], ours["hidden_size"]),
            "groups": (layers, groups, ours["num_key_value_heads"]),
            "queries": (layers * groups, self.a_group, kept_a_group),
            "units": (layers, theirs["intermediate_size"], ours["intermediate_size"]),
        }
        self.shape = {kind: (rows, units) for kind, (rows, units, _) in sizes.items()}
        self.seed = seed
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.kinds = nn.ModuleDict(
            {kind: HardConcrete(*size, beta) for kind, size in sizes.items() if size[1] > size[2]}
        )
        torch.random.set_rng_state(state)
        for kind, masks in self.each():
            refuse_unreachable(kind, masks.target_sparsity, layers, beta)

    def each(self) -> Iterator[tuple[str, HardConcrete]]:
        """Yield each kind with its masks."""
        for kind, masks in self.kinds.items():
            assert isinstance(masks, HardConcrete)
            yield kind, masks

    def sample(self, *place: int) -> dict[str, Tensor]:
        """Sample a mask of every kind.

        The numbers depend only on (seed, *place), so a resumed run samples the same masks on any
        ranks.
        """
        mixed = np.random.SeedSequence([self.seed, *place]).generate_state(2)
        generator = torch.Generator().manual_seed(int(mixed[0]) << 31 | int(mixed[1]) >> 1)
        found = {}
        for kind, masks in self.each():
            uniform_WU = torch.rand(masks.logit_WU.shape, generator=generator)
            found[kind] = masks.sample(uniform_WU.to(masks.logit_WU.device))
        return self._with_ones(found)

    def binary(self) -> dict[str, Tensor]:
        """Return the masks of the cut."""
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
        """Return by kind the largest sparsity gap and the margin of the cut."""
        found = {}
        for kind, masks in self.each():
            found[f"sparsity_gap/{kind}"] = float(
                (masks.sparsity_W() - masks.target_sparsity).abs().max().detach()
            )
            found[f"margin/{kind}"] = masks.margin()
        return found

    def cut(self) -> Cut:
        """Return the cut that the binary masks make."""
        z = {kind: mask.bool().cpu() for kind, mask in self.binary().items()}
        layers = z["layers"][0].nonzero().flatten()
        groups_LK = _kept(z["groups"][layers])
        queries = z["queries"].view(self.shape["layers"][1], -1, self.a_group)[layers]
        chosen_LKG = queries.gather(1, groups_LK[:, :, None].expand(-1, -1, self.a_group))
        return Cut(
            tuple(layers.tolist()),
            z["hidden"][0].nonzero().flatten(),
            groups_LK,
            _kept(chosen_LKG),
            _kept(z["units"][layers]),
            torch.ones(2 * len(layers) + 1),
            self.a_group,
        )


def describe_masks(figures: Mapping[str, float]) -> list[str]:
    """Return lines that report `Masks.figures`, with warnings for unreliable cuts."""
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
            f"warning: masks of {', '.join(off)} are more than {NEAR:.0%} off their sparsity, so "
            f"the cut removes units that the model still uses. Train longer (loop.max_steps, or "
            f"another limit of the loop)"
        )
    if tied := [kind for kind in kinds if margins[kind] == 0]:
        lines.append(
            f"warning: the choice among {', '.join(tied)} is arbitrary because the last kept and "
            f"the first removed have equal logits"
        )
    return lines


def refuse_unreachable(kind: str, sparsity: float, layers: int, beta: float) -> None:
    """Raise UserError if the masks cannot reach a sparsity.

    The limit is REACHABLE, or less if the bound of the logits requires it.
    """
    edge = beta * math.log(-LOW / HIGH)
    most = min(REACHABLE, 1 / (1 + math.exp(-BOUND - edge)))
    if sparsity <= most:
        return
    remedy = "use a wider shape"
    if kind == "layers":
        between = max(2, round((layers * (1 - sparsity) * layers) ** 0.5))
        remedy = (
            f"prune in stages (for example depths=[{between}] in distill.prune, or a smaller "
            f"prune_largest_cut in an experiment)"
        )
    raise UserError(
        f"mode=l0 must remove {sparsity:.1%} of the {kind}, but its masks can remove {most:.1%} at "
        f"most because their logits are bounded: {remedy}, or use mode=importance"
    )


def _kept(mask: Tensor) -> Tensor:
    """Return the indices of the ones along the last dimension; all rows have equally many."""
    count = int(mask.sum(-1).flatten()[0])
    return mask.nonzero()[:, -1].view(*mask.shape[:-1], count)
