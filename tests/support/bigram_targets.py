"""A native target whose next token hangs on the last one alone, by a table that is written down;
and models and heads that know this table, or say the opposite of it. On such a target every way of
drafting can be made perfect, and made never right.

Its two layers have sub-layers of both kinds: attention and the first MLP add nothing, the second
MLP alone turns the table the right way round. Without it the model says the opposite.

Shapes: V words of the vocabulary, C = 2 V hidden size.
"""

import torch
from torch import Tensor

from decoding.models.native.model import NativeTarget
from recurrent_drafting.head import HeadConfig, RecurrentHead
from tests.support.tiny_targets import SHAPES

WORDS = 32
SURE = 500.0  # a logit over others of 0: their probability is no number that a test meets
SHARP = 8.0


def after(token: int) -> int:
    """The token that follows for sure under `sure_table`: one cycle through all words."""
    return (5 * token + 7) % WORDS


def sure_table() -> Tensor:
    """Logits (V, V) after each token: all of the probability on one next token."""
    table_VV = torch.zeros(WORDS, WORDS, dtype=torch.float64)
    for token in range(WORDS):
        table_VV[token, after(token)] = SURE
    return table_VV


def unsure_table(seed: int = 0) -> Tensor:
    """Random logits (V, V) after each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(WORDS, WORDS, generator=generator, dtype=torch.float64) * 2


def model_of(table_VV: Tensor) -> NativeTarget:
    """The target of a table; that of `-table_VV` is the model that puts last what this one puts
    first.

    A token's embedding is a 1 in the first half of the residual stream. The second MLP writes a 4
    into its place in the second half. The head reads the table's negative from the first half, and
    more of the table than that from the second.
    """
    C, eye_VV = 2 * WORDS, torch.eye(WORDS, dtype=torch.float64)
    first_VC, second_VC = (
        torch.cat(halves, 1) for halves in ((eye_VV, 0 * eye_VV), (0 * eye_VV, eye_VV))
    )
    scale = C**0.5  # of a normed embedding, whose other entries are 0
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
    normed = scale / 17**0.5  # what the norm makes of the 1 beside the 4
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
    """The recurrent head that knows the table: its state is the last token, and nothing of the
    target's hidden state is read.
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


def telling_prompts(count: int) -> list[list[int]]:
    """Prompts that hold the cycle one and a half times, each from another token on: what follows
    has stood there before.
    """
    prompts = []
    for start in range(count):
        prompt = [start]
        while len(prompt) < WORDS * 3 // 2:
            prompt.append(after(prompt[-1]))
        prompts.append(prompt)
    return prompts


def misleading_prompts(count: int) -> list[list[int]]:
    """Prompts in which every two tokens that will follow each other stand before a wrong third one,
    and nothing longer that will be said.

    Good for WORDS tokens; from then on the text has its own beginning to copy from.
    """
    prompts = []
    for start in range(2, count + 2):  # after 1 the last two tokens would be right to copy from
        prompt: list[int] = []
        for token in range(WORDS):
            prompt += [token, after(token), (after(after(token)) + 1) % WORDS]
        prompts.append([*prompt, start, after(start)])
    return prompts
