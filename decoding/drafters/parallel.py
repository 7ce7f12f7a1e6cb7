"""The parallel chain: a causal LM drafts a chain in one forward, through mask tokens after the tip.

PARD (An et al. 2025, arXiv 2504.18583). The forward reads the unseen tokens, whose last one is the
tip, and N - 1 mask tokens. The tip predicts the first drafted token and the n-th mask token the
one n places later. Only the unseen tokens are committed, so no mask token stays in the cache. A
depth depends on the text alone and not on the tokens drafted before it, so q of a depth is known
before any token is sampled, and tests of p / q are exact. The model is trained for it by
`distill.train parallel_drafting.tokens=8`.

Shapes: B rows, N drafted tokens, K tokens that are read, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Policies, Proposal, Target, Tokens
from decoding.models.folder import read_config
from decoding.models.text.mask_token import check_mask_token
from decoding.values import is_int

# Keys of config.json: the id of the mask token, which vLLM reads too, and the trained draft length.
MASK_TOKEN, TRAINED_TOKENS = "pard_token", "num_parallel_tokens"


class ParallelChain(ChainDrafter):
    """A causal LM that proposes a chain in one forward.

    tokens: longest draft, at most the number that the folder's model was trained for, which is the
    default; a larger num_draft_tokens is capped at it. mask_token: id of the mask token; None: that
    in config.json. Both are required with a `model` in memory. options: further options of
    `ChainDrafter`. Raises UserError as it does, and for values that do not fit the folder.
    """

    capabilities = Capabilities(
        shape="chain", has_q=True, can_overlap=True, steps="round", stops_by_token=False
    )

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        tokens: int | None = None,
        mask_token: int | None = None,
        model: Target | None = None,
        **options: Any,
    ) -> None:
        config = read_config(folder) if folder is not None and model is None else {}
        where = f"{folder}/config.json" if config else "parallel chain"
        self.tokens, self.mask_token = _settings(where, config, tokens, mask_token)
        super().__init__(folder, model=model, **options)
        check_mask_token(f"{where}: {MASK_TOKEN}", self.mask_token, self.model.vocab_size)

    def width(self, gamma: int) -> int:
        """Return the length of the chain: gamma, at most the trained number of tokens."""
        return min(gamma, self.tokens)

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Read all tokens of each prompt except the last."""
        # mask tokens are read at slots past the sequences
        super().open(prompts_B, prefill_hidden_BNC, capacity + self.tokens)
        self._capacity = capacity

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft a chain for each row in one forward; rows past this model's context get none."""
        fitting_B = self._within_context(sequences_B, budgets_B)
        counts_B = [min(count, self.tokens) for count in fitting_B]
        if max(counts_B) == 0:
            return Proposal(torch.empty(len(counts_B), 0, dtype=torch.long), counts_B)
        logits_BNV = self._read_ahead(self._unseen(sequences_B, counts_B), counts_B)
        fitted_BNV = self._fit(logits_BNV, chooser)
        tokens_BN, q_BNV = choose_at_each_depth(fitted_BNV, sequences_B, chooser)
        return Proposal(tokens_BN, counts_B, None, q_BNV, 1)

    def _read_ahead(self, unseen_B: list[list[int]], counts_B: Sequence[int]) -> Tensor:
        """Commit the unseen tokens; return logits_BNV after each row's tip and its mask tokens."""
        read_B = [
            [*unseen, *[self.mask_token] * max(count - 1, 0)]
            for unseen, count in zip(unseen_B, counts_B, strict=True)
        ]
        logits_BKV, _ = self.model.forward(self._padded(read_B))
        self.model.commit(None, [len(unseen) for unseen in unseen_B])
        N, K = max(counts_B), logits_BKV.shape[1]
        tips_B = [max(len(unseen) - 1, 0) for unseen in unseen_B]
        if len(tips_B) == 1:
            return logits_BKV[:, tips_B[0] : tips_B[0] + N]
        device = logits_BKV.device
        tips_B1, rows_B1 = (
            devices.tensor(list(values), device)[:, None] for values in (tips_B, range(len(tips_B)))
        )
        # a row with a shorter draft has no node at the last depths, which are not verified
        nodes_BN = (tips_B1 + torch.arange(N, device=device)).clamp_(max=K - 1)
        return logits_BKV[rows_B1, nodes_BN]

    def time_step(self, frontier: int = 1) -> None:
        """Run the forward of the longest draft after an accepted token, without committing it.

        A shorter draft is charged the same: a forward over so few tokens takes the time in which
        the weights are read, so it is at most a little faster.
        """
        self._time_forward(self.tokens + 1)


def choose_at_each_depth(
    logits_BNV: Tensor, sequences_B: Tokens, chooser: Chooser
) -> tuple[Tensor, Tensor | None]:
    """Return the tokens (B, N) of chains whose logits were all known before, and q if it is tested.

    sequences_B: the texts before the chains, which logits processors read.
    """
    process = None
    if chooser.processors is not None:
        process = chooser.processors.drafting(sequences_B)
    tokens, rows_q = [], []
    for depth, logits_BV in enumerate(logits_BNV.unbind(1)):
        if process is not None:
            logits_BV = process(logits_BV)
        tokens_B, q_BV = chooser.draft(logits_BV, depth)
        tokens.append(tokens_B)
        if q_BV is not None:
            rows_q.append(q_BV)
        if process is not None:
            process.add(tokens_B)
    return torch.stack(tokens, 1), torch.stack(rows_q, 1) if rows_q else None


def _settings(
    where: str, config: dict[str, Any], tokens: int | None, mask_token: int | None
) -> tuple[int, int]:
    """Return the longest draft and the mask token, from arguments and a folder's config.json.

    where: the start of a message. Raises UserError for missing, invalid and contradicting values.
    """
    stored, trained = config.get(MASK_TOKEN), config.get(TRAINED_TOKENS)
    for key, value, least in ((MASK_TOKEN, stored, 0), (TRAINED_TOKENS, trained, 1)):
        if value is not None and not (is_int(value) and value >= least):
            raise UserError(
                f"{where}: {key} is {value!r}, expected an integer of {least} or more. Copy the "
                f"folder again."
            )
    mask = stored if mask_token is None else mask_token
    if mask is None:
        raise UserError(
            f"{where} has no {MASK_TOKEN}, expected the mask token of a model that drafts in "
            f"parallel. Train one with distill.train parallel_drafting.tokens=8, or use the "
            f"drafter 'chain'."
        )
    if not is_int(mask) or mask < 0 or stored not in (None, mask):
        expected = "the id of a token" if stored is None else f"the stored {MASK_TOKEN} {stored}"
        raise UserError(
            f"{where}: mask_token is {mask!r}, expected {expected}. Correct or omit it."
        )
    longest = trained if tokens is None else tokens
    if longest is None:
        raise UserError(
            f"{where} has no {TRAINED_TOKENS}, expected the draft length that the model was "
            f"trained for. Set the option tokens to it, such as tokens=8."
        )
    if not is_int(longest) or not 1 <= longest <= (trained or longest):
        most = f"1 to {trained}, for which the model was trained" if trained else "1 or more"
        raise UserError(f"{where}: tokens is {tokens!r}, expected {most}. Correct or omit it.")
    return longest, mask
