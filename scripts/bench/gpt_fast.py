"""Time the decoding of gpt-fast (https://github.com/pytorch-labs/gpt-fast) beside `gpu.sh decode`.

    git clone https://github.com/pytorch-labs/gpt-fast
    python scripts/bench/gpt_fast.py folder=gpt-fast device=cuda

Its own `generate` runs with random bfloat16 weights of LLaMA-7B, its step compiled as its README's
command does it: torch.compile with mode="reduce-overhead" and its Inductor settings. The prompt and
the new tokens are those of `gpu.sh decode`. It writes scripts/bench/results/gpt_fast.json.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from decoding import devices
from decoding.costs.machine_limits import measure_limits
from decoding.errors import UserError
from scripts.bench import common
from scripts.bench.common import BenchOptions
from scripts.bench.gpu_decode import REAL, TOY, Sizes
from scripts.usage import run_script

RUNS = 3


@dataclass
class Options(BenchOptions):
    device: str = "cuda"  # cpu | cuda | cuda:N
    folder: str = "gpt-fast"  # a clone of gpt-fast
    toy: bool = False  # small shapes, to test the script


def load_gpt_fast(folder: Path) -> tuple[Any, Any]:
    """Return gpt-fast's modules `generate` and `model`, from its source folder."""
    if not (folder / "generate.py").is_file():
        raise UserError(
            f"{folder} has no generate.py, expected a clone of gpt-fast. Run git clone "
            f"https://github.com/pytorch-labs/gpt-fast, and set folder="
        )
    sys.path.insert(0, str(folder))
    import generate  # type: ignore[import-not-found]
    import model  # type: ignore[import-not-found]

    return generate, model


def measure(folder: Path, device: str, sizes: Sizes) -> dict[str, Any]:
    """Return tokens/s of its autoregressive decoding and the share of the bandwidth it reaches."""
    generate, model = load_gpt_fast(folder)
    shape = sizes.target
    config = model.ModelArgs(
        n_layer=shape.num_hidden_layers,
        n_head=shape.num_attention_heads,
        dim=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        n_local_heads=shape.num_key_value_heads,
        vocab_size=shape.vocab_size,
    )
    with torch.device(device):
        target = model.Transformer(config).to(sizes.dtype)
    torch.nn.init.normal_(target.output.weight, std=0.02)
    generate.decode_one_token = torch.compile(
        generate.decode_one_token, mode="reduce-overhead", fullgraph=True
    )
    prompt = torch.full((sizes.prompt,), 3, dtype=torch.int, device=device)

    def seconds(tokens: int) -> float:
        devices.synchronize(torch.device(device))
        began = time.perf_counter()
        generate.generate(
            target,
            prompt,
            tokens,
            batch_size=1,
            interactive=False,
            draft_model=None,
            temperature=0.8,
            top_k=200 if shape.vocab_size > 200 else 20,
        )
        devices.synchronize(torch.device(device))
        return time.perf_counter() - began

    compiling = seconds(sizes.tokens)
    # the prompt's forward is in both, so their difference is of decoding alone
    took = [seconds(sizes.tokens) - seconds(2) for _ in range(RUNS)]
    per_second = (sizes.tokens - 2) / median(took)
    # every weight but the embedding table is read in each step
    weight_bytes = sum(each.numel() * each.element_size() for each in target.parameters())
    weight_bytes -= target.tok_embeddings.weight.numel() * target.output.weight.element_size()
    limits = measure_limits(weight_bytes, sizes.dtype, device, sizes.limit_seconds)
    return {
        "tokens_per_second": per_second,
        "share_of_limit": per_second * weight_bytes / limits.bytes_a_second,
        "first_run_seconds": compiling,
        "bytes_a_second": limits.bytes_a_second,
    }


def main() -> None:
    chosen = common.read_options(Options)
    device = devices.device_of(chosen.device)
    common.save(
        "gpt_fast", chosen, measure(Path(chosen.folder), device, TOY if chosen.toy else REAL)
    )


if __name__ == "__main__":
    run_script(main)
