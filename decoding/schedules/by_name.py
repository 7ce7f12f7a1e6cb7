"""The overlapped schedules by name; `serial`, the default, is not one of them."""

from decoding.drafters.remote import RemoteChain, RemoteParallelChain
from decoding.errors import UserError
from decoding.interfaces import (
    Capabilities,
    Drafter,
    RoundCosts,
    Target,
    precision,
    rounds_coarsely,
)
from decoding.rounds.batch import Batch
from decoding.sampling.rule_names import is_lossy
from decoding.schedules.pearl import Pearl, PearlWithoutPost, PearlWithoutPre
from decoding.schedules.pearl_plus import PearlPlus, PearlPlusWall
from decoding.schedules.pearl_wall import PearlWall, PearlWallWithoutPost, PearlWallWithoutPre
from decoding.stopping.policies import BY_COST, POLICIES

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
NON_LEARNING = tuple(name for name, policy in POLICIES.items() if not policy.learns)


def default_stopping(capabilities: Capabilities, schedule: str, target: Target) -> str:
    """Return the default stopping policy of a drafter.

    It is `cost_ratio` for chains whose tokens are sampled from known distributions, under the
    serial schedule. Otherwise it is `fixed`: trees are sized by their drafter, the tokens of a
    lookup are mostly accepted or rejected together, which a mean acceptance rate hides, and
    overlapped schedules choose the length of their chunks. It is also `fixed` where draft lengths,
    which `cost_ratio` decides from measured costs, could change the text (`text_varies_by_length`).
    """
    in_one_pass = _is_sampled_chain(capabilities) and capabilities.steps == "round"
    by_cost = (token_by_token(capabilities) or in_one_pass) and schedule == "serial"
    return "cost_ratio" if by_cost and not text_varies_by_length(target) else "fixed"


def text_varies_by_length(target: Target) -> bool:
    """Return whether greedy text depends on the draft lengths: on a CPU in half precision or less.

    Forwards of different widths round a token's logits differently, except in the fused step. They
    do so on a GPU too, where lengths still follow the costs (docs/exactness.md).
    """
    return target.device.type == "cpu" and rounds_coarsely(precision(target), target.backend)


def token_by_token(capabilities: Capabilities) -> bool:
    """Return whether a policy can end the draft after each sampled token."""
    by_token = capabilities.steps == "token" and capabilities.stops_by_token
    return _is_sampled_chain(capabilities) and by_token


def _is_sampled_chain(capabilities: Capabilities) -> bool:
    return capabilities.shape == "chain" and capabilities.has_q


def decides_by_cost(
    capabilities: Capabilities, schedule: str, stopping: str | None, target: Target
) -> bool:
    """Return whether the drafter, its policy or its schedule needs measured costs.

    stopping: name of the policy; None: the default one.
    """
    policy = stopping or default_stopping(capabilities, schedule, target)
    return policy in BY_COST or capabilities.needs_costs or "plus" in schedule


def batch_type(
    schedule: str,
    drafter: Drafter,
    verify: str,
    stopping: str,
    costs: RoundCosts | None,
    num_rows: int,
) -> type[Batch]:
    """Return the batch class of an overlapped schedule.

    Raises UserError for an unknown schedule, and for a drafter, verification rule, stopping policy,
    costs or number of rows that the schedule does not support.
    """
    if schedule not in SCHEDULES:
        raise UserError(
            f"schedule '{schedule}' is unknown, expected one of serial, {', '.join(SCHEDULES)}."
        )
    if not drafter.capabilities.can_overlap:
        raise UserError(
            f"schedule '{schedule}' needs a chain drafter that can run while the target does, "
            f"found '{drafter.name}'. Use schedule=serial. Small models can, PARD's too; of the "
            f"trained heads, SpecDiff, those of EAGLE-3 and EAGLE-1 with shape=chain, and a "
            f"recurrent head with beam_width=1 and by_cost=false. Trees, Medusa, blocks that read "
            f"layers of the target, P-EAGLE, early exit and SDSAT cannot."
        )
    if schedule in WALL and drafter.capabilities.needs_hidden:
        raise UserError(
            f"schedule '{schedule}' needs a drafter in a separate process, but '{drafter.name}' "
            f"reads the target's hidden states in this one. Use schedule=serial, or a virtual "
            f"clock: {', '.join(VIRTUAL)}."
        )
    if schedule in WALL and not isinstance(drafter, RemoteChain):
        in_one_pass = drafter.capabilities.steps == "round"
        worker = RemoteParallelChain if in_one_pass else RemoteChain
        raise UserError(
            f"schedule '{schedule}' needs a drafter in a separate process, but '{drafter.name}' "
            f"runs in this process. Use decoding.drafters.remote.{worker.__name__}(folder)."
        )
    if verify == "block" or is_lossy(verify):
        raise UserError(
            f"schedule '{schedule}' verifies chunks in parts, which verify={verify} cannot do. Use "
            f"verify=token or verify=coupled."
        )
    if stopping not in NON_LEARNING:
        raise UserError(
            f"schedule '{schedule}' drafts before the previous chunk is verified, so stopping "
            f"cannot be '{stopping}', which learns from rounds. Use {' or '.join(NON_LEARNING)}."
        )
    if issubclass(SCHEDULES[schedule], PearlPlus) and costs is None:
        raise UserError(
            f"schedule '{schedule}' needs measured costs, found None. Use "
            f"Settings(costs=time_parts(...).costs)."
        )
    if num_rows > 1 and SCHEDULES[schedule].one_row:
        raise UserError(
            f"schedule '{schedule}' runs one prompt at a time, found {num_rows}. Decode the "
            f"prompts one by one, or use schedule=serial."
        )
    return SCHEDULES[schedule]
