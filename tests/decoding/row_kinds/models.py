"""Rows of drafters with a language model, without any model, and of the oracles."""

from typing import Any

import torch

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.lookahead import Lookahead
from decoding.drafters.ouroboros import Ouroboros
from decoding.drafters.parallel import ParallelChain
from decoding.drafters.prompt_lookup import PromptLookup, SuffixLookup
from decoding.drafters.self_speculation import SelfSpeculation
from decoding.drafters.trees.graph import GraphDrafter
from decoding.drafters.trees.multi_candidate import MultiCandidate
from decoding.drafters.trees.ranked import RankedTree
from decoding.drafters.trees.static import StaticTree
from decoding.drafters.with_lookup import ChainWithLookup
from decoding.interfaces import Target
from tests.decoding.row_kinds.kit import DrafterRow, draft_table
from tests.support.oracle_drafters import Foresight, Oracle, OracleTree, WrongLookahead
from tests.support.other_vocabularies import partly_shared, renamed_drafter
from tests.support.tiny_targets import TableTarget


def parallel_of(model: Target) -> ParallelChain:
    """Return a parallel chain of a model that is trained for it as well as a model can be."""
    foresight: Any = Foresight(model)
    return ParallelChain(model=foresight, tokens=8, mask_token=foresight.mask_token)


def six_words() -> TableTarget:
    """Return a draft model with four tokens of the 5-symbol target and two others."""
    return TableTarget(torch.randn(6, 6, 6, generator=torch.Generator().manual_seed(7)) * 1.5)


ROWS = [
    DrafterRow(
        "chain",
        make=lambda kit: ChainDrafter(model=kit.draft_model),
        rules=("greedy", "token", "block", "coupled"),
        perfect=lambda kit: ChainDrafter(model=kit.twin),
        table=lambda: ChainDrafter(model=draft_table()),
    ),
    DrafterRow(
        "parallel",
        make=lambda kit: parallel_of(kit.draft_model),
        rules=("greedy", "token", "block", "coupled"),
        perfect=lambda kit: parallel_of(kit.twin),
        # sampled tokens are not those that its deeper distributions assume
        perfect_rules=("greedy",),
        table=lambda: ParallelChain(model=draft_table(), tokens=8, mask_token=0),
    ),
    DrafterRow(
        "other_vocabulary",
        make=lambda kit: renamed_drafter(kit.draft_model, "tokens"),
        rules=("greedy", "token", "block", "coupled"),
        perfect=lambda kit: renamed_drafter(kit.twin, "tokens"),
        table=lambda: partly_shared(six_words(), 5, 4, "tokens"),
    ),
    DrafterRow(
        "other_vocabulary_strings",
        make=lambda kit: renamed_drafter(kit.draft_model, "strings"),
        rules=("greedy", "token", "block", "coupled"),
        perfect=lambda kit: renamed_drafter(kit.twin, "strings"),
        # it drafts the likeliest text
        perfect_rules=("greedy",),
        table=lambda: partly_shared(six_words(), 5, 4, "strings"),
    ),
    DrafterRow(
        "multi_candidate",
        make=lambda kit: MultiCandidate(model=kit.draft_model, branching=(3, 2)),
        rules=("greedy", "token", "coupled"),
        perfect=lambda kit: MultiCandidate(model=kit.twin, branching=(2, 2)),
        table=lambda: MultiCandidate(model=draft_table(), branching=(3, 2)),
    ),
    DrafterRow(
        "static_tree",
        make=lambda kit: StaticTree(model=kit.draft_model),
        rules=("greedy", "token", "coupled"),
        perfect=lambda kit: StaticTree(model=kit.twin),
        table=lambda: StaticTree(model=draft_table()),
    ),
    DrafterRow(
        "ranked_tree",
        make=lambda kit: RankedTree(model=kit.draft_model, frontier=3, max_nodes=10),
        rules=("greedy", "token", "coupled"),
        perfect=lambda kit: RankedTree(model=kit.twin, frontier=1),
        table=lambda: RankedTree(model=draft_table(), frontier=3, max_nodes=10),
    ),
    DrafterRow(
        "budget_tree",
        make=lambda kit: RankedTree(model=kit.draft_model, frontier=3, by_cost=True),
        rules=("greedy", "token", "coupled"),
        table=lambda: RankedTree(model=draft_table(), frontier=3, by_cost=True),
        slow=True,
    ),
    DrafterRow(
        "graph",
        make=lambda kit: GraphDrafter(model=kit.draft_model, frontier=3),
        rules=("greedy", "token", "coupled"),
        perfect=lambda kit: GraphDrafter(
            model=kit.twin, frontier=1, match=1000, leaf_threshold=0.0
        ),
        table=lambda: GraphDrafter(model=draft_table(), frontier=3, match=0),
    ),
    DrafterRow(
        "lookahead",
        make=lambda kit: Lookahead(),
        rules=("greedy", "token", "coupled"),
        adversarial=lambda kit: WrongLookahead(kit.answers, kit.target.vocab_size),
        table=lambda: Lookahead(ngram=3, columns=3, candidates=3),
    ),
    DrafterRow(
        "ouroboros",
        make=lambda kit: Ouroboros(model=kit.draft_model),
        rules=("greedy", "token", "coupled"),
        # an attached phrase has 3 tokens, so the model drafts 3, two of them by lookahead
        gamma=6,
        table=lambda: Ouroboros(model=draft_table(), ngram=3, columns=3),
    ),
    DrafterRow(
        "self_speculation",
        make=lambda kit: SelfSpeculation(attention=(1,), mlp=(0,)),
        rules=("greedy", "token", "block", "coupled"),
        adversarial=lambda kit: SelfSpeculation(mlp=(1,)),
        table=lambda: SelfSpeculation(attention=(1,), mlp=(0,)),
    ),
    DrafterRow(
        "chain_with_lookup",
        make=lambda kit: ChainWithLookup(model=kit.draft_model, min_match=2),
        rules=("greedy", "token", "block", "coupled"),
        perfect=lambda kit: ChainWithLookup(model=kit.twin, min_match=1000),
        table=lambda: ChainWithLookup(model=draft_table(), min_match=2),
    ),
    DrafterRow(
        "prompt_lookup",
        make=lambda kit: PromptLookup(),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: PromptLookup(),
    ),
    DrafterRow(
        "suffix_lookup",
        make=lambda kit: SuffixLookup(),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: SuffixLookup(),
    ),
]


# Trees with top-k children under sampling; under the other rules they equal the rows above.
PICKED = [
    DrafterRow(
        "static_tree_picked",
        make=lambda kit: StaticTree(model=kit.draft_model, children="top_k"),
        rules=("token",),
        table=lambda: StaticTree(model=draft_table(), children="top_k"),
    ),
    DrafterRow(
        "ranked_tree_picked",
        make=lambda kit: RankedTree(
            model=kit.draft_model, frontier=3, max_nodes=10, children="top_k"
        ),
        rules=("token",),
        table=lambda: RankedTree(model=draft_table(), frontier=3, max_nodes=10, children="top_k"),
    ),
    DrafterRow(
        "budget_tree_picked",
        make=lambda kit: RankedTree(
            model=kit.draft_model, frontier=3, by_cost=True, children="top_k"
        ),
        rules=("token",),
        table=lambda: RankedTree(model=draft_table(), frontier=3, by_cost=True, children="top_k"),
    ),
    DrafterRow(
        "graph_picked",
        make=lambda kit: GraphDrafter(model=kit.draft_model, frontier=3, children="top_k"),
        rules=("token",),
        table=lambda: GraphDrafter(model=draft_table(), frontier=3, match=0, children="top_k"),
    ),
]


ORACLES = [
    DrafterRow(
        "oracle",
        make=lambda kit: Oracle(kit.answers, kit.target.vocab_size),
        rules=("greedy", "coupled"),
        perfect=lambda kit: Oracle(kit.answers, kit.target.vocab_size),
        adversarial=lambda kit: Oracle(kit.answers, kit.target.vocab_size, wrong=True),
    ),
    DrafterRow(
        "oracle_tree",
        make=lambda kit: OracleTree(kit.answers, kit.target.vocab_size),
        rules=("greedy", "coupled"),
        perfect=lambda kit: OracleTree(kit.answers, kit.target.vocab_size),
        adversarial=lambda kit: OracleTree(kit.answers, kit.target.vocab_size, wrong=True),
    ),
]
