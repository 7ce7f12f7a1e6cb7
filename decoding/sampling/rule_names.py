"""Names of the verification rules, and which of them change the target's distribution."""

from collections.abc import Sequence

from decoding.errors import UserError
from decoding.values import check_choice, quote

# Token verification that multiplies q by a factor, which follows the name: `lossy_lenience:0.5`.
LENIENCE = "lossy_lenience"
LOSSY = ("typical", LENIENCE)  # rules that change the target's distribution
FRESH = ("token", "block", LENIENCE)  # rules that test q, with new random numbers in every round
SAMPLING = ("token", "block", "coupled", *LOSSY)  # rules where temperature > 0
RULES = ("greedy", *SAMPLING)


def split_rule(verify: str) -> tuple[str, float]:
    """Return a rule's name and lenience, which is 1 (off) for all rules but `lossy_lenience:L`."""
    name, _, lenience = verify.partition(":")
    return (name, float(lenience)) if name == LENIENCE else (verify, 1.0)


def is_lossy(verify: str) -> bool:
    """Return whether the rule changes the target's distribution where temperature > 0."""
    return split_rule(verify)[0] in LOSSY


def check_verify(verify: str, choices: Sequence[str] = RULES) -> None:
    """Raise UserError for an unknown rule, and for a lenience that is no number in (0, 1]."""
    name, _, lenience = str(verify).partition(":")
    if name != LENIENCE:
        shown = [f"{one}:L" if one == LENIENCE else one for one in choices]
        check_choice("verify", verify, shown)
        return
    try:
        fits = 0 < float(lenience) <= 1
    except ValueError:
        fits = False
    if not fits:
        raise UserError(
            f"verify is {quote(verify)}, expected a lenience above 0 and at most 1 (lossless) "
            f"behind the colon, such as {LENIENCE}:0.5."
        )
