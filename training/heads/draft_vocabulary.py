"""Choice of a head's draft vocabulary by the target's probability.

A token that is not drafted costs the probability that the target gives it: the probability of the
drafted tokens, their *coverage*, is an upper bound of acceptance. So the best tokens are those with
the largest sums of this probability over the places of the target's text. Counts of the text's
tokens (training/draft_vocabulary.py) are samples of the same sums, without a forward of the target.

Shapes: V drafted vocabulary, T the target's vocabulary, N places, H hidden size, C rows of a chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data.packing import PackedData, collate
from training.draft_vocabulary import choose_tokens
from training.held_out.texts import sample_rows
from training.losses.chunked import chunk_rows, widen
from training.objectives import hidden_states

MASS, COUNTS = "mass", "counts"
CHOICES = (MASS, COUNTS)
MOST_TOKENS = 32_768  # of the data that the target reads


def choose_by_mass(
    data: PackedData, target: Any, draft_vocab_size: int, show: bool, most_tokens: int = MOST_TOKENS
) -> Tensor:
    """Return the ids [V] of the tokens with the largest probability, rising.

    Probabilities are the target's at temperature 1, at the supervised tokens of evenly spaced rows;
    ties go to smaller ids. A sharded target needs all ranks to call it. show: print the coverage,
    and that of as many tokens by counts.
    """
    mass_T, places = measure_mass(data, target, most_tokens)
    chosen_V = mass_T.argsort(descending=True, stable=True)[:draft_vocab_size]
    if show:
        size = len(mass_T)
        counted_V = choose_tokens(data.samples, size, draft_vocab_size, show=False)
        print(
            f"draft vocabulary: {len(chosen_V):,} of {size:,} tokens, with "
            f"{mass_T[chosen_V].sum():.2%} of the target's probability at {places:,} places of the "
            f"training answers; the most frequent tokens have {mass_T[counted_V].sum():.2%}"
        )
    return chosen_V.sort().values


@torch.no_grad()
def measure_mass(data: PackedData, target: Any, most_tokens: int) -> tuple[Tensor, int]:
    """Return the mean probability [T] that the target gives to each token, and at how many places.

    target: a Hugging Face causal LM. most_tokens: of the rows that it reads, at least one row.
    """
    weight_TH = target.get_output_embeddings().weight
    device = next(target.parameters()).device
    sums_T, places = torch.zeros(len(weight_TH), dtype=torch.float64), 0
    for row in sample_rows(data.rows, data.capacity, most_tokens):
        batch = collate(data.samples, [row], data.capacity, device)
        states_NH = batch.at_supervised(hidden_states(target, batch))
        for states_CH in states_NH.split(chunk_rows(len(weight_TH))):
            p_CT = widen(F.linear(states_CH, weight_TH)).softmax(dim=-1)
            sums_T += p_CT.sum(dim=0).double().cpu()
        places += len(states_NH)
    return sums_T / max(1, places), places
