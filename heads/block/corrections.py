"""Corrections: sequential parts that make a block's logits depend on the tokens drafted before.

All slots of a block are computed at once, so the state h_k of a slot does not depend on the tokens
that are drafted in the slots before it. A correction adds W f_k to the logits of depth k, with a
few features f_k of h_k and of these tokens, and takes K small steps after the one pass of the
backbone. The output layer of a corrected head is [lm_head | W] over [h_k ; f_k], in two parts of
which only W has a gradient. W starts at zero: a new head drafts like one without a correction.

A selector corrects only the likeliest tokens of each slot, and no other token is drafted.

Shapes: M drafts, H hidden size, E features of the correction, V drafted vocabulary, C
candidates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.block.shape import GRU, MARKOV, SELECTOR, BlockConfig
from training.heads.candidates import keep_listed

Embed = Callable[[Tensor], Tensor]  # the target's embeddings (..., H) of token ids


class Correction(nn.Module, ABC):
    """A correction of the logits, with a state that every token advances."""

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """W, the output layer [V, E] of the features."""

    @abstractmethod
    def advance(self, state_ME: Tensor | None, tokens_M: Tensor, embed: Embed) -> Tensor:
        """Return the state after one more token; state_ME is None before the tips."""

    @abstractmethod
    def features(self, hidden_MH: Tensor, state_ME: Tensor, depth: int) -> Tensor:
        """Return the features f [M, E] of the backbone's states and the correction's state."""

    @abstractmethod
    def correct(self, logits_MV: Tensor, features_ME: Tensor) -> Tensor:
        """Return the backbone's logits [M, V] with the correction."""


class FullCorrection(Correction):
    """A correction of all tokens' logits."""

    @property
    @abstractmethod
    def output(self) -> nn.Linear:
        """The output layer of the features."""

    @property
    def weight(self) -> Tensor:
        return self.output.weight

    def correct(self, logits_MV: Tensor, features_ME: Tensor) -> Tensor:
        added_MV = self.output(features_ME)
        assert isinstance(added_MV, Tensor)
        return logits_MV + added_MV


class Markov(FullCorrection):
    """DSpark's head: the logits W2 W1[x] of the last token x (arXiv 2607.05147)."""

    def __init__(self, shape: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, shape.rank)
        self.markov_w2 = nn.Linear(shape.rank, shape.num_drafted, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=shape.rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    @property
    def output(self) -> nn.Linear:
        return self.markov_w2

    def advance(self, state_ME: Tensor | None, tokens_M: Tensor, embed: Embed) -> Tensor:
        found = self.markov_w1(tokens_M)
        assert isinstance(found, Tensor)
        return found

    def features(self, hidden_MH: Tensor, state_ME: Tensor, depth: int) -> Tensor:
        return state_ME


class PrefixGRU(FullCorrection):
    """Domino's head: a GRU over the tip and the drafted tokens (arXiv 2605.29707).

    The features are SiLU(W [h ; s]) of the slot's state h and the GRU's state s. The first token of
    a draft, before which nothing is drafted, has none.
    """

    def __init__(self, shape: BlockConfig) -> None:
        super().__init__()
        H, S = shape.hidden_size, shape.gru_size
        self.prefix_gru = nn.GRU(H, S, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(H + S, shape.rank, bias=False),
            nn.SiLU(),
            nn.Linear(shape.rank, shape.num_drafted, bias=False),
        )
        nn.init.zeros_(self.weight)

    @property
    def output(self) -> nn.Linear:
        layer = self.embed_proj[2]
        assert isinstance(layer, nn.Linear)
        return layer

    def advance(self, state_ME: Tensor | None, tokens_M: Tensor, embed: Embed) -> Tensor:
        self.prefix_gru.flatten_parameters()  # on a GPU, after a change of dtype
        before_1ME = None if state_ME is None else state_ME[None]
        _, after_1ME = self.prefix_gru(embed(tokens_M)[:, None], before_1ME)
        assert isinstance(after_1ME, Tensor)
        return after_1ME[0]

    def features(self, hidden_MH: Tensor, state_ME: Tensor, depth: int) -> Tensor:
        found = self.embed_proj[:2](torch.cat((hidden_MH, state_ME), 1))
        assert isinstance(found, Tensor)
        return found if depth else torch.zeros_like(found)


class Selector(Correction):
    """DFlash2's head: the logits <A[x] * W h, B[y]> of a token y after the last token x.

    Only the likeliest tokens of a slot by its state h are candidates. B is the weight.
    """

    def __init__(self, shape: BlockConfig) -> None:
        super().__init__()
        self.candidates = shape.candidates
        self.predecessor_codebook = nn.Parameter(torch.empty(shape.vocab_size, shape.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(shape.num_drafted, shape.rank))
        self.hidden_projection = nn.Linear(shape.hidden_size, shape.rank, bias=False)
        nn.init.normal_(self.predecessor_codebook, std=0.02)

    @property
    def weight(self) -> Tensor:
        return self.successor_codebook

    def advance(self, state_ME: Tensor | None, tokens_M: Tensor, embed: Embed) -> Tensor:
        return F.embedding(tokens_M, self.predecessor_codebook)

    def features(self, hidden_MH: Tensor, state_ME: Tensor, depth: int) -> Tensor:
        found = state_ME * self.hidden_projection(hidden_MH)
        assert isinstance(found, Tensor)
        return found

    def correct(self, logits_MV: Tensor, features_ME: Tensor) -> Tensor:
        candidates_MC = logits_MV.topk(min(self.candidates, logits_MV.shape[1])).indices
        added_MC = torch.einsum("me,mce->mc", features_ME, self.weight[candidates_MC])
        return keep_listed(logits_MV.scatter_add(1, candidates_MC, added_MC), candidates_MC)


def make_correction(shape: BlockConfig) -> Correction | None:
    """Return a new correction of a head's shape, None if it has none."""
    kinds: dict[str, Callable[[BlockConfig], Correction]] = {
        MARKOV: Markov,
        GRU: PrefixGRU,
        SELECTOR: Selector,
    }
    return kinds[shape.correction](shape) if shape.correction in kinds else None


def features_of_text(
    correction: Correction, hidden_MKH: Tensor, tokens_MK: Tensor, embed: Embed
) -> Tensor:
    """Return the features [M, K, E] if the tokens before each depth are those of a text.

    tokens_MK: the tips, and the tokens that follow them.
    """
    state: Tensor | None = None
    found = []
    for depth in range(tokens_MK.shape[1]):
        state = correction.advance(state, tokens_MK[:, depth], embed)
        found.append(correction.features(hidden_MKH[:, depth], state, depth))
    return torch.stack(found, 1)
