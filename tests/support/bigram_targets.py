"""Native bigram targets: a table of logits gives the next token from the last one alone.

Models and heads of the same table draft perfectly; those of the negative table are never right.
The targets have two layers, in which attention and the first MLP add nothing. The second MLP turns
the logits of the negative table into those of the table.

Shapes: V vocabulary, C = 2 V hidden size.
"""

import torch
from torch import Tensor

from decoding.models.native.model import NativeTarget
from heads.eagle.model import EagleConfig, EagleHead
from recurrent_drafting.head import HeadConfig, RecurrentHead
from tests.support.tiny_targets import SHAPES

WORDS = 32
SURE = 500.0  # a logit next to which others of 0 have no measurable probability
SHARP = 8.0


def after(token: int) -> int:
    """Return the only token that follows `token` under `sure_table`.

    The successors form one cycle through the vocabulary.
    """
    return (5 * token + 7) % WORDS


def sure_table() -> Tensor:
    """Return logits (V, V) after each token, with all of the probability on one next token."""
    table_VV = torch.zeros(WORDS, WORDS, dtype=torch.float64)
    for token in range(WORDS):
        table_VV[token, after(token)] = SURE
    return table_VV


def unsure_table(seed: int = 0) -> Tensor:
    """Return random logits (V, V) after each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(WORDS, WORDS, generator=generator, dtype=torch.float64) * 2


def model_of(table_VV: Tensor) -> NativeTarget:
    """Return the target of a table; `-table_VV` gives a model that ranks tokens in reverse.

    A token's embedding is a 1 in the first half of the residual stream, and the second MLP writes a
    4 at the same place of the second half. The head reads the negative table from the first half,
    and from the second enough of the table to outweigh it.
    """
    C, eye_VV = 2 * WORDS, torch.eye(WORDS, dtype=torch.float64)
    first_VC, second_VC = (
        torch.cat(halves, 1) for halves in ((eye_VV, 0 * eye_VV), (0 * eye_VV, eye_VV))
    )
    scale = C**0.5  # the norm scales an embedding's only entry to this
    state = {
        "model.embed_tokens.weight": first_VC,
        "model.norm.weight": torch.ones(C, dtype=torch.float64),
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{at}{norm}.weight"] = torch.ones(C, dtype=torch.float64)
        generator = torch.Generator().manual_seed(layer)
        for part in "qkv":
            state[f"{at}self_attn.{part}_proj.weight"] = torch.randn(
                C, C, generator=generator, dtype=torch.float64
            )
        state[f"{at}self_attn.o_proj.weight"] = torch.zeros(C, C, dtype=torch.float64)
        state[f"{at}mlp.gate_proj.weight"] = state[f"{at}mlp.up_proj.weight"] = first_VC
        written = 4 / (torch.nn.functional.silu(torch.tensor(scale, dtype=torch.float64)) * scale)
        state[f"{at}mlp.down_proj.weight"] = second_VC.T * (written if layer == 1 else 0)
    normed = scale / 17**0.5  # the norm scales the 1 to this where there is a 4 too
    against, towards = 1 / scale, (1 + normed / scale) / (4 * normed)
    state["lm_head.weight"] = torch.cat((-against * table_VV.T, towards * table_VV.T), 1)
    config = {
        **SHAPES["llama_mha"],
        "tie_word_embeddings": False,
        "vocab_size": WORDS,
        "hidden_size": C,
        "intermediate_size": WORDS,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 0.0,
    }
    return NativeTarget.from_state(config, state, name="last word", dtype=torch.float64)


def head_of(table_VV: Tensor) -> RecurrentHead:
    """Return the recurrent head whose logits are the table's row of the last token.

    Its recurrent state is that token alone; it ignores the target's hidden state.
    """
    C = 2 * WORDS
    head = (
        RecurrentHead(HeadConfig(WORDS, C, 2 * C, num_draft_layers=0))
        .double()
        .requires_grad_(False)
    )
    for parameter in head.parameters():
        parameter.zero_()
    head.rnn_w.weight.copy_(torch.eye(C) * SHARP)
    state = torch.nn.functional.silu(torch.tensor(SHARP, dtype=torch.float64))
    head.output[:, C : C + WORDS] = table_VV.T / state
    return head.eval()


def eagle_of(table_VV: Tensor) -> EagleHead:
    """Return the EAGLE-3 head whose logits are the table's row of the last token.

    All queries and keys are one vector, whose rotations agree best at equal positions, so an
    element attends to itself alone. Its value is its token, next to which its own state is small.
    """
    C = 2 * WORDS
    config = EagleConfig(
        vocab_size=WORDS,
        hidden_size=C,
        num_heads=1,
        num_kv_heads=1,
        head_dim=C,
        intermediate_size=1,
        taps=(2,),
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_positions=256,
        norm_eps=1e-12,
        fc_norm=False,
    )
    head = EagleHead(config).double().requires_grad_(False)
    for name, parameter in head.named_parameters():
        parameter.fill_(float("norm" in name))
    attention = head.midlayer.self_attn
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[: C // 2, :WORDS] = SURE
    attention.v_proj.weight[:WORDS, :WORDS] = torch.eye(WORDS) * 1e6
    attention.o_proj.weight.copy_(torch.eye(C))
    head.lm_head.weight[:, :WORDS] = table_VV.T / C**0.5
    return head.eval()


def repeating_prompts(count: int) -> list[list[int]]:
    """Return prompts of one and a half cycles of `after`, each from another first token.

    The continuation occurs in the prompt, so a lookup is always right.
    """
    prompts = []
    for start in range(count):
        prompt = [start]
        while len(prompt) < WORDS * 3 // 2:
            prompt.append(after(prompt[-1]))
        prompts.append(prompt)
    return prompts


def misleading_prompts(count: int) -> list[list[int]]:
    """Return prompts in which a wrong token follows every pair of the continuation's tokens.

    The prompts contain no three consecutive tokens of the continuation, so a lookup is wrong for
    WORDS tokens. After that the continuation repeats itself.
    """
    prompts = []
    for start in range(2, count + 2):  # after 1 the last two tokens would be right to copy from
        prompt: list[int] = []
        for token in range(WORDS):
            prompt += [token, after(token), (after(after(token)) + 1) % WORDS]
        prompts.append([*prompt, start, after(start)])
    return prompts
