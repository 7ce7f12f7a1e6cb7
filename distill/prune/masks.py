"""Hard-concrete masks over the parts of a target, and the constraint that drives them to a shape
(Sheared-LLaMA, arXiv 2310.06694).

A mask z in [0, 1] a unit: sampled while training (Louizos et al. 2018, arXiv 1712.01312), and in
the end the units with the highest logits. Of each kind of mask the expected share of zeros is held
to the target share by a quadratic Lagrangian whose two multipliers ascend. Heads and MLP units are
held layer by layer, so that all layers come out alike. Key/value groups have masks of their own,
and query heads inside them only where a shape has fewer of them a group.

Shapes: W rows of a mask (1, or one a layer or group), U units of a row.
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

BETA = {"code": 2 / 3, "paper": 0.83}  # of the published code, and of the paper's appendix
LOW, HIGH = -0.1, 1.1  # what the sigmoid is stretched to before it is clamped to [0, 1]
EPSILON = 1e-6
BOUND = math.log(100)  # of the logits, either way
START, SPREAD = 5.0, 0.01
# Sparsity beyond which no kind is driven: at 95.29 %, with the code's beta, all logits lie on their
# bound.
REACHABLE = 0.95
NEAR = 0.02  # of a target sparsity: masks that end farther off have not been trained to their end


class HardConcrete(nn.Module):
    """Masks of one kind, [W, U], of which `keep` units a row shall stay."""

    def __init__(self, rows: int, units: int, keep: int, beta: float) -> None:
        super().__init__()
        self.keep, self.beta = keep, beta
        self.logit_WU = nn.Parameter(
            torch.empty(rows, units).normal_(START, SPREAD).clamp_(-BOUND, BOUND)
        )
        self.multipliers = nn.Parameter(torch.zeros(2))

    @property
    def target_sparsity(self) -> float:
        """Share of the units that shall go."""
        return 1 - self.keep / self.logit_WU.shape[1]

    def sample(self, uniform_WU: Tensor) -> Tensor:
        """Masks in [0, 1] from numbers that are uniform in (0, 1)."""
        uniform_WU = uniform_WU.clamp(EPSILON, 1 - EPSILON)
        soft_WU = torch.sigmoid((torch.logit(uniform_WU) + self.logit_WU) / self.beta)
        return (soft_WU * (HIGH - LOW) + LOW).clamp(0, 1)

    @torch.no_grad()
    def bound(self) -> None:
        """Put logits that an update took past their bound back on it; in place, as a clamp in the
        graph would end their gradient for good.
        """
        self.logit_WU.clamp_(-BOUND, BOUND)

    def sparsity_W(self) -> Tensor:
        """Expected share of zeros in each row: 1 - mean P(z > 0)."""
        edge = self.beta * math.log(-LOW / HIGH)
        nonzero_WU = torch.sigmoid(self.logit_WU - edge).clamp(EPSILON, 1 - EPSILON)
        return 1 - nonzero_WU.mean(1)

    def penalty(self, warm: float) -> Tensor:
        """The Lagrangian: mean over rows of l1 (s - t) + l2 (s - t)^2, the target t grown to `warm`
        of itself.
        """
        gap_W = self.sparsity_W() - self.target_sparsity * warm
        return (self.multipliers[0] * gap_W + self.multipliers[1] * gap_W.square()).mean()

    def binary(self) -> Tensor:
        """1 for the `keep` highest logits of each row, 0 for the others; ties go to the lower
        index.
        """
        order_WU = torch.argsort(self.logit_WU.detach(), dim=1, descending=True, stable=True)
        return torch.zeros_like(self.logit_WU).scatter_(1, order_WU[:, : self.keep], 1.0)

    def margin(self) -> float:
        """The smallest gap, over rows, between the last logit that stays and the first that goes;
        0: an arbitrary choice.
        """
        if self.keep == self.logit_WU.shape[1]:
            return math.inf
        falling_WU = self.logit_WU.detach().sort(dim=1, descending=True).values
        return float((falling_WU[:, self.keep - 1] - falling_WU[:, self.keep]).min())


class Masks(nn.Module):
    """All kinds of masks of one target; kinds that nothing is taken of have none."""

    def __init__(self, student: Any, target: Any, beta: float, seed: int) -> None:
        """student, target: Hugging Face configurations. Raises UserError for a sparsity that the
        masks cannot reach.
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
        """Kind and masks."""
        for kind, masks in self.kinds.items():
            assert isinstance(masks, HardConcrete)
            yield kind, masks

    def sample(self, *place: int) -> dict[str, Tensor]:
        """A fresh mask of every kind; its numbers hang on (seed, *place) alone, so that a resumed
        run draws the same, on any ranks.
        """
        mixed = np.random.SeedSequence([self.seed, *place]).generate_state(2)
        generator = torch.Generator().manual_seed(int(mixed[0]) << 31 | int(mixed[1]) >> 1)
        found = {}
        for kind, masks in self.each():
            uniform_WU = torch.rand(masks.logit_WU.shape, generator=generator)
            found[kind] = masks.sample(uniform_WU.to(masks.logit_WU.device))
        return self._with_ones(found)

    def binary(self) -> dict[str, Tensor]:
        """The masks that the cut will have."""
        return self._with_ones({kind: masks.binary() for kind, masks in self.each()})

    def _with_ones(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        device = next(iter(found.values())).device if found else torch.device("cpu")
        return {
            kind: found.get(kind, torch.ones(shape, device=device))
            for kind, shape in self.shape.items()
        }

    def penalty(self, warm: float) -> Tensor:
        """Sum over the kinds."""
        total = torch.zeros(())
        for _, masks in self.each():
            total = total.to(masks.logit_WU.device) + masks.penalty(warm)
        return total

    def figures(self) -> dict[str, float]:
        """Expected sparsity less its target, and the margin at the cut, by kind."""
        found = {}
        for kind, masks in self.each():
            found[f"sparsity_gap/{kind}"] = float(
                (masks.sparsity_W() - masks.target_sparsity).abs().max().detach()
            )
            found[f"margin/{kind}"] = masks.margin()
        return found

    def cut(self) -> Cut:
        """What the binary masks keep."""
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
    """Of `Masks.figures`: how near every kind came to its sparsity and how clear its choice is, and
    warnings where the cut is not to be trusted.
    """
    gaps, margins = (
        {
            key.removeprefix(prefix): value
            for key, value in figures.items()
            if key.startswith(prefix)
        }
        for prefix in ("sparsity_gap/", "margin/")
    )
    told = "; ".join(
        f"{kind} {gap:.2%} off, margin {margins[kind]:.2g}" for kind, gap in gaps.items()
    )
    lines = (
        [f"masks, expected sparsity against its target and margin of the logits at the cut: {told}"]
        if told
        else []
    )
    off = [kind for kind, gap in gaps.items() if gap > NEAR]
    if off:
        lines.append(
            f"warning: masks of {', '.join(off)} are more than {NEAR:.0%} off their sparsity, so "
            f"the cut takes away what the model still used: train them longer (loop.max_steps, or "
            f"what else bounds the loop)"
        )
    tied = [kind for kind, margin in margins.items() if margin == 0]
    if tied:
        lines.append(
            f"warning: of {', '.join(tied)} the last that stays and the first that goes have equal "
            f"logits, so which one stays is arbitrary"
        )
    return lines


def max_sparsity(beta: float) -> float:
    """The largest expected sparsity that masks are driven to: REACHABLE, or what the bound of the
    logits allows where that is less.
    """
    edge = beta * math.log(-LOW / HIGH)
    return min(REACHABLE, 1 / (1 + math.exp(-BOUND - edge)))


def refuse_unreachable(kind: str, sparsity: float, layers: int, beta: float) -> None:
    """Raise UserError where the relaxation cannot take away as much as asked."""
    most = max_sparsity(beta)
    if sparsity <= most:
        return
    between = max(2, round((layers * (1 - sparsity) * layers) ** 0.5))
    stages = (
        f"prune in stages (distill.prune: such as depths=[{between}]; a recipe: a smaller "
        f"prune_largest_cut)"
    )
    remedy = stages if kind == "layers" else "take a wider shape"
    raise UserError(
        f"mode=l0 is asked to take {sparsity:.1%} of the {kind}, but its masks reach {most:.1%} at "
        f"most (their logits are bounded; beyond, all lie on the bound and the choice is "
        f"arbitrary): {remedy}, or take mode=importance"
    )


def _kept(mask: Tensor) -> Tensor:
    """Indices of the ones along the last dimension, where every row has as many."""
    count = int(mask.sum(-1).flatten()[0])
    return mask.nonzero()[:, -1].view(*mask.shape[:-1], count)
