"""P-EAGLE heads for the laws of decoding, which know a bigram target's text.

The first attention head copies the token of the nearest element that is no mask: the tip. Head k
after it attends to the element itself if it is a mask k or more places after the tip, and else to
the tip, so these heads count the depth. The MLP's last product is solved for the wanted tokens.

Shapes: V vocabulary, H = 2 V hidden size, D head size, K drafted tokens, N = V K examples.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot, silu

from decoding.interfaces import Target
from heads.eagle.model import EagleConfig, EagleHead
from tests.support.block_heads import after_each

SHARP = 1e6  # score of an element at the same place; that d places before has 200 d^2 less
LARGE = 1e8  # by which a mask scores less, where it must not be seen
NEAR, STILL = 8, 15  # pairs of channels, which rotate by 0.02 and hardly at all in a place
D, DRAFTED = 32, 6


@torch.inference_mode()
def knowing_head(target: Target, draft_model: Target, masks_by_depth: bool = False) -> EagleHead:
    """Return a head that predicts at every depth what the draft model has after the text.

    masks_by_depth: see `EagleConfig`.
    """
    V, H = target.vocab_size, target.hidden_size
    config = EagleConfig(
        vocab_size=V,
        hidden_size=H,
        num_heads=DRAFTED,
        num_kv_heads=DRAFTED,
        head_dim=D,
        intermediate_size=512,
        taps=(1,),
        rope={"rope_type": "default", "rope_theta": 2500.0},
        max_positions=256,
        norm_eps=1e-12,
        fc_norm=False,
        parallel=DRAFTED,
        mask_token_id=V - 1,
        masks_by_depth=masks_by_depth,
    )
    head = EagleHead(config).double().requires_grad_(False).eval()
    for name, parameter in head.named_parameters():
        parameter.fill_(float("norm" in name))
    # only a mask's state has the last channel, so it alone has a state that is not zero
    assert head.mask_hidden is not None
    head.mask_hidden[..., -1] = head.fc.weight[-1, -1] = 1.0
    scale = H**0.5  # of a normed state with one channel
    projections = head.midlayer.self_attn
    queries, keys, values = (
        product.weight.view(DRAFTED, D, 2 * H)
        for product in (projections.q_proj, projections.k_proj, projections.v_proj)
    )
    queries[:, [NEAR, STILL], :V] = 1 / scale
    keys[:, NEAR, :V] = SHARP * D**0.5 / scale
    depths_K = torch.arange(DRAFTED)
    less_K = torch.where(depths_K > 0, 200 * (depths_K - 0.5) ** 2, LARGE)
    keys[:, STILL, -1] = -less_K.double() * D**0.5 / scale
    values[0, :V, :V] = torch.eye(V) / scale
    values[1:, 0, -1] = 1 / scale
    output = projections.o_proj.weight.view(H, DRAFTED, D)
    output[:V, 0, :V] = torch.eye(V)
    output[range(V, V + DRAFTED - 1), range(1, DRAFTED), 0] = 1.0
    head.lm_head.weight[:, :V] = torch.eye(V) * 500 / scale
    _solve(head, _wanted(target, draft_model))
    return head


def _wanted(target: Target, draft_model: Target) -> Tensor:
    """Return the tokens (V, K) that the draft model has after the target's text from each tip."""
    ids_V = torch.arange(target.vocab_size)
    next_V, drafted_V = (after_each(model, ids_V)[0].argmax(-1) for model in (target, draft_model))
    found, last_V = [], ids_V
    for _ in range(DRAFTED):
        found.append(drafted_V[last_V])
        last_V = next_V[last_V]
    return torch.stack(found, 1)


def _solve(head: EagleHead, wanted_VK: Tensor) -> None:
    """Set the MLP's products so that the states of all tips and depths are the wanted tokens."""
    V, K = wanted_VK.shape
    states_VKH = torch.zeros(V, K, head.config.hidden_size, dtype=torch.float64)
    states_VKH[:, :, :V] = torch.eye(V)[:, None]
    for depth in range(1, K):
        states_VKH[:, depth, V : V + depth] = states_VKH[:, depth, -1] = 1.0
    mlp, generator = head.midlayer.mlp, torch.Generator().manual_seed(0)
    for product in (mlp.gate_proj, mlp.up_proj):
        product.weight.normal_(generator=generator)
    states_NH = states_VKH.flatten(0, 1)
    normed_NH = head.midlayer.post_attention_layernorm(states_NH)
    features_NE = silu(mlp.gate_proj(normed_NH)) * mlp.up_proj(normed_NH)
    targets_NH = one_hot(wanted_VK.flatten(), states_NH.shape[1]).double() - states_NH
    solution_EH = torch.linalg.lstsq(features_NE, targets_NH, driver="gelsd").solution
    mlp.down_proj.weight.copy_(solution_EH.T)
