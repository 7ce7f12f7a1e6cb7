"""The overlapped schedules by name; `serial`, the default, is not one of them."""

from decoding.drafters.remote import RemoteChain
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Drafter, RoundCosts
from decoding.rounds.batch import Batch
from decoding.schedules.pearl import Pearl, PearlWithoutPost, PearlWithoutPre
from decoding.schedules.pearl_plus import PearlPlus, PearlPlusWall
from decoding.schedules.pearl_wall import PearlWall, PearlWallWithoutPost, PearlWallWithoutPre

VIRTUAL: dict[str, type[Pearl]] = {
    "pearl_virtual": Pearl,
    "pearl_plus_virtual": PearlPlus,
    "pearl_virtual_wo_pre": PearlWithoutPre,
    "pearl_virtual_wo_post": PearlWithoutPost,
}
WALL: dict[str, type[Pearl]] = {
    "pearl_wall": PearlWall,
    "pearl_plus_wall": PearlPlusWall,
    "pearl_wall_wo_pre": PearlWallWithoutPre,
    "pearl_wall_wo_post": PearlWallWithoutPost,
}
SCHEDULES = VIRTUAL | WALL
NON_LEARNING = ("fixed", "confidence")  # policies that learn nothing from a round


def usual_stopping(capabilities: Capabilities, schedule: str) -> str:
    """Return the stopping policy for a drafter when the settings name none.

    It is `cost_ratio` for tokens that are sampled one by one from a known distribution, else
    `fixed`: trees and lookups are proposed at once, and an overlapped schedule chooses the length
    of its chunks.
    """
    return "cost_ratio" if token_by_token(capabilities) and schedule == "serial" else "fixed"


def token_by_token(capabilities: Capabilities) -> bool:
    """Return whether a policy can end the draft after each sampled token."""
    return (
        capabilities.shape == "chain"
        and capabilities.has_q
        and capabilities.steps == "token"
        and capabilities.stops_by_token
    )


def weighs_costs(capabilities: Capabilities, schedule: str, stopping: str | None) -> bool:
    """Return whether the drafter or its policy decides by measured costs.

    stopping: None is the usual policy.
    """
    policy = stopping or usual_stopping(capabilities, schedule)
    return policy == "cost_ratio" or capabilities.needs_costs or "plus" in schedule


def batch_type(
    schedule: str,
    drafter: Drafter,
    verify: str,
    stopping: str,
    costs: RoundCosts | None,
    num_rows: int,
) -> type[Batch]:
    """Return the batch class of a schedule.

    Raises UserError if the drafter, rule, policy, costs or number of rows do not fit it.
    """
    if schedule not in SCHEDULES:
        raise UserError(
            f"schedule '{schedule}' is unknown, expected one of serial, {', '.join(SCHEDULES)}."
        )
    if not drafter.capabilities.can_overlap:
        raise UserError(
            f"schedule '{schedule}' needs a drafter that can overlap: a chain drafter whose model "
            f"runs beside the target and can drop a discarded chunk from its cache. "
            f"'{drafter.name}' cannot: take serial."
        )
    if schedule in WALL and not isinstance(drafter, RemoteChain):
        raise UserError(
            f"schedule '{schedule}' needs a drafter in a process of its own: make it with "
            f"decoding.drafters.remote.RemoteChain(folder)."
        )
    if verify in ("block", "typical"):
        raise UserError(
            f"schedule '{schedule}' verifies chunks in parts; take verify=token or coupled, not "
            f"{verify}."
        )
    if stopping not in NON_LEARNING:
        raise UserError(
            f"schedule '{schedule}' verifies a chunk while the next one is drafted, which stopping "
            f"'{stopping}' cannot learn from; take {' or '.join(NON_LEARNING)}."
        )
    if issubclass(SCHEDULES[schedule], PearlPlus) and costs is None:
        raise UserError(
            f"schedule '{schedule}' needs measured costs: Settings(costs=time_parts(...).costs)."
        )
    if num_rows > 1 and SCHEDULES[schedule].one_row:
        raise UserError(f"schedule '{schedule}' runs one prompt at a time, found {num_rows}.")
    return SCHEDULES[schedule]
