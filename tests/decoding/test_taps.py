"""Taps equal Hugging Face's hidden states, on both backends and in recorded steps.

Drafters that read them: test_tap_drafters.py.

Shapes: B rows, N nodes, X taps, C hidden size.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from decoding.errors import UserError
from decoding.interfaces import Target, ancestors
from decoding.models import prefill as prefill_module
from decoding.models.hf import HFTarget
from decoding.models.native import static
from decoding.models.native.skips import Skips
from decoding.models.prefill import prefill
from tests.support.tiers import tiered
from tests.support.tiny_targets import SHAPES, VOCABULARY, hf_model, native_of

from .test_targets import close, ids

LAYERS = 3
EVERY = (2, 0, 3, 1)  # all taps of three layers, not in their order
PARENTS = [[-1, 0, 0, 1, 1, 4], [-1, 0, 1, 0, 3, 3], [-1, 0, 1, 2, 3, 4], [-1, -1, 0, 1, 2, 2]]
Seen = list[tuple[list[int], Tensor]]  # (token ids, the tapped states of the last one)


def exercise(target: Target, taps: tuple[int, ...]) -> Seen:
    """Fill a target's cache in many ways, and return every text with its last token's states.

    The ways are chunked prompts, chains, trees, ragged rows, moved paths, roll-back, selection and
    a restored row.
    """
    texts: list[list[int]] = [[5, 6, 7, 8, 9, 10, 11], [9], [], [3, 4, 5, 6]]
    seen: Seen = []

    def see(tokens_BN: Tensor, parents_BN: Tensor, hidden_BNC: Tensor) -> None:
        for b, text in enumerate(texts):
            for n, reached_N in enumerate(ancestors(parents_BN)[b]):
                path = reached_N.nonzero().flatten()
                seen.append(([*text, *tokens_BN[b, path].tolist()], hidden_BNC[b, n]))

    def forward(nodes: int, seed: int, parents: Sequence[Sequence[int]] | None = None) -> Tensor:
        tokens_BN = ids(len(texts), nodes, seed=seed)
        parents_BN = None if parents is None else torch.tensor(parents)
        chain_BN = torch.arange(-1, nodes - 1).expand(len(texts), nodes)
        _, hidden_BNC = target.forward(tokens_BN, parents_BN, taps)
        see(tokens_BN, chain_BN if parents_BN is None else parents_BN, hidden_BNC)
        close(target.features(tokens_BN, parents_BN, taps), hidden_BNC)
        return tokens_BN

    with torch.inference_mode():
        target.open(4, 60)
        hidden_BNC = prefill(target, texts, True, taps)
        assert hidden_BNC is not None
        for text, states_NC in zip(texts, hidden_BNC, strict=True):
            seen += [(text[: n + 1], states_NC[n]) for n in range(len(text))]
        tokens_BN = forward(3, 0)
        target.commit(None, [3, 1, 0, 2])
        texts = [
            text + tokens_BN[b, :n].tolist() for b, (text, n) in enumerate(zip(texts, [3, 1, 0, 2]))
        ]
        tokens_BN = forward(6, 1, PARENTS)
        paths = [[0, 1, 4, 5], [0, 3], [0], [1, 3]]
        target.commit(paths, [4, 2, 1, 2])
        texts = [
            text + tokens_BN[b, path].tolist() for b, (text, path) in enumerate(zip(texts, paths))
        ]
        forward(1, 2)
        target.truncate([9, 3, 1, 4])
        target.select([3, 0])
        texts = [texts[3][:4], texts[0][:9]]
        forward(2, 3)
        target.keep(1, 7)
        target.open(3, 60)
        target.begin(2, 7, 6)
        texts = [[], [], texts[1][:6]]
        forward(5, 4, [row[:5] for row in PARENTS[:3]])
        target.forget()
    return seen


def states_of(model: torch.nn.Module, text: list[int], taps: tuple[int, ...]) -> Tensor:
    """Return Hugging Face's hidden states of a text's last token, concatenated over the taps."""
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
    return torch.cat([found.hidden_states[tap][0, -1] for tap in taps], -1)


def agree(seen: Seen, model: torch.nn.Module, taps: tuple[int, ...]) -> bool:
    """Return whether all states equal Hugging Face's at these layers."""
    pairs = [(states_X, states_of(model, text, taps)) for text, states_X in seen]
    assert len(pairs) > 50
    return all(
        left.shape == right.shape and (left - right).abs().max() < 1e-9 * right.abs().max().clamp(1)
        for left, right in pairs
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink prefill chunks and recorded buckets so that a short text fills them."""
    monkeypatch.setattr(prefill_module, "PREFILL_CHUNK", 3)
    monkeypatch.setattr(static, "SMALLEST_BUCKET", 8)


MAKE: dict[str, Callable[[Any], Target]] = {
    "native": lambda model: native_of(model),
    "native graph": lambda model: native_of(model, execution="graph"),
    "native compiled": lambda model: native_of(model, execution="compiled"),
    "hf": lambda model: HFTarget(model, "tiny"),
    "hf compiled": lambda model: HFTarget(model, "tiny", execution="compiled"),
}


# ------------------------------------------------------------------------------------- the targets
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("kind", "shape"),
    # Tracing takes seconds, and half a minute of a model of Hugging Face's.
    [
        *tiered(
            [*product(("native", "native graph", "hf"), SHAPES), ("native compiled", "llama")],
            lambda kind, shape: shape in ("llama", "qwen3") and kind != "native compiled",
        ),
        pytest.param("hf compiled", "llama", marks=pytest.mark.exhaustive),
    ],
)
def test_every_tap_equals_hugging_faces_hidden_state(kind: str, shape: str) -> None:
    torch._dynamo.reset()
    model = hf_model(shape, layers=LAYERS)
    target = MAKE[kind](model)
    for taps in (EVERY,) if "compiled" in kind else (EVERY, (1,)):
        assert agree(exercise(target, taps), model, taps)


@pytest.mark.exhaustive
def test_each_choice_of_taps_is_compiled_separately() -> None:
    """Check that each choice of layers has two traced forms: for single tokens and for more."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = hf_model(layers=LAYERS)
    targets = [MAKE[kind](model) for kind in ("hf", "hf compiled")]
    choices = ((), (0, 2), (2, 0))
    with torch.inference_mode():
        for target in targets:
            target.open(2, 60)
            prefill(target, [[5, 6, 7], [9]])
        for taps in (*choices, *choices):
            for nodes in (1, 3, 4):
                left, right = (target.forward(ids(2, nodes), None, taps)[1] for target in targets)
                close(left, right, tolerance=1e-5)
                assert right.shape[-1] == 32 * max(1, len(taps))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * len(choices)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", tiered(["native", "native graph", "hf"], ["native", "hf"]))
def test_controls_a_wrong_layer_or_order_is_detected(kind: str) -> None:
    model = hf_model(layers=LAYERS)
    seen = exercise(MAKE[kind](model), (0, 2))
    assert agree(seen, model, (0, 2))
    for wrong in ((1, 2), (0, 1), (0, 3), (2, 0), (0,)):
        assert not agree(seen, model, wrong)
    shifted = [(text, seen[i - 1][1]) for i, (text, _) in enumerate(seen)]
    assert not agree(shifted, model, (0, 2)), "states of other tokens are accepted"


def test_the_last_tap_is_after_the_final_norm() -> None:
    model = hf_model(layers=LAYERS)
    for kind in ("native", "native graph", "hf"):
        target = MAKE[kind](model)
        with torch.inference_mode():
            target.open(1, 20)
            logits_BNV, hidden_BNC = target.forward(ids(1, 4))
            tapped = target.forward(ids(1, 4), None, (LAYERS,))
        close(tapped[0], logits_BNV)
        close(tapped[1], hidden_BNC)
        close(target.lm_head(tapped[1]), logits_BNV)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64}),
        ("gpt_neox", {}),
        ("gemma", {"head_dim": 16, "num_key_value_heads": 2}),  # scales the embedding's output
        ("olmo2", {}),  # norms after its sub-layers
    ],
)
def test_other_architectures_on_the_hf_backend(kind: str, fields: dict[str, int]) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": VOCABULARY,
            "initializer_range": 0.3,
            "pad_token_id": None,
            **(fields if kind == "gpt2" else sizes | fields),
        },
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    target = HFTarget(model, kind)
    tokens_BN = ids(1, 9)
    with torch.inference_mode():
        target.open(1, 20)
        hidden_BNC = target.features(tokens_BN[:, :5], None, EVERY)
        target.commit(None, [5])
        hidden_BNC = torch.cat((hidden_BNC, target.forward(tokens_BN[:, 5:], None, EVERY)[1]), 1)
    for n in range(9):
        expected_X = states_of(model, tokens_BN[0, : n + 1].tolist(), EVERY)
        close(hidden_BNC[0, n], expected_X, tolerance=1e-5)  # some norms are in float32


def test_a_model_without_a_list_of_layers_is_refused_by_name() -> None:
    target = HFTarget(hf_model(layers=LAYERS), "odd")
    target.model.base_model.layers = torch.nn.Sequential(*target.model.base_model.layers)
    with torch.inference_mode():
        target.open(1, 8)
        target.forward(ids(1, 2))
        with pytest.raises(UserError, match="odd: this llama model has no list of 3 layers"):
            target.forward(ids(1, 2), None, (1,))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_recorded_steps_equal_the_eager_twin(shape: str) -> None:
    model = hf_model(shape, layers=LAYERS)
    recorded, eager = (exercise(MAKE[kind](model), EVERY) for kind in ("native graph", "native"))
    for (text, left_X), (same, right_X) in zip(recorded, eager, strict=True):
        assert text == same
        close(left_X, right_X, tolerance=1e-12)


def test_tapped_states_are_copies_and_each_order_has_its_step() -> None:
    target = native_of(hf_model(layers=LAYERS), execution="graph")
    with torch.inference_mode():
        target.open(1, 20)
        _, first = target.forward(ids(1, 2), None, (0, 2))
        kept = first.clone()
        target.forward(ids(1, 2, seed=1), None, (0, 2))
        assert torch.equal(first, kept)
        _, turned = target.forward(ids(1, 2), None, (2, 0))
    assert torch.equal(turned, torch.cat((kept[..., 32:], kept[..., :32]), -1))
    assert target._static is not None and len(target._static._steps) == 2


def test_taps_of_a_partial_view_are_those_of_its_layers() -> None:
    model = hf_model(layers=LAYERS)
    target = native_of(model)
    with torch.inference_mode():
        target.open(1, 20)
        _, whole = target.forward(ids(1, 4), None, (0, 1))
        view = target.partial(Skips(attention=(1, 2), mlp=(1, 2)))
        _, first = view.forward(ids(1, 4), None, (0, 1))
        assert torch.equal(first[..., :32], whole[..., :32])
        close(
            first[..., 32:], view.forward(ids(1, 4))[1]
        )  # the view's last tap is after the final norm
        with pytest.raises(UserError, match="from 0 .* to 1 "):
            view.forward(ids(1, 4), None, (2,))


class Operations(TorchDispatchMode):
    """Recorder of the names of all operations inside its context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.names.append(str(function))
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("kind", ["native", "native graph", "hf"])
def test_without_taps_no_operation_is_added(kind: str) -> None:
    """Check that taps add one concatenation, and that no hook remains without them."""
    model = hf_model(layers=LAYERS)
    target = MAKE[kind](model)
    counted = {}
    with torch.inference_mode():
        target.open(1, 20)
        for taps in ((), EVERY, ()):
            target.forward(ids(1, 3), None, taps)  # records the step
            with Operations() as operations:
                target.forward(ids(1, 3), None, taps)
            counted.setdefault(taps, operations.names)
            assert counted[taps] == operations.names
    assert sorted(counted[EVERY]) == sorted([*counted[()], "aten.cat.default"])
    assert not any(module._forward_pre_hooks for module in model.model.modules())


@pytest.mark.parametrize("kind", ["native", "native graph", "hf"])
@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ((0, 4), "taps holds 4, expected layers of '.*': whole numbers from 0 .* to 3 "),
        ((-1,), "taps holds -1, expected layers"),
        ((1.0,), "taps holds 1.0, expected layers"),
        ((1, 2, 1), "taps holds layer 1 twice, expected each layer once"),
    ],
)
def test_taps_at_missing_layers_are_refused(kind: str, taps: tuple[int, ...], message: str) -> None:
    target = MAKE[kind](hf_model(layers=LAYERS))
    target.open(1, 8)
    for run in (target.forward, target.features):
        with pytest.raises(UserError, match=message):
            run(ids(1, 2), None, taps)
    assert target.lengths_B == [0]
