"""The confidence of a block drafter, and the length of a draft that follows from it (DSpark).

c_k = sigmoid(w [h_k ; f_k] + b) is the predicted chance that the token at depth k is accepted if
those before it are (arXiv 2607.05147). Its inputs are the state of the slot and the correction's
features, which depend on the tokens drafted before it and not on the token itself. So whether a
token is kept may depend on c_k and on earlier confidences, but not on later ones, which have seen
it: a draft ends at the first token that does not pay, and never looks past it (appendix A).

Shapes: M drafts, N predictions, E features of the output layer.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from decoding.interfaces import RoundCosts
from heads.block.shape import NONE, BlockConfig


class Confidence(nn.Module):
    """A linear layer from the features of the output layer to a logit."""

    def __init__(self, shape: BlockConfig) -> None:
        super().__init__()
        size = shape.hidden_size + (0 if shape.correction == NONE else shape.rank)
        self.proj = nn.Linear(size, 1)

    def forward(self, features_NE: Tensor) -> Tensor:
        """Return the logits of the chances of acceptance (...)."""
        logits_N1 = self.proj(features_NE)
        assert isinstance(logits_N1, Tensor)
        return logits_N1.squeeze(-1)


def count_kept(chances: Sequence[float], stop_below: float, costs: RoundCosts | None) -> int:
    """Return how many tokens of a draft to keep, decided from left to right.

    chances: each token's chance of acceptance if those before it are accepted. stop_below: the
    draft ends before the first token whose chance with all before it is smaller. costs: it also
    ends before the first token that does not raise the expected tokens per millisecond; None: no
    such limit.
    """
    reached, tokens, rate = 1.0, 1.0, 0.0
    if costs is not None:
        rate = tokens / costs.drafted_ms(costs.t_draft_ms, 0)
    for count, chance in enumerate(chances):
        reached *= chance
        tokens += reached
        if reached < stop_below:
            return count
        if costs is not None:
            better = tokens / costs.drafted_ms(costs.t_draft_ms, count + 1)
            if better <= rate:
                return count
            rate = better
    return len(chances)
