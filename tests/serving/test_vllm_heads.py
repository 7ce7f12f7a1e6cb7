"""Heads and unsuitable drafters in the real vLLM."""

import shlex
import subprocess
from pathlib import Path

import pytest

from decoding import load
from decoding.loop import decode
from decoding.rounds.settings import Settings
from tests.support.trained_heads import train_head
from tests.support.vllm_server import serve
from training.config import StudentConfig
from training.drafter_folder import write_model
from training.models.build import build_llama, dtype_of

pytestmark = pytest.mark.engines
QUESTIONS, TOKENS = ["def add(a, b):", "Write a class for a queue.", "import json"], 48


@pytest.mark.parametrize(
    ("head", "length"),
    [("medusa", 4), ("eagle1", 3), ("eagle3", 3), ("p_eagle", 7), ("dflash", 7)],
)
def test_vllm_serves_trained_heads(
    head: str, length: int, embedded_target: Path, vllm_python: Path, tmp_path: Path
) -> None:
    """Check the launch line of a head folder: equal text, and drafts of all tokens."""
    folder = train_head(tmp_path / "run", head)
    lines = (folder / "README.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("vllm serve "))
    with serve(line, folder, tmp_path / "log") as server:
        answers = server.ask(QUESTIONS, TOKENS)
        tested, accepted = server.tested_and_accepted()
    target = load(embedded_target).target
    plain = decode(target, None, [one.prompt for one in answers], Settings(max_new_tokens=TOKENS))
    assert [one.tokens for one in answers] == [one.tokens for one in plain]
    assert len(tested) == length and tested[0] > sum(accepted) > 0


def test_vllm_refuses_a_drafter_with_another_vocabulary(
    embedded_target: Path, vllm_python: Path, tmp_path: Path
) -> None:
    """Check vLLM's words for a draft vocabulary, which our loop allows."""
    shape = StudentConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=1, intermediate_size=48
    )
    sizes = {"vocab_size": 1024, "max_position_embeddings": 512}
    model = build_llama(shape, dtype_of("float32"), **sizes, bos_token_id=1, eos_token_id=2)
    write_model(model, embedded_target, tmp_path / "small", dtype_of("float32"))
    given = '{"method": "draft_model", "model": "small", "num_speculative_tokens": 4}'
    line = f"vllm serve {shlex.quote(str(embedded_target))} --speculative-config '{given}'"
    with (
        serve(line, tmp_path, tmp_path / "log") as server,
        pytest.raises(AssertionError, match="vocab"),
    ):
        server.wait()


def test_vllm_for_cpus_norms_the_keys_of_all_layers_with_the_first_layers_weights(
    vllm_python: Path,
) -> None:
    """Check why vLLM 0.32.0 for CPUs reads DFlash heads of several layers a little wrongly.

    It normalizes the context's keys of all layers in one call of a kernel whose CPU version takes
    the first row of the weights.
    """
    program = """
import torch, vllm
from vllm import _custom_ops
from vllm.platforms import current_platform

current_platform.import_kernels()
keys, weights = torch.randn(2, 5, 3, 32), torch.rand(2, 32)
found, eps = torch.empty_like(keys), 1e-6
_custom_ops.rms_norm(found, keys, weights, eps)
normed = keys * (keys.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
same = [torch.allclose(found[i], normed[i] * weights[j], atol=1e-5) for i in (0, 1) for j in (0, 1)]
print(vllm.__version__, *map(int, same))
"""
    command = [str(vllm_python), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    version, *same = done.stdout.splitlines()[-1].split()
    if version != "0.32.0":
        pytest.skip(f"vLLM {version} is another version")
    assert same == ["1", "0", "1", "0"]  # layer 1 has the weights of layer 0
