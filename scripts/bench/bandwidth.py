"""Decoding speed against plain reading of memory, for a random-weight LLaMA of a gigabyte or more.

    python scripts/bench/bandwidth.py
    python scripts/bench/bandwidth.py device=cuda layers=32 hidden_size=4096 \\
      intermediate_size=11008 kv_heads=32

A forward over one token reads every weight once. The bytes it reads per second are compared with
the best of three plain readers of the same size (a sum, a matrix-vector product in the same dtype,
and on a GPU a copy), and its operations per second with a product of two square matrices, in the
same rounds. The model runs as with `target.execution=auto`, fused on a CPU. The best round of a
reader counts, and a share above 1 is marked as not valid. V(n) stays near 1 while bytes are the
limit.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from decoding.costs.machine_limits import per_second, product, readers
from decoding.costs.roofline import ForwardBudget, forward_budget
from scripts.bench import common
from scripts.bench.common import BenchOptions
from scripts.bench.random_models import llama, random_target
from scripts.usage import run_script
from training.models.build import dtype_of


@dataclass
class Options(BenchOptions):
    layers: int = 12  # decoder layers
    hidden_size: int = 2048  # width
    intermediate_size: int = 5632  # width of the MLP
    heads: int = 16  # query heads
    kv_heads: int = 4  # key/value heads
    vocab_size: int = 32000  # rows of the output layer
    context: int = 256  # committed tokens
    widths: list[int] = field(default_factory=lambda: [1, 2, 4, 8])  # new tokens in a forward
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])  # dtypes to measure
    forwards: int = 8  # forwards per round
    rounds: int = 5  # measured rounds
    product_side: int = 1024  # rows of the square matrices of the product
    name: str = "bandwidth"  # name of the results file


def measure(chosen: Options, dtype_name: str) -> dict[str, Any]:
    """Measure forwards, plain readers and the matrix product in one dtype."""
    dtype, device, width = dtype_of(dtype_name), chosen.device, chosen.hidden_size
    inner, head_dim = chosen.intermediate_size, width // chosen.heads
    shape = (chosen.layers, width, chosen.heads, inner, chosen.kv_heads, head_dim)
    most = chosen.context + max(chosen.widths) + 1
    target = random_target(llama(*shape, chosen.vocab_size), dtype, device, most)
    budget = forward_budget(target.config, dtype, 1, chosen.context)
    target.open(1, most)
    target.slots.lengths_B = [chosen.context]  # the content of the cache does not change the time
    plain = readers(budget.weight_bytes, dtype, device)
    multiply, operations = product(dtype, device, chosen.product_side)
    actions: dict[str, tuple[Callable[[], Any], int]] = {}
    for n in chosen.widths:
        tokens_BN = torch.ones(1, n, dtype=torch.long, device=device)
        actions[f"forward {n}"] = partial(target.forward, tokens_BN), chosen.forwards
    actions |= {name: (reader, 2) for name, (reader, _) in plain.items()}
    actions["product"] = multiply, 2
    sides = {name: partial(per_second, call, device, n) for name, (call, n) in actions.items()}
    with torch.inference_mode():
        figures = common.take_turns(sides, chosen.rounds)
    sizes = {name: size for name, (_, size) in plain.items()} | {"product": operations}
    facts = {"parameters": target.num_parameters, "backend": target.backend}
    return {**facts, **compute_shares(figures, budget, sizes)}


def compute_shares(
    figures: dict[str, list[float]], budget: ForwardBudget, sizes: dict[str, int]
) -> dict[str, Any]:
    """Return the shares of the machine's limits that the forwards reach.

    figures: calls/s in every round. sizes: bytes of each reader, and operations of the product.
    Forwards count by their median. Readers and the product count by their best round, because other
    processes cause the slow ones.
    """
    forwards = {name: values for name, values in figures.items() if name.startswith("forward")}
    median = common.medians(forwards)
    limits = {name: max(figures[name]) * size for name, size in sizes.items()}
    computing = limits.pop("product")
    best, one = max(limits, key=limits.__getitem__), median["forward 1"]
    moved, computed = one * budget.bytes_read, one * budget.operations
    shares = {
        "share_of_bandwidth": moved / limits[best],
        "share_of_operations": computed / computing,
    }
    return {
        "gigabytes_a_forward": budget.bytes_read / 1e9,
        "gigaflop_a_forward": budget.operations / 1e9,
        "tokens_per_second": one,
        "gigabytes_per_second": moved / 1e9,
        "gigaflop_per_second": computed / 1e9,
        "plain_reading_gigabytes_per_second": {name: value / 1e9 for name, value in limits.items()},
        "best_reader": best,
        "product_gigaflop_per_second": computing / 1e9,
        **common.add_warnings(shares),
        "V": {name.removeprefix("forward "): one / rate for name, rate in median.items()},
    }


def main() -> None:
    """Measure every dtype and save the figures."""
    chosen = common.read_options(Options)
    found = {dtype: measure(chosen, dtype) for dtype in chosen.dtypes}
    common.save(chosen.name, chosen, found)


if __name__ == "__main__":
    run_script(main)
