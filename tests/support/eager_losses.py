"""Eager references of the losses in training/losses, with full logits and autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor


def eager_soft(name: str, logits_NV: Tensor, log_p_NV: Tensor, eta: float = 3.0) -> Tensor:
    """Return the loss of each row [N], computed with autograd from full logits.

    name: `forward_kl`, `lk` or `lk_hybrid`. eta: decay of the KL share of `lk_hybrid`.
    """
    log_q_NV = F.log_softmax(logits_NV, dim=-1)
    alpha_N = torch.minimum(log_p_NV.exp(), log_q_NV.exp()).sum(dim=-1)
    mass_N = log_p_NV.exp().sum(dim=-1)
    kl_N = (log_p_NV.exp() * (log_p_NV - mass_N.log()[:, None] - log_q_NV)).sum(dim=-1)
    if name == "forward_kl":
        return kl_N
    if name == "lk":
        return -alpha_N.log()
    share_N = torch.exp(-eta * alpha_N.detach())
    return share_N * kl_N + (1 - share_N) * (1 - alpha_N)
