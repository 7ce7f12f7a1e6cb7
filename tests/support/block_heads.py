"""Block drafters for the laws of decoding: random ones, and ones that know a bigram target's text.

Shapes: V vocabulary, C hidden size, D head size, S slots, K drafted tokens, N = V K examples.
"""

from typing import Any

import torch
from torch import Tensor

from decoding.interfaces import Target
from heads.block.context import StoredContext
from heads.block.model import BlockHead
from heads.block.shape import BlockConfig
from heads.layers import rope_at

LAW_3_SIZES = {"vocab_size": 5, "hidden_size": 16, "target_layers": 2}  # of law_3.five_words
SHARP = 5000.0  # product of the norms of queries and keys
MOST_CANDIDATES = 64  # of a selector that knows a draft model's logits


def random_block(sizes: dict[str, int], scale: float = 1.0, **fields: Any) -> BlockHead:
    """Return a float64 block drafter with random weights.

    sizes: the target's. scale: factor of all weights. fields: further fields of `BlockConfig`.
    """
    more = {"layout": "fill_in", "num_heads": 4, "num_kv_heads": 2, "head_dim": 4} | fields
    more = {"block_size": 7 if more["layout"] == "fill_in" else 6, "intermediate_size": 24} | more
    more = {"taps": (1,), "mask_token_id": sizes["vocab_size"] - 1} | more
    config = BlockConfig(**sizes, **more)
    generator = torch.Generator().manual_seed(6)
    head = BlockHead(config).double().requires_grad_(False)
    for parameter in head.parameters():
        parameter.normal_(generator=generator).mul_(scale / parameter.shape[-1] ** 0.5)
    head.norm.weight.fill_(1.0)
    return head.eval()


def unsure_block(**fields: Any) -> BlockHead:
    """Return a random block drafter for law 3 whose confidence follows the token drafted last.

    Drafts of several lengths are common, and the length depends on the drafted tokens.
    """
    more = {"correction": "markov", "rank": 4, "confidence": True} | fields
    head = random_block(LAW_3_SIZES, 2.0, **more)
    assert head.confidence is not None
    weight_1E, bias_1 = head.confidence.proj.weight, head.confidence.proj.bias
    weight_1E[:, : LAW_3_SIZES["hidden_size"]] = 0.0
    weight_1E.mul_(12.0)
    bias_1.zero_()
    return head


def sizes_of(target: Target) -> dict[str, int]:
    """Return the fields of `BlockConfig` that are the target's."""
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "target_layers": target.num_layers,
    }


@torch.inference_mode()
def after_each(model: Target, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return a model's logits (N, V) and states (N, C) after texts of one token each."""
    found = []
    for ids_B in ids_N.split(64):  # all rows at once would leave the model a large cache
        model.open(len(ids_B), 2)
        found.append([each[:, 0] for each in model.forward(ids_B[:, None])])
    logits, states = zip(*found, strict=True)
    return torch.cat(logits), torch.cat(states)


def corrected_block(target: Target, draft_model: Target, confidence: bool = False) -> BlockHead:
    """Return a block drafter whose correction holds the draft model's logits after each token.

    On a bigram target they are the whole of its logits, as its backbone's states are zero. A
    confidence is then nearly 1, and random on other targets.
    """
    V = target.vocab_size
    head = random_block(
        sizes_of(target),
        layout="anchor_first",
        correction="markov",
        rank=V,
        num_layers=1,
        confidence=confidence,
    )
    logits_VV, _ = after_each(draft_model, torch.arange(V, device=draft_model.device))
    assert head.correction is not None
    weights = dict(head.correction.named_parameters())
    weights["markov_w1.weight"].copy_(torch.eye(V))
    weights["markov_w2.weight"].copy_(logits_VV.T)
    if target.name == "last word":
        head.norm.weight.zero_()
        if head.confidence is not None:
            head.confidence.proj.weight.zero_()
            head.confidence.proj.bias.fill_(9.0)
    else:
        head.norm.weight.fill_(0.1)
    return head.to(target.device)


def selecting_block(target: Target, draft_model: Target) -> BlockHead:
    """Return a block drafter whose selector holds the draft model's logits after each token.

    On a bigram target they are the whole of its logits: every drafting slot has the mask token's
    state, whose logits are nearly zero, so all tokens are candidates. For a large vocabulary, of
    which each candidate would gather a row, the drafter is random and has few candidates.
    """
    V = target.vocab_size
    fields = {"correction": "selector", "conv_taps": 2, "conv_group": 1}
    if V > MOST_CANDIDATES:
        few = {"rank": 6, "candidates": 8, **fields}
        return random_block(sizes_of(target), num_layers=1, **few).to(target.device)
    fields |= {"rank": V, "candidates": V}
    head = random_block(sizes_of(target), num_layers=1, **fields)
    logits_VV, _ = after_each(draft_model, torch.arange(V, device=draft_model.device))
    if target.name == "last word":
        layer: Any = head.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        head.norm.weight.fill_(1e-6)
        mask_H = target.embed(torch.tensor(head.config.mask_token_id)).to("cpu", torch.float64)
        state_H = head.norm(mask_H)
        weights = dict(head.correction.named_parameters()) if head.correction is not None else {}
        weights["predecessor_codebook"].copy_(torch.eye(V))
        weights["successor_codebook"].copy_(logits_VV.T)
        weights["hidden_projection.weight"].copy_((state_H / state_H.norm() ** 2).expand(V, -1))
    return head.to(target.device)


@torch.inference_mode()
def gru_block(target: Target, draft_model: Target) -> BlockHead:
    """Return a block drafter whose GRU holds the draft model's logits after each token.

    On a bigram target the backbone knows the token after the tip, which the GRU leaves alone, and
    has logits of zero at all later depths. On other targets the head is random.
    """
    V, fields = target.vocab_size, {"correction": "gru"}
    if target.name != "last word":
        return random_block(sizes_of(target), rank=6, gru_size=5, **fields).to(target.device)
    head = _knowing(target, draft_model, depths=1, rank=V, gru_size=V, **fields)
    logits_VV, _ = after_each(draft_model, torch.arange(V, device=draft_model.device))
    assert head.correction is not None
    weights = dict(head.correction.named_parameters())
    for weight in weights.values():
        weight.zero_()
    _, update, new = weights["prefix_gru.weight_ih_l0"].chunk(3)
    update[:, :V] = -50.0  # nothing of the state before
    new[:, :V] = torch.eye(V)
    seen = torch.ones((), dtype=torch.float64).tanh()
    weights["embed_proj.0.weight"][:, -V:] = torch.eye(V)
    weights["embed_proj.2.weight"].copy_(logits_VV.T / torch.nn.functional.silu(seen))
    return head


@torch.inference_mode()
def block_of(target: Target, draft_model: Target, **fields: Any) -> BlockHead:
    """Return a block drafter without a correction.

    On a bigram target it predicts at every depth what the draft model has after the target's text;
    on others it is random.
    """
    if target.name == "last word":
        return _knowing(target, draft_model, **fields)
    return random_block(sizes_of(target), **fields).to(target.device)


def _knowing(
    target: Target, draft_model: Target, depths: int | None = None, **fields: Any
) -> BlockHead:
    """Return a block drafter of one layer that reads the token before the tip.

    depths: number of first depths at which it predicts, logits of others being zero; None: all.

    Its first attention head copies that token, the nearest of the context. The second one weighs
    the context against the block, more of it the nearer a slot is, so that the slots differ. The
    MLP's last product is solved for the states of the wanted tokens.
    """
    V, C, D = target.vocab_size, target.hidden_size, 64
    head = random_block(
        sizes_of(target),
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=D,
        rope_theta=1e6,
        norm_eps=1e-12,
        intermediate_size=512,
        **fields,
    )
    layer: Any = head.layers[0]
    for name, parameter in layer.self_attn.named_parameters():
        parameter.fill_(SHARP**0.5 if "norm" in name else 0.0)
    for norm in (head.hidden_norm, layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight.fill_(1.0)
    block, text = slice(0, V), slice(V, C)  # channels of the block's tokens and of the context's
    assert head.fc is not None
    head.fc.weight.zero_()
    head.fc.weight[text, block] = torch.eye(V, dtype=torch.float64)
    # pairs of channels by the speed of their rotation; idle is read by no query
    near, slow, still, idle = 16, 25, 31, 20
    queries, keys, values = (
        getattr(layer.self_attn, f"{part}_proj").weight.view(2, D, C) for part in "qkv"
    )
    queries[0, [near, still]] = queries[1, [slow, still]] = 1.0
    # the score falls with the distance of a token of the context
    keys[0, near + D // 2, text] = keys[1, slow + D // 2, text] = -1.0
    keys[0, still, block] = -1.0
    keys[1, idle, block], keys[1, still, block] = 1.0, -1e-4
    values[0, :V, text] = torch.eye(V, dtype=torch.float64) / C**0.5
    values[1, 0, text] = 1 / C**0.5
    output = layer.self_attn.o_proj.weight.view(C, 2, D)
    output[text, 0, :V] = torch.eye(V, dtype=torch.float64)
    output[0, 1, 0] = 1.0
    _solve(head, target, draft_model, head.config.num_drafts if depths is None else depths)
    return head.to(target.device)


def _solve(head: BlockHead, target: Target, draft_model: Target, depths: int) -> None:
    """Set the MLP's last product so that the slots have the states of the wanted tokens.

    depths: as of `_knowing`.
    """
    V, K = target.vocab_size, head.config.num_drafts
    lm_head_CV = target.lm_head(torch.eye(target.hidden_size, dtype=torch.float64))
    silent_C = torch.linalg.svd(lm_head_CV).U[:, -1]
    next_V, drafted_V = _next(target), _next(draft_model)
    texts_VT = torch.arange(V)[:, None]
    while texts_VT.shape[1] < 40:
        texts_VT = torch.cat((texts_VT, next_V[texts_VT[:, -1:]]), 1)
    context = StoredContext(head, V, 64)
    context.append(target_taps(target, texts_VT, head), [texts_VT.shape[1]] * V)
    found: list[Tensor] = []
    layer: Any = head.layers[0]
    hook = layer.post_attention_layernorm.register_forward_hook(
        lambda _, given, normed: found.extend((given[0], normed))
    )
    last_V = next_V[texts_VT[:, -1]]  # the tips
    slots_VS = texts_VT.shape[1] + torch.arange(head.config.block_size).expand(V, -1)
    blocks_V1SC = target.embed(head.block_ids(last_V))[:, None]
    head(blocks_V1SC, rope_at(context.tables, slots_VS), context.join, context.visible())
    hook.remove()
    before_NC, normed_NC = (each[:, -K:].flatten(0, 1) for each in found)
    wanted = []
    for depth in range(K):
        if depth >= depths:
            wanted.append(silent_C.expand(V, -1))
            continue
        states_VC = torch.zeros(V, target.hidden_size, dtype=torch.float64)
        source_V = next_V.argsort()[drafted_V[last_V]]  # the token before the wanted one
        rows_V = torch.arange(V)
        states_VC[rows_V, source_V], states_VC[rows_V, V + source_V] = 1.0, 4.0
        wanted.append(states_VC)
        last_V = next_V[last_V]
    wanted_NC = torch.stack(wanted, 1).flatten(0, 1)
    gate_NE, up_NE = layer.mlp.gate_proj(normed_NC), layer.mlp.up_proj(normed_NC)
    features_NE = torch.nn.functional.silu(gate_NE) * up_NE
    solution = torch.linalg.lstsq(features_NE, wanted_NC - before_NC, driver="gelsd").solution
    layer.mlp.down_proj.weight.copy_(solution.T)


def target_taps(target: Target, texts_BT: Tensor, head: BlockHead) -> Tensor:
    """Return the states (B, T, X) of a target that a block drafter reads."""
    target.open(len(texts_BT), texts_BT.shape[1])
    return target.features(texts_BT, None, head.config.taps)


def _next(model: Target) -> Tensor:
    """Return the token after each token (V,), if it is the only one of its text."""
    return after_each(model, torch.arange(model.vocab_size))[0].argmax(-1)
