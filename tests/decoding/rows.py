"""The table of rows for the laws of decoding: one entry per drafter, with its verification rules.

A new drafter or rule is one more entry. `make` builds the row's drafter from a `Kit`. `table`
builds one for the 5-symbol target of law 3; the oracles have none, as they must know the answer.

Law 4 needs perfect and adversarial drafters (test_law_of_gain.py). For most rows `make` builds
both, from a kit whose models and head predict the text or its opposite; the other rows define
`adversarial`. `perfect` builds a drafter with q = p on a target with random weights. Rows without
it have no closed form on such a target: the size of a cost-based tree depends on the model's
confidence; Lookahead, Ouroboros and lookups propose earlier text, likely or not; top-k beams are
point masses, and the likeliest beams need not begin with the likeliest token. Sampled beams and
self-speculation have separate tests of q = p.

scripts/bench/gpu_rows.py reads the table without pytest.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
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
from decoding.drafters.with_lookup import ChainWithLookup, LookupFirst
from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.models.native.model import NativeTarget
from heads.block.drafter import BlockDrafter
from heads.eagle.drafter import EagleDrafter
from heads.eagle.model import EagleConfig, EagleHead, default_taps
from heads.early_exit.drafter import EarlyExitDrafter
from heads.early_exit.model import EarlyExitConfig, EarlyExitHead
from heads.medusa.drafter import MedusaDrafter
from heads.medusa.model import MedusaConfig, MedusaHeads
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import HeadConfig, RecurrentHead
from tests.support.block_heads import (
    LAW_3_SIZES,
    after_each,
    block_of,
    corrected_block,
    random_block,
)
from tests.support.oracle_drafters import Foresight, Oracle, OracleTree, WrongLookahead
from tests.support.tiny_targets import TableTarget, five_words


@dataclass(frozen=True)
class Kit:
    """The models, heads and texts from which a row builds its drafter."""

    target: Target
    twin: Target  # the same model with a separate cache
    draft_model: Target  # the target with noise in its weights
    answers: Sequence[Sequence[int]]  # the target's continuations
    head: RecurrentHead | None = None  # None: a row that needs one makes a random head
    texts: Sequence[Sequence[int]] = ()  # the target's texts, to which other heads are fitted
    eagle: EagleHead | None = None  # None: fitted to the texts, or a random head without texts


@dataclass(frozen=True)
class DrafterRow:
    """A drafter, its verification rules, and its variants for the laws."""

    name: str
    make: Callable[[Kit], Drafter]
    rules: tuple[str, ...]
    perfect: Callable[[Kit], Drafter] | None = None  # builds a drafter with q = p
    # rules that never reject the perfect drafter; None: all of `rules`
    perfect_rules: tuple[str, ...] | None = None
    # builds a drafter that is never accepted; None: `make` does so from an adversarial kit
    adversarial: Callable[[Kit], Drafter] | None = None
    table: Callable[[], Drafter] | None = None  # builds a drafter for the 5-symbol target
    gamma: int | None = None  # minimum draft length that uses all parts of the drafter
    slow: bool = False  # a variant of another row, which the laws test only in the long suite


def draft_table() -> TableTarget:
    """Return a draft model for the 5-symbol target, with logits unrelated to the target's."""
    return TableTarget(torch.randn(5, 5, 5, generator=torch.Generator().manual_seed(7)) * 1.5)


def random_head(target: Target, scale: float = 1.0, seed: int = 3, **fields: int) -> RecurrentHead:
    """Return a float64 recurrent head with random weights, in the target's sizes.

    scale: factor of the output layer's weights; a larger one makes the distribution less even.
    fields: further sizes of `HeadConfig`.
    """
    sizes = {"exit_dim": 2 * target.hidden_size, "num_draft_layers": 1} | fields
    config = HeadConfig(target.vocab_size, target.hidden_size, **sizes)
    generator = torch.Generator().manual_seed(seed)
    head = RecurrentHead(config).double().requires_grad_(False)
    for parameter in head.parameters():
        parameter.normal_(generator=generator).div_(parameter.shape[-1] ** 0.5)
    head.output.mul_(scale)
    return head.eval().to(target.device)


class AllBeams(RecurrentDrafter):
    """Recurrent drafter that always searches `beam_width` beams.

    Under `by_cost` the costs of the tests would otherwise reduce the search to a single beam.
    """

    def choose_width(self) -> int:
        return self.beam_width


def recurrent(
    target: Target,
    beam_width: int = 4,
    scale: float = 3.0,
    fields: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> RecurrentDrafter:
    """Return a recurrent drafter with a random head, with top-k children by default.

    scale, fields: arguments of `random_head`. dtype: dtype of the head. options: further options of
    the drafter.
    """
    head = random_head(target, scale, **(fields or {})).to(dtype)
    return AllBeams(head=head, beam_width=beam_width, **{"children": "top_k", **options})  # type: ignore[arg-type]


def recurrent_of(
    kit: Kit, beam_width: int, dtype: torch.dtype | None = None, **options: object
) -> RecurrentDrafter:
    """Return a recurrent drafter with the kit's head or a random one, in `dtype` if given."""
    head = kit.head or random_head(kit.target, 3.0)
    if dtype is not None:
        head = deepcopy(head).to(dtype)
    return AllBeams(head=head, beam_width=beam_width, **{"children": "top_k", **options})  # type: ignore[arg-type]


def random_medusa(target: Target, scale: float = 1.0, **fields: int) -> MedusaHeads:
    """Return float64 Medusa heads with random weights, in the target's sizes.

    scale: factor of all weights. fields: further sizes of `MedusaConfig`.
    """
    config = MedusaConfig(target.vocab_size, target.hidden_size, **{"num_heads": 4, **fields})
    generator = torch.Generator().manual_seed(4)
    heads = MedusaHeads(config).double().requires_grad_(False)
    for parameter in heads.parameters():
        parameter.normal_(generator=generator).mul_(scale / parameter.shape[-1] ** 0.5)
    return heads.eval().to(target.device)


def fitted_medusa(kit: Kit, count: int = 4) -> MedusaHeads:
    """Return `count` Medusa heads fitted by least squares to the kit's texts.

    Head k maps the target's state at a position to the token k + 2 positions later.
    """
    target, V = kit.target, kit.target.vocab_size
    states, tokens = [], []
    for text in kit.texts:
        target.open(1, len(text))
        states_NC = target.features(torch.tensor([text], device=target.device))[0]
        states.append(states_NC[: -count - 1].double().cpu())
        tokens.append(torch.tensor(text).unfold(0, count + 2, 1)[:, 2:])
    inverse_CN, tokens_NK = torch.linalg.pinv(torch.cat(states)), torch.cat(tokens)
    heads = MedusaHeads(MedusaConfig(V, target.hidden_size, num_heads=count))
    for head in range(count):
        wanted_NV = torch.nn.functional.one_hot(tokens_NK[:, head], V).double()
        heads.projections[head].weight.data.copy_((inverse_CN @ wanted_NV).T)
    return heads.requires_grad_(False).eval().to(target.device)


@torch.inference_mode()
def medusa_of(kit: Kit, **options: object) -> MedusaDrafter:
    """Return a drafter with Medusa heads fitted by least squares.

    If the kit has texts, the heads are `fitted_medusa`'s. Otherwise they map the state of each
    one-token prompt to the draft model's logits along a greedy text, each computed from the token
    before alone. The text begins with the target's next token.
    """
    if kit.texts:
        return MedusaDrafter(heads=fitted_medusa(kit), **options)  # type: ignore[arg-type]
    target, V = kit.target, kit.target.vocab_size
    logits_VV, states_VC = after_each(target, torch.arange(V, device=target.device))
    heads = MedusaHeads(MedusaConfig(V, target.hidden_size, num_heads=6)).double()
    next_V, inverse_CV = logits_VV.argmax(-1), torch.linalg.pinv(states_VC.cpu())
    for head in range(6):
        next_VV, _ = after_each(kit.draft_model, next_V)
        heads.projections[head].weight.data.copy_((inverse_CV @ next_VV.cpu()).T)
        next_V = next_VV.argmax(-1)
    heads = heads.requires_grad_(False).eval().to(target.device)
    return MedusaDrafter(heads=heads, **options)  # type: ignore[arg-type]


def random_eagle(target: Target, scale: float = 1.0, **fields: object) -> EagleHead:
    """Return a float64 EAGLE-3 head with random weights, in the target's sizes.

    scale: factor of the output layer's weights. fields: further fields of `EagleConfig`.
    """
    sizes = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "taps": default_taps(target.num_layers),
        "rope": {"rope_type": "default", "rope_theta": 100.0},
        "max_positions": target.max_length,
        "norm_eps": 1.0,  # a table's states have one channel, which would always be normed to 1
    }
    config = EagleConfig(target.vocab_size, target.hidden_size, **{**sizes, **fields})  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(4)
    head = EagleHead(config).double().requires_grad_(False)
    for parameter in head.parameters():
        parameter.normal_(generator=generator).div_(parameter.shape[-1] ** 0.5)
    head.lm_head.weight.mul_(scale)
    return head.eval().to(target.device)


def fitted_eagle(target: Target, texts: Sequence[Sequence[int]]) -> EagleHead:
    """Return an EAGLE-3 head whose output layer is fitted to texts by least squares.

    The layer adds nothing, so a draft repeats the prediction from the target's last state.
    """
    head = random_eagle(target, taps=(target.num_layers,), fc_norm=False)
    head.fc.weight.copy_(torch.eye(target.hidden_size))
    for weight in (head.midlayer.self_attn.o_proj.weight, head.midlayer.mlp.down_proj.weight):
        weight.zero_()
    states, tokens = [], []
    for text in texts:
        target.open(1, len(text))
        states_NC = target.features(torch.tensor([text], device=target.device))[0]
        states.append(head.norm(states_NC[:-2].double()))
        tokens.append(torch.tensor(text[2:], device=target.device))
    wanted_NV = torch.nn.functional.one_hot(torch.cat(tokens), target.vocab_size).double()
    head.lm_head.weight.copy_((torch.linalg.pinv(torch.cat(states)) @ wanted_NV).T)
    return head


def empty_early_exit(target: Target, exit_layer: int = 1) -> EarlyExitHead:
    """Return a float64 early-exit head for a native target, whose layer adds nothing."""
    assert isinstance(target, NativeTarget)
    shape = EarlyExitConfig(**(vars(target.config) | {"exit_layer": exit_layer}))
    head = EarlyExitHead(shape).double().requires_grad_(False).eval()
    head.out.weight.zero_()
    head.down.weight.zero_()
    head.norm.copy_(target.weights.norm_C)
    return head


@torch.inference_mode()
def eagle_of(kit: Kit, **options: object) -> EagleDrafter:
    """Return a drafter with the kit's EAGLE-3 head, a fitted one or a random one."""
    head = kit.eagle
    if head is None and kit.texts:
        head = fitted_eagle(kit.target, kit.texts)
    return EagleDrafter(head=head or random_eagle(kit.target, 3.0), **options)  # type: ignore[arg-type]


@torch.inference_mode()
def early_exit_of(kit: Kit, model: Target) -> EarlyExitDrafter:
    """Return a drafter with the kit's target up to its last layer, then the last layer of `model`.

    model: a native target whose layers have the shape of the kit's target's, without biases.
    """
    assert isinstance(model, NativeTarget)
    head, layer = empty_early_exit(kit.target, kit.target.num_layers - 1), model.weights.layers[-1]
    for name in ("qkv", "out", "gate_up", "down"):
        ours, theirs = getattr(head, name), getattr(layer, name)
        # products with unit vectors, as packed weights cannot be read
        units = torch.eye(ours.in_features, dtype=model.weights.dtype, device=model.device)
        ours.weight.copy_(theirs(units).T)
    head.attention_norm.copy_(layer.attention_norm_C)
    head.mlp_norm.copy_(layer.mlp_norm_C)
    head.norm.copy_(model.weights.norm_C)
    return EarlyExitDrafter(head=head)


def random_early_exit(target: Target) -> EarlyExitDrafter:
    """Return a drafter with a random layer after the target's first layer."""
    head, generator = empty_early_exit(target), torch.Generator().manual_seed(6)
    for product in (head.qkv, head.out, head.gate_up, head.down):
        product.weight.normal_(generator=generator).mul_(product.weight.shape[-1] ** -0.5)
    return EarlyExitDrafter(head=head)


def parallel_of(model: Target) -> ParallelChain:
    """Return a parallel chain of a model that is trained for it as well as a model can be."""
    foresight: Any = Foresight(model)
    return ParallelChain(model=foresight, tokens=8, mask_token=foresight.mask_token)


def with_lookup_before(row: DrafterRow, slow: bool = True) -> DrafterRow:
    """Return a row that tries suffix lookup before the given row's drafter."""
    adversarial, table = row.adversarial, row.table
    return DrafterRow(
        f"{row.name}_with_lookup",
        make=lambda kit: LookupFirst(row.make(kit), min_match=2),
        rules=row.rules,
        adversarial=None
        if adversarial is None
        else lambda kit: LookupFirst(adversarial(kit), min_match=2),
        table=None if table is None else lambda: LookupFirst(table(), min_match=2),
        gamma=row.gamma,
        slow=slow,
    )


# Costs for the rows that decide from them. A step from one beam costs as much as a token of a
# chain, and each further beam costs about as much as it gains.
COSTS = RoundCosts(0.2, (1.0, 1.05, 1.1, 1.15, 1.2), t_draft_by_frontier_ms=((1, 0.2), (6, 0.45)))

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
    DrafterRow(
        "recurrent",
        make=lambda kit: recurrent_of(kit, 8),
        rules=("greedy", "token", "coupled"),
        table=lambda: recurrent(draft_table(), 3, 0.8),
    ),
    DrafterRow(
        "recurrent_chain",
        make=lambda kit: recurrent_of(kit, 1),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: recurrent(draft_table(), 1, 0.8, children="sampled"),
    ),
    DrafterRow(
        "recurrent_drawn",
        make=lambda kit: recurrent_of(kit, 6, children="sampled"),
        rules=("greedy", "token", "coupled"),
        table=lambda: recurrent(draft_table(), 3, 0.8, children="sampled"),
    ),
    # The head has a lower precision than the target: tokens are tested against the rounded q from
    # which they were sampled.
    DrafterRow(
        "recurrent_bfloat16",
        make=lambda kit: recurrent_of(kit, 6, torch.bfloat16, children="sampled"),
        rules=("greedy", "token", "coupled"),
        table=lambda: recurrent(draft_table(), 3, 0.8, dtype=torch.bfloat16, children="sampled"),
        slow=True,
    ),
    DrafterRow(
        "recurrent_by_cost",
        make=lambda kit: recurrent_of(kit, 6, by_cost=True),
        rules=("greedy", "token", "coupled"),
        table=lambda: recurrent(draft_table(), 3, 0.8, by_cost=True),
        slow=True,
    ),
    DrafterRow(
        "recurrent_drawn_by_cost",
        make=lambda kit: recurrent_of(kit, 6, children="sampled", by_cost=True),
        rules=("greedy", "token", "coupled"),
        table=lambda: recurrent(draft_table(), 3, 0.8, children="sampled", by_cost=True),
    ),
    DrafterRow(
        "medusa",
        make=lambda kit: medusa_of(kit),
        rules=("greedy", "token", "coupled"),
        table=lambda: MedusaDrafter(heads=random_medusa(draft_table(), 2.0)),
    ),
    DrafterRow(
        "medusa_chain",
        make=lambda kit: medusa_of(kit, shape="chain"),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: MedusaDrafter(heads=random_medusa(draft_table(), 2.0), shape="chain"),
        slow=True,
    ),
    DrafterRow(
        "eagle3",
        make=lambda kit: eagle_of(kit, frontier=3, max_nodes=10),
        rules=("greedy", "token", "coupled"),
        table=lambda: EagleDrafter(head=random_eagle(draft_table(), 2.0), frontier=3, max_nodes=10),
    ),
    DrafterRow(
        "eagle3_chain",
        make=lambda kit: eagle_of(kit, shape="chain"),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: EagleDrafter(head=random_eagle(draft_table(), 2.0), shape="chain"),
    ),
    DrafterRow(
        "eagle3_by_cost",
        make=lambda kit: eagle_of(kit, frontier=3, by_cost=True),
        rules=("greedy", "token", "coupled"),
        table=lambda: EagleDrafter(head=random_eagle(draft_table(), 2.0), frontier=3, by_cost=True),
        slow=True,
    ),
    DrafterRow(
        "dflash",
        make=lambda kit: BlockDrafter(head=block_of(kit.target, kit.draft_model)),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(head=random_block(LAW_3_SIZES, 2.0)),
        slow=True,
    ),
    DrafterRow(
        "dspark",
        make=lambda kit: BlockDrafter(head=corrected_block(kit.target, kit.draft_model)),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(LAW_3_SIZES, 2.0, layout="anchor_first", correction="markov", rank=4)
        ),
    ),
    DrafterRow(
        "dspark_bfloat16",
        make=lambda kit: BlockDrafter(
            head=corrected_block(kit.target, kit.draft_model).to(torch.bfloat16)
        ),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(LAW_3_SIZES, 2.0, correction="markov", rank=4).to(torch.bfloat16)
        ),
        slow=True,
    ),
    DrafterRow(
        "dspark_by_cost",
        make=lambda kit: BlockDrafter(
            head=corrected_block(kit.target, kit.draft_model, confidence=True), by_cost=True
        ),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(LAW_3_SIZES, 2.0, correction="markov", rank=4, confidence=True),
            by_cost=True,
        ),
        slow=True,
    ),
    DrafterRow(
        "dspark_confident",
        make=lambda kit: BlockDrafter(
            head=corrected_block(kit.target, kit.draft_model, confidence=True), stop_below=0.5
        ),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(LAW_3_SIZES, 2.0, correction="markov", rank=4, confidence=True),
            stop_below=0.4,
        ),
        slow=True,
    ),
    DrafterRow(
        "block_tree",
        make=lambda kit: BlockDrafter(
            head=block_of(kit.target, kit.draft_model, in_block_mask="causal"),
            shape="tree",
            max_nodes=12,
        ),
        rules=("greedy", "token", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(LAW_3_SIZES, 2.0, in_block_mask="causal"), shape="tree", max_nodes=9
        ),
    ),
    DrafterRow(
        "early_exit",
        make=lambda kit: early_exit_of(kit, kit.draft_model),
        rules=("greedy", "token", "block", "coupled"),
        perfect=lambda kit: early_exit_of(kit, kit.twin),
        # without its last layer, the target of a table has the logits of the negative table
        adversarial=lambda kit: EarlyExitDrafter(head=empty_early_exit(kit.target)),
        table=lambda: random_early_exit(five_words()),
    ),
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

BY_NAME = {row.name: row for row in ROWS}
# Rows that are repeated with lookup before the drafter; for a chain that is `chain_with_lookup`.
KINDS = (
    "multi_candidate",
    "static_tree",
    "ranked_tree",
    "graph",
    "ouroboros",
    "self_speculation",
    "early_exit",
    "recurrent",
)
KINDS += ("recurrent_chain", "recurrent_drawn", "recurrent_drawn_by_cost", "eagle3")
ADDED = [with_lookup_before(BY_NAME[name], slow=name != "ranked_tree") for name in KINDS]
ROWS += ADDED
BY_NAME |= {row.name: row for row in ADDED}


def of_rows() -> list:
    """Return ROWS as parameters of a test, with the slow ones marked for the long suite."""
    import pytest

    return [pytest.param(row, id=row.name, marks=[pytest.mark.long] * row.slow) for row in ROWS]
