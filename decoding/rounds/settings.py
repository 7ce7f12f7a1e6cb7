"""The settings of a decode call.

Every field is checked on construction; its fit with the target and the drafter is checked when a
decode begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from decoding.sampling.logits_processors import Allowed
from decoding.sampling.rule_names import check_verify
from decoding.sampling.warpers import Warper
from decoding.stopping.policies import NAMES
from decoding.values import RULES, check_choice, check_value, quote


@dataclass(frozen=True)
class Settings:
    """The settings of a decode call. Warpers are off by default; temperature 0 is greedy.

    Raises UserError for an invalid value.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    # gamma: drafted tokens of a round along a chain
    num_draft_tokens: int = 4
    # "token", "block", "coupled", or a lossy rule: "typical" or "lossy_lenience:L" with a lenience
    # L; at temperature 0 verification is greedy for every rule
    verify: str = "token"
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    # The policy (decoding.stopping.policies.NAMES) that may end a draft before num_draft_tokens.
    # None: with `costs` the drafter's default (decoding.schedules.by_name.default_stopping), else
    # "fixed".
    stopping: str | None = None
    # threshold of the policies that have one; None takes the policy's default
    stopping_threshold: float | None = None
    # "serial", or a schedule that drafts while it verifies (decoding.schedules.by_name.SCHEDULES)
    schedule: str = "serial"
    # measured costs, for the policies, drafters and schedules that decide from them
    costs: RoundCosts | None = None
    # divides positive and multiplies negative logits of the text's tokens; 1 is off
    repetition_penalty: float = 1.0
    # Maps the text so far (ids) to the ids that may follow, None for all. It runs on the host,
    # which on a GPU therefore waits for every drafted token.
    allowed: Allowed | None = None
    # a row ends with the token that completes one of them
    stop_strings: tuple[str, ...] = ()
    # decodes ids to text, for stop_strings
    text_of: Callable[[Sequence[int]], str] | None = None
    # continue to max_new_tokens past stop tokens, for timing
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in RULES:
                check_value(name, value)
        check_verify(self.verify)
        if self.stopping is not None:
            check_choice("stopping", self.stopping, NAMES)
        if not isinstance(self.schedule, str):
            raise UserError(
                f"schedule is {quote(self.schedule)}, expected a name such as 'serial'."
            )
        if self.costs is not None and not isinstance(self.costs, RoundCosts):
            raise UserError(f"costs is {quote(self.costs)}, expected measured RoundCosts, or None.")
        if self.stop_strings and self.text_of is None:
            raise UserError(
                "stop_strings needs text_of, the function that decodes token ids, found None. Set "
                "text_of, or use decoding.generate, which sets it."
            )

    @property
    def warper(self) -> Warper:
        """The warper with these sampling settings."""
        return Warper(self.temperature, self.top_k, self.top_p, self.min_p)
