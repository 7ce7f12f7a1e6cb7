"""The recurrent head as a drafter: beams of its tokens, packed into a tree that the target verifies
in one forward.

The head reads the target's hidden state of the last token in the cache, which stands before the
tip; it comes from the prefill and after that from every round's own forward. A prompt of one token
has no such token: its first round drafts from a hidden state of zeros.

Picked beams are point masses to verification, drawn ones (`children=sampled`) are tested by p / q
at every node; greedy decoding and the coupled rule pick whatever `children` is. One beam is a
chain. How many steps, beams and nodes a row drafts is said by its plan
(recurrent_drafting/plans.py): all of them, or as many as measured costs make worth it.

Shapes: B rows, P beams that a step starts from, N nodes proposed, C = H hidden size.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.devices import device_of
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
from decoding.models.native.model import EXECUTIONS
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.verification.nodes import at_nodes
from recurrent_drafting.beams import Choose, Picks, search, timed_step
from recurrent_drafting.checkpoint import load_head
from recurrent_drafting.drafts import DrawnDraft, PickedDraft, drawing, rooms_of
from recurrent_drafting.head import RecurrentHead
from recurrent_drafting.packed import for_drafting
from recurrent_drafting.plans import Plan, best_width, ladder, plan_of, width_rate
from recurrent_drafting.recorded import RecordedPicks


class RecurrentDrafter:
    """A recurrent head that drafts for the target that it was trained on. Hydra:
    `_target_: recurrent_drafting.drafter.RecurrentDrafter`.

    The draft length, num_draft_tokens, counts the drafted tokens of a beam; the published
    beam_length counts the token before them too.
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
        """From a head's folder, or from a `head` in memory, which keeps its dtype and device.

        beam_width: beams of a draft. children: `sampled`, or `top_k`, the likeliest beams, as
        published; greedy they are always picked.
        by_cost: take the number of steps, the beams that each starts from, the nodes that are
        verified, and whether to draft at all from measured costs; beam_width and the draft length
        are then the most. execution: fixed picked beams are drafted operation by operation
        (`eager`) or as one recorded step (`graph`, and `compiled` as well, as there is nothing to
        fuse); None takes graph on a GPU and eager on a CPU.
        """
        if head is None:
            if folder is None:
                raise ValueError("RecurrentDrafter needs a folder or a head")
            if dtype not in DTYPES:
                raise UserError(
                    f"dtype '{dtype}' is unknown, expected one of {', '.join(DTYPES)}; or auto, "
                    f"where a configuration names the drafter."
                )
            head = load_head(Path(folder), DTYPES[dtype], device_of(device))
        self.head = for_drafting(head)
        self.name = name or (Path(folder).resolve().name if folder is not None else "recurrent")
        check_kind(children, self.name)
        drafted = head.config.num_drafted
        if not 1 <= beam_width <= drafted:
            raise UserError(
                f"drafter '{self.name}': beam_width is {beam_width}, expected 1 to {drafted}, the "
                f"tokens that its head drafts from."
            )
        self.beam_width, self.children = beam_width, children
        shape = "chain" if beam_width == 1 else "tree"
        frontiers = ladder(beam_width) if by_cost else tuple(sorted({1, beam_width}))
        self.capabilities = Capabilities(
            shape,
            has_q=children == "sampled",
            needs_hidden=True,
            last_hidden=True,
            needs_costs=by_cost,
            stops_by_token=False,
            frontiers=frontiers,
            frontier_planner=self if by_cost else None,
        )
        self.num_layers, self.num_parameters = head.config.num_draft_layers, head.num_parameters
        self.device, self.dtype = head.output.device, head.output.dtype
        if execution is None:
            execution = "graph" if devices.runs_ahead(self.device) else "eager"
        if execution not in EXECUTIONS:
            raise UserError(
                f"execution '{execution}' is unknown, expected one of {', '.join(EXECUTIONS)}."
            )
        self.execution = execution
        self._recorded: RecordedPicks | None = None
        self._target: Target | None = None
        # The target's, where the head's dtype is another: converted once, not in every step.
        self._embedding_VH: Tensor | None = None
        self._costs: RoundCosts | None = None
        self._width = beam_width  # that is searched: with costs, as many as pay
        self._rows = 0
        self._plans_B: list[Plan] = []
        self._drawn = children == "sampled"  # the last draft, or what the first one may be
        self._timed: dict[int, Choose] = {}  # by beams of a search
        self._hidden_BH = torch.empty(0)

    def width(self, gamma: int) -> int:
        """Nodes of beams of gamma tokens. Raises UserError for more than the target's
        cache holds.
        """
        nodes = self.beam_width * gamma
        if self._target is not None and nodes >= self._target.max_length:
            raise UserError(
                f"drafter '{self.name}': {self.beam_width} beams of {gamma} tokens are {nodes} "
                f"nodes, but '{self._target.name}' holds {self._target.max_length} tokens: take a "
                f"smaller beam_width, or shorter beams (num_draft_tokens, or beam_length, which "
                f"counts one more)."
            )
        return nodes

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Take the target. Raises UserError for one that the head was not trained on, as far as
        shapes tell.
        """
        config, head = self.head.config, f"drafter '{self.name}': its head"
        for what, own, other in (
            ("hidden size", config.hidden_size, target.hidden_size),
            ("vocabulary", config.vocab_size, target.vocab_size),
        ):
            if own != other:
                raise UserError(
                    f"{head} was trained for a {what} of {own}, but '{target.name}' has {other}: "
                    f"take the head of this target."
                )
        if (self.device.type, self.device.index or 0) != (
            target.device.type,
            target.device.index or 0,
        ):
            raise UserError(
                f"{head} is on {self.device}, but '{target.name}' is on {target.device}: give both "
                f"one device."
            )
        if target is not self._target:
            if self.execution != "eager":
                self._recorded = RecordedPicks(self.head, self.beam_width, self.embed, self.device)
            other = DTYPES[target.dtype] != self.dtype
            ids_V = torch.arange(target.vocab_size, device=target.device)
            self._embedding_VH = self._own(target.embed(ids_V)) if other else None
        self._target, self._costs = target, costs if self.capabilities.needs_costs else None

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int
    ) -> None:
        """Take the hidden state of each prompt's last token but one. Raises UserError for hidden
        states of another size than the head's.
        """
        size = self.head.config.hidden_size
        self._hidden_BH = torch.zeros(len(prompts_B), size, dtype=self.dtype, device=self.device)
        if prefill_hidden_BNC is not None:
            if prefill_hidden_BNC.shape[-1] != size:
                raise UserError(
                    f"drafter '{self.name}': the target's hidden states have the size "
                    f"{prefill_hidden_BNC.shape[-1]}, its head reads {size}."
                )
            read_B1 = devices.tensor([[len(prompt) > 1] for prompt in prompts_B], self.device)
            last = prefill_hidden_BNC.shape[1] - 1  # 0: of each prompt the last state alone
            last_BH = at_nodes(
                prefill_hidden_BNC, [min(max(len(prompt) - 2, 0), last) for prompt in prompts_B]
            )
            self._hidden_BH = torch.where(read_B1, self._own(last_BH), self._hidden_BH)
        self._plan(len(prompts_B))

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Take the last of the hidden states that the target has just read: it stands before the
        tip.
        """
        if hidden_NC is not None:
            self._hidden_BH = self._own(hidden_NC[-1:])
        self._plan(1)

    def _plan(self, rows: int) -> None:
        """Decide afresh how much is drafted."""
        self._rows, self._plans_B, self._timed = rows, [], {}

    def _planned(self) -> list[Plan]:
        """Return the rows' plans, made with their first round."""
        if not self._plans_B:
            ahead = devices.runs_ahead(self.device)
            self._width = self.choose_width()
            self._plans_B = [plan_of(self._costs, self._width, ahead) for _ in range(self._rows)]
        return self._plans_B

    def choose_width(self) -> int:
        """Return the largest number of beams to search."""
        if self._costs is None:
            return self.beam_width
        width = self._costs.frontier or best_width(self._costs, self.beam_width)
        return min(width, self.beam_width)

    def best_frontier(self, costs: RoundCosts) -> int:
        """Return the number of beams with the most expected tokens per millisecond."""
        return best_width(costs, self.beam_width)

    def expected_rate(self, costs: RoundCosts) -> float:
        """Return the expected tokens per millisecond with the beams of these costs."""
        return width_rate(costs, min(costs.frontier or 1, self.beam_width))

    def _own(self, target_states: Tensor) -> Tensor:
        return target_states.to(self.device, self.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings in the head's dtype, (..., H)."""
        assert self._target is not None, "prepare() comes before propose()"
        if self._embedding_VH is None:
            return self._own(self._target.embed(ids))
        return F.embedding(ids, self._embedding_VH)

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """The beams of each row, as long as its budget. Stopping policies limit the length before a
        round, not inside it.
        """
        depths_B = [
            plan.begin(budget) for plan, budget in zip(self._planned(), budgets_B, strict=True)
        ]
        length = max(depths_B)
        if length == 0:
            return Proposal(torch.empty(len(depths_B), 0, dtype=torch.long), depths_B)
        tips = [sequence[-1] for sequence in sequences_B]
        self._drawn = are_sampled(self.children, chooser)
        if (
            self._recorded is not None
            and not self._drawn
            and self._costs is None
            and chooser.rule != "coupled"
        ):
            temperature = 1.0 if chooser.warper.greedy else chooser.warper.temperature
            return self._recorded(
                tips, self._hidden_BH, depths_B, temperature, rooms_of(self._plans_B)
            )
        tips_B = devices.tensor(tips, self.device)
        kind = DrawnDraft if self._drawn else PickedDraft
        draft = kind(self.head, self._width, chooser, self._plans_B)
        beams = search(
            self.head, self.embed, tips_B, self._hidden_BH, length, draft.choose, draft.narrow
        )
        return draft.proposal(beams)

    def observe(self, observation: Observation) -> None:
        """Keep the hidden state of the last accepted token; with costs, learn what the draft was
        worth.
        """
        outcome = observation.outcome
        last_B = outcome.accepted_B  # of a chain
        if outcome.paths_B is not None:
            last_B = [path[-1] + 1 if path else 0 for path in outcome.paths_B]
        self._hidden_BH = self._own(at_nodes(observation.hidden_BNC, last_B))
        answer_B = observation.readback[0] if observation.readback else [None] * len(self._plans_B)
        # there are none as long as others, such as a lookup, have drafted every round
        if self._plans_B:
            for plan, answer, accepted in zip(
                self._plans_B, answer_B, outcome.accepted_B, strict=True
            ):
                plan.learn(answer, accepted)

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Beams leave nothing behind."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        # a list as an index would wait for the device
        kept = devices.tensor(list(rows), self.device)
        self._hidden_BH = self._hidden_BH[kept]
        self._rows = len(rows)
        self._plans_B = [self._plans_B[row] for row in rows] if self._plans_B else []

    def time_step(self, frontier: int = 1) -> None:
        """One step from so many beams, drawn or picked as the last draft was; before one as `draws`
        says.

        By cost a step from one beam is a chain's, which does without the tree: it is one where a
        single beam is searched. A tree's first step takes a little longer, which then counts as the
        rest of a round.
        """
        B, H = self._hidden_BH.shape
        width = 1 if frontier == 1 and self.capabilities.needs_costs else self.beam_width
        if width not in self._timed:
            picks = Picks(self.head, width, scored=self.capabilities.needs_costs)
            self._timed[width] = self._timed_draws(B, width) if self._drawn else picks
        states_BPH = self._hidden_BH[:, None].expand(B, frontier, H)
        context = self.head.context(self._hidden_BH).unsqueeze(1)
        timed_step(self.head, self.embed, context, states_BPH, self._timed[width])

    def _timed_draws(self, rows: int, width: int) -> Choose:
        """Draws of a round that there never is; its noise is made once, as it is once a round."""
        config = self.head.config
        chooser = TokenChooser(Warper(1.0), "token", 0, config.vocab_size, self.device)
        chooser.begin([0] * rows, [0] * rows, [0] * rows, 3)
        return drawing(self.head, width, 3, rows, chooser)
