"""Counter-based noise: every random number is a pure function of its key, never of batch row, order
or device.

Two kinds. `uniform` is keyed by (seed, request, round, position, purpose), for token verification:
a position that is drafted again in a later round must meet fresh noise. `exponentials` are keyed by
(seed, request, position, token id) alone, for the coupled rule: draft and target, tree node and
batch row all see the same noise, so the output is the target's own. With E = -log(uniform), a
standard exponential, -log E is a Gumbel variable, and argmax(log p + Gumbel) = argmax(p / E).

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), in integers, on both
sides: Python's for single numbers and torch.int64 (which wraps) for rows of a vocabulary, equal on
CPU and CUDA.
"""

import torch
from torch import Tensor

DRAFT, ACCEPT, RESIDUAL, BONUS = range(4)  # purposes of a uniform

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = 0xFFFFFFFFFFFFFFFF
HALF_STEP = 2.0**-53  # a 52-bit integer times 2^-52, plus this, is a float64 strictly inside (0, 1)
SIGNED_STEP = 2.0**-64 * (1 - 2.0**-52)  # a signed 64-bit integer times this, plus 0.5, is as well


def mix(z: int) -> int:
    """SplitMix64's finaliser on an unsigned 64-bit integer."""
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def key(*parts: int) -> int:
    """One unsigned 64-bit key from integers; order matters."""
    state = 0
    for part in parts:
        state = mix((state ^ (part & MASK)) * 5 + GOLDEN & MASK)
    return state


def extend(state: int, part: int) -> int:
    """key(*parts, part) from state = key(*parts)."""
    return mix((state ^ (part & MASK)) * 5 + GOLDEN & MASK)


def uniform(state: int) -> float:
    """A float64 uniform inside (0, 1) from a key."""
    return (mix((state + GOLDEN) & MASK) >> 12) * 2.0**-52 + HALF_STEP


def signed(z: int) -> int:
    """The torch.int64 value with the bits of an unsigned 64-bit integer."""
    return z - (1 << 64) if z >> 63 else z


def mix_tensor(z: Tensor) -> Tensor:
    """`mix` without its last step, on a fresh int64 tensor, in place. `>>` carries the sign in, so
    it is masked off.

    The step that is left out changes the lower 33 bits alone, which a float64 uniform barely shows.
    """
    z = z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(signed(MIX_1))
    return z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(signed(MIX_2))


def exponentials(keys: Tensor, scaled: Tensor) -> Tensor:
    """Standard exponentials -log(uniform), float32, in the broadcast shape of the two arguments.

    keys: signed key(seed, request, position), int64. scaled: `scaled_ids` of the token ids.
    """
    # The logarithm in float64: a uniform near 1 needs the digits.
    return uniforms(keys, scaled).log_().to(torch.float32).neg_()


def uniforms(keys: Tensor, scaled: Tensor) -> Tensor:
    """Uniforms inside (0, 1), float64, in the broadcast shape of the two arguments, which are those
    of `exponentials`.
    """
    return mix_tensor(scaled + keys).to(torch.float64).mul_(SIGNED_STEP).add_(0.5)


def scaled_ids(ids: Tensor) -> Tensor:
    """Token ids spread over 64 bits, the form `exponentials` takes; made once for a whole
    vocabulary.
    """
    return (ids + 1) * signed(GOLDEN)
