"""Test initial students: their shapes, the layers they copy, and refused values."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoding.errors import UserError
from decoding.models.text.tokenizer import copy_tokenizer
from distill.shapes import student_config
from distill.student import build_student, choose_layers
from training.config import StudentConfig


@pytest.fixture(scope="module")
def target(tiny_target: Path):
    return AutoModelForCausalLM.from_pretrained(tiny_target)


def test_a_student_of_all_layers_equals_the_target(target):
    student = build_student(StudentConfig(num_hidden_layers=4), target, torch.float32)
    assert student.state_dict().keys() == target.state_dict().keys()
    assert all(
        torch.equal(tensor, target.state_dict()[name])
        for name, tensor in student.state_dict().items()
    )


def test_given_layers_are_copied(target):
    student = build_student(
        StudentConfig(num_hidden_layers=2, layers=[1, 3]), target, torch.float32
    )
    for new, old in enumerate([1, 3]):
        ours = student.model.layers[new].mlp.down_proj.weight
        assert torch.equal(ours, target.model.layers[old].mlp.down_proj.weight)
        assert ours.data_ptr() != target.model.layers[old].mlp.down_proj.weight.data_ptr(), (
            "training must not change the target"
        )


def test_default_layers_are_first_last_and_evenly_spaced():
    assert [choose_layers(StudentConfig(num_hidden_layers=n), 13) for n in (1, 2, 3, 4)] == [
        [0],
        [0, 12],
        [0, 6, 12],
        [0, 4, 8, 12],
    ]


def test_random_students_may_have_any_shape(target):
    shape = StudentConfig(
        num_hidden_layers=1,
        init="random",
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        intermediate_size=80,
    )
    torch.manual_seed(1)
    student = build_student(shape, target, torch.float32)
    config = student.config
    assert (
        config.hidden_size,
        config.num_attention_heads,
        config.head_dim,
        config.intermediate_size,
    ) == (
        48,
        6,
        16,
        80,
    )
    assert config.vocab_size == target.config.vocab_size
    assert student(
        torch.tensor([[1, 2, 3]]), attention_bias=torch.zeros(1, 1, 3, 3)
    ).logits.shape == (1, 3, 2048)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            StudentConfig(num_hidden_layers=5),
            "expected at most the target's 4. Use student.init=random",
        ),
        (StudentConfig(num_hidden_layers=0), "num_hidden_layers is 0, expected 1 to 64"),
        (StudentConfig(num_hidden_layers=1, layers=[4]), "from 0 to 3"),
        (StudentConfig(num_hidden_layers=2, layers=[1]), "expected 2 layers"),
        (StudentConfig(hidden_size=64), "student.hidden_size is 64, expected the target's 32"),
        (StudentConfig(init="copy"), "expected one of layers, folder, random"),
        (
            StudentConfig(init="random", num_attention_heads=5, num_key_value_heads=2),
            "expected a multiple of",
        ),
    ],
)
def test_invalid_students_are_refused(target, shape: StudentConfig, words: str):
    with pytest.raises(UserError, match=words):
        build_student(shape, target, torch.float32)


def test_rope_and_context_come_from_the_target(target):
    config = student_config(StudentConfig(num_hidden_layers=1), target.config)
    assert config.rope_parameters == target.config.rope_parameters
    assert config.max_position_embeddings == target.config.max_position_embeddings


def test_a_student_with_the_targets_tokenizer_is_resized(target, tiny_target: Path, tmp_path: Path):
    """Check that a student with the target's tokenizer gets the target's vocabulary size.

    Its table is three rows longer or shorter than the target's. A longer one is refused if the
    folder has no tokenizer.
    """
    for more in (3, -3):
        student = AutoModelForCausalLM.from_pretrained(tiny_target)
        student.resize_token_embeddings(2048 + more if more > 0 else 2048, mean_resizing=False)
        student.save_pretrained(tmp_path)
        shape = StudentConfig(init="folder", path=str(tmp_path))
        if more > 0:
            with pytest.raises(
                UserError,
                match="a vocabulary of 2051, expected the target's 2048, and has no tokenizer",
            ):
                build_student(shape, target, torch.float32, tiny_target)
        copy_tokenizer(tiny_target, tmp_path)
        wanted = target if more > 0 else AutoModelForCausalLM.from_pretrained(tiny_target)
        wanted.resize_token_embeddings(2048 if more > 0 else 2051, mean_resizing=False)
        made = build_student(shape, wanted, torch.float32, tiny_target)
        assert made.config.vocab_size == wanted.config.vocab_size == made.lm_head.out_features
        assert torch.equal(made.lm_head.weight[:2048], target.lm_head.weight[:2048])
