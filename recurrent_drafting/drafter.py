"""The recurrent head as a drafter: its beams form a tree that the target verifies in one forward.

The head reads the target's hidden state before the tip (training/heads/drafter.py). Top-k beams are
point masses in verification; sampled ones (`children=sampled`) are tested by p / q at every node.
Greedy decoding and the coupled rule use top-k beams in any case. One beam is a chain. A row's plan
(recurrent_drafting/plans.py) sets its steps, beams and nodes: all of them, or with measured costs
as many as pay.

A single beam can be continued before its tokens are verified (decoding/schedules/pearl.py): the
head's state after a token depends on the tokens since the last one that the target has read, so
the next chunk begins from the state after the assumed tokens.

Shapes: B rows, H hidden size, N nodes proposed, P beams that a step starts from, V the target's
vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.costs.roofline import ForwardBudget
from decoding.drafters.trees.sampled_children import are_sampled, check_kind
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
from decoding.models.load import DTYPES
from decoding.models.native.model import EXECUTIONS, RECORDED
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from recurrent_drafting.beams import Choose, TopBeams, read_tokens, run_step, search
from recurrent_drafting.checkpoint import load_head
from recurrent_drafting.drafts import SampledDraft, TopDraft, list_rooms, make_sampler
from recurrent_drafting.head import RecurrentHead
from recurrent_drafting.packed import for_drafting
from recurrent_drafting.plans import Plan, best_width, list_widths, make_plan, width_rate
from recurrent_drafting.recorded import RecordedBeams
from training.heads import budget
from training.heads.drafter import HeadDrafter, choose_name, load_to_draft


class RecurrentDrafter(HeadDrafter):
    """Drafter of a recurrent head, for the target that the head was trained on.

    Hydra: `_target_: recurrent_drafting.drafter.RecurrentDrafter`. The draft length,
    num_draft_tokens, counts the drafted tokens of a beam; the published beam_length counts the
    token before them too.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        beam_width: int = 8,
        children: str = "sampled",
        by_cost: bool = False,
        dtype: str = "float32",
        device: str = "cpu",
        name: str | None = None,
        head: RecurrentHead | None = None,
        execution: str | None = None,
    ) -> None:
        """Draft with the head in a folder, or with a `head` in memory in its dtype and device.

        beam_width: number of beams. children: `sampled`, or `top_k` for the likeliest beams, as
        published. by_cost: decide from measured costs whether to draft, and with how many steps,
        beams and verified nodes; beam_width and the draft length are then upper limits.
        execution: run fixed top-k drafts operation by operation (`eager`) or as one recorded step
        (`graph`; `compiled` is the same as there is nothing to fuse), or with fused products; by
        default graph on a GPU and eager on a CPU. Raises UserError for an invalid folder or
        argument.
        """
        head = load_to_draft(folder, head, load_head, dtype, device)
        super().__init__(choose_name(name, folder, "recurrent"), head.config, head.output)
        self.head = for_drafting(head, fused=execution == "fused")
        drafted = head.config.num_drafted
        if not 1 <= beam_width <= drafted:
            raise UserError(
                f"drafter '{self.name}': beam_width is {beam_width}, expected 1 to {drafted}, the "
                f"number of tokens that its head drafts from."
            )
        self.beam_width, self.children = beam_width, check_kind(children, self.name)
        self.capabilities = Capabilities(
            "chain" if beam_width == 1 else "tree",
            has_q=children == "sampled",
            needs_hidden=True,
            last_hidden=True,
            can_overlap=beam_width == 1 and not by_cost,  # costs decide from verified rounds
            needs_costs=by_cost,
            stops_by_token=False,
            frontiers=list_widths(beam_width) if by_cost else tuple(sorted({1, beam_width})),
            frontier_planner=self if by_cost else None,
        )
        self.num_layers, self.num_parameters = head.config.num_draft_layers, head.num_parameters
        if execution is None:
            execution = "graph" if devices.runs_ahead(self.device) else "eager"
        if execution not in EXECUTIONS:
            raise UserError(
                f"execution '{execution}' is unknown, expected one of {', '.join(EXECUTIONS)}."
            )
        self.execution = execution
        self._recorded: RecordedBeams | None = None
        self._target: Target | None = None
        # the target's embedding in the head's dtype, if that differs: converted once, not each step
        self._embedding_VH: Tensor | None = None
        self._costs: RoundCosts | None = None
        self._width = beam_width  # beams to search; with costs, as many as pay
        self._rows = 0
        self._known_B: list[int] = []  # tokens that the target has read
        self._plans_B: list[Plan] = []
        self._sampled = children == "sampled"  # whether the last draft was, or the first may be
        self._timed: dict[int, Choose] = {}  # choices of steps that are timed, by beams

    def width(self, gamma: int) -> int:
        """Return the number of nodes of beam_width beams of gamma tokens.

        Raises UserError if they do not fit into the target's context.
        """
        nodes = self.beam_width * gamma
        if self._target is not None and nodes >= self._target.max_length:
            raise UserError(
                f"drafter '{self.name}': {self.beam_width} beams of {gamma} tokens are {nodes} "
                f"nodes, but '{self._target.name}' holds {self._target.max_length} tokens. Use a "
                f"smaller beam_width, or shorter beams (num_draft_tokens, or beam_length, which "
                f"counts one more)."
            )
        return nodes

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Set the target, and the costs with `by_cost`.

        Raises UserError if the target's sizes or its device differ from the head's.
        """
        super().prepare(target, costs)
        if target is not self._target:
            if self.execution in RECORDED:
                self._recorded = RecordedBeams(self.head, self.beam_width, self.embed, self.device)
            self._embedding_VH = None
            if DTYPES[target.dtype] != self.dtype:
                ids_V = torch.arange(target.vocab_size, device=target.device)
                self._embedding_VH = self.convert(target.embed(ids_V))
        self._target, self._costs = target, costs if self.capabilities.needs_costs else None

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int
    ) -> None:
        """Store the hidden state of each prompt's last token but one, and reset the plans."""
        super().open(prompts_B, prefill_hidden_BNC, capacity)
        self._reset(prompts_B)

    def join(self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None) -> None:
        """Store the hidden states of the new prompts, and start plans of their own."""
        super().join(prompts_B, prefill_hidden_BNC)
        self._rows, self._timed = self._rows + len(prompts_B), {}
        self._known_B = [*self._known_B, *(len(prompt) - 1 for prompt in prompts_B)]
        if self._plans_B:
            self._plans_B = [*self._plans_B, *self._new_plans(len(prompts_B))]

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Store the last of the hidden states that the target has just computed; reset the plan."""
        super().resume(prompt, kept, hidden_NC)
        self._reset([prompt])

    def _reset(self, prompts_B: Sequence[Sequence[int]]) -> None:
        self._rows, self._plans_B, self._timed = len(prompts_B), [], {}
        self._known_B = [len(prompt) - 1 for prompt in prompts_B]

    def _plans(self) -> list[Plan]:
        """Return the rows' plans, which the first round creates."""
        if not self._plans_B:
            self._width = self.choose_width()
            self._plans_B = self._new_plans(self._rows)
        return self._plans_B

    def _new_plans(self, count: int) -> list[Plan]:
        ahead = devices.runs_ahead(self.device)
        return [make_plan(self._costs, self._width, ahead) for _ in range(count)]

    def choose_width(self) -> int:
        """Return the number of beams to search: beam_width, or with costs as many as pay."""
        if self._costs is None:
            return self.beam_width
        width = self._costs.frontier or best_width(self._costs, self.beam_width)
        return min(width, self.beam_width)

    def best_frontier(self, costs: RoundCosts) -> int:
        """Return the number of beams with the most expected tokens per millisecond."""
        return best_width(costs, self.beam_width)

    def expected_rate(self, costs: RoundCosts) -> float:
        """Return the expected tokens per millisecond with `costs.frontier` beams."""
        return width_rate(costs, min(costs.frontier or 1, self.beam_width))

    def embed(self, ids: Tensor) -> Tensor:
        """Return the target's embeddings of tokens in the head's dtype, (..., H)."""
        assert self._target is not None, "prepare() comes before propose()"
        if self._embedding_VH is None:
            return self.convert(self._target.embed(ids))
        return F.embedding(ids, self._embedding_VH)

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """Draft each row's beams, at most as long as its budget.

        Stopping policies limit the draft length before a round, not within it.
        """
        pairs = zip(self._plans(), budgets_B, strict=True)
        depths_B = [plan.begin(budget) for plan, budget in pairs]
        length = max(depths_B)
        if length == 0:
            return Proposal(torch.empty(len(depths_B), 0, dtype=torch.long), depths_B)
        tips = [sequence[-1] for sequence in sequences_B]
        self._sampled = are_sampled(self.children, chooser)
        state_BH = self._read_assumed(sequences_B)
        is_fixed_top_k = not self._sampled and self._costs is None and chooser.rule != "coupled"
        if self._recorded is not None and is_fixed_top_k and state_BH is None:
            temperature = 1.0 if chooser.warper.greedy else chooser.warper.temperature
            rooms_B = list_rooms(self._plans_B)
            return self._recorded(tips, self._hidden_BH, depths_B, temperature, rooms_B)
        kind = SampledDraft if self._sampled else TopDraft
        draft = kind(self.head, self._width, chooser, self._plans_B)
        tips_B = devices.tensor(tips, self.device)
        hidden_BH = self._hidden_BH
        beams = search(
            self.head, self.embed, tips_B, hidden_BH, length, draft.choose, draft.narrow, state_BH
        )
        return draft.proposal(beams)

    def _read_assumed(self, sequences_B: Sequence[Sequence[int]]) -> Tensor | None:
        """Return the head's states (B, H) before the last tokens, None if they are all zero.

        The tokens before the last one that the target has not read determine them.
        """
        pairs = zip(sequences_B, self._known_B, strict=True)
        unread_B = [sequence[known:-1] for sequence, known in pairs]
        if not any(unread_B):
            return None
        return read_tokens(self.head, self.embed, unread_B, self.device)

    def observe(self, observation: Observation) -> None:
        """Store the hidden state of the last accepted token, and update the plans."""
        super().observe(observation)
        accepted_B = observation.outcome.accepted_B
        self._known_B = [n + 1 + new for n, new in zip(self._known_B, accepted_B, strict=True)]
        readback_B = observation.readback[0] if observation.readback else [None] * self._rows
        # without plans, another drafter, such as a lookup, has drafted every round so far
        if self._plans_B:
            for plan, read, accepted in zip(self._plans_B, readback_B, accepted_B, strict=True):
                plan.learn(read, accepted)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        super().select(rows)
        self._rows, self._known_B = len(rows), [self._known_B[row] for row in rows]
        self._plans_B = [self._plans_B[row] for row in rows] if self._plans_B else []

    def draft_budget(
        self, target: Target, steps: float, gamma: int, context: int, rows: float
    ) -> ForwardBudget:
        """Return the budget of a mean round's draft (see `BudgetedDrafter`).

        The map of the target's state is read once a draft, and that of the head's state from the
        second step on. A step counts one beam.
        """
        config, first = self.head.config, min(steps, 1.0)
        H, E = config.hidden_size, config.exit_dim

        def product(inputs: int, outputs: int, times: float) -> ForwardBudget:
            return budget.product(inputs, outputs, rows, self.dtype).times(times)

        found = budget.table_rows(H, rows, self.dtype).times(steps)
        if config.rnn:
            found += product(H, H, steps) + product(H, H, steps - first)
        if config.has_input_map:
            found += product(H, E, first) + product(H, E, steps)
            blocks = config.num_draft_layers - (not config.projects)
            found += product(E, E, blocks * steps)
        return found + product(E, config.num_drafted, steps)

    def time_step(self, frontier: int = 1) -> None:
        """Run a step from `frontier` beams, sampled or top-k like the last draft.

        With costs, a step from one beam is timed as a step of a chain, which is searched with one
        beam. The first step of a tree takes a little longer; the difference counts as overhead.
        """
        B, H = self._hidden_BH.shape
        width = 1 if frontier == 1 and self.capabilities.needs_costs else self.beam_width
        if width not in self._timed:
            self._timed[width] = (
                self._sampler_to_time(B, width)
                if self._sampled
                else TopBeams(self.head, width, scored=self.capabilities.needs_costs)
            )
        states_BPH = self._hidden_BH[:, None].expand(B, frontier, H)
        context = self.head.context(self._hidden_BH).unsqueeze(1)
        run_step(self.head, self.embed, context, states_BPH, self._timed[width])

    def _sampler_to_time(self, rows: int, width: int) -> Choose:
        """Return the sampler of a fictitious round, whose noise is computed here and not timed."""
        vocabulary = self.head.config.vocab_size
        chooser = TokenChooser(Warper(1.0), "token", 0, vocabulary, self.device)
        chooser.begin([0] * rows, [0] * rows, [0] * rows, 3)
        return make_sampler(self.head, width, 3, rows, chooser)
