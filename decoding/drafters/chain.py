"""The chain drafter: a causal LM with the target's tokenizer drafts token by token.

Its cache is rolled back by length alone. The first step of a round reads the unseen tokens: usually
the tip, and after a full acceptance also the last drafted token. A model that can drafts its chains
outside Python (`Target.chain_call`).

Shapes: B rows, N drafted tokens, V the target's vocabulary, K unseen tokens.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.drafters.base import StatelessDrafter
from decoding.interfaces import (
    Capabilities,
    ChainChoice,
    Chooser,
    Draws,
    Policies,
    Proposal,
    Stopping,
    Target,
    TokenConfidence,
    Tokens,
)
from decoding.models.folder import is_gguf, load_state, read_config, refuse_nonfinite
from decoding.models.hf import EXECUTIONS as HF_EXECUTIONS
from decoding.models.load import AUTO, load_target
from decoding.models.native.weights import FAMILIES
from decoding.models.prefill import prefill, prefill_more
from decoding.verification.nodes import at_nodes


class ChainDrafter(StatelessDrafter):
    """A causal LM that proposes chains. Hydra: `_target_: decoding.drafters.chain.ChainDrafter`."""

    capabilities = Capabilities(shape="chain", has_q=True, can_overlap=True)

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        backend: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        name: str | None = None,
        model: Target | None = None,
        trust_remote_code: bool = False,
        execution: str = AUTO,
    ) -> None:
        """Load a model folder or a GGUF file, or use a `model` in memory.

        backend: None selects llama_cpp for a GGUF file, native for the families that it supports,
        and hf for others, on which an execution that hf lacks is replaced by eager. execution: see
        `load_target`; a GGUF file has none. Raises ValueError without a folder and a model, and
        UserError for a folder that cannot be loaded.
        """
        if model is None:
            if folder is None:
                raise ValueError("ChainDrafter needs a folder or a model, found neither. Pass one.")
            if is_gguf(folder):
                backend, execution = backend or "llama_cpp", AUTO
            elif backend is None:
                backend = "native" if read_config(folder)["model_type"] in FAMILIES else "hf"
                if backend == "hf" and execution not in HF_EXECUTIONS:
                    execution = AUTO
            model = load_target(
                folder,
                backend=backend,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                execution=execution,
            )
            if not is_gguf(folder):
                refuse_nonfinite(folder, load_state(folder))
        self.model = model
        self.name = name or model.name
        self.num_layers, self.num_parameters = model.num_layers, model.num_parameters
        self._capacity = 0

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Read all tokens of each prompt except the last."""
        self._capacity = capacity
        self.model.open(len(prompts_B), capacity)
        prefill(self.model, [self._unread(prompt) for prompt in prompts_B])

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Read all tokens of each new prompt except the last."""
        prefill_more(self.model, [self._unread(prompt) for prompt in prompts_B], self._capacity)

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Keep the first `kept` tokens, and read the prompt's other tokens except the last."""
        self.model.truncate([kept])
        prefill(self.model, [self._unread(prompt)[self.model.lengths_B[0] :]])

    def _unread(self, prompt: Sequence[int]) -> list[int]:
        """Return the prompt without its last token, within this model's context and vocabulary."""
        last = self.model.vocab_size - 1
        return [min(token, last) for token in prompt[: min(len(prompt) - 1, self.model.max_length)]]

    def _fit_ids(self, tokens_BN: Tensor, chooser: Chooser) -> Tensor:
        """Clamp token ids to this model's vocabulary.

        A clamped id can only lower the acceptance rate.
        """
        if self.model.vocab_size < chooser.vocab_size:
            tokens_BN = tokens_BN.clamp(max=self.model.vocab_size - 1)
        return tokens_BN.to(self.model.device)

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft a chain for each row; rows past this model's context get none."""
        counts_B = self._within_context(sequences_B, budgets_B)
        if max(counts_B) == 0:
            return Proposal(torch.empty(len(counts_B), 0, dtype=torch.long), counts_B)
        unseen_B = self._unseen(sequences_B, counts_B)
        tips_B = [sequence[-1] for sequence in sequences_B]
        drafted = self._draft_outside(unseen_B, tips_B, counts_B, stopping_B, chooser)
        if drafted is not None:
            return drafted
        processors = chooser.processors
        logits_BV = self._read_last(unseen_B)
        tokens: list[Tensor] = []
        rows_q: list[Tensor] = []
        process = processors.drafting(sequences_B) if processors is not None else None
        while True:
            fitted_BV = self._fit(logits_BV, chooser)
            if process is not None:
                fitted_BV = process(fitted_BV)
            tokens_B, q_BV = chooser.draft(fitted_BV, len(tokens))
            tokens.append(tokens_B)
            if q_BV is not None:
                rows_q.append(q_BV)
            confidences_B = token_confidences(stopping_B[0].reads, tokens_B, q_BV, fitted_BV)
            counts_B = _counts_after(stopping_B, len(tokens), confidences_B, counts_B)
            if max(counts_B) <= len(tokens):
                break
            if process is not None:
                process.add(tokens_B)
            reads_B = [int(count > len(tokens)) for count in counts_B]
            logits_BV = self._step(self._fit_ids(tokens_B[:, None], chooser), reads_B)
        q_BNV = torch.stack(rows_q, 1) if rows_q else None
        return Proposal(torch.stack(tokens, 1), counts_B, None, q_BNV, len(tokens))

    def _draft_outside(
        self,
        unseen_B: list[list[int]],
        tips_B: Sequence[int],
        counts_B: list[int],
        stopping_B: Policies,
        chooser: Chooser,
    ) -> Proposal | None:
        """Draft the chains outside Python (`Target.chain_call`), or return None if it cannot."""
        reads, is_random = stopping_B[0].reads, chooser.tests_q or chooser.rule == "coupled"
        warper = chooser.warper
        samples = is_random and not warper.truncates and warper.is_shared
        if chooser.processors is not None or reads not in ("nothing", "confidence"):
            return None
        if not samples and not chooser.drafts_likeliest:
            return None
        call = self.model.chain_call(len(unseen_B) * max(map(len, unseen_B)))
        if call is None:
            return None
        shorten = partial(_shorten, stopping_B) if reads == "confidence" else None
        if shorten is None:
            counts_B = [_decided(*each) for each in zip(stopping_B, counts_B, strict=True)]
        draws = chooser.draws if samples else Draws()
        choice = ChainChoice(chooser.vocab_size, draws, shorten)
        tokens_BN, q_BNV, counts_B = call(self._within(unseen_B), tips_B, counts_B, choice)
        if chooser.device != tokens_BN.device:
            tokens_BN = tokens_BN.to(chooser.device)
            q_BNV = None if q_BNV is None else q_BNV.to(chooser.device)
        drafted_BN = tokens_BN[:, 1:]
        steps = drafted_BN.shape[1]
        return Proposal(drafted_BN, counts_B, None, q_BNV, steps, with_tips_BN=tokens_BN)

    def _step(self, tokens_B1: Tensor, counts_B: Sequence[int]) -> Tensor:
        """Read a drafted token in each row; return the logits (B, V) of the next.

        counts_B: 1 for the rows that draft another token, 0 for the others.
        """
        logits_B1V, _ = self.model.forward(tokens_B1)
        self.model.commit(None, counts_B)
        return logits_B1V[:, -1]

    def _within_context(self, sequences_B: Tokens, budgets_B: Sequence[int]) -> list[int]:
        return [
            max(0, min(b, self.model.max_length + 1 - len(s)))
            for s, b in zip(sequences_B, budgets_B, strict=True)
        ]

    def _catch_up(self, sequences_B: Tokens, counts_B: Sequence[int]) -> Tensor:
        """Read the unseen tokens; return logits_BV after the last one of each row that drafts."""
        return self._read_last(self._unseen(sequences_B, counts_B))

    def _read_last(self, unseen_B: list[list[int]]) -> Tensor:
        """Commit the unseen tokens; return logits_BV after each row's last one."""
        return at_nodes(self._read(unseen_B), [max(len(unseen) - 1, 0) for unseen in unseen_B])

    def _unseen(self, sequences_B: Tokens, counts_B: Sequence[int]) -> list[list[int]]:
        """Return the unseen tokens of each row that drafts, which fit into the cache."""
        lengths_B = self.model.lengths_B
        unseen_B = [
            list(s[length:]) if count else []
            for s, length, count in zip(sequences_B, lengths_B, counts_B)
        ]
        # After rounds without a draft, a row may have to read so many tokens that the padding of
        # the other rows would not fit into the cache. It then reads them in parts.
        while max(len(unseen) for unseen in unseen_B) > (
            room := self._capacity - max(self.model.lengths_B)
        ):
            first_B = [unseen[: max(0, min(room, len(unseen) - room))] for unseen in unseen_B]
            self._read(first_B)
            unseen_B = [unseen[len(first) :] for unseen, first in zip(unseen_B, first_B)]
        return unseen_B

    def _padded(self, tokens_B: Sequence[Sequence[int]]) -> Tensor:
        """Return tokens_BK, padded on the right, within this model's vocabulary."""
        width = max(len(tokens) for tokens in tokens_B)
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in self._within(tokens_B)]
        return devices.tensor(padded, self.model.device)

    def _within(self, tokens_B: Tokens) -> list[list[int]]:
        """Return the tokens, within this model's vocabulary (see `_fit_ids`)."""
        last = self.model.vocab_size - 1
        return [[min(token, last) for token in tokens] for tokens in tokens_B]

    def _read(self, tokens_B: Sequence[Sequence[int]]) -> Tensor:
        """Commit tokens to the cache; return logits_BKV after each token, padded on the right."""
        logits_BKV, _ = self.model.forward(self._padded(tokens_B))
        self.model.commit(None, [len(tokens) for tokens in tokens_B])
        return logits_BKV

    def _fit(self, logits_BV: Tensor, chooser: Chooser) -> Tensor:
        """Return logits over the target's vocabulary, -inf for ids that this model lacks."""
        extra = chooser.vocab_size - logits_BV.shape[-1]
        if extra:
            logits_BV = F.pad(logits_BV, (0, extra), value=float("-inf"))
        return logits_BV.to(chooser.device)

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Keep the tokens that the target kept."""
        self.model.truncate(lengths_B)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.model.select(rows)

    def time_step(self, frontier: int = 1) -> None:
        """Run one forward over one token per row without committing it."""
        self._time_forward(1)

    def _time_forward(self, nodes: int) -> None:
        B, device = len(self.model.lengths_B), self.model.device
        self.model.forward(torch.zeros(B, nodes, dtype=torch.long, device=device))


def _decided(policy: Stopping, count: int) -> int:
    """Return the draft length, at most `count`, of a policy that reads nothing."""
    return next((depth for depth in range(1, count) if not policy.more(depth, None)), count)


def _counts_after(
    stopping_B: Policies,
    depth: int,
    confidences_B: Sequence[TokenConfidence | None],
    counts_B: list[int],
) -> list[int]:
    """Return the rows' draft lengths after their stopping policies' decisions at `depth`.

    A row that stops keeps its sampled tokens.
    """
    return [
        depth if count > depth and not policy.more(depth, token) else count
        for policy, token, count in zip(stopping_B, confidences_B, counts_B, strict=True)
    ]


def _shorten(
    stopping_B: Policies, depth: int, confidences_B: Sequence[float], counts_B: list[int]
) -> list[int]:
    """Return `_counts_after` for policies that read the confidence (`ChainChoice.shorten`)."""
    return _counts_after(stopping_B, depth, [*map(TokenConfidence, confidences_B)], counts_B)


def token_confidences(
    reads: str, tokens_B: Tensor, q_BV: Tensor | None, logits_BV: Tensor
) -> list[TokenConfidence] | list[None]:
    """Return what stopping policies read, from q or, without q, from the softmax of the logits."""
    if reads in ("nothing", "time"):
        return [None] * len(tokens_B)
    q_BV = logits_BV.float().softmax(-1) if q_BV is None else q_BV
    confidence_B = q_BV.gather(-1, tokens_B[:, None]).squeeze(-1).tolist()
    if reads == "confidence":
        return [TokenConfidence(confidence) for confidence in confidence_B]
    entropy_B = torch.special.entr(q_BV).sum(-1).tolist()
    return [TokenConfidence(*pair) for pair in zip(confidence_B, entropy_B)]
