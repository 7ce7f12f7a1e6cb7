"""Counter-based noise: every random number is a pure function of its key.

It does not depend on the batch row, the order of calls or the device. There are two kinds:

- `uniform` is keyed by (seed, request, round, position, purpose), for token verification, where a
  position that is drafted again in a later round must get new noise.
- `exponentials` are keyed by (seed, request, position, token id), for the coupled rule: draft and
  target, tree nodes and batch rows share the noise, so the output equals the target's alone. With
  E = -log(uniform), a standard exponential, -log E is a Gumbel variable, and argmax(log p + Gumbel)
  = argmax(p / E).

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood 2014) in integer arithmetic:
Python integers for single numbers, numpy.uint64, which wraps, for all rows of a batch, and
torch.int64, which wraps too, for rows of a vocabulary. CPU and CUDA give equal numbers.
"""

from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Unsigned = TypeVar("Unsigned", int, np.ndarray)  # 64-bit integers

DRAFT, ACCEPT, RESIDUAL, BONUS = range(4)  # purposes of a uniform

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = 0xFFFFFFFFFFFFFFFF
# a 52-bit integer times 2^-52, plus this, is a float64 strictly inside (0, 1)
HALF_STEP = 2.0**-53
# a signed 64-bit integer times this, plus 0.5, is a float64 strictly inside (0, 1)
SIGNED_STEP = 2.0**-64 * (1 - 2.0**-52)


def mix(z: Unsigned) -> Unsigned:
    """Apply SplitMix64's finaliser to unsigned 64-bit integers."""
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def key(*parts: int) -> int:
    """Return one unsigned 64-bit key from integers; their order matters."""
    return reduce(extend, parts, 0)


def extend(state: Unsigned, part: Any) -> Unsigned:
    """Return key(*parts, part) from state = key(*parts)."""
    return mix((state ^ (part & MASK)) * 5 + GOLDEN & MASK)


def uniform(state: Unsigned) -> Any:
    """Return a float64 uniform inside (0, 1) from each key."""
    return (mix((state + GOLDEN) & MASK) >> 12) * 2.0**-52 + HALF_STEP


def signed(z: int) -> int:
    """Return the torch.int64 value with the bits of an unsigned 64-bit integer."""
    return z - (1 << 64) if z >> 63 else z


def mix_tensor(z: Tensor) -> Tensor:
    """Apply `mix` without its last step to an int64 tensor in place.

    `>>` extends the sign, which is masked off. The omitted step only changes the lower 33 bits,
    which hardly affect a float64 uniform.
    """
    z = z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(signed(MIX_1))
    return z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(signed(MIX_2))


def exponentials(keys: Tensor, scaled: Tensor) -> Tensor:
    """Return standard exponentials -log(uniform), float32, in the arguments' broadcast shape.

    keys: signed key(seed, request, position), int64. scaled: `scaled_ids` of the token ids.
    """
    # the logarithm is in float64, since float32 is too coarse for a uniform near 1
    return uniforms(keys, scaled).log_().to(torch.float32).neg_()


def uniforms(keys: Tensor, scaled: Tensor) -> Tensor:
    """Return float64 uniforms inside (0, 1) for the arguments of `exponentials`."""
    return mix_tensor(scaled + keys).to(torch.float64).mul_(SIGNED_STEP).add_(0.5)


def scaled_ids(ids: Tensor) -> Tensor:
    """Return token ids spread over 64 bits, as `exponentials` takes them."""
    return (ids + 1) * signed(GOLDEN)
