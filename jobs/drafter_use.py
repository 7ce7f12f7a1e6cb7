"""Options of a drafter that belong to the decoding loop, not to the drafter's class."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from decoding.errors import UserError
from decoding.interfaces import Capabilities
from decoding.sampling.token_chooser import SAMPLING
from decoding.schedules.by_name import NON_LEARNING, SCHEDULES, default_stopping
from decoding.stopping.policies import EAGER, NAMES

# the schedule of a drafter that decodes its own text without the target: the upper bound
ALONE = "alone"


@dataclass(frozen=True)
class DrafterUse:
    """Loop options of one drafter.

    Raises UserError for unknown values and for options that contradict each other.
    """

    # stopping policy; None: the drafter's default
    stopping: str | None = None
    stopping_threshold: float | None = None
    schedule: str = "serial"
    # shortest match, in tokens, of suffix lookup before the drafter runs; None: no lookup
    lookup: int | None = None
    # verification rule where temperature > 0; None: the job's
    verify: str | None = None
    # cap of a stopping policy that chooses its own lengths; None: the job's
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for key, found, known in (
            ("stopping", self.stopping, NAMES),
            ("schedule", self.schedule, ("serial", *SCHEDULES, ALONE)),
            ("verify", self.verify, SAMPLING),
        ):
            if found is not None and found not in known:
                raise UserError(f"{key} '{found}' is unknown, expected one of {', '.join(known)}.")
        if self.schedule in SCHEDULES and self.stopping not in (None, *NON_LEARNING):
            raise UserError(
                f"schedule '{self.schedule}' does not work with stopping '{self.stopping}': a "
                f"policy that learns gets the result of a chunk too late. Give stopping="
                f"{' or '.join(NON_LEARNING)}."
            )
        if self.lookup is not None and self.schedule != "serial":
            raise UserError(
                f"lookup={self.lookup} does not work with schedule '{self.schedule}', as a lookup "
                f"cannot forget the tokens of a discarded chunk. Remove lookup=, or give "
                f"schedule=serial."
            )
        if (
            self.stopping_threshold is not None
            and self.stopping is not None
            and self.stopping not in EAGER
        ):
            raise UserError(
                f"stopping_threshold is {self.stopping_threshold}, but stopping '{self.stopping}' "
                f"has no threshold. Remove it, or give stopping={' | '.join(EAGER)}."
            )
        self._check_rule()
        self._check_cap()

    def _check_rule(self) -> None:
        if self.schedule in SCHEDULES and self.verify in ("block", "typical"):
            raise UserError(
                f"verify={self.verify} does not work with schedule '{self.schedule}', which "
                f"verifies unfinished chunks. Give verify=token or coupled."
            )
        if self.schedule == ALONE and self.verify is not None:
            raise UserError(
                f"verify={self.verify} has no effect with schedule={ALONE}, which verifies "
                f"nothing. Remove it."
            )

    def _check_cap(self) -> None:
        cap = self.max_draft_tokens
        if cap is None:
            return
        if isinstance(cap, bool) or not isinstance(cap, int) or cap < 1:
            raise UserError(f"max_draft_tokens is {cap!r}, expected an integer of at least 1.")
        if self.schedule != "serial":
            raise UserError(
                f"max_draft_tokens={cap} has no effect with schedule '{self.schedule}', whose "
                f"chunks have num_draft_tokens= or the sweep's length. Remove it."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Options that are fields of decoding.Settings, except those that the job sets itself."""
        # A drafter alone decodes serially.
        schedule = "serial" if self.schedule == ALONE else self.schedule
        return {
            "stopping": self.stopping,
            "stopping_threshold": self.stopping_threshold,
            "schedule": schedule,
        }

    @property
    def eval_only(self) -> dict[str, Any]:
        """Options that only eval.run supports, as far as they are given.

        Other jobs have one rule and one length for all drafters.
        """
        given = {"verify": self.verify, "max_draft_tokens": self.max_draft_tokens}
        return {key: value for key, value in given.items() if value is not None}

    def with_default_stopping(self, capabilities: Capabilities) -> DrafterUse:
        """Return a copy with the drafter's default stopping policy where none is given."""
        return (
            self
            if self.stopping
            else replace(self, stopping=default_stopping(capabilities, self.schedule))
        )


USE = tuple(one.name for one in fields(DrafterUse))


def check_not_evaluated(name: str, use: DrafterUse) -> None:
    """Raise UserError for options that only eval.run supports. Other jobs would ignore them."""
    if use.eval_only:
        given = ", ".join(f"{key}={value}" for key, value in use.eval_only.items())
        raise UserError(
            f"drafters: {name} has {given}, which only eval.run supports. Remove it: this job has "
            f"one setting for all drafters."
        )
