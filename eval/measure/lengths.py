"""Rules that set the draft length of a drafter in the main part.

The prediction shown with a row is made afterwards, from the prompts of that row, and sets nothing.
"""

from __future__ import annotations

from decoding.errors import UserError
from decoding.interfaces import Capabilities, Target
from decoding.models.native.model import RECORDED, NativeTarget
from decoding.schedules.by_name import SCHEDULES, token_by_token
from decoding.stopping.policies import POLICIES
from eval.config import EvalConfig
from eval.statistics.schema import DrafterFacts
from jobs.drafter_use import ALONE, DrafterUse

# Rule -> its description in the table.
RULES: dict[str, str] = {
    "given": "given",
    "predicted": "sweep, by the formula",
    "fastest": "sweep, by measured speed",
    "own": "schedule, each round",
    "cap": "stopping rule, up to max_draft_tokens",
    "none": "–",
}
CAPPED = ("own", "cap")  # rules under which the length is an upper bound, seldom reached

# Stopping rules of published systems, which have no gamma: a swept one would cut drafts short
# (Hugging Face's schedule begins at 5). `cost_ratio` uses costs measured at the sweep's widths, so
# it has a cap only if its entry gives one.
SELF_ENDING = tuple(name for name, policy in POLICIES.items() if policy.ends_itself)


def rule_of(schedule: str, given: bool, length_cap: int | None = None) -> str:
    """Return the name in RULES of the rule that sets a drafter's length.

    given: whether the user gave the lengths. length_cap: result of `length_cap_of`, which overrides
    given and swept lengths. The closed form of an overlapped schedule assumes uniform acceptance,
    so such a schedule takes the length that was fastest in the sweep.
    """
    if schedule == ALONE:
        return "none"
    if length_cap is not None:
        return "cap"
    if given:
        return "given"
    if "plus" in schedule:
        return "own"
    return "fastest" if schedule in SCHEDULES else "predicted"


def length_cap_of(
    name: str, use: DrafterUse, capabilities: Capabilities, target: Target, usual: int
) -> int | None:
    """Return the cap on the drafts of a drafter whose stopping rule sets their lengths, else None.

    usual: the job's max_draft_tokens. A target that records its steps has one recording for each
    width, so it always takes the sweep's lengths. Raises UserError if the entry sets a cap that
    would have no effect.
    """
    recorded = isinstance(target, NativeTarget) and target.execution in RECORDED
    whole_proposals = not token_by_token(capabilities)
    if use.max_draft_tokens is None:
        ends_itself = use.stopping in SELF_ENDING and use.schedule == "serial"
        return usual if ends_itself and not whole_proposals and not recorded else None
    why = ""
    if recorded:
        why = (
            "this target records one step for each width, so the sweep sets the lengths "
            "(target.execution=eager records none)"
        )
    elif whole_proposals:
        why = "it drafts in one step, so a stopping rule decides before it, up to the given length"
    elif use.stopping == "fixed":
        why = "stopping=fixed ends no draft early"
    if why:
        raise UserError(
            f"drafters: {name} has max_draft_tokens={use.max_draft_tokens}, but {why}. Remove "
            f"it: num_draft_tokens= or the sweep then sets its length."
        )
    return use.max_draft_tokens


def sweep_lengths(facts: DrafterFacts, cfg: EvalConfig) -> list[int]:
    """Return a drafter's lengths in the sweep: its cap if it has one, [] if it decodes alone."""
    if facts.length_rule == "none":
        return []
    return list(cfg.sweep) if facts.length_cap is None else [facts.length_cap]


def possible_lengths(facts: DrafterFacts, cfg: EvalConfig) -> list[int]:
    """Return all draft lengths at which a drafter may run; [0] if it decodes alone."""
    if facts.length_rule == "none":
        return [0]
    given = [] if facts.length_cap else cfg.num_draft_tokens
    return list(dict.fromkeys([*sweep_lengths(facts, cfg), *given]))


def longest_draft(facts: DrafterFacts, cfg: EvalConfig) -> int:
    """Return the longest draft of a drafter in the run."""
    return facts.length_cap or max([*cfg.num_draft_tokens, *cfg.sweep])
