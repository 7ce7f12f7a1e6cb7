"""Recorded and fused forwards in float64, compared with eager ones, and the laws on them.

The forwards cover chains, trees, ragged rows, commits and buckets.

Shapes: B rows, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.trees.multi_candidate import MultiCandidate
from decoding.loop import decode
from decoding.models.native import static
from decoding.models.native.model import NativeTarget
from decoding.models.native.skips import Skips
from decoding.models.prefill import prefill
from decoding.rounds.settings import Settings
from tests.support.tiers import tiered
from tests.support.tiny_targets import SHAPES, VOCABULARY, hf_model, native_of, random_prompts

TREE = [[-1, 0, 0, 1, 1, 4], [-1, 0, 1, 0, 3, 3], [-1, 0, 1, 2, 3, 4], [-1, -1, 0, 1, 2, 2]]


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def pair(shape: str = "llama", execution: str = "graph") -> tuple[NativeTarget, NativeTarget]:
    model = hf_model(shape)
    return native_of(model, execution=execution), native_of(model)


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=1e-12 * max(1.0, right.abs().max().item()))


def both(pair: Sequence[NativeTarget], tokens_BN: Tensor, parents_BN: Tensor | None = None) -> None:
    """Run one forward of each target, and check that logits and hidden states agree."""
    for left, right in zip(*(target.forward(tokens_BN, parents_BN) for target in pair)):
        same(left, right)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "SMALLEST_BUCKET", 16)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(
    ("shape", "batch", "execution"),
    # Tracing takes seconds; the short suite compiles in test_all_layers_share_one_compiled_form.
    tiered(
        [
            *product(SHAPES, (1, 4), ("graph", "fused")),
            *((shape, 4, "compiled") for shape in ("llama", "qwen3")),
        ],
        lambda shape, batch, execution: execution != "compiled",
    ),
)
def test_static_steps_equal_the_eager_twin(shape: str, batch: int, execution: str) -> None:
    targets = pair(shape, execution)
    parents_BN = torch.tensor(TREE[:batch])
    prompts = [[5, 6, 7, 8], [9], [], [3, 4, 5, 6, 7, 8, 9]][:batch]
    with torch.inference_mode():
        for target in targets:
            target.open(batch, 100)
            prefill(target, prompts)
        both(targets, ids(batch, 1))
        both(targets, ids(batch, 5))
        for target in targets:
            target.commit(None, [5, 2, 0, 3][:batch])
        for round_ in range(6):  # past 16, 32 and 64 slots
            both(targets, ids(batch, 6, seed=round_), parents_BN)
            paths = [[0, 1, 3], [0, 1], [0], [0, 2, 4, 1]][:batch]
            for target in targets:
                target.commit([path + [5] * 6 for path in paths], [6, 5, 6, 4][:batch])
            both(targets, ids(batch, 2, seed=round_))
            for target in targets:
                target.commit(None, [2] * batch)
        for target in targets:
            target.truncate([9, 30, 2, 11][:batch])
        both(targets, ids(batch, 3))
        for target in targets:
            target.select([batch - 1, 0][: min(batch, 2)])
        both(targets, ids(min(batch, 2), 3, seed=3))
        for target in targets:  # another call on the same cache, unaffected by the last one
            target.open(1, 20)
        both(targets, ids(1, 4, seed=4))


@pytest.mark.parametrize(("tokens", "recorded"), [(257, True), (static.WIDEST + 1, False)])
def test_a_tree_of_sixty_four_beams_is_recorded(tokens: int, recorded: bool) -> None:
    targets = pair()
    parents_BN = torch.tensor([[-1, *range(64), *range(tokens - 65)]])
    with torch.inference_mode():
        for target in targets:
            target.open(1, 600)
            prefill(target, [[5, 6, 7]])
        both(targets, ids(1, tokens), parents_BN)
    assert targets[0]._static is not None
    assert bool(targets[0]._static._steps) == recorded


@pytest.mark.usefixtures("small_buckets")
def test_one_step_is_made_for_each_shape_and_bucket() -> None:
    target, _ = pair()
    with torch.inference_mode():
        target.open(1, 60)
        for _ in range(10):
            target.forward(ids(1, 3))
            target.commit(None, [3])
    assert target._static is not None
    assert sorted(key[:3] for key in target._static._steps) == [
        (1, 3, slots) for slots in (16, 20, 24, 28, 32)
    ]
    assert target._cache_L2BHTD is not None and target._cache_L2BHTD.shape[4] == 64


def test_all_layers_share_one_compiled_form() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = hf_model("llama", layers=4)
    targets = native_of(model, execution="compiled"), native_of(model)
    with torch.inference_mode():
        for target in targets:
            target.open(1, 20)
        both(targets, ids(1, 2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_outputs_are_copies_of_a_steps_buffers() -> None:
    target, _ = pair()
    with torch.inference_mode():
        target.open(1, 20)
        first, hidden = target.forward(ids(1, 2))
        kept = first.clone(), hidden.clone()
        target.forward(ids(1, 2, seed=1))
    assert torch.equal(first, kept[0]) and torch.equal(hidden, kept[1])


@pytest.mark.parametrize("execution", ["graph", "fused"])
def test_partial_views_and_full_caches(execution: str) -> None:
    targets = pair("llama", execution)
    with torch.inference_mode():
        for target in targets:
            target.open(1, 12)
        both(targets, ids(1, 6))
        for target in targets:
            target.commit(None, [6])
        both([target.partial(Skips(attention=(1,), mlp=(0,))) for target in targets], ids(1, 3))
        with pytest.raises(
            ValueError, match="13 slots are needed, but the cache was opened for 12"
        ):
            targets[0].forward(ids(1, 7))


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("execution", ["graph", "fused"])
def test_laws_1_and_2_on_static_steps(execution: str, kind: str, temperature: float) -> None:
    """Check that drafted, autoregressive and eager text are equal."""
    model = hf_model("llama")
    target, plain = native_of(model, execution=execution), native_of(model)
    draft_model = native_of(model, noise=0.05, execution=execution)
    drafter = (
        ChainDrafter(model=draft_model)
        if kind == "chain"
        else MultiCandidate(model=draft_model, branching=(3, 2))
    )
    settings = Settings(
        max_new_tokens=48, temperature=temperature, verify="coupled", num_draft_tokens=3, seed=3
    )
    prompts = random_prompts(6)
    texts = [
        [made.tokens for made in decode(t, d, prompts, settings)]
        for t, d in ((target, drafter), (target, None), (plain, None))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_backend_names_and_unknown_executions() -> None:
    model = hf_model()
    assert [
        native_of(model, execution=execution).backend
        for execution in (None, "eager", "fused", "graph", "compiled")
    ] == [
        "native",
        "native",
        "native fused",
        "native graph",
        "native compiled",
    ]
    with pytest.raises(
        ValueError,
        match="execution 'fast' is unknown, expected one of eager, fused, graph, compiled",
    ):
        native_of(model, execution="fast")
