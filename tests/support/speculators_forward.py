"""Writes what speculators computes from folders of heads; runs in the environment that has it.

    .venv-speculators/bin/python tests/support/speculators_forward.py FOLDER...

A folder's inputs.safetensors has `ids_T`, the tokens of a text, and `states_TX`, the target's
states that the head reads, side by side. Its found.safetensors gets `begins_N`, `depths_N` and
`q_NV`: the distribution of the token begins + 2 + depth, from the states up to `begins` and the
tokens before it. Heads with a confidence add its logits, `chance_N`. The forward is that of
speculators' training.

Shapes: T tokens, X channels of all layers, N predictions, K depths, V the target's vocabulary.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from speculators.models.peagle import core as peagle
from torch import Tensor

KL, TV = (resolve_loss_config(name, "eager") for name in ("kl_div", "tv"))  # fused needs a GPU


def load(folder: str) -> Any:
    """Load a folder as speculators does; with attention that needs no compiler."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config).eval()


def outputs_of(module: torch.nn.Module) -> list[Tensor]:
    """Return a list to which every call of a module adds its output."""
    found: list[Tensor] = []
    module.register_forward_hook(lambda *call: found.append(call[-1].detach()))
    return found


def eagle3(model: Any, ids_T: Tensor, states_TX: Tensor) -> dict[str, Tensor]:
    """Return three steps of an EAGLE-3 head, each with the tokens of the text."""
    logits = outputs_of(model.lm_head)
    # an element is the state of one token and the next token
    model(states_TX[None, :-1], ids_T[None, 1:], torch.zeros(1, len(ids_T) - 1, dtype=torch.long))
    kept_K = [len(ids_T) - 1 - depth for depth in range(len(logits))]
    return {
        "begins_N": torch.cat([torch.arange(kept) for kept in kept_K]),
        "depths_N": torch.cat([torch.full((kept,), k) for k, kept in enumerate(kept_K)]),
        "q_NV": torch.cat([each[0, :kept] for each, kept in zip(logits, kept_K, strict=True)]),
    }


def p_eagle(model: Any, ids_T: Tensor, states_TX: Tensor) -> dict[str, Tensor]:
    """Return the elements of a P-EAGLE head that training keeps if it drops as few as it can."""
    logits, sample = outputs_of(model.lm_head), peagle.generate_cod_sample_indices
    kept: list[tuple[Tensor, Tensor]] = []

    def watched(**given: Any) -> tuple[Tensor, Tensor]:
        kept.append(sample(**given))
        return kept[0]

    peagle.generate_cod_sample_indices = watched
    length, hidden = len(ids_T) - 1, model.hidden_size
    depths = model.config.speculators_config.proposal_methods[0].speculative_tokens
    model(
        states_TX[None, :-1],
        ids_T[None, 1:],
        torch.zeros(1, length, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, length, hidden),
        num_depths=depths,
        down_sample_ratio=1.0,
        loss_config=KL,
    )
    peagle.generate_cod_sample_indices = sample
    return {"begins_N": kept[0][0], "depths_N": kept[0][1], "q_NV": logits[0][0]}


def block(model: Any, ids_T: Tensor, states_TX: Tensor) -> dict[str, Tensor]:
    """Return the blocks of DFlash, DSpark or DFlash2 after every token but the last ones."""
    size, first = model.block_size, 0 if model.config.sample_from_anchor else 1
    base = outputs_of(model.lm_head)
    markov = getattr(model, "markov_head", None)
    added = outputs_of(markov.markov_w2) if markov else []
    confidence = getattr(model, "confidence_head", None)
    chances = outputs_of(confidence) if confidence else []
    chosen = selected_by(model.candidate_selector) if hasattr(model, "candidate_selector") else []
    length = len(ids_T)
    mask = torch.ones(1, length)
    last = torch.zeros(1, length, model.hidden_size)
    documents = torch.zeros(1, length, dtype=torch.long)
    options = {"max_anchors": length - size, "loss_config": KL, "tv_loss_fn": TV["tv"][0]}
    model(states_TX[None], ids_T[None], mask, last, documents, **options)
    (logits,) = chosen or base
    logits_MSV = logits.view(length - size, size, -1)
    if added:
        logits_MSV = logits_MSV + added[0]
    tips_MS = torch.arange(length - size)[:, None].expand(-1, size)
    depths_MS = (torch.arange(size) - first).expand(length - size, -1)
    found = {"begins_N": tips_MS - 1, "depths_N": depths_MS, "q_NV": logits_MSV}
    if chances:
        found["chance_N"] = chances[0].view(length - size, size)
    return {name: each[:, first:].flatten(0, 1) for name, each in found.items()}


def selected_by(selector: Any) -> list[Tensor]:
    """Return a list to which a call of DFlash2's selector adds the scores of its candidates.

    The scores are those of the likeliest tokens, without the true token that training adds.
    """
    found: list[Tensor] = []
    score: Callable[..., Tensor] = selector.score_candidates

    def watched(unary: Tensor, hidden: Tensor, previous: Tensor, ids: Tensor) -> Tensor:
        likeliest = unary.topk(selector.top_k, dim=-1).indices
        scores = score(unary, hidden, previous, likeliest)
        whole = torch.full_like(unary, -torch.inf)
        found.append(whole.scatter(-1, likeliest, scores.to(unary.dtype)).detach())
        return score(unary, hidden, previous, ids)

    selector.score_candidates = watched
    return found


def run(folder: Path) -> None:
    """Write what a folder's head computes."""
    given, model = load_file(folder / "inputs.safetensors"), load(str(folder))
    forward = {"eagle3": eagle3, "peagle": p_eagle}.get(model.config.speculators_model_type, block)
    found = forward(model, given["ids_T"], given["states_TX"])
    q_NV = found["q_NV"].softmax(dim=-1)
    if model.use_draft_vocab:
        ids_N = model.d2t + torch.arange(len(model.d2t))
        whole_NV = q_NV.new_zeros(len(q_NV), model.verifier_vocab_size)
        q_NV = whole_NV.index_copy(1, ids_N, q_NV)
    named = {name: each.contiguous() for name, each in (found | {"q_NV": q_NV}).items()}
    save_file(named, folder / "found.safetensors")


if __name__ == "__main__":
    with torch.no_grad():
        for name in sys.argv[1:]:
            run(Path(name))
