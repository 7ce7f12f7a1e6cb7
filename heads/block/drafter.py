"""Block drafters: a pass drafts a chain, or a tree of the likeliest tokens at each depth.

The head stores its keys and values of the text and adds those of the accepted tokens after each
round, so nothing is computed twice. Without a correction the depths of a block are independent
given the text, and a correction makes each depth's distribution depend on the tokens drafted before
it. In both cases tokens are sampled from left to right from the distributions that are tested by
p / q, so the output is the target's. Tokens are never sampled out of order, which would bias it;
masked diffusion fills slots in any order, but with tokens that depend on the text alone.

Shapes: B rows, K drafted tokens, N nodes, H hidden size, V the target's vocabulary, X channels of
all taps.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from decoding import devices
from decoding.costs.roofline import ForwardBudget
from decoding.drafters.trees.sampled_children import check_kind
from decoding.errors import UserError
from decoding.interfaces import (
    Capabilities,
    Chooser,
    Observation,
    Proposal,
    RoundCosts,
    Stopping,
    Target,
)
from decoding.models.draft_vocabulary import spread
from decoding.models.load import DTYPES
from heads.block.budget import context_budget, correction_budget, pass_budget
from heads.block.checkpoint import load_head
from heads.block.confidence import count_kept
from heads.block.context import StoredContext
from heads.block.denoising import choose_steps, denoise, find_surest
from heads.block.fused import FusedPass, make_pass
from heads.block.model import BlockHead
from heads.block.shape import EMBEDDING
from heads.block.tree import TreePlanner
from heads.layers import rope_at
from training.heads.drafter import (
    accepted_states,
    check_draft,
    check_target,
    choose_name,
    linear_of,
    load_to_draft,
)
from training.heads.temperatures import confidences

UNITS = 64  # unit vectors at once, each of which has logits of the target's vocabulary
# maps the logits of the drafted tokens and a depth to the ids (B,) of the tokens
Choose = Callable[[Tensor, int], Tensor]


class BlockDrafter:
    """Drafter of a block head, in a folder or in memory.

    shape: `chain`, or `tree` for a head without a correction.
    children: of a chain above temperature 0. `sampled` samples each token, and `top_k` proposes the
        likeliest ones as point masses, as a tree always does.
    max_nodes: the largest size of a tree.
    stop_below: for a head with a confidence. A chain ends before the first token whose chance of
        being accepted, with all tokens before it, is smaller. 0: no chain ends early.
    by_cost: use the measured costs of a round to choose the size of each tree, and where a head
        with a confidence ends a chain, which the stopping policy may end earlier.
    denoising_steps: the passes of a draft (heads/block/denoising.py), for a head that was trained
        on random masks. None: as many as in its training.
    layout: of the slots, for a folder that does not name it (heads/block/checkpoint.py).
    execution: `fused` runs a pass, or else the products of a loaded head, like a fused target's.

    Raises UserError for an invalid folder or argument.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        head: BlockHead | None = None,
        shape: str = "chain",
        children: str = "sampled",
        max_nodes: int = 32,
        stop_below: float = 0.0,
        by_cost: bool = False,
        denoising_steps: int | None = None,
        layout: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        name: str | None = None,
        execution: str = "eager",
    ) -> None:

        def load(path: Path, dtype: torch.dtype, place: str) -> BlockHead:
            return load_head(path, dtype, place, layout)

        loads = head is None
        head = load_to_draft(folder, head, load, dtype, device, execution)
        self.name = name = choose_name(name, folder, "block")
        self.head, self.config = head, head.config
        self.device, self.dtype = head.norm.weight.device, head.norm.weight.dtype
        self.children = check_kind(children, name)
        check_draft(name, shape, max_nodes)
        _check_head(name, head, shape, stop_below)
        self._steps = choose_steps(name, self.config, denoising_steps)
        self._stop_below = stop_below
        self.ends_by_confidence = (  # of drafts
            shape == "chain" and self.config.confidence and (by_cost or stop_below > 0)
        )
        needs_costs = by_cost and (shape == "tree" or self.config.confidence)
        temperatures = self.config.temperatures or [1.0] * self.config.num_drafts
        self._temperatures_K = devices.tensor(temperatures, self.device, self.dtype)
        self._costs: RoundCosts | None = None
        self._trees = TreePlanner(max_nodes) if shape == "tree" else None
        self.num_layers, self.num_parameters = self.config.num_layers, head.num_parameters
        self.capabilities = Capabilities(
            shape,
            has_q=shape == "chain" and children == "sampled",
            needs_hidden=True,
            taps=self.config.taps,
            needs_costs=needs_costs,
            # states of layers come from the target alone
            can_overlap=shape == "chain" and self.config.taps == (EMBEDDING,),
            steps="round",
            stops_by_token=False,
        )
        self._target: Target | None = None
        self._context: StoredContext | None = None
        self._drafted = False  # in this round
        self._shortlist: nn.Linear | None = None  # the target's lm_head for a draft vocabulary
        self._execution = execution if loads else "eager"
        self._pass: FusedPass | None = None

    def as_chain(self, children: str) -> "BlockDrafter":
        """Return a drafter of chains with the same head, which no costs or confidence shorten."""
        return BlockDrafter(head=self.head, children=children, name=self.name)

    def width(self, gamma: int) -> int:
        """Return the number of tokens of a chain, or the largest number of nodes of a tree."""
        depth = min(gamma, self.config.num_drafts)
        return depth if self._trees is None else self._trees.width(depth)

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Set the target, and the costs if a decision needs them.

        Raises UserError for a target of another shape than the head's, or on another device.
        """
        check_target(self.name, self.config, self.device, target)
        if self.config.target_layers not in (0, target.num_layers):
            raise UserError(
                f"drafter '{self.name}': its head reads a target of {self.config.target_layers} "
                f"layers, but '{target.name}' has {target.num_layers}. Use a head that was trained "
                f"for this target."
            )
        self._costs = costs if self.capabilities.needs_costs else None
        if target is not self._target:
            ids_V = self.head.token_ids_V
            if ids_V is not None:  # the lm_head's columns, as logits of unit vectors
                eye_HH = torch.eye(target.hidden_size, dtype=DTYPES[target.dtype])
                units = eye_HH.to(target.device).split(UNITS)
                columns_HV = torch.cat([target.lm_head(each)[:, ids_V] for each in units])
                rows_VH = self._convert(columns_HV.T.contiguous())
                self._shortlist = linear_of(rows_VH, self._execution)
            fuses = self._execution == "fused"
            self._pass = make_pass(self.head, target) if fuses else None
        self._target = target

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int
    ) -> None:
        """Store the keys and values of each prompt without its tip."""
        self._context = StoredContext(self.head, len(prompts_B), capacity)
        if self._trees is not None:
            self._trees.open(len(prompts_B), self._costs)
        if prefill_hidden_BNC is not None:
            counts_B = [len(prompt) - 1 for prompt in prompts_B]
            self._context.append(self._convert(prefill_hidden_BNC), counts_B)

    def join(self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None) -> None:
        """Store the keys and values of each new prompt without its tip."""
        states = None if prefill_hidden_BNC is None else self._convert(prefill_hidden_BNC)
        self._stored.extend(states, [len(prompt) - 1 for prompt in prompts_B])
        if self._trees is not None:
            self._trees.add_rows(len(prompts_B))

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Keep the tokens before those that the target has just read, and add these."""
        context = self._stored
        if self._trees is not None:
            self._trees.open(1, self._costs)
        new = 0 if hidden_NC is None else len(hidden_NC)
        context.truncate([len(prompt) - 1 - new])
        if hidden_NC is not None:
            context.append(self._convert(hidden_NC[None]), [new])

    @property
    def _stored(self) -> StoredContext:
        assert self._context is not None, "open() comes before the first round"
        return self._context

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """Draft each row's chain or tree, at most as deep as its budget."""
        depths_B = [min(budget, self.config.num_drafts) for budget in budgets_B]
        if self._trees is not None:
            depths_B = self._trees.depths(depths_B)
        depth = max(depths_B)
        self._drafted = depth > 0
        if depth == 0:
            return Proposal(torch.empty(len(depths_B), 0, dtype=torch.long), depths_B)
        tips_B = devices.tensor([sequence[-1] for sequence in sequences_B], self.device)
        known_B = self._read_assumed(sequences_B)
        hidden_BKH = self._denoise(tips_B)[:, :depth]
        self._stored.truncate(known_B)
        if self._trees is not None:
            logits_BKV = self._spread(self._logits(hidden_BKH))
            return self._trees.proposal(logits_BKV, depths_B, chooser)
        q: list[Tensor] = []

        def choose(logits_BV: Tensor, number: int) -> Tensor:
            tokens_B, q_BV = chooser.draft(self._spread(logits_BV), number)
            if q_BV is not None:
                q.append(q_BV)
            return tokens_B

        point_masses = self.children == "top_k" and chooser.tests_q
        chosen = self._likeliest if point_masses else choose
        tokens_BK, logits_BK = self._chain(tips_B, hidden_BKH, chosen)
        if logits_BK is not None:
            (chances,) = devices.read(confidences(logits_BK, self._temperatures_K[:depth]))
            kept_B = [count_kept(row, self._stop_below, self._costs) for row in chances]
            depths_B = [min(pair) for pair in zip(depths_B, kept_B, strict=True)]
        longest = max(depths_B)  # the target reads no token that every row has dropped
        q_BNV = torch.stack(q[:longest], 1) if q[:longest] else None
        return Proposal(tokens_BK[:, :longest], depths_B, None, q_BNV, 1)

    def _read_assumed(self, sequences_B: Sequence[Sequence[int]]) -> list[int]:
        """Store tokens that the target has not read, and return the lengths without them.

        There are such tokens only under an overlapped schedule, whose heads read the embedding
        alone.
        """
        context = self._stored
        known_B = context.lengths_B
        pairs = zip(sequences_B, known_B, strict=True)
        assumed_B = [list(sequence[known:-1]) for sequence, known in pairs]
        counts_B = [len(assumed) for assumed in assumed_B]
        if width := max(counts_B):
            padded = [[*assumed, *[0] * (width - len(assumed))] for assumed in assumed_B]
            context.append(self._embed(devices.tensor(padded, self.device)), counts_B)
        return known_B

    def _likeliest(self, logits_BV: Tensor, depth: int) -> Tensor:
        """Return the ids (B,) of the largest logits."""
        return self._ids(devices.argmax(logits_BV))

    def _ids(self, drafted: Tensor) -> Tensor:
        """Return the ids of drafted tokens, given as indices of logits."""
        ids_V = self.head.token_ids_V
        return drafted if ids_V is None else ids_V[drafted]

    def _chain(
        self, tips_B: Tensor, hidden_BKH: Tensor, choose: Choose
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (B, K), chosen from left to right, and the confidence's logits."""
        logits_BKV = self._logits(hidden_BKH)
        correction, state, last_B = self.head.correction, None, tips_B
        tokens, confidences = [], []
        for depth in range(logits_BKV.shape[1]):
            logits_BV, features_BE = logits_BKV[:, depth], hidden_BKH[:, depth]
            if correction is not None:
                state = correction.advance(state, last_B, self._embed)
                more_BE = correction.features(features_BE, state, depth)
                logits_BV = correction.correct(logits_BV, more_BE)
                features_BE = torch.cat((features_BE, more_BE), 1)
            if self._stops and self.head.confidence is not None:
                confidences.append(self.head.confidence(features_BE))
            last_B = choose(logits_BV, depth)
            tokens.append(last_B)
        return torch.stack(tokens, 1), torch.stack(confidences, 1) if confidences else None

    @property
    def _stops(self) -> bool:
        """Whether the confidence may end a draft."""
        return self._stop_below > 0 or self._costs is not None

    def _convert(self, states: Tensor) -> Tensor:
        """Return the target's states in the head's dtype and on the head's device."""
        return states.to(self.device, self.dtype)

    def _embed(self, ids: Tensor) -> Tensor:
        """Return the target's embeddings in the head's dtype."""
        assert self._target is not None, "prepare() comes before propose()"
        return self._convert(self._target.embed(ids))

    def _denoise(self, tips_B: Tensor) -> Tensor:
        """Return the inputs of the output layer for all depths of a block, (B, K, H)."""

        def fill(hidden_BKH: Tensor) -> tuple[Tensor, Tensor]:
            best_BK, chances_BK = find_surest(self._logits(hidden_BKH))
            return self._ids(best_BK), chances_BK

        return denoise(self._steps, lambda filled_BK: self._states(tips_B, filled_BK), fill)

    def _states(self, tips_B: Tensor, filled_BK: Tensor | None) -> Tensor:
        """Return the states (B, K, H) of one pass. filled_BK: see `BlockHead.block_ids`."""
        context, S = self._stored, self.config.block_size
        ids_BS = self.head.block_ids(tips_B, filled_BK)
        if self._pass is not None and self._pass.takes(ids_BS):
            return self._pass.states(ids_BS, context)
        lengths_B1 = devices.tensor(context.lengths_B, self.device)[:, None]
        slots_BS = lengths_B1 + torch.arange(S, device=self.device)
        blocks_B1SH = self._embed(ids_BS)[:, None]
        rope = rope_at(context.tables, slots_BS)
        found_B1KH = self.head(blocks_B1SH, rope, context.join, context.visible())
        assert isinstance(found_B1KH, Tensor)
        return found_B1KH[:, 0]

    def _logits(self, hidden_BKH: Tensor) -> Tensor:
        """Return the logits of the drafted tokens, without the correction."""
        if self._shortlist is not None:
            logits_BKV = self._shortlist(hidden_BKH)
            assert isinstance(logits_BKV, Tensor)
            return logits_BKV
        assert self._target is not None, "prepare() comes before propose()"
        hidden_BKH = hidden_BKH.to(self._target.device, DTYPES[self._target.dtype])
        return self._convert(self._target.lm_head(hidden_BKH))

    def _spread(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary."""
        ids_V, size = self.head.token_ids_V, self.config.vocab_size
        return spread(logits, ids_V, size, float("-inf"))

    def observe(self, observation: Observation) -> None:
        """Add the tip and the accepted tokens of each row to its context."""
        states_BNX, counts_B = accepted_states(observation)
        self._stored.append(self._convert(states_BNX), counts_B, wait=not self._drafted)
        self._drafted = False
        if self._trees is not None:
            self._trees.learn(observation.outcome.accepted_B)

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Drop tokens past these lengths."""
        self._stored.truncate(lengths_B)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._stored.select(rows)
        if self._trees is not None:
            self._trees.select(rows)

    def draft_budget(
        self, target: Target, steps: float, gamma: int, context: int, rows: float
    ) -> ForwardBudget:
        """Return the budget of a mean round's draft (see `BudgetedDrafter`): of all its passes."""
        depths = min(gamma, self.config.num_drafts)
        passes = pass_budget(self.head, target, depths, context, rows).times(self._steps)
        more = correction_budget(self.head, target, depths, rows, self._stops)
        return (context_budget(self.head, rows) + passes + more).times(steps)

    def time_step(self, frontier: int = 1) -> None:
        """Run the passes of one block, with its correction, and choose the likeliest tokens."""
        tips_B = torch.zeros(len(self._stored.lengths_B), dtype=torch.long, device=self.device)
        self._chain(tips_B, self._denoise(tips_B), self._likeliest)


def _check_head(name: str, head: BlockHead, shape: str, stop_below: float) -> None:
    """Raise UserError for options of the drafter `name` that its head does not allow."""
    if shape == "tree" and head.correction is not None:
        raise UserError(
            f"drafter '{name}': shape is 'tree', but its head has a {head.config.correction} "
            f"correction, whose distributions differ from branch to branch; expected chain. Use a "
            f"head without a correction for trees."
        )
    if stop_below and (head.confidence is None or not 0 < stop_below < 1):
        raise UserError(
            f"drafter '{name}': stop_below is {stop_below}, expected 0, or a chance below 1 if its "
            f"head has a confidence. Train one with head.confidence=true."
        )
