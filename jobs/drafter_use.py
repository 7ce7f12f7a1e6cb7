"""Options of a drafter that belong to the decoding loop, not to the drafter's class."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from decoding.errors import UserError
from decoding.interfaces import Capabilities
from decoding.sampling.token_chooser import SAMPLING
from decoding.schedules.by_name import SCHEDULES, UNTAUGHT, usual_stopping
from decoding.stopping.policies import EAGER, NAMES

# the schedule of a drafter that writes its own text, without the target: the end of the scale
ALONE = "alone"


@dataclass(frozen=True)
class DrafterUse:
    """Loop options of one drafter.

    Raises UserError for unknown values and for options that contradict each other.
    """

    stopping: str | None = None  # None: the drafter's usual one
    stopping_threshold: float | None = None
    schedule: str = "serial"
    # tokens of a match in the row's own text, copied before the model is asked; None: never
    lookup: int | None = None
    verify: str | None = None  # the rule where temperature > 0; None: the job's
    # cap of a stopping rule that chooses its own lengths; None: the job's
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for key, found, known in (
            ("stopping", self.stopping, NAMES),
            ("schedule", self.schedule, ("serial", *SCHEDULES, ALONE)),
            ("verify", self.verify, SAMPLING),
        ):
            if found is not None and found not in known:
                raise UserError(f"{key} '{found}' is unknown, expected one of {', '.join(known)}.")
        if self.schedule in SCHEDULES and self.stopping not in (None, *UNTAUGHT):
            raise UserError(
                f"schedule '{self.schedule}' with stopping '{self.stopping}': what a chunk became "
                f"is known too late for a policy that learns; take {' or '.join(UNTAUGHT)}."
            )
        if self.lookup is not None and self.schedule != "serial":
            raise UserError(
                f"lookup={self.lookup} with schedule '{self.schedule}': what a lookup has read of "
                f"a chunk cannot be taken back when the chunk is thrown away, so it goes with "
                f"schedule=serial alone. Leave lookup= out, or take schedule=serial."
            )
        if (
            self.stopping_threshold is not None
            and self.stopping is not None
            and self.stopping not in EAGER
        ):
            raise UserError(
                f"stopping '{self.stopping}' takes no threshold, found "
                f"stopping_threshold={self.stopping_threshold}: leave it out, or take "
                f"stopping={' | '.join(EAGER)}."
            )
        self._check_rule()
        self._check_cap()

    def _check_rule(self) -> None:
        if self.schedule in SCHEDULES and self.verify in ("block", "typical"):
            raise UserError(
                f"verify={self.verify} with schedule '{self.schedule}', which tests chunks that go "
                f"on: "
                f"take verify=token or coupled."
            )
        if self.schedule == ALONE and self.verify is not None:
            raise UserError(
                f"verify={self.verify} with schedule={ALONE}, under which nothing is verified: "
                f"leave it out."
            )

    def _check_cap(self) -> None:
        cap = self.max_draft_tokens
        if cap is None:
            return
        if isinstance(cap, bool) or not isinstance(cap, int) or cap < 1:
            raise UserError(f"max_draft_tokens is {cap!r}, expected a whole number from 1 up.")
        if self.schedule != "serial":
            raise UserError(
                f"max_draft_tokens={cap} with schedule '{self.schedule}', whose chunks are "
                f"num_draft_tokens= or the sweep's: leave it out."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Options that are fields of decoding.Settings, except those that the job sets itself."""
        # a text of its own is plain decoding
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
        said = {"verify": self.verify, "max_draft_tokens": self.max_draft_tokens}
        return {key: value for key, value in said.items() if value is not None}

    def with_default_stopping(self, capabilities: Capabilities) -> DrafterUse:
        """Return a copy with the drafter's default stopping policy where none is given."""
        return (
            self
            if self.stopping
            else replace(self, stopping=usual_stopping(capabilities, self.schedule))
        )


USE = tuple(one.name for one in fields(DrafterUse))


def check_not_evaluated(name: str, use: DrafterUse) -> None:
    """Raise UserError for options that only eval.run supports. Other jobs would ignore them."""
    if use.eval_only:
        said = ", ".join(f"{key}={value}" for key, value in use.eval_only.items())
        raise UserError(
            f"drafters: {name} has {said}, which eval.run alone follows. Leave it out: this job "
            f"has its own."
        )
