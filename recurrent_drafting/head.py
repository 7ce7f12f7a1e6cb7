"""The recurrent drafter's head: logits of the next token from the target's state and the draft.

Cheng et al. 2024, "Recurrent Drafter for Fast Speculative Decoding in Large Language Models" (arXiv
2403.09919), in the form of its published code. With h the target's hidden state after the final
norm at the sequence's last cached token, and e_i the target's embedding of the i-th token after it
(the first is the one that the target has already chosen):

    s_0 = 0
    s_i = SiLU(W_w e_i + W_u s_(i-1) + b_u), or s_(i-1) + e_i in the form without recurrence
    z = [h; s_i]   (through `input_proj` if the blocks are not 2 H wide)
    z <- z + SiLU(A z + a), once per residual block
    logits of token i + 1 = W z

The weights are equal for all i, and h is constant during a draft. So h's half of the first linear
map is computed once per draft (`context`), and only the state's half is computed for every token.

Shapes: R rows (any leading dimensions), H the target's hidden size, E the blocks' width, V drafted
vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_BLOCKS = 64


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head.

    The first five fields have the published names; `num_lookback_tokens`, which nothing reads, is
    written as -1.
    """

    vocab_size: int  # of the target
    hidden_size: int  # H, of the target
    exit_dim: int  # E
    num_draft_layers: int = 2  # residual blocks
    rnn: bool = True  # recurrent; else the state is the sum of the embeddings
    # tokens of the shortlist; 0: the full vocabulary. No published layout has one
    draft_vocab_size: int = 0

    @property
    def num_drafted(self) -> int:
        """The number of tokens that the head can draft."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def projects(self) -> bool:
        """Whether [h; s] is projected before the blocks."""
        return self.exit_dim != 2 * self.hidden_size

    @property
    def has_input_map(self) -> bool:
        """Whether a linear map reads [h; s] before the output layer does."""
        return self.projects or self.num_draft_layers > 0


@dataclass(frozen=True, slots=True)
class Context:
    """The target's hidden state in the head's equations, computed once per draft."""

    # part of z before the first block; without `input_proj` only h, [R, H]
    input_RE: Tensor
    # part of the first block's linear map with bias; unused without blocks or with `input_proj`
    first_RE: Tensor

    def select(self, index_N: Tensor) -> "Context":
        """Return the context of these rows; a row may occur several times."""
        # its backward pass is far faster than indexing's
        input_NE = self.input_RE.index_select(0, index_N)
        return Context(
            input_NE,
            input_NE if self.first_RE is self.input_RE else self.first_RE.index_select(0, index_N),
        )

    def unsqueeze(self, dim: int) -> "Context":
        """Return the context with a new dimension, for several states per row."""
        return Context(self.input_RE.unsqueeze(dim), self.first_RE.unsqueeze(dim))


class Head(ABC):
    """The head's equations over linear maps that subclasses provide as attributes or methods."""

    config: HeadConfig
    token_ids_V: Tensor | None  # ids of the shortlist in the target's vocabulary, rising
    rnn_w: Callable[[Tensor], Tensor]  # W_w e
    rnn_u: Callable[[Tensor], Tensor]  # W_u s + b_u
    from_hidden: Callable[[Tensor], Tensor]  # the first map's half for h, with its bias
    from_state: Callable[[Tensor], Tensor]  # the first map's half for s

    @property
    @abstractmethod
    def rnn_bias_H(self) -> Tensor:
        """The bias b_u."""

    @property
    @abstractmethod
    def later_linears(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """The linear maps A z + a of the blocks whose input is z, not [h; s]."""

    @abstractmethod
    def logits(self, features_RE: Tensor) -> Tensor:
        """Return the logits [R, V] of the drafted tokens, in the order of `token_ids_V` if set."""

    def start(self, embedded_RH: Tensor) -> Tensor:
        """Return the state after the first token, s_1 [R, H]."""
        return F.silu(self.rnn_w(embedded_RH) + self.rnn_bias_H) if self.config.rnn else embedded_RH

    def advance(self, state_RH: Tensor, embedded_RH: Tensor) -> Tensor:
        """Return the state after the next token, s_i [R, H]."""
        if self.config.rnn:
            return F.silu(self.rnn_w(embedded_RH) + self.rnn_u(state_RH.contiguous()))
        return state_RH + embedded_RH

    def context(self, hidden_RH: Tensor) -> Context:
        """Return the results that all tokens of a draft share."""
        if not self.config.has_input_map:
            return Context(hidden_RH, hidden_RH)
        first_RE = self.from_hidden(hidden_RH.contiguous())
        return Context(first_RE if self.config.projects else hidden_RH, first_RE)

    def features(self, context: Context, state_RH: Tensor) -> Tensor:
        """Return z after the last block, [R, E]. The context is broadcast over the states."""
        if self.config.projects:
            z_RE = context.input_RE + self.from_state(state_RH.contiguous())
        else:
            hidden_RH = context.input_RE.expand(*state_RH.shape[:-1], self.config.hidden_size)
            z_RE = torch.cat((hidden_RH, state_RH), -1)
            if self.config.has_input_map:
                z_RE = z_RE + F.silu(context.first_RE + self.from_state(state_RH.contiguous()))
        for linear in self.later_linears:
            z_RE = z_RE + F.silu(linear(z_RE))
        return z_RE

    def to_target_ids(self, drafted_R: Tensor) -> Tensor:
        """Convert indices into the head's logits to token ids of the target."""
        return drafted_R if self.token_ids_V is None else self.token_ids_V[drafted_R]


class ResidualBlock(nn.Module):
    """The parameters A and a of a residual block z + SiLU(A z + a)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class RecurrentHead(Head, nn.Module):
    """The head as a PyTorch module, whose parameters have the published names.

    These are lm_head.{i}.linear, lm_head.{n}, rnn_u, rnn_w and input_proj.
    """

    rnn_u: nn.Linear
    rnn_w: nn.Linear

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        H, E = config.hidden_size, config.exit_dim
        drafted = config.num_drafted
        self.lm_head = nn.ModuleList([ResidualBlock(E) for _ in range(config.num_draft_layers)])
        self.lm_head.append(nn.Linear(E, drafted, bias=False))
        if config.rnn:
            self.rnn_u = nn.Linear(H, H)
            self.rnn_w = nn.Linear(H, H, bias=False)
        if config.projects:
            self.input_proj = nn.Linear(2 * H, E)
        shortlist = torch.arange(drafted) if config.draft_vocab_size else None
        self.register_buffer("token_ids_V", shortlist)

    @property
    def output(self) -> Tensor:
        """The weight W of the output layer, [V, E]."""
        weight = self.lm_head[-1].weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the head, without the target's embedding."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def rnn_bias_H(self) -> Tensor:
        return self.rnn_u.bias

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear maps before the output layer, in order; the first one reads [h; s]."""
        projection = [self.input_proj] if self.config.projects else []
        blocks = [block.linear for block in self.lm_head if isinstance(block, ResidualBlock)]
        return projection + blocks

    @property
    def later_linears(self) -> list[nn.Linear]:
        return self.linears[1:]

    def from_hidden(self, hidden_RH: Tensor) -> Tensor:
        first = self.linears[0]
        return F.linear(hidden_RH, first.weight[:, : self.config.hidden_size], first.bias)

    def from_state(self, state_RH: Tensor) -> Tensor:
        return F.linear(state_RH, self.linears[0].weight[:, self.config.hidden_size :])

    def logits(self, features_RE: Tensor) -> Tensor:
        return F.linear(features_RE, self.output)
