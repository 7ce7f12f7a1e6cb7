"""Options of a drafter that belong to the decoding loop, not to the drafter's class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from decoding.errors import UserError
from decoding.interfaces import Capabilities, Target
from decoding.sampling.rule_names import SAMPLING, check_verify, is_lossy
from decoding.schedules.by_name import NON_LEARNING, SCHEDULES, default_stopping
from decoding.stopping.policies import EAGER, NAMES
from decoding.values import SWITCH, check_choice, check_value, whole_number

# schedule of a drafter that decodes alone, without the target: the upper bound of the speed
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
    # cap of a stopping policy that chooses draft lengths; None: the job's
    max_draft_tokens: int | None = None
    # decode with a head that was trained for other weights of the target, to measure what it lost
    any_target: bool = False

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, ("serial", *SCHEDULES, ALONE))
        if self.stopping is not None:
            check_choice("stopping", self.stopping, NAMES)
        if self.verify is not None:
            check_verify(self.verify, SAMPLING)
        if self.max_draft_tokens is not None:
            check_value("max_draft_tokens", self.max_draft_tokens, whole_number(1))
        check_value("any_target", self.any_target, SWITCH)
        for found, text in self._contradictions():
            if found:
                raise UserError(text)

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Yield, for each refused combination of options, whether it occurs and the error text."""
        schedule = f"schedule '{self.schedule}'"
        in_chunks = self.schedule in SCHEDULES
        yield (
            in_chunks and self.stopping not in (None, *NON_LEARNING),
            f"stopping '{self.stopping}' does not work with {schedule}: a policy that learns gets "
            f"the result of a chunk too late. Use stopping={' or '.join(NON_LEARNING)}.",
        )
        yield (
            self.lookup is not None and self.schedule != "serial",
            f"lookup={self.lookup} does not work with {schedule}, as a lookup cannot forget the "
            f"tokens of a discarded chunk. Remove lookup=, or use schedule=serial.",
        )
        yield (
            self.stopping_threshold is not None and self.stopping not in (None, *EAGER),
            f"stopping_threshold is {self.stopping_threshold}, but stopping '{self.stopping}' has "
            f"no threshold. Remove it, or use stopping={' or '.join(EAGER)}.",
        )
        yield (
            in_chunks and (self.verify == "block" or is_lossy(self.verify or "")),
            f"verify={self.verify} does not work with {schedule}, which verifies unfinished "
            f"chunks. Use verify=token or coupled.",
        )
        yield (
            self.schedule == ALONE and self.verify is not None,
            f"verify={self.verify} has no effect with schedule={ALONE}, which verifies nothing. "
            f"Remove it.",
        )
        yield (
            self.max_draft_tokens is not None and self.schedule != "serial",
            f"max_draft_tokens={self.max_draft_tokens} has no effect with {schedule}, whose draft "
            f"length is num_draft_tokens= or the sweep's. Remove it.",
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Options that are fields of decoding.Settings, except those that the job sets itself."""
        return {
            "stopping": self.stopping,
            "stopping_threshold": self.stopping_threshold,
            # A drafter alone decodes serially.
            "schedule": "serial" if self.schedule == ALONE else self.schedule,
        }

    def with_default_stopping(self, capabilities: Capabilities, target: Target) -> DrafterUse:
        """Return a copy with the drafter's default stopping policy if none is set."""
        stopping = self.stopping or default_stopping(capabilities, self.schedule, target)
        return replace(self, stopping=stopping)


USE = tuple(field.name for field in fields(DrafterUse))


def refuse_eval_options(name: str, use: DrafterUse) -> None:
    """Raise UserError for options that only eval.run supports; other jobs would ignore them."""
    options = {"verify": use.verify, "max_draft_tokens": use.max_draft_tokens}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    if given:
        raise UserError(
            f"drafters: {name} has {', '.join(given)}, which only eval.run supports. Remove it: "
            f"this job has one setting for all drafters."
        )
