"""`Settings`: how to decode. Every field is checked when one is made; what depends on the target or
the drafter, when a decode begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from decoding.sampling.logits_processors import Allowed
from decoding.sampling.token_chooser import RULES as VERIFY
from decoding.sampling.warpers import Warper
from decoding.stopping.policies import NAMES
from decoding.values import RULES, check_choice, check_value, shown


@dataclass(frozen=True)
class Settings:
    """How to decode. The warpers are off at their defaults; temperature 0 is greedy.

    Raises UserError for a value that a field cannot have.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_draft_tokens: int = 4  # gamma: drafted tokens a round along a chain
    # "token", "block" or "coupled" (or "typical", which is lossy); at temperature 0 verification is
    # greedy, whatever the rule
    verify: str = "token"
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    # A name of decoding.stopping.policies.NAMES: when to end a draft before num_draft_tokens. None:
    # with `costs`, the drafter's usual policy (decoding.schedules.by_name.usual_stopping); without,
    # "fixed".
    stopping: str | None = None
    # of the policies that have one; None takes the policy's own
    stopping_threshold: float | None = None
    # or decoding.schedules.by_name.SCHEDULES: draft and verify at the same time
    schedule: str = "serial"
    # measured, for stopping="cost_ratio" and for what weighs its proposals or chunks
    costs: RoundCosts | None = None
    # divides positive and multiplies negative logits of the text's tokens; 1 is off
    repetition_penalty: float = 1.0
    # Text so far, as ids -> ids that may follow; None: all of them. It is asked on the host: on a
    # card every drafted token is waited for.
    allowed: Allowed | None = None
    stop_strings: tuple[str, ...] = ()  # a row ends with the token that completes one of them
    text_of: Callable[[Sequence[int]], str] | None = None  # ids -> text, for stop_strings
    ignore_eos: bool = False  # continue to max_new_tokens past stop tokens, for timing

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in RULES:
                check_value(name, value)
        check_choice("verify", self.verify, VERIFY)
        if self.stopping is not None:
            check_choice("stopping", self.stopping, NAMES)
        if not isinstance(self.schedule, str):
            raise UserError(
                f"schedule is {shown(self.schedule)}, expected a text such as 'serial'."
            )
        if self.costs is not None and not isinstance(self.costs, RoundCosts):
            raise UserError(f"costs is {shown(self.costs)}, expected measured RoundCosts, or None.")
        if self.stop_strings and self.text_of is None:
            raise UserError(
                "stop_strings needs text_of, the function from token ids to text "
                "(decoding.generate has it)."
            )

    @property
    def warper(self) -> Warper:
        """The sampling part of the settings."""
        return Warper(self.temperature, self.top_k, self.top_p, self.min_p)
