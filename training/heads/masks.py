"""Random masks of a block's slots, for drafters that learn to denoise (masked diffusion).

Of the K slots of a draft m stay masked, with m sampled from 1 to K, and the others hold the text's
tokens. The mask ratio is t = m / K, and the losses of masked slots have the weight 1 / t, as in
MDLM (Sahoo et al. 2024, arXiv 2406.07524). So the expected weight of every slot is 1.

Shapes: K drafted tokens, M drafts.
"""

import numpy as np

from decoding.sampling import noise

MASKED = -1  # in place of the token of a masked slot


def mask_slots(keys_M: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each slot is masked [K, M], and the number of masked slots [M].

    keys_M: the 64-bit key of each draft, on which both depend. slots: K.
    """
    counts_M = 1 + (noise.uniform(keys_M) * slots).astype(np.int64)
    numbers_K1 = np.arange(1, slots + 1, dtype=np.uint64)[:, None]
    order_KM = noise.uniform(noise.extend(keys_M, numbers_K1)).argsort(axis=0)
    return order_KM.argsort(axis=0) < counts_M, counts_M
