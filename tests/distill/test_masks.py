"""Test mode l0: the masks' distribution, constraint, limits and training objective."""

import math

import pytest
import torch

from decoding.errors import UserError
from distill.config import L0Config
from distill.prune.cut import cut_model
from distill.prune.l0 import MaskedModel, apply_masks
from distill.prune.masks import BETA, BOUND, HardConcrete, Masks, describe_masks, refuse_unreachable
from distill.shapes import student_config
from tests.support.model_families import family
from training.bounds import Bounds, Place, RunTotals
from training.config import StudentConfig
from training.data.packing import Sample, collate
from training.objectives import hidden_states
from training.optimizer import MasterAdamW
from training.optimizer_config import OptimizerConfig
from training.parallel.fsdp import checkpoint_activations

from .test_cut import SHAPE, logits

FROZEN = L0Config(train_weights=False)


def at(step: int, total: int) -> Place:
    """Return the place of a step in a run of `total` steps."""
    return Place(RunTotals(step), Bounds(steps=total))


@pytest.mark.parametrize("beta", BETA.values())
@pytest.mark.parametrize("logit", [-3.0, 0.0, 2.0])
def test_the_expected_share_of_zeros_equals_its_formula(beta: float, logit: float):
    """Compare the formula for P(z = 0) with the share of zeros in 2 x 10^5 sampled masks."""
    masks = HardConcrete(1, 200_000, 1, beta)
    with torch.no_grad():
        masks.logit_WU.fill_(logit)
        z = masks.sample(torch.rand(1, 200_000, generator=torch.Generator().manual_seed(0)))
    assert float((z == 0).double().mean()) == pytest.approx(
        float(masks.sparsity_W()[0].detach()), abs=5e-3
    )
    assert float(z.min()) >= 0 and float(z.max()) <= 1


def test_the_largest_sparsity_follows_from_the_bound():
    """Check the largest sparsity for each beta, and that shapes above it are refused.

    At the lowest logit, P(z > 0) is 0.0471 with the code's beta (95.29 % sparsity) and 0.068 with
    the paper's.
    """
    for beta, most in ((2 / 3, 0.9529), (0.83, 0.932)):
        masks = HardConcrete(1, 8, 1, beta)
        with torch.no_grad():
            masks.logit_WU.fill_(-100.0)
            masks.bound()
        assert float(masks.sparsity_W()[0].detach()) == pytest.approx(most, abs=1e-3)
    refuse_unreachable("layers", 1 - 5 / 80, 80, BETA["code"])
    with pytest.raises(UserError, match=r"96.9% of the layers.*95.0% at most.*depths=\[6\]"):
        refuse_unreachable("layers", 1 - 1 / 32, 32, BETA["code"])
    for deeper, layers in ((32, 6), (6, 1)):  # the suggested stages are possible
        refuse_unreachable("layers", 1 - layers / deeper, deeper, BETA["code"])
    with pytest.raises(UserError, match=r"93.8% of the layers.*93.2% at most"):
        refuse_unreachable("layers", 1 - 5 / 80, 80, BETA["paper"])
    with pytest.raises(
        UserError,
        match=r"96.0% of the units.*95.0% at most.*Use a wider shape, or use mode=importance",
    ):
        refuse_unreachable("units", 0.96, 32, BETA["code"])


def test_masks_start_open_and_logits_stay_bounded():
    masks = HardConcrete(2, 50, 10, 2 / 3)
    assert float(masks.sparsity_W().detach().max()) < 0.01
    assert float(masks.logit_WU.detach().abs().max()) <= BOUND + 1e-6


def trained(
    masks: Masks, weight_of: dict[str, torch.Tensor], steps: int, train: bool = True
) -> None:
    """Train masks to minimize -mean(importance x mask) plus the penalty of the constraint.

    The learning rates are the published ones. weight_of: importance of each unit, by kind of mask.
    train: False leaves the penalty out.
    """
    lr = 1e-4
    rates = MaskedModel(torch.nn.Linear(1, 1), masks, FROZEN, lr).rates
    holder = torch.nn.ModuleDict({"masks": masks})
    optimizer = MasterAdamW(holder, OptimizerConfig(lr=lr), rates)
    for step in range(steps):
        for _, mask in masks.each():
            mask.bound()
        z = masks.sample(step)
        loss = sum(-(weight_of[kind] * z[kind]).mean() for kind in weight_of)
        (loss + masks.penalty(min(1.0, (step + 1) / (0.2 * steps))) * train).backward()
        optimizer.clip()
        optimizer.step(lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps))))


def test_the_constraint_reaches_its_shape_and_keeps_important_units():
    target = family("llama", num_hidden_layers=8).config
    shape = student_config(StudentConfig(num_hidden_layers=3, intermediate_size=20), target)
    masks = Masks(shape, target, BETA["code"], 0)
    generator = torch.Generator().manual_seed(1)
    importance = {
        kind: torch.randn(masks.shape[kind], generator=generator).exp()
        for kind in ("layers", "units")
    }
    trained(masks, importance, 1200)
    assert {*dict(masks.each())} == {"layers", "units"}, "kinds that are not cut have no masks"
    for kind, mask in masks.each():
        assert float((mask.sparsity_W() - mask.target_sparsity).detach().abs().max()) < 0.05, kind
    best = torch.zeros(masks.shape["units"]).scatter_(1, importance["units"].topk(20).indices, 1.0)
    assert float((masks.binary()["units"] * best).sum() / best.sum()) > 0.7, (
        "chance would give half of them"
    )
    assert masks.figures()["margin/layers"] > 0


def test_unreliable_masks_are_warned_of():
    good = {"sparsity_gap/layers": 0.001, "margin/layers": 0.4, "acceptance": 0.3}
    report = (
        "masks (gap from the target sparsity, margin of the logits at the cut): "
        "layers 0.10% off, margin 0.4"
    )
    assert describe_masks(good) == [report]
    words = describe_masks(good | {"sparsity_gap/units": 0.3, "margin/units": 0.0})
    assert "units 30.00% off, margin 0" in words[0]
    assert "warning: the masks of units are more than 2% off their target sparsity" in words[1]
    assert "warning: the choice among units is arbitrary" in words[2]
    assert describe_masks({}) == [], "nothing is cut"


def test_control_without_the_constraint_nothing_is_removed():
    target = family("llama", num_hidden_layers=8).config
    masks = Masks(
        student_config(StudentConfig(num_hidden_layers=3), target), target, BETA["code"], 0
    )
    trained(masks, {"layers": torch.rand(1, 8)}, 300, train=False)
    assert float(dict(masks.each())["layers"].sparsity_W().detach().max()) < 0.05


@pytest.mark.parametrize("name", ["llama", "llama_mha", "qwen3"])
def test_the_cut_student_equals_the_masked_model(name: str):
    target = family(name)
    shape = student_config(SHAPE, target.config)
    masks = Masks(shape, target.config, BETA["paper"], 0)
    with torch.no_grad():
        for _, mask in masks.each():
            mask.logit_WU.uniform_(-BOUND, BOUND)
    with apply_masks(target, masks.binary()):
        expected = logits(target)
    torch.testing.assert_close(
        logits(cut_model(target, masks.cut(), shape).eval()), expected, rtol=1e-5, atol=1e-5
    )


def test_masks_depend_only_on_step_and_rows():
    target = family("llama").config
    masks = Masks(student_config(SHAPE, target), target, BETA["code"], 7)
    first, again, other, later = (
        masks.sample(*place) for place in ((3, 0, 1), (3, 0, 1), (3, 1, 1), (4, 0, 1))
    )
    assert all(torch.equal(first[kind], again[kind]) for kind in first)
    assert not torch.equal(first["units"], other["units"]), "other rows have other masks"
    assert not torch.equal(first["units"], later["units"]), "every step has new masks"


def test_the_penalty_counts_once_for_any_micro_batches():
    """Check that the losses and gradients of two forward passes add up to one pass's."""
    target = family("llama")
    shape = student_config(SHAPE, target.config)
    samples = [
        Sample(torch.randint(3, 60, (9,)).numpy().astype("int32"), torch.ones(9).bool().numpy())
        for _ in range(2)
    ]
    gradients = []
    for rows in ([[0], [1]], [[0, 1]]):
        masks = Masks(shape, target.config, BETA["code"], 0)
        masks.sample = lambda *_, masks=masks: masks.binary()  # type: ignore[method-assign]
        objective = MaskedModel(target, masks, FROZEN, 1e-4)
        objective.begin(50, at(50, 100), [])
        total = torch.zeros(())
        for row in rows:
            total = total + objective(collate(samples, [row], 20))[0]
        total.backward()
        gradients.append((total.item(), dict(masks.each())["units"].multipliers.grad.clone()))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-5)
    torch.testing.assert_close(gradients[0][1], gradients[1][1])


def test_frozen_weights_get_no_gradient_but_masks_do():
    target = family("llama")
    masks = Masks(student_config(SHAPE, target.config), target.config, BETA["code"], 0)
    batch = collate(
        [Sample(torch.arange(3, 13).numpy().astype("int32"), torch.ones(10).bool().numpy())],
        [[0]],
        12,
    )
    objective = MaskedModel(target, masks, FROZEN, 1e-4)
    objective.begin(0, at(0, 10), [])
    objective(batch)[0].backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert any(bool(mask.logit_WU.grad.abs().sum() > 0) for _, mask in masks.each())
    plain = hidden_states(family("llama"), batch)
    assert not torch.equal(hidden_states(target, batch), plain), (
        "the masks stay for the backward pass"
    )
    objective.unmask()
    assert torch.equal(hidden_states(target, batch), plain)


def test_recomputed_layers_use_the_same_masks():
    """Check that activation checkpointing, which runs layers again, changes no gradient."""
    batch = collate(
        [Sample(torch.arange(3, 13).numpy().astype("int32"), torch.ones(10).bool().numpy())],
        [[0]],
        12,
    )
    found = []
    for again in (False, True):
        target = family("llama").train()
        masks = Masks(student_config(SHAPE, target.config), target.config, BETA["code"], 0)
        objective = MaskedModel(target, masks, L0Config(), 1e-4)
        if again:
            checkpoint_activations(objective)
        with torch.no_grad():
            for _, mask in masks.each():
                mask.logit_WU.zero_()  # half-open masks, which all change the logits
        objective.begin(50, at(50, 100), [])
        objective(batch)[0].backward()
        found.append({name: parameter.grad for name, parameter in objective.named_parameters()})
    assert any(
        bool(gradient.abs().sum() > 0) for name, gradient in found[0].items() if "logit_WU" in name
    )
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


def test_the_target_sparsity_grows_over_the_warm_up():
    """Check that the target sparsity at a step is t min(1, step / warm-up).

    The penalty at that sparsity is the Lagrangian of Sheared-LLaMA.
    """
    target = family("llama")
    masks = Masks(student_config(SHAPE, target.config), target.config, BETA["code"], 0)
    objective = MaskedModel(target, masks, FROZEN, 1e-4)
    batch = collate(
        [Sample(torch.arange(3, 13).numpy().astype("int32"), torch.ones(10).bool().numpy())],
        [[0]],
        12,
    )
    with torch.no_grad():
        for _, mask in masks.each():
            mask.logit_WU.uniform_(-2, 2)
    differences = []
    for multipliers in ((0.0, 0.0), (0.7, 30.0)):
        for _, mask in masks.each():
            mask.multipliers.data = torch.tensor(multipliers)
        for step in (0, 10, 20, 90):
            objective.begin(step, at(step, 100), [])
            differences.append(float(objective(batch)[0].detach()) * (1 if multipliers[1] else -1))
    supervised = batch.supervised
    for place, share in enumerate((0.0, 0.5, 1.0, 1.0)):
        expected = 0.0
        for _, mask in masks.each():
            edge = mask.beta * math.log(0.1 / 1.1)
            sparsity_W = 1 - torch.sigmoid(mask.logit_WU.detach() - edge).mean(1)
            gap_W = sparsity_W - share * (1 - mask.keep / mask.logit_WU.shape[1])
            expected += float((0.7 * gap_W + 30.0 * gap_W**2).mean())
        assert (differences[place] + differences[place + 4]) / supervised == pytest.approx(
            expected, rel=1e-3
        )
