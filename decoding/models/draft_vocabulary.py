"""Draft vocabularies: the subset of the target's tokens that a drafter proposes.

A draft vocabulary restricts only q, so decoding stays exact. A drafter's logits follow the order of
`ids_N`, the rising ids of its tokens in the target's vocabulary.

A causal LM with a draft vocabulary embeds every token, has an lm_head of N rows, and returns -inf
for all other tokens. Its config.json has `draft_vocab_size`, and its weights the tensor `d2t` in
EAGLE-3's convention (Li et al. 2025, arXiv 2503.01840): row i is the token i + d2t[i].

Shapes: N tokens of the draft vocabulary, V the target's vocabulary, H hidden size.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoding.errors import UserError
from decoding.models.folder import load_state, read_json

D2T = "d2t"
T2D = "t2d"  # whether each token of the target is drafted (bool), which servers do not need


def spread(values: Tensor, ids_N: Tensor | None, vocab_size: int, others: float) -> Tensor:
    """Spread values (..., N) to the target's vocabulary (..., V); other tokens get `others`.

    ids_N: the draft vocabulary; None: all tokens, whose values are returned unchanged.
    """
    if ids_N is None:
        return values
    return values.new_full((*values.shape[:-1], vocab_size), others).index_copy_(-1, ids_N, values)


def check_tokens(where: str | Path, name: str, ids_N: Tensor, vocab_size: int) -> None:
    """Raise UserError unless `ids_N` are rising token ids (int64) below `vocab_size`.

    where, name: the file and the tensor's name in it, for the error.
    """
    if (
        ids_N.dtype != torch.long
        or not len(ids_N)
        or bool((ids_N.diff() <= 0).any())
        or int(ids_N[0]) < 0
        or int(ids_N[-1]) >= vocab_size
    ):
        raise UserError(
            f"{where}: {name} is not a rising list of token ids (int64) below {vocab_size}. The "
            f"file is damaged; copy it again."
        )


def ids_of(d2t_N: Tensor, vocab_size: int, where: str | Path) -> Tensor:
    """Return the ids [N] of a stored tensor `d2t`.

    where: the source, for the error. Raises UserError for duplicate ids and ids out of range.
    """
    ids_N = d2t_N + torch.arange(len(d2t_N), device=d2t_N.device, dtype=d2t_N.dtype)
    check_tokens(where, f"tensor '{D2T}' plus its index", ids_N, vocab_size)
    return ids_N


def is_drafted(ids_N: Tensor, vocab_size: int) -> Tensor:
    """Return whether each token of the target is in the draft vocabulary (bool, V)."""
    found = torch.zeros(vocab_size, dtype=torch.bool, device=ids_N.device)
    return found.index_fill_(0, ids_N, True)


def check_t2d(file: Path, stored_V: Tensor, drafted_V: Tensor) -> None:
    """Raise UserError unless a stored tensor `t2d` holds the draft vocabulary of `d2t`."""
    if not torch.equal(stored_V.bool(), drafted_V):
        raise UserError(
            f"{file}: the tensors t2d and d2t hold different draft vocabularies. The file is "
            f"damaged; copy it again."
        )


def draft_vocab_size(folder: str | Path) -> int:
    """Return the number of tokens that a folder's model or head proposes; 0: its full vocabulary.

    The folder's config.json must be valid. A folder without one has 0.
    """
    file = Path(folder) / "config.json"
    values = read_json(file) if file.is_file() else {}
    size = int(values.get("draft_vocab_size") or 0)
    return 0 if size == values.get("vocab_size") else size


def check_full_vocabulary(folder: str | Path, reader: str) -> None:
    """Raise UserError for a drafter with a draft vocabulary, which `reader` does not read."""
    if size := draft_vocab_size(folder):
        raise UserError(
            f"{folder} drafts {size:,} tokens of its vocabulary, expected all of them, as {reader} "
            f"reads no draft vocabulary. Make a copy with all tokens: python "
            f"scripts/full_vocabulary.py {folder} COPY"
        )


class DraftHead(nn.Linear):
    """An lm_head with a row for each token of a draft vocabulary; logits of others are -inf."""

    token_ids_N: Tensor

    def __init__(self, weight_NH: Tensor, ids_N: Tensor, vocab_size: int) -> None:
        N, H = weight_NH.shape
        super().__init__(H, N, bias=False, device="meta")
        self.weight = nn.Parameter(weight_NH)
        self.vocab_size = vocab_size
        self.register_buffer("token_ids_N", ids_N, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., H)."""
        logits = F.linear(hidden, self.weight)
        return spread(logits, self.token_ids_N, self.vocab_size, float("-inf"))


def token_ids(model: Any) -> Tensor | None:
    """Return the draft vocabulary [N] of a Hugging Face causal LM; None: all tokens."""
    head = model.get_output_embeddings()
    return head.token_ids_N if isinstance(head, DraftHead) else None


def restrict_head(model: Any, ids_N: Tensor) -> None:
    """Give a Hugging Face causal LM a draft vocabulary: its lm_head keeps a copy of these rows."""
    rows_NH = model.get_output_embeddings().weight.detach()[ids_N].clone()
    ids_N = ids_N.to(rows_NH.device)
    model.set_output_embeddings(DraftHead(rows_NH, ids_N, model.config.vocab_size))
    model.register_buffer(D2T, ids_N - torch.arange(len(ids_N), device=ids_N.device))
    model.config.tie_word_embeddings = False
    model.config.draft_vocab_size = len(ids_N)


def complete_head(model: Any, others_H: Tensor) -> None:
    """Give a model with a draft vocabulary an lm_head of all tokens.

    others_H: the row of every token outside the draft vocabulary.
    """
    head, (ids_N, V) = model.get_output_embeddings(), (token_ids(model), model.config.vocab_size)
    weight_VH = others_H.to(head.weight.dtype).repeat(V, 1)
    weight_VH[ids_N] = head.weight.detach()
    complete = nn.Linear(len(others_H), V, bias=False, device="meta")
    complete.weight = nn.Parameter(weight_VH)
    model.set_output_embeddings(complete)
    del model.d2t, model.config.draft_vocab_size


def load_restricted(folder: str | Path, config: Any, dtype: torch.dtype, **options: Any) -> Any:
    """Load a causal LM that has a draft vocabulary, as a Hugging Face model.

    `transformers` refuses its lm_head. config: the folder's Hugging Face configuration. options:
    further arguments of `from_config`. Raises UserError for an invalid draft vocabulary. The folder
    must have passed `check_model`.
    """
    from transformers import AutoModelForCausalLM  # its import takes seconds

    state: Mapping[str, Tensor] = load_state(folder)
    if D2T not in state:
        raise UserError(
            f"{folder}: the weights have no tensor '{D2T}', expected the token ids of the "
            f"{config.draft_vocab_size} tokens in config.json. Copy the folder again."
        )
    ids_N = ids_of(state[D2T], config.vocab_size, folder)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=dtype, trust_remote_code=False, **options
    )
    restrict_head(model, ids_N)
    model.load_state_dict(state)
    return model.eval()
