"""Law 3 for sampled beams: variants of sampling that keep it, and variants that break it.

The rows of the law are in tests/decoding.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Drafter, Proposal
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.verification import device_tree, tail_rejection, token_tree
from recurrent_drafting import drafts, sampled_beams
from recurrent_drafting.beams import Beams, Step
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.prefix_tree import mask_survivors, pack
from recurrent_drafting.sampled_beams import SampledBeams
from tests.decoding.law_3 import target_of
from tests.decoding.row_kinds.recurrent import recurrent
from tests.decoding.rows import COSTS, draft_table
from tests.decoding.test_law_of_distribution import P_LIMIT, law_holds
from tests.support.tiers import tiered

WIDTH, LOGIT_SCALE = 3, 0.8  # number of beams; scale of an unsure head's logits
# A second beam seldom pays, but a second child does.
STEEP = replace(
    COSTS, t_target_ms=(1.0, 1.002), t_draft_by_frontier_ms=((1, 0.05), (2, 0.5), (3, 1.0))
)
Keep = Callable[[drafts.SampledDraft, Beams, Proposal], Tensor]


class StochasticBeams(SampledBeams):
    """Stochastic beam search (Kool et al. 2019, section 4): the W best perturbed sequences."""

    perturbed: Tensor

    def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
        _, P, _ = logits_BPV.shape
        places_BPS, _, rates_BPS, tail_BPV = self._symbols(logits_BPV, step)
        scores_BPS = rates_BPS.clamp(min=0).log() + (
            0.0 if scores_BP is None else scores_BP[:, :, None]
        )
        gumbel_BPS = scores_BPS - (-self._clocks_BLWS[:, step, :P]).log()
        if step:  # so that the largest child equals its parent (Kool et al., section 4.2)
            above_BP1 = self.perturbed[:, :, None]
            v = (
                above_BP1
                - gumbel_BPS
                + torch.log1p(-(gumbel_BPS - gumbel_BPS.amax(-1, keepdim=True)).exp())
            )
            gumbel_BPS = above_BP1 - v.clamp(min=0) - torch.log1p((-v.abs()).exp())
        best = gumbel_BPS.nan_to_num(nan=float("-inf")).flatten(1).topk(self.width, dim=-1)
        self.perturbed = best.values
        tokens_BW = self.head.to_target_ids(places_BPS.flatten(1).gather(1, best.indices))
        scores_BW = scores_BPS.flatten(1).gather(1, best.indices)
        return Step(
            best.indices // self.symbols,
            tokens_BW,
            scores_BW,
            None,
            tail_BPV,
            places_BPS,
            rates_BPS,
        )


def break_proposals(monkeypatch: pytest.MonkeyPatch, keep: Keep) -> None:
    """Make sampled drafts propose only some of their nodes.

    keep: function that returns the mask of the nodes to propose.
    """
    original = drafts.SampledDraft.proposal

    def proposal(self: drafts.SampledDraft, beams: Beams) -> Proposal:
        full = original(self, beams)
        assert full.q_top is not None and full.parents_BN is not None
        tree = pack(full.tokens_BN, full.parents_BN, keep(self, beams, full))
        broken = drafts.tree_proposal(tree, None)
        broken.steps = full.steps
        broken.q_top = drafts.reorder_rows(
            tree, broken.tokens_BN.shape[1], full.q_top, drafts.number_rows(beams)
        )
        return broken

    monkeypatch.setattr(drafts.SampledDraft, "proposal", proposal)


def keep_all(draft: drafts.SampledDraft, beams: Beams, full: Proposal) -> Tensor:
    return torch.ones_like(full.tokens_BN, dtype=torch.bool)


def keep_survivors(draft: drafts.SampledDraft, beams: Beams, full: Proposal) -> Tensor:
    """Keep the nodes in beams of the last step, as top-k drafts do."""
    return mask_survivors(beams.parents_BLW, torch.tensor(draft.depths_B))


def keep_likely(draft: drafts.SampledDraft, beams: Beams, full: Proposal) -> Tensor:
    """Keep the nodes with a probability over 0.2 whose ancestors are kept too."""
    assert full.q_top is not None and full.parents_BN is not None
    rows_B1 = torch.arange(len(full.tokens_BN))[:, None]
    ids_BNK = full.q_top.ids_BPK[rows_B1, full.parents_BN + 1]
    q_BN = (
        full.q_top.probs_BPK[rows_B1, full.parents_BN + 1] * (ids_BNK == full.tokens_BN[:, :, None])
    ).sum(-1)
    keep_BN = q_BN > 0.2
    for node in range(keep_BN.shape[1]):
        parents_B1 = full.parents_BN[:, node, None]
        keep_BN[:, node] &= (keep_BN.gather(1, parents_B1.clamp(min=0)) | (parents_B1 < 0))[:, 0]
    return keep_BN


def sampled_drafter() -> Drafter:
    return recurrent(draft_table(), WIDTH, scale=LOGIT_SCALE, children="sampled")


def short_law_p_value(drafter: Drafter, warper: str = "plain") -> float:
    """Return law 3's p-value for the first three tokens, most of which one round drafts."""
    return law_holds(drafter, "token", warper, max_new_tokens=4, num_draft_tokens=3)


@pytest.mark.parametrize("keep", tiered([keep_all, keep_survivors], [keep_survivors]))
def test_stochastic_beams_keep_the_law(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that stochastic beam search keeps law 3 for each choice of nodes.

    The choices are exact, because clocks carry no information about their tokens.
    """
    monkeypatch.setattr(drafts, "SampledBeams", StochasticBeams)
    break_proposals(monkeypatch, keep)
    assert short_law_p_value(sampled_drafter()) > P_LIMIT


@pytest.mark.parametrize(
    ("keep", "exact"), tiered([(keep_all, True), (keep_likely, False)], [(keep_likely, False)])
)
def test_dropped_children_break_the_law(
    keep: Keep, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_proposals(monkeypatch, keep)
    assert (short_law_p_value(sampled_drafter()) > P_LIMIT) == exact


def drafter_by_cost() -> RecurrentDrafter:
    """Return a recurrent drafter that samples children and sizes its drafts from costs."""
    return recurrent(draft_table(), WIDTH, scale=LOGIT_SCALE, children="sampled", by_cost=True)


@pytest.mark.parametrize("ahead", [False, True])
def test_sampled_children_without_expansion_stay_in_the_tree(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that sampled children that are not expanded stay as leaves, in sampling order.

    Each node was sampled from its parent's row of q.
    """
    monkeypatch.setattr(devices, "runs_ahead", lambda device: ahead)
    leaves = 0
    original = drafts.SampledDraft.proposal

    def proposal(self: drafts.SampledDraft, beams: Beams) -> Proposal:
        nonlocal leaves
        made = original(self, beams)
        assert made.parents_BN is not None and made.q_top is not None
        assert [plan.nodes for plan in self.by_cost_B] == beams.join(
            lambda step: step.admitted_BW
        ).sum(1).tolist()
        assert (
            made.frontiers == beams.num_started < 1 + WIDTH * (len(beams.steps) - 1)
            or len(beams.steps) == 1
        )
        for row, count in enumerate(made.counts_B):
            parents, tokens = (
                made.parents_BN[row, :count].tolist(),
                made.tokens_BN[row, :count].tolist(),
            )
            levels = [0] * count
            for node, parent in enumerate(parents):
                levels[node] = levels[parent] + 1 if parent >= 0 else 0
                q_of_token = made.q_top.probs_BPK[row, parent + 1][
                    made.q_top.ids_BPK[row, parent + 1] == tokens[node]
                ]
                assert q_of_token.max() > 0
                if parent >= 0:
                    below = made.q_top.probs_BPK[row, parent + 1]
                    assert not below.equal(made.q_top.probs_BPK[row, 0]), "this is the tip's row"
            inner = [node for node in range(count) if levels[node] < max(levels)]
            leaves += sum(node not in parents for node in inner)
        return made

    monkeypatch.setattr(drafts.SampledDraft, "proposal", proposal)
    settings = Settings(max_new_tokens=200, num_draft_tokens=3, temperature=1.0, costs=STEEP)
    (done,) = decode(target_of(None), drafter_by_cost(), [[1, 2]], settings)
    assert done.accepted > 20
    assert leaves > 20


@pytest.mark.long
@pytest.mark.parametrize("numbered", [True, False])
def test_law_3_where_few_of_the_drawn_children_are_expanded(
    numbered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that law 3 holds if few of the sampled children are expanded.

    Control: it fails if all children are tested by the tip's distribution (numbered=False).
    """
    if not numbered:
        monkeypatch.setattr(
            drafts, "number_rows", lambda beams: torch.zeros_like(beams.parents_BLW.flatten(1))
        )
    more = {"max_new_tokens": 4, "num_draft_tokens": 3, "costs": STEEP}
    assert (law_holds(drafter_by_cost(), "token", "plain", **more) > P_LIMIT) == numbered


def test_siblings_out_of_their_order_break_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that law 3 fails if the likeliest of the sampled children comes first."""

    class Sorted(SampledBeams):
        def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
            chosen = super().__call__(logits_BPV, scores_BP, step)
            assert chosen.places_BPS is not None and chosen.rates_BPS is not None
            rows_B1 = torch.arange(len(logits_BPV))[:, None]
            of_parent_BWS = (
                chosen.places_BPS[rows_B1, chosen.parents_BW] == chosen.tokens_BW[:, :, None]
            )
            q_BW = (chosen.rates_BPS[rows_B1, chosen.parents_BW] * of_parent_BWS).sum(-1)
            order_BW = (q_BW - 10.0 * chosen.parents_BW).argsort(1, descending=True)
            scores_BW = None if chosen.scores_BW is None else chosen.scores_BW.gather(1, order_BW)
            parents_BW, tokens_BW = (
                chosen.parents_BW.gather(1, order_BW),
                chosen.tokens_BW.gather(1, order_BW),
            )
            return replace(chosen, parents_BW=parents_BW, tokens_BW=tokens_BW, scores_BW=scores_BW)

    monkeypatch.setattr(drafts, "SampledBeams", Sorted)
    assert short_law_p_value(sampled_drafter()) < P_LIMIT


@pytest.mark.parametrize("children", tiered(["top_k", "sampled"], ["sampled"]))
@pytest.mark.parametrize("warper", tiered(["plain", "hot_top_p"], ["plain"]))
def test_law_3_where_a_tree_is_read_at_once(
    children: str, warper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_tree, "token", device_tree.token)
    drafter = recurrent(draft_table(), WIDTH, scale=LOGIT_SCALE, children=children)
    assert short_law_p_value(drafter, warper) > P_LIMIT


def test_law_3_rejects_a_tree_read_at_once_without_residual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_tree, "token", device_tree.token)
    monkeypatch.setattr(device_tree.CandidateNode, "reject", lambda self, child, uniform: True)
    assert short_law_p_value(sampled_drafter()) < P_LIMIT


TAILS = [("at once", 2, 4), ("walked", 2, 0), ("at once", 3, 0), ("walked", 3, 0)]


@pytest.mark.parametrize(("rule", "width", "shortlist"), tiered(TAILS, TAILS[:1]))
def test_law_3_of_a_tail_of_several_tokens(
    rule: str, width: int, shortlist: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that law 3 holds with a tail, whose tokens are tested twice.

    With two candidates, some children come from the tail of all other tokens.
    """
    monkeypatch.setattr(sampled_beams, "CANDIDATES", 2)
    if rule == "at once":
        monkeypatch.setattr(token_tree, "token", device_tree.token)
    fields = {"draft_vocab_size": shortlist}
    assert (
        short_law_p_value(recurrent(draft_table(), width, LOGIT_SCALE, fields, children="sampled"))
        > P_LIMIT
    )


def accept_tails_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept a token of the tail with its tail, without a test of its probability."""
    for module in (tail_rejection, device_tree):
        monkeypatch.setattr(module, "tail_ratio", lambda *given: 1.0)


def sample_rejected_tails_from_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a rejected token of the tail by a sample from p, not from the residual."""
    following = device_tree.CandidateNode.next_token

    def wrong(self: device_tree.CandidateNode, uniform: float) -> int:
        return self.other if self.rejection.rejected_in_tail else following(self, uniform)

    monkeypatch.setattr(device_tree.CandidateNode, "next_token", wrong)


@pytest.mark.parametrize(
    "broken",
    tiered([accept_tails_untested, sample_rejected_tails_from_p], [accept_tails_untested]),
)
def test_law_3_rejects_a_tail_that_is_tested_once(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled_beams, "CANDIDATES", 2)
    monkeypatch.setattr(token_tree, "token", device_tree.token)
    broken(monkeypatch)
    assert short_law_p_value(recurrent(draft_table(), 2, LOGIT_SCALE, children="sampled")) < P_LIMIT
