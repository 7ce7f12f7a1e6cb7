"""The verification rules by name: which drafted tokens are accepted, and which token follows.

A rule is one function (target logits, proposal, chooser, readback) -> Outcome, batched over rows
with different draft counts. `greedy` and `coupled` follow the target's choices (follow.py); `token`
tests sampled tokens one by one by p / q (token.py, token_tree.py); `block` tests a chain jointly
(block.py). The last two treat a proposal without q as point masses. All keep the target's
distribution except the lossy `typical` (typical.py) and `lossy_lenience` (token.py). On a GPU each
except `typical` waits once per round: `token` and `block` have device versions for that
(device_chain.py, device_tree.py).
"""

from collections.abc import Callable

from torch import Tensor

from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Outcome, Proposal, Readback
from decoding.sampling.rule_names import LENIENCE, split_rule
from decoding.verification.block import block
from decoding.verification.follow import coupled, greedy
from decoding.verification.token import lenient, token
from decoding.verification.typical import typical

VerificationRule = Callable[[Tensor, Proposal | None, Chooser, Readback], Outcome]


def check_rule(verify: str, temperature: float, capabilities: Capabilities, name: str) -> None:
    """Raise UserError for a rule that cannot verify the proposals of this drafter.

    At temperature 0 verification is greedy for every `verify`, which fits chains and trees.
    """
    tests_chains = split_rule(verify)[0] in ("block", LENIENCE)
    if tests_chains and temperature > 0 and capabilities.shape == "tree":
        raise UserError(
            f"drafter {name} proposes trees, and verify={verify} tests chains. Use verify=token or "
            f"verify=coupled, or a drafter of chains (with beams, beam_width=1)."
        )


RULES: dict[str, VerificationRule] = {
    "greedy": greedy,
    "token": token,
    "block": block,
    "coupled": coupled,
    "typical": typical,  # lossy
    LENIENCE: lenient,
}
