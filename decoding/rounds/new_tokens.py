"""The tokens of a round's forward: the tips, the proposal's nodes, and its riders.

Shapes: B rows, N tokens before the riders, M riders.
"""

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Proposal, Riders, Tokens


def new_tokens(
    sequences_B: Tokens, proposal: Proposal | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return the tokens and parents of a forward as `Target.forward` reads them.

    sequences_B: each row's text, whose last token is the tip. Parents None are a chain.
    """
    tokens_BN = None if proposal is None else proposal.with_tips_BN
    if tokens_BN is None:
        tokens_BN = devices.tensor([sequence[-1:] for sequence in sequences_B], device)
        if proposal is not None:
            tokens_BN = torch.cat((tokens_BN, proposal.tokens_BN), 1)
    parents_BN = None
    if proposal is not None and proposal.parents_BN is not None:
        above_BN = proposal.parents_BN
        parents_BN = torch.cat((torch.full_like(tokens_BN[:, :1], -1), above_BN + 1), 1)
    if proposal is None or proposal.riders is None:
        return tokens_BN, parents_BN
    return _with_riders(tokens_BN, parents_BN, proposal.riders)


def _with_riders(
    tokens_BN: Tensor, parents_BN: Tensor | None, riders: Riders
) -> tuple[Tensor, Tensor]:
    """Return the tokens and parents with the riders' after them."""
    N = tokens_BN.shape[1]
    if parents_BN is None:
        parents_BN = torch.arange(-1, N - 1, device=tokens_BN.device).expand_as(tokens_BN)
    below_BM = riders.parents_BM
    below_BM = torch.where(below_BM < 0, -1 - below_BM, below_BM + N)
    return torch.cat((tokens_BN, riders.tokens_BM), 1), torch.cat((parents_BN, below_BM), 1)
