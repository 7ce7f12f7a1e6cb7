"""Every loss of the family equals its formula on full logits, in value and gradient."""

import pytest
import torch
from torch import Tensor

from decoding.errors import UserError
from distill.config import TrainConfig
from jobs.config_checks import refuse
from training.draft_vocabulary import index_tokens
from training.heads.loss_config import HeadLossConfig, head_loss_rules
from training.losses.chunked import RowLoss, chunked_loss, listed_cross_entropy_rows
from training.losses.config import (
    CROSS_ENTROPY,
    TEACHER_LOSSES,
    LossConfig,
    describe_loss,
    loss_rules,
    teacher_temperature,
)
from training.losses.eager import SOFT, overlap, p_and_q, row_losses
from training.losses.family import Reference, acceptance_rows, reference_rows
from training.losses.soft import SOFT_LOSSES
from training.losses.teacher import Teacher

N, H, G, V = 23, 6, 5, 19
LISTED = torch.tensor([0, 3, 4, 11, 17, 18])
MIXTURES = ({"forward_kl": 0.7, "cross_entropy": 0.4}, {"tv": 1.0, "jsd": 2.0, "cross_entropy": 0})
LOSSES = [
    *({"name": name} for name in TEACHER_LOSSES),
    {"name": CROSS_ENTROPY},
    {"name": "jsd", "jsd_beta": 0.1},
    {"name": "skewed_kl", "skew_alpha": 0.6},
    {"name": "skewed_reverse_kl", "skew_alpha": 0.6},
    {"name": "lk_hybrid", "lk_eta": 0.0},
    *({"name": "mixture", "parts": parts} for parts in MIXTURES),
]
TEMPERATURES = [{}, {"temperature": 1.7}, {"temperature": 1.7, "teacher_temperature": 0.6}]


class Case:
    """Hidden states and output layers of drafter and teacher, and the text's tokens."""

    def __init__(self, loss: LossConfig, shortlist: Tensor | None) -> None:
        torch.manual_seed(0)
        self.loss, self.shortlist = loss, shortlist
        drafted = V if shortlist is None else len(shortlist)
        self.hidden = torch.randn(N, H, dtype=torch.float64, requires_grad=True)
        self.weight = torch.randn(drafted, H, dtype=torch.float64, requires_grad=True)
        self.states = torch.randn(N, G, dtype=torch.float64)
        self.teacher_weight = torch.randn(V, G, dtype=torch.float64)
        labels = torch.randint(0, V, (N,))
        self.labels = labels if shortlist is None else index_tokens(shortlist, V)[labels]

    def reference(self, start: int, end: int) -> Reference:
        teacher = Teacher(
            self.states, self.teacher_weight, teacher_temperature(self.loss), self.shortlist
        )
        return Reference(self.labels[start:end], teacher.at(start, end))

    def eager_rows(self) -> Tensor:
        targets = self.states @ self.teacher_weight.T
        return row_losses(
            self.loss, self.hidden @ self.weight.T, targets, self.labels, self.shortlist
        )

    def assert_equal(self, rows: RowLoss) -> None:
        """Compare the chunked sum and its gradients with autograd's."""
        inputs = (self.hidden, self.weight)
        loss, _ = chunked_loss(*inputs, rows, self.reference, chunk=10)
        twin = self.eager_rows().sum()
        torch.testing.assert_close(loss, twin)
        for ours, theirs in zip(
            torch.autograd.grad(loss * 0.37, inputs), torch.autograd.grad(twin * 0.37, inputs)
        ):
            torch.testing.assert_close(ours, theirs)


def accepted(given: dict[str, object]) -> bool:
    return all(valid for valid, _ in loss_rules(LossConfig(**given)).values())  # type: ignore[arg-type]


@pytest.mark.parametrize("temperatures", TEMPERATURES, ids=str)
@pytest.mark.parametrize("shortlist", [None, LISTED], ids=["all", "shortlist"])
@pytest.mark.parametrize("given", LOSSES, ids=str)
def test_loss_and_gradient_equal_the_eager_twin(
    given: dict[str, object], shortlist: Tensor | None, temperatures: dict[str, float]
):
    loss = LossConfig(**{**given, **temperatures})  # type: ignore[arg-type]
    if given["name"] == CROSS_ENTROPY and temperatures:
        assert not accepted(given | temperatures)
        return
    assert accepted(given | temperatures)
    case = Case(loss, shortlist)
    rows = reference_rows(loss, listed_cross_entropy_rows)
    case.assert_equal(rows)

    def wrong(logits: Tensor, reference: Reference) -> tuple[Tensor, Tensor, Tensor]:
        value, gradient, metric = rows(logits, reference)
        return value, gradient * (1 + 1e-4), metric

    with pytest.raises(AssertionError, match="not close"):
        case.assert_equal(wrong)  # the control: the value is right, the gradient is not


@pytest.mark.parametrize("name", SOFT)
def test_the_gradient_at_another_temperature_is_rejected(name: str):
    """Control: without the factor 1 / temperature the gradient differs from autograd's."""
    case = Case(LossConfig(name, temperature=1.7), LISTED)
    plain = reference_rows(LossConfig(name))

    def wrong(logits: Tensor, reference: Reference) -> tuple[Tensor, Tensor, Tensor]:
        return plain(logits / 1.7, reference)

    with pytest.raises(AssertionError, match="not close"):
        case.assert_equal(wrong)


@pytest.mark.parametrize("shortlist", [None, LISTED], ids=["all", "shortlist"])
def test_identities_between_losses(shortlist: Tensor | None):
    """Check each formula against others, so that chunked and eager code do not err alike."""

    def rows(**given: object) -> Tensor:
        return Case(LossConfig(**given), shortlist).eager_rows()  # type: ignore[arg-type]

    case = Case(LossConfig(), shortlist)
    logits, targets = case.hidden @ case.weight.T, case.states @ case.teacher_weight.T
    p, q = p_and_q(case.loss, logits, targets, shortlist)
    mass, alpha = p.sum(dim=-1), overlap(p, q)
    inside = p / mass[:, None]
    torch.testing.assert_close(rows(name="tv"), 1 - alpha)
    torch.testing.assert_close(rows(name="lk"), -alpha.log())
    torch.testing.assert_close(rows(name="lk_hybrid", lk_eta=0.0), rows(name="forward_kl"))
    torch.testing.assert_close(rows(name="lk_hybrid", lk_eta=1e4), rows(name="tv"))
    both_ways = rows(name="forward_kl") + rows(name="reverse_kl")
    jeffreys = mass * ((inside - q) * (inside.log() - q.log())).sum(dim=-1)
    torch.testing.assert_close(both_ways, jeffreys)
    for skewed, plain in (("skewed_kl", "forward_kl"), ("skewed_reverse_kl", "reverse_kl")):
        found = rows(name=skewed, skew_alpha=1e-9)
        torch.testing.assert_close(found, rows(name=plain), rtol=1e-4, atol=1e-4)
    middle = (inside + q) / 2
    entropies = [-(x * x.log()).sum(dim=-1) for x in (middle, inside, q)]
    jensen_shannon = mass * (entropies[0] - (entropies[1] + entropies[2]) / 2)
    torch.testing.assert_close(rows(name="jsd"), jensen_shannon)
    assert not torch.allclose(rows(name="jsd", jsd_beta=0.3), jensen_shannon), "the control"


@pytest.mark.parametrize("name", SOFT)
def test_a_teacher_that_excludes_tokens_gives_finite_losses(name: str):
    """Check probabilities of 0 in float32: tokens of the teacher, and all of a shortlist."""
    logits = torch.randn(3, V)
    targets = torch.zeros(3, V)
    targets[0, ::2], targets[1, 1:] = -1e4, -1e4
    targets[2, LISTED] = -1e4
    for shortlist in (None, LISTED):
        reference = Reference(teacher=Teacher(targets, torch.eye(V), 1.0, shortlist).at(0, 3))
        seen = logits if shortlist is None else logits[:, shortlist]
        for part in reference_rows(LossConfig(name))(seen, reference):
            assert bool(torch.isfinite(part).all())


@pytest.mark.parametrize("name", ["lk", CROSS_ENTROPY])
@pytest.mark.parametrize("shortlist", [None, LISTED], ids=["all", "shortlist"])
def test_chances_of_acceptance(name: str, shortlist: Tensor | None):
    case = Case(LossConfig(name), shortlist)
    logits = (case.hidden @ case.weight.T).detach()
    reference = case.reference(0, N)
    if name == CROSS_ENTROPY:
        reference = reference._replace(teacher=None)
    found = acceptance_rows(case.loss)(logits, reference)
    some = found > 0
    torch.testing.assert_close(-found[some].log(), case.eager_rows()[some].detach())
    assert bool((found == 0).any()) == (name == CROSS_ENTROPY and shortlist is not None)


def test_every_loss_has_a_twin_and_a_constructor():
    assert set(SOFT) == set(SOFT_LOSSES) == set(TEACHER_LOSSES)


def test_a_mixture_is_described_by_its_weights():
    assert describe_loss(LossConfig("mixture", MIXTURES[0])) == "0.7 forward_kl + 0.4 cross_entropy"
    assert describe_loss(LossConfig("tv")) == "tv"


WRONG: list[tuple[dict[str, object], str]] = [
    (
        {"name": "revers_kl"},
        "loss.name is revers_kl, expected one of .*; the nearest is reverse_kl",
    ),
    ({"name": "zzz"}, "loss.name is zzz, expected one of .*, mixture$"),
    ({"name": "mixture"}, "loss.parts is .*, expected a weight above 0 for at least one loss"),
    ({"name": "mixture", "parts": {"tv": 0.0}}, "expected a weight above 0 for at least one loss"),
    ({"name": "mixture", "parts": {"tv": -1.0, "lk": 2.0}}, "loss.parts .*, expected weights of 0"),
    (
        {"name": "mixture", "parts": {"tv": float("nan"), "lk": 1.0}},
        "expected weights of 0 or more",
    ),
    (
        {"name": "mixture", "parts": {"foward_kl": 1.0}},
        "is not one of .*; the nearest is forward_kl",
    ),
    ({"name": "mixture", "parts": {"cross_entropy": 1.0}}, "for the text alone loss=cross_entropy"),
    ({"name": "tv", "parts": {"tv": 1.0}}, "expected weights of 0, or loss.name=mixture"),
    ({"temperature": 0.0}, "loss.temperature is 0.0, expected more than 0"),
    ({"name": CROSS_ENTROPY, "temperature": 2.0}, "loss.temperature .* 1 for losses on tokens"),
    ({"teacher_temperature": -1.0}, "loss.teacher_temperature is -1.0, expected more than 0"),
    ({"name": CROSS_ENTROPY, "teacher_temperature": 2.0}, "null for losses on tokens"),
    ({"lk_eta": -1.0}, "loss.lk_eta is -1.0, expected 0 or more"),
    ({"jsd_beta": 1.0}, "loss.jsd_beta is 1.0, expected a share above 0 and below 1"),
    ({"skew_alpha": 0.0}, "loss.skew_alpha is 0.0, expected a share above 0 and below 1"),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=str)
def test_wrong_settings_are_named(given: dict[str, object], words: str):
    config = TrainConfig()
    vars(config.loss).update(given)
    rules = loss_rules(config.loss)
    with pytest.raises(UserError, match=words):
        refuse(config, [(key, *rule) for key, rule in rules.items()])


@pytest.mark.parametrize(
    ("key", "value"), [("depth_weights", "pace"), ("d_pace_alpha", 1.5), ("d_pace_alpha", -0.1)]
)
def test_wrong_depth_weights_are_named(key: str, value: object):
    def wrong(loss: HeadLossConfig) -> list[str]:
        rules = head_loss_rules(loss, (loss.name,), "", 64, True, False)
        return [name for name, (valid, _) in rules.items() if not valid]

    assert wrong(HeadLossConfig()) == []
    assert wrong(HeadLossConfig(**{key: value})) == [f"loss.{key}"]  # type: ignore[arg-type]
