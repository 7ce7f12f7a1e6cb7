"""By what rule a drafter gets the draft length of the main part; the session follows it, rows name
it, and reports say it in words.

A prediction stands beside every row: what the formula says of it afterwards, from its own prompts.
It chooses nothing.
"""

from __future__ import annotations

from decoding.errors import UserError
from decoding.interfaces import Capabilities, Target
from decoding.models.native.model import NativeTarget
from decoding.schedules.by_name import SCHEDULES, token_by_token
from eval.config import EvalConfig
from eval.statistics.schema import DrafterFacts
from jobs.drafter_use import ALONE, DrafterUse

# Rule -> how a row at `gamma` came by it.
RULES: dict[str, str] = {
    "given": "gamma={gamma}, as given",
    "predicted": "gamma={gamma}, chosen in the sweep",
    "fastest": "gamma={gamma}, the fastest of the sweep",
    "own": "lengths of its own choice, up to gamma={gamma}",
    "cap": "lengths of its stopping rule's choice, up to a cap of its own, {gamma} "
    "(max_draft_tokens)",
    "none": "",
}
OWN = ("own", "cap")  # rules under which the row's length is a bound that it seldom reaches

# Stopping rules of published systems, which know no gamma: a swept one would cut them short
# (Hugging Face's schedule begins at 5). `cost_ratio` weighs costs that are measured at the sweep's
# widths, and has a cap of its own where its entry names one.
SELF_ENDING = ("confidence", "assisted", "adaptive_confidence", "entropy", "thompson")


def rule_of(schedule: str, given: bool, own_cap: int | None = None) -> str:
    """One of RULES: predicted takes what the sweep's acceptance and times promise most, fastest
    what the sweep itself measured.

    given: whether the user names the lengths. An overlapped schedule's closed form takes acceptance
    as even, so the sweep itself knows better.
    own_cap: of a stopping rule that chooses the lengths, as `own_cap_of` has it; neither lengths
    that are given nor the sweep's are its.
    """
    if schedule == ALONE:
        return "none"
    if own_cap is not None:
        return "cap"
    if given:
        return "given"
    if "plus" in schedule:
        return "own"
    return "fastest" if schedule in SCHEDULES else "predicted"


def own_cap_of(
    name: str, use: DrafterUse, capabilities: Capabilities, target: Target, usual: int
) -> int | None:
    """The most tokens of a draft where the drafter's stopping rule ends each one by itself; None
    where gamma does.

    use: settled. usual: the job's cap. A target that records its steps takes the sweep's lengths as
    ever: each width is a recording of its own. Raises UserError for an entry that names a cap which
    nothing would follow.
    """
    recorded = isinstance(target, NativeTarget) and target.execution != "eager"
    if use.max_draft_tokens is None:
        fits = (
            use.stopping in SELF_ENDING
            and use.schedule == "serial"
            and token_by_token(capabilities)
            and not recorded
        )
        return usual if fits else None
    why = ""
    if recorded:
        why = (
            "this target records its steps, one for each width, so that lengths are the sweep's "
            "(target.execution=eager has none)"
        )
    elif not token_by_token(capabilities):
        why = "its proposals come whole, and no rule is asked after a token"
    elif use.stopping == "fixed":
        why = "stopping=fixed ends no draft"
    if why:
        raise UserError(
            f"drafters: {name} has max_draft_tokens={use.max_draft_tokens}, but {why}: leave it "
            f"out, and its length is num_draft_tokens= or the sweep's."
        )
    return use.max_draft_tokens


def swept(facts: DrafterFacts, cfg: EvalConfig) -> list[int]:
    """Draft lengths that a drafter runs at in the sweep: all of them, or its own cap alone; none
    where it drafts for nobody.
    """
    if facts.length_rule == "none":
        return []
    return list(cfg.sweep) if facts.own_cap is None else [facts.own_cap]


def tried(facts: DrafterFacts, cfg: EvalConfig) -> list[int]:
    """All draft lengths at which a drafter may run; 0 where it writes alone."""
    if facts.length_rule == "none":
        return [0]
    return [*dict.fromkeys([*swept(facts, cfg), *([] if facts.own_cap else cfg.num_draft_tokens)])]


def longest(facts: DrafterFacts, cfg: EvalConfig) -> int:
    """The longest draft of a drafter in the whole run."""
    return facts.own_cap or max([*cfg.num_draft_tokens, *cfg.sweep])
