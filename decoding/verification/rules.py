"""The verification rules by name: which drafted tokens are kept, and which token follows them.

Each rule is one function (target logits, proposal, chooser, readback) -> Outcome, batched over rows
with their own draft counts. `greedy` and `coupled` follow the tokens that the target chooses
(follow.py), `token` tests sampled tokens one by one by p / q (token.py, token_tree.py), `block` all
of a chain together (block.py); both take q for a point mass where the proposal has none. All keep
the target's distribution; `typical` alone does not (typical.py). On a GPU a round waits once for
what they decided: `greedy` and `coupled` read the target's choices, `token` and `block` have twins
that do (device_chain.py, device_tree.py).
"""

from collections.abc import Callable

from torch import Tensor

from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Outcome, Proposal, Readback
from decoding.verification.block import block
from decoding.verification.follow import coupled, greedy
from decoding.verification.token import token
from decoding.verification.typical import typical

Rule = Callable[[Tensor, Proposal | None, Chooser, Readback], Outcome]


def check_rule(verify: str, temperature: float, capabilities: Capabilities, name: str) -> None:
    """Raise UserError for a rule that cannot verify what a drafter of this name proposes; greedy
    decoding follows trees whatever `verify` is.
    """
    if verify == "block" and temperature > 0 and capabilities.shape == "tree":
        raise UserError(
            f"drafter {name} proposes trees, and verify=block tests chains: take verify=token or "
            f"verify=coupled, or a drafter of chains (of beams a single one, beam_width=1)."
        )


RULES: dict[str, Rule] = {
    "greedy": greedy,
    "token": token,
    "block": block,
    "coupled": coupled,
    "typical": typical,  # lossy
}
