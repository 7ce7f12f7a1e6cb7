"""Test cuts: a student equals the masked target in every family, and cuts are checked and saved."""

import dataclasses
from pathlib import Path

import pytest
import torch

from decoding.errors import UserError
from decoding.models.native.model import NativeTarget
from decoding.models.prefill import prefill
from distill.prune.cut import (
    Cut,
    cut_model,
    keep_layers,
    load_cut,
    refuse_other_shape,
    save_cut,
)
from distill.prune.l0 import apply_masks
from distill.shapes import (
    describe_size_mismatch,
    nearest_divisible_width,
    refuse_wider,
    student_config,
    warn_unaligned_widths,
)
from tests.support.model_families import FAMILIES, family
from training.config import StudentConfig
from training.models.attention import document_mask
from training.models.shapes import parameter_counts

SHAPE = StudentConfig(
    num_hidden_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=24,
)
IDS = torch.tensor([[5, 9, 17, 4, 33, 8, 60, 2]])


def logits(model) -> torch.Tensor:
    bias = document_mask(torch.ones_like(IDS), torch.float32)
    with torch.no_grad():
        return model(IDS, attention_bias=bias).logits


def random_masks(model, shape, seed: int = 0) -> tuple[dict[str, torch.Tensor], Cut]:
    """Return random binary masks that reduce the model to `shape`, and the equivalent cut.

    The masks are given by kind, each of shape [rows, units].
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    layers, groups = config.num_hidden_layers, config.num_key_value_heads
    group_size, kept_group_size = (
        config.num_attention_heads // groups,
        shape.num_attention_heads // shape.num_key_value_heads,
    )

    def rows(count: int, units: int, keep: int) -> torch.Tensor:
        scores = torch.rand(count, units, generator=generator)
        return torch.zeros(count, units).scatter_(1, scores.topk(keep).indices, 1.0)

    z = {
        "layers": rows(1, layers, shape.num_hidden_layers),
        "hidden": rows(1, config.hidden_size, shape.hidden_size),
        "groups": rows(layers, groups, shape.num_key_value_heads),
        "queries": rows(layers * groups, group_size, kept_group_size),
        "units": rows(layers, config.intermediate_size, shape.intermediate_size),
    }
    kept = z["layers"][0].nonzero().flatten()
    groups_LK = torch.stack([z["groups"][layer].nonzero().flatten() for layer in kept])
    queries = z["queries"].view(layers, groups, group_size)
    queries_LKG = torch.stack(
        [
            torch.stack([queries[layer, g].nonzero().flatten() for g in groups_LK[i]])
            for i, layer in enumerate(kept)
        ]
    )
    units_LK = torch.stack([z["units"][layer].nonzero().flatten() for layer in kept])
    hidden = z["hidden"][0].nonzero().flatten()
    return z, Cut(
        tuple(kept.tolist()),
        hidden,
        groups_LK,
        queries_LKG,
        units_LK,
        torch.ones(2 * len(kept) + 1),
        group_size,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_student_equals_the_masked_target(name: str):
    target = family(name)
    shape = student_config(SHAPE, target.config)
    z, cut = random_masks(target, shape)
    with apply_masks(target, z):
        expected = logits(target)
    student = cut_model(target, cut, shape).eval()
    torch.testing.assert_close(logits(student), expected, rtol=1e-5, atol=1e-5)
    assert student.config.num_attention_heads // student.config.num_key_value_heads == 1


def test_control_other_masks_give_other_logits():
    """Control: the logits differ if one kept channel, group, query head or unit is replaced."""
    target = family("llama")
    shape = student_config(SHAPE, target.config)
    z, cut = random_masks(target, shape)
    with apply_masks(target, z):
        expected = logits(target)
    for kind in ("hidden_K", "groups_LK", "queries_LKG", "units_LK"):
        kept = getattr(cut, kind).clone()
        limit = {"hidden_K": 24, "groups_LK": 3, "queries_LKG": 2, "units_LK": 40}[kind]
        row = kept.view(-1, kept.shape[-1])[0]
        row[0] = next(i for i in range(limit) if i not in row)
        other = cut_model(target, dataclasses.replace(cut, **{kind: kept}), shape).eval()
        assert (logits(other) - expected).abs().max() > 1e-3, kind


def test_the_native_backend_runs_cut_students(tmp_path: Path):
    for name in FAMILIES:
        target = family(name)
        shape = student_config(SHAPE, target.config)
        student = cut_model(target, random_masks(target, shape)[1], shape).eval()
        native = NativeTarget.from_state(student.config.to_dict(), student.state_dict())
        native.open(1, 16)
        prefill(native, [IDS[0, :-1].tolist()])
        found, _ = native.forward(IDS[:, -1:])
        torch.testing.assert_close(
            found[0, -1], logits(student)[0, -1], rtol=1e-4, atol=1e-4, msg=name
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_of_nothing_is_the_target(name: str):
    target = family(name)
    shape = student_config(StudentConfig(num_hidden_layers=4), target.config)
    torch.testing.assert_close(
        logits(cut_model(target, keep_layers(target.config, range(4)), shape).eval()),
        logits(target),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_parameter_counts_equal_those_of_the_weights(name: str):
    target = family(name)
    assert parameter_counts(target.config)["all"] == sum(p.numel() for p in target.parameters())
    shape = student_config(SHAPE, target.config)
    student = cut_model(target, random_masks(target, shape)[1], shape)
    assert parameter_counts(shape)["all"] == sum(p.numel() for p in student.parameters())


def test_student_weights_are_copies():
    target = family("llama")
    student = cut_model(
        target,
        keep_layers(target.config, range(4)),
        student_config(StudentConfig(num_hidden_layers=4), target.config),
    )
    theirs = {parameter.data_ptr() for parameter in target.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in student.parameters()}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5, expected at most the target's 4"),
        ({"hidden_size": 30}, "hidden_size is 30, expected at most the target's 24"),
        ({"intermediate_size": 64}, "intermediate_size is 64"),
        (
            {"num_key_value_heads": 6, "num_attention_heads": 6},
            "num_key_value_heads is 6, expected at most the target's 3",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 1},
            "is 6, expected at most the target's 2. Use at most 2 query heads",
        ),
        ({"head_dim": 4}, "rope rotates each channel"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 2},
            "expected a multiple of num_key_value_heads",
        ),
        ({"num_attention_heads": 7}, "num_attention_heads is 7, expected at most the target's 6"),
        (
            {"num_attention_heads": 6, "hidden_size": 20},
            "hidden_size is 20, expected a multiple of the 6 query heads",
        ),
    ],
)
def test_shapes_that_cannot_be_cut_are_refused(changed: dict[str, int], words: str):
    target = family("llama").config
    with pytest.raises(UserError, match=words):
        refuse_wider(
            student_config(StudentConfig(**{"num_hidden_layers": 2, **changed}), target), target
        )


def test_unsupported_families_are_refused():
    from transformers import AutoConfig

    with pytest.raises(
        UserError, match="family 'gpt2', expected one of llama, mistral, qwen2, qwen3"
    ):
        student_config(StudentConfig(), AutoConfig.for_model("gpt2"))


@pytest.mark.parametrize(
    ("name", "noted"),
    [
        ("llama_1m", True),
        ("llama_0b1", True),
        ("wide_17m", False),
        ("student", False),
        ("chat24m", False),
        ("m", False),
    ],
)
def test_a_wrong_size_in_a_name_is_noted(name: str, noted: bool):
    from transformers import LlamaConfig

    shape = LlamaConfig(
        vocab_size=32000, hidden_size=256, num_hidden_layers=1, intermediate_size=512
    )
    note = describe_size_mismatch(name, shape)  # 17.0 M
    assert bool(note) == noted
    if noted:
        assert (
            f"student.name is {name}, but with this target's vocabulary of 32,000 the shape has "
            f"17.0 M" in note
        )
        assert note.endswith(f"{name.rsplit('_')[0]}_17m")


@pytest.mark.parametrize(
    ("size", "heads", "below"), [(200, 3, 192), (190, 4, 128), (100, 3, 99), (300, 5, 300)]
)
def test_the_nearest_divisible_width_is_preferably_aligned(size: int, heads: int, below: int):
    assert nearest_divisible_width(size, heads) == below


def test_unaligned_widths_are_warned_of():
    shape = student_config(
        StudentConfig(hidden_size=384, intermediate_size=100), family("llama").config
    )
    assert warn_unaligned_widths(shape) == [
        "student.intermediate_size is 100, not a multiple of 64: 128 is often as fast"
    ]


def test_a_saved_cut_is_read_back_and_refused_for_another_target(tmp_path: Path):
    target = family("llama")
    shape = student_config(SHAPE, target.config)
    _, cut = random_masks(target, shape)
    path = tmp_path / "masks.safetensors"
    save_cut(cut, path, "a" * 64, {"layers": [0, 1]})
    found = load_cut(path, "a" * 64)
    first, second = (cut_model(target, one, shape).state_dict() for one in (cut, found))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(UserError, match="was made for another target"):
        load_cut(path, "b" * 64)
    with pytest.raises(UserError, match="is not a file, expected"):
        load_cut(tmp_path / "none", "a" * 64)
    refuse_other_shape(cut, shape, "here")
    other = student_config(dataclasses.replace(SHAPE, intermediate_size=16), target.config)
    with pytest.raises(UserError, match="student.intermediate_size is 16, expected 24 as in"):
        refuse_other_shape(cut, other, "here")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged, expected a safetensors file"):
        load_cut(path, "a" * 64)
