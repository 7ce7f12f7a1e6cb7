"""How near our decoding comes to what the machine can read: a random-weight LLaMA of a gigabyte and
more, batch 1, in turn with plain reading.

    python scripts/bench/bandwidth.py
    python scripts/bench/bandwidth.py device=cuda layers=32 hidden_size=4096 \\
      intermediate_size=11008 kv_heads=32

A forward over one token has to read every weight once. Its bytes over its time are set against the
best of three plain readers of the same size (a sum, a matrix-vector product in the same dtype, and
on a GPU a copy), and its operations against those of a product of two square matrices, measured in
the same rounds. Of a yardstick the best round counts, and a share above 1 is told to be none. Both
budgets of decoding/costs/roofline.py, bytes and operations, are printed with the share reached; and
V(n), which stays near 1 for as long as bytes bind.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from decoding.costs.machine_limits import per_second, product, readers
from decoding.costs.roofline import Budget, forward_budget
from decoding.models.native.model import NativeTarget
from scripts.bench import random_models
from scripts.bench.common import judged, options, save, take_turns
from scripts.bench.random_models import Shape
from training.models.build import dtype_of


@dataclass
class Options:
    layers: int = 12  # decoder layers
    hidden_size: int = 2048  # width
    intermediate_size: int = 5632  # of the MLP
    heads: int = 16  # query heads
    kv_heads: int = 4  # key/value heads
    vocab_size: int = 32000  # rows of the head
    context: int = 256  # committed tokens
    widths: list[int] = field(default_factory=lambda: [1, 2, 4, 8])  # new tokens a forward
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])  # each in turn
    forwards: int = 8  # a round
    rounds: int = 5  # rounds that count
    product_side: int = 1024  # rows of the square matrices whose product is the limit of operations
    threads: int = 2  # CPU threads
    device: str = "cpu"  # cpu | cuda | cuda:N
    name: str = "bandwidth"  # of the results file


def random_target(chosen: Options, dtype: torch.dtype) -> NativeTarget:
    """The LLaMA of the options."""
    shape = Shape(
        chosen.layers,
        chosen.hidden_size,
        chosen.heads,
        chosen.intermediate_size,
        chosen.kv_heads,
        chosen.hidden_size // chosen.heads,
        chosen.vocab_size,
    )
    return random_models.random_target(
        shape, dtype, chosen.device, chosen.context + max(chosen.widths) + 1
    )


def bench(chosen: Options, dtype_name: str) -> dict[str, Any]:
    """Figures of one dtype."""
    dtype = dtype_of(dtype_name)
    target = random_target(chosen, dtype)
    budget = forward_budget(target.config, dtype, 1, chosen.context)
    inputs = {n: torch.ones(1, n, dtype=torch.long, device=chosen.device) for n in chosen.widths}
    target.open(1, chosen.context + max(chosen.widths) + 1)
    target.slots.lengths_B = [chosen.context]  # what the cache holds does not matter to the clock
    plain = readers(budget.weight_bytes, dtype, chosen.device)
    multiply, operations = product(dtype, chosen.device, chosen.product_side)
    actions: dict[str, tuple[Callable[[], Any], int]] = {
        f"forward {n}": (partial(target.forward, inputs[n]), chosen.forwards) for n in chosen.widths
    }
    actions |= {name: (reader, 2) for name, (reader, _) in plain.items()} | {
        "product": (multiply, 2)
    }
    sides = {
        name: partial(per_second, action, chosen.device, times)
        for name, (action, times) in actions.items()
    }
    with torch.inference_mode():
        figures = take_turns(sides, chosen.rounds)
    sizes = {name: size for name, (_, size) in plain.items()} | {"product": operations}
    return {"parameters": target.num_parameters, **reached(figures, budget, sizes)}


def reached(
    figures: dict[str, list[float]], budget: Budget, sizes: dict[str, int]
) -> dict[str, Any]:
    """What forwards reach of what the machine can do.

    figures: calls a second in every round; sizes: bytes of each reader, and the operations of the
    product. Forwards count by their median and the yardsticks by their best round: what slows one
    down says nothing of the machine.
    """
    median = {
        name: statistics.median(values)
        for name, values in figures.items()
        if name.startswith("forward")
    }
    limits = {name: max(figures[name]) * size for name, size in sizes.items()}
    computing = limits.pop("product")
    best = max(limits, key=limits.__getitem__)
    moved, computed = (
        median["forward 1"] * budget.bytes_read,
        median["forward 1"] * budget.operations,
    )
    return {
        "gigabytes_a_forward": budget.bytes_read / 1e9,
        "gigaflop_a_forward": budget.operations / 1e9,
        "tokens_per_second": median["forward 1"],
        "gigabytes_per_second": moved / 1e9,
        "gigaflop_per_second": computed / 1e9,
        "plain_reading_gigabytes_per_second": {name: value / 1e9 for name, value in limits.items()},
        "best_reader": best,
        "product_gigaflop_per_second": computing / 1e9,
        **judged(
            {
                "share_of_bandwidth": moved / limits[best],
                "share_of_operations": computed / computing,
            }
        ),
        "V": {
            name.removeprefix("forward "): median["forward 1"] / rate
            for name, rate in median.items()
        },
    }


def main() -> None:
    chosen = options(Options)
    save(chosen.name, chosen, {dtype: bench(chosen, dtype) for dtype in chosen.dtypes})


if __name__ == "__main__":
    main()
