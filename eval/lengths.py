"""By what rule a drafter gets the draft length of the main part; the session follows it, rows name it, and reports say it in words.

A prediction stands beside every row: what the formula says of it afterwards, from its own prompts. It chooses nothing.
"""

from __future__ import annotations

from decoding.schedules import SCHEDULES
from training.drafters import ALONE

# Rule -> how a row at `gamma` came by it.
RULES: dict[str, str] = {
    "given": "gamma={gamma}, as given",
    "predicted": "gamma={gamma}, chosen in the sweep",
    "fastest": "gamma={gamma}, the fastest of the sweep",
    "own": "lengths of its own choice, up to gamma={gamma}",
    "none": "",
}


def rule_of(schedule: str, given: bool) -> str:
    """One of RULES: predicted takes what the sweep's acceptance and times promise most, fastest what the sweep itself measured.

    given: whether the user names the lengths. An overlapped schedule's closed form takes acceptance as even, so the sweep itself knows better.
    """
    if schedule == ALONE:
        return "none"
    if given:
        return "given"
    if "plus" in schedule:
        return "own"
    return "fastest" if schedule in SCHEDULES else "predicted"
