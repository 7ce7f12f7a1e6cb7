"""The proposer of tokens, and the capabilities that determine its inputs and schedules.

Shapes: B rows, N tokens, C hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from decoding.interfaces.chooser import Chooser
from decoding.interfaces.costs import FrontierPlanner, RoundCosts
from decoding.interfaces.proposal import Observation, Proposal
from decoding.interfaces.stopping import Policies
from decoding.interfaces.target import Target, Tokens


@dataclass(frozen=True)
class Capabilities:
    """Abilities and needs of a drafter, which determine its inputs and schedules."""

    shape: str = "chain"  # or "tree"
    has_q: bool = False  # proposals carry the probabilities that the tokens were sampled from
    needs_hidden: bool = False  # reads the target's hidden states
    taps: tuple[int, ...] = ()  # layers of these states, see `Target.forward`; (): the final norm
    last_hidden: bool = False  # of a prompt only the last hidden state is needed
    can_overlap: bool = False  # can continue a chain while the target verifies it
    needs_costs: bool = False  # chooses the size of its proposals from measured costs
    steps: str = "token"  # unit of t_draft: a drafted "token" or a "round" (one-pass drafters)
    # chains: whether stopping policies decide after every token, and not just before a round
    stops_by_token: bool = True
    # frontiers at which a draft step is timed, in increasing order; one if all steps cost the same
    frontiers: tuple[int, ...] = (1,)
    frontier_planner: FrontierPlanner | None = None  # chooses one from measured costs
    keeps_pools: bool = False  # is a `PoolKeeper`

    def __post_init__(self) -> None:
        if self.taps and not self.needs_hidden:
            raise ValueError(
                f"taps is {self.taps} but needs_hidden is False; taps are hidden states. Set "
                f"needs_hidden=True."
            )


class Pool(Protocol):
    """What a drafter remembers of earlier texts; it never changes a text, but what is drafted."""

    def end(self, sequence: Sequence[int]) -> None:
        """Remember the text of a row that has ended."""


class PoolKeeper(Protocol):
    """A drafter whose rows may begin with a pool of earlier texts instead of an empty one."""

    def new_pool(self, most: int) -> Pool:
        """Return an empty pool, which remembers at most about `most` tokens."""

    def use_pool(self, row: int, pool: Pool) -> None:
        """Let a row that has just begun use this pool, which other rows may use too."""


class Drafter(Protocol):
    """Proposer of tokens for the rows of a running batch.

    The order of calls is: `prepare` and `open` once; then in each round `propose`, `observe`,
    `rollback`, and `select` if rows have finished. `resume` replaces `open` in a conversation, and
    `join` may come between two rounds.
    """

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def name(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...

    def width(self, gamma: int) -> int:
        """Return the maximum number of tokens in a proposal of draft length or depth `gamma`."""

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Set the target that verifies the drafts, and the measured costs of a round, if any."""

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Start rows with these prompts; no sequence will exceed `capacity` tokens.

        prefill_hidden_BNC: the target's hidden states of all prompt tokens except the last, if
        `capabilities.needs_hidden`. With `capabilities.last_hidden` it may be a single column: each
        prompt's last such state.
        """

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Start further rows with these prompts after the running ones, which stay as they are.

        The arguments are those of `open`, whose capacity still holds.
        """

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Continue the single row of `open` with a new prompt.

        The row already holds the prompt's first `kept` tokens. hidden_NC: with
        `capabilities.needs_hidden`, the target's hidden states of the tokens that the target has
        just read: at least one, the last of which is the prompt's second-to-last token. Without
        `capabilities.last_hidden` they cover all tokens past `kept`.
        """

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft at most budgets_B[b] tokens for row b; its stopping policy may end the draft.

        With `can_overlap`, the end of a sequence may be tokens that this drafter has drafted and
        the target has not read yet.
        """

    def observe(self, observation: Observation) -> None:
        """Use the results of a round, in which other drafters may have proposed for some rows.

        See decoding/drafters/with_lookup.py. Under an overlapped schedule `accepted_B` counts the
        accepted tokens that this round's forward has read, whose hidden states it has.
        """

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Drop cached tokens past these lengths, which count committed tokens without the tip.

        Under an overlapped schedule they also count the tokens that are assumed and not verified.
        """

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""

    def time_step(self, frontier: int = 1) -> None:
        """Run one draft step for timing, and leave the state unchanged.

        frontier: one of `Capabilities.frontiers`. `Capabilities.steps` defines a step.
        """
