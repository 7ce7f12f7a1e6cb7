"""The simplest stopping policy, and the rules that all policies follow.

Each request has a policy, which is called after every sampled token. The token is kept and tested
in any case: dropping it for its low confidence would bias the output, since the test needs x ~ q
given everything that earlier tests read (Leviathan et al. 2023). Stopping after it does not. A
policy's state belongs to its request, so a row's output depends neither on its neighbors nor on
earlier requests.
"""

import math

from decoding.interfaces import Stopping, TokenConfidence

# The confidence of a token that was copied from the text and not sampled.
UNKNOWN = TokenConfidence(confidence=0.5, entropy=math.log(2))


def cut(drafted: list[int], policy: "Stopping") -> list[int]:
    """Return the tokens of a copied continuation up to the one after which the policy stops."""
    for depth in range(1, len(drafted)):
        if not policy.more(depth, UNKNOWN):
            return drafted[:depth]
    if drafted:
        policy.more(len(drafted), UNKNOWN)  # some policies count tokens here
    return drafted


class Fixed:
    """Policy that drafts exactly the budget."""

    reads = "nothing"
    # Whether `update` changes what it decides. PEARL drafts before it knows the last outcome.
    learns = False
    # Whether it ends drafts itself. Evaluations then give it a cap, max_draft_tokens, and no gamma.
    ends_itself = False

    @classmethod
    def make(cls, key: int, threshold: float | None) -> "Fixed":
        """Return the policy of one request.

        key: for random numbers. threshold: None for the policy's default, and always None for a
        policy that reads nothing.
        """
        return cls()

    def limit(self, budget: int) -> int:
        """Return the budget."""
        return budget

    def more(self, depth: int, token: TokenConfidence | None) -> bool:
        """Return True."""
        return True

    def update(self, drafted: int, accepted: int) -> None:
        """Do nothing."""
