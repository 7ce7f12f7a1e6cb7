"""Test the shapes in conf/student against published parameter counts."""

import pytest
from omegaconf import OmegaConf
from transformers import LlamaConfig

from distill.shapes import refuse_wider, student_config
from jobs.config import typed
from jobs.job import CONF
from tests.support.configurations import configuration
from training.config import StudentConfig
from training.models.build import target_config
from training.models.shapes import bytes_a_step, millions, parameter_counts

# Names of "Decoding Speculative Decoding" (arXiv 2402.01528), and Sheared-LLaMA's (arXiv
# 2310.06694) by their shapes.
PUBLISHED = {
    "llama_1b3": (1_333_721_600, "1333.7 M"),
    "llama_796m": (796_290_560, "796.3 M"),
    "llama_543m": (543_311_360, "543.3 M"),
    "llama_290m": (290_332_160, "290.3 M"),
    "sheared_1b3": (1_345_423_360, "1345.4 M"),
    "sheared_2b7": (2_701_560_320, "2701.6 M"),
    "sheared_370m": (373_867_520, "373.9 M"),
}
LLAMA_7B = LlamaConfig(vocab_size=32000)  # the defaults are LLaMA-7B's


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str):
    shape = typed(OmegaConf.load(CONF / "student" / f"{name}.yaml"), StudentConfig)
    student = student_config(shape, LLAMA_7B)
    refuse_wider(student, LLAMA_7B)
    count, words = PUBLISHED[name]
    assert parameter_counts(student)["all"] == count
    assert millions(count) == words
    text = (CONF / "student" / f"{name}.yaml").read_text()
    assert words in text, "the comment in the file has the same size"
    assert shape.name == name


@pytest.mark.parametrize("target", ["llama3_1_8b", "llama3_1_70b"])
def test_published_shapes_are_cut_from_a_target_with_grouped_queries(target: str):
    """Check that a student has 8 key-value heads, the target's number, or 5 if it has 20 heads."""
    theirs = target_config(configuration("distill.train", f"target={target}").target)
    for name in PUBLISHED:
        shape = typed(OmegaConf.load(CONF / "student" / f"{name}.yaml"), StudentConfig)
        student = student_config(shape, theirs)
        refuse_wider(student, theirs)
        heads, groups = student.num_attention_heads, student.num_key_value_heads
        assert heads % groups == 0 and groups == {32: 8, 20: 5, 16: 8, 8: 8}[heads], name


def test_bytes_per_step_count_layers_and_head():
    """Check that a step reads the published 13.2 GB (LLaMA-7B) or 1.43 GB (796 M drafter)."""
    assert bytes_a_step(LLAMA_7B) == pytest.approx(13.2e9, rel=0.01)
    shape = typed(OmegaConf.load(CONF / "student" / "llama_796m.yaml"), StudentConfig)
    assert bytes_a_step(student_config(shape, LLAMA_7B)) == pytest.approx(1.43e9, rel=0.01)
