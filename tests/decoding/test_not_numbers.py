"""NaN and infinite weights raise an error that names the model, and no token is emitted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.trees.multi_candidate import MultiCandidate
from decoding.errors import UserError
from decoding.interfaces import Proposal
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from decoding.sampling.readback import DeviceReadback, FiniteCheck
from decoding.sampling.token_chooser import TokenChooser
from decoding.verification import follow
from tests.support.tiny_targets import hf_model, native_of

RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with a penalty": {"repetition_penalty": 1.3},
    "greedy with a mask": {"allowed": lambda text: range(4, 40)},
    "token": {"temperature": 1.0, "verify": "token"},
    "token with top-p": {"temperature": 1.0, "verify": "token", "top_p": 0.9},
    "block": {"temperature": 1.0, "verify": "block"},
    "coupled": {"temperature": 1.0, "verify": "coupled"},
}
# PEARL has no block verification.
WAYS = [
    (schedule, rule)
    for schedule in (None, "serial", "pearl_virtual")
    for rule in RULES
    if (schedule, rule) != ("pearl_virtual", "block")
]


def spoiled(value: float, tensor: str = "model.norm.weight") -> NativeTarget:
    model = hf_model()
    model.state_dict()[tensor].view(-1)[0] = value
    return native_of(model, name="spoiled")


@pytest.mark.parametrize(("schedule", "rule"), WAYS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_target_with_nonfinite_logits_is_named(
    schedule: str | None, rule: str, value: float
) -> None:
    drafter = None if schedule is None else ChainDrafter(model=native_of(hf_model()))
    said: list[int] = []
    with pytest.raises(
        UserError,
        match="the target 'spoiled' computes non-finite logits .found .*, expected finite",
    ):
        decode(
            spoiled(value),
            drafter,
            [[4, 5]],
            Settings(schedule=schedule or "serial", **RULES[rule]),
            on_tokens=lambda _, new: said.extend(new),
        )
    assert said == []


def test_one_nonfinite_row_of_the_head_is_detected() -> None:
    with pytest.raises(UserError, match="the target 'spoiled' computes non-finite logits"):
        decode(spoiled(float("nan"), "lm_head.weight"), None, [[4, 5]], Settings())


def test_minus_infinity_among_finite_logits_is_accepted() -> None:
    logits = torch.tensor([[1.0, float("-inf"), 2.0]])
    DeviceReadback(watched=[FiniteCheck(logits, "the target", "logits")])
    with pytest.raises(UserError, match="expected finite ones"):
        DeviceReadback(
            watched=[FiniteCheck(torch.full((1, 3), float("-inf")), "the target", "logits")]
        )


@pytest.mark.parametrize("kind", [ChainDrafter, MultiCandidate])
@pytest.mark.parametrize("verify", ["token", "coupled"])
def test_a_drafter_with_nonfinite_probabilities_is_named(
    kind: type[ChainDrafter], verify: str
) -> None:
    """Check that NaN is an error where q is tested, and has no effect under the coupled rule."""
    target, settings = (
        native_of(hf_model()),
        Settings(max_new_tokens=8, temperature=1.0, verify=verify),
    )
    drafter = kind(model=spoiled(float("nan")))
    if verify == "coupled":
        assert (
            decode(target, drafter, [[4, 5]], settings)[0].tokens
            == decode(target, None, [[4, 5]], settings)[0].tokens
        )
        return
    with pytest.raises(UserError, match="the drafter 'spoiled' computes non-finite probabilities"):
        decode(target, drafter, [[4, 5]], settings)


@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_drafters_weights_are_checked_on_loading(
    tmp_path: Path, backend: str, value: float
) -> None:
    hf_model(dtype=torch.float32).save_pretrained(tmp_path)
    ChainDrafter(tmp_path, backend=backend)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 2] = value
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"tensor 'model.layers.1.mlp.up_proj.weight' holds non-finite weights"
    ):
        ChainDrafter(tmp_path, backend=backend)
    with pytest.raises(UserError, match="computes non-finite logits"):
        decode(load_target(tmp_path, backend=backend), None, [[4, 5]], Settings())


def test_finite_checks_share_the_rules_readback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the finite check adds no wait: its number arrives with the rule's readback."""
    from decoding import devices

    reads = []
    monkeypatch.setattr(devices, "runs_ahead", lambda device: True)
    monkeypatch.setattr(
        devices,
        "read",
        lambda *tensors: reads.append(len(tensors)) or [each.tolist() for each in tensors],
    )
    logits = torch.randn(1, 2, 8)
    along = torch.tensor([3])
    chooser = TokenChooser(Settings().warper, "greedy", 0, 8, torch.device("cpu"))
    readback = DeviceReadback(along, watched=[FiniteCheck(logits, "the target", "logits")])
    assert reads == []
    follow.greedy(logits, Proposal(torch.tensor([[1]]), [1]), chooser, readback)
    assert readback.drafter_values() == [[3]]
    assert reads == [4], "choices, drafted tokens, the drafter's value, and the largest logit"
    readback = DeviceReadback(watched=[FiniteCheck(logits * float("nan"), "the target", "logits")])
    with pytest.raises(UserError, match="the target computes non-finite logits"):
        follow.greedy(logits, Proposal(torch.tensor([[1]]), [1]), chooser, readback)
