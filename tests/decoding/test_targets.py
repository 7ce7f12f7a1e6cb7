"""Both backends, and their cache operations, compared with plain `transformers`.

Ragged rows, trees, commits, roll-back and selection are tested.

Shapes: B rows, N nodes, V vocabulary.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.interfaces import Target, ancestors
from decoding.loop import decode
from decoding.models.hf import HFTarget
from decoding.models.load import load_target
from decoding.models.native import linear
from decoding.models.native.linear import PackedLinear, PlainLinear, can_pack, make_linear
from decoding.models.native.model import NativeTarget
from decoding.models.native.skips import Skips
from decoding.models.prefill import prefill
from decoding.rounds.settings import Settings
from tests.support.tiny_targets import SHAPES, VOCABULARY, hf_model, native_of

BACKENDS = ("native", "hf")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}


def make(
    backend: str, shape: str = "llama", dtype: torch.dtype = torch.float64
) -> tuple[Target, torch.nn.Module]:
    model = hf_model(shape, dtype=dtype)
    return (native_of(model) if backend == "native" else HFTarget(model, "tiny")), model


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def plain(model: torch.nn.Module, tokens: list[int]) -> Tensor:
    """Return the logits (N, V) of a sequence without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def close(left: Tensor, right: Tensor, tolerance: float | None = None) -> None:
    """Check that two tensors differ by at most `tolerance` times the largest number of `right`.

    That number is absolute and at least 1. tolerance: None takes the dtype's value in TOLERANCE.
    """
    tolerance = TOLERANCE[right.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(
        left, right, rtol=0, atol=tolerance * max(1.0, right.abs().max().item())
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_plain_transformers(backend: str, shape: str, dtype: torch.dtype) -> None:
    """Check a prompt, a chain and single tokens against one forward without a cache."""
    target, model = make(backend, shape, dtype)
    tokens = ids(1, 70)  # past position 32, where the Llama 3.1 scaling begins
    with torch.inference_mode():
        target.open(1, 128)
        parts = []
        for start, stop in ((0, 60), (60, 65), (65, 66), (66, 67), (67, 70)):
            logits_BNV, hidden_BNC = target.forward(tokens[:, start:stop])
            close(target.lm_head(hidden_BNC), logits_BNV)
            target.commit(None, [stop - start])
            parts.append(logits_BNV)
        assert target.lengths_B == [70]
    close(torch.cat(parts, 1)[0], plain(model, tokens[0].tolist()))


@pytest.mark.parametrize("shape", ["llama", "qwen3"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_rows_equal_single_rows(backend: str, shape: str) -> None:
    target, model = make(backend, shape)
    prompts = [[5], [7, 8, 9, 10, 11, 12], [], [3, 4]]
    new = ids(4, 3)
    with torch.inference_mode():
        target.open(4, 32)
        prefill(target, prompts)
        assert target.lengths_B == [1, 6, 0, 2]
        logits_BNV, _ = target.forward(new)
        target.commit(None, [3, 1, 2, 3])
        later_BNV, _ = target.forward(new)
    for b, prompt in enumerate(prompts):
        row = new[b].tolist()
        close(logits_BNV[b], plain(model, prompt + row)[-3:])
        kept = prompt + row[: [3, 1, 2, 3][b]]
        close(later_BNV[b], plain(model, kept + row)[-3:])


@pytest.mark.parametrize("shape", ["llama", "qwen2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tree_forward_equals_a_forward_for_each_path(backend: str, shape: str) -> None:
    target, model = make(backend, shape)
    prompts = [[5, 6, 7], [9]]
    parents_BN = torch.tensor([[-1, 0, 0, 1, 1, 4], [-1, 0, 1, 0, 3, 3]])
    tokens_BN = ids(2, 6)
    with torch.inference_mode():
        target.open(2, 24)
        prefill(target, prompts)
        logits_BNV, hidden_BNC = target.forward(tokens_BN, parents_BN)
    for b, prompt in enumerate(prompts):
        for n in range(6):
            path = [m for m in range(6) if ancestors(parents_BN)[b, n, m]]
            close(logits_BNV[b, n], plain(model, prompt + tokens_BN[b, path].tolist())[-1])
    assert hidden_BNC.shape == (2, 6, 32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_committed_path_equals_a_chain(backend: str) -> None:
    target, model = make(backend)
    prompts = [[5, 6, 7], [9], [4, 4]]
    parents_BN = torch.tensor([[-1, 0, 0, 1, 1, 4]] * 3)
    tokens_BN = ids(3, 6)
    paths, counts = [[0, 1, 4, 5], [0, 2], [0, 1, 3]], [4, 2, 3]
    with torch.inference_mode():
        target.open(3, 32)
        prefill(target, prompts)
        target.forward(tokens_BN, parents_BN)
        target.commit(paths, counts)
        assert target.lengths_B == [7, 3, 5]
        more_BN = ids(3, 2, seed=1)
        logits_BNV, _ = target.forward(more_BN)
    for b, prompt in enumerate(prompts):
        kept = prompt + tokens_BN[b, paths[b]].tolist()
        close(logits_BNV[b], plain(model, kept + more_BN[b].tolist())[-2:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_roll_back_and_selection(backend: str) -> None:
    target, model = make(backend)
    prompts = [[5, 6, 7, 8], [9, 10], [4, 4, 3], [11]]
    with torch.inference_mode():
        target.open(4, 32)
        prefill(target, prompts)
        target.truncate([2, 9, 3, 1])
        assert target.lengths_B == [2, 2, 3, 1]
        target.select([0, 2, 3])
        target.select([2, 0])
        assert target.lengths_B == [1, 2]
        new = ids(2, 2)
        logits_BNV, _ = target.forward(new)
    close(logits_BNV[0], plain(model, [11, *new[0].tolist()])[-2:])
    close(logits_BNV[1], plain(model, [5, 6, *new[1].tolist()])[-2:])


def test_a_forward_past_the_cache_is_refused() -> None:
    target, _ = make("native")
    target.open(1, 4)
    with pytest.raises(ValueError, match="5 slots are needed, but the cache was opened for 4"):
        target.forward(ids(1, 5))


def test_stale_slots_do_not_change_logits() -> None:
    target, model = make("native")
    with torch.inference_mode():
        for seed in range(3):
            tokens = ids(1, 9, seed=seed)
            target.open(1, 16)
            target.forward(ids(1, 12, seed=9))  # not committed
            logits_BNV, _ = target.forward(tokens)
            close(logits_BNV[0], plain(model, tokens[0].tolist()))


def test_a_partial_view_runs_some_layers_on_the_shared_cache() -> None:
    target, model = make("native")
    assert isinstance(target, NativeTarget)
    config = {**model.config.to_dict(), "num_hidden_layers": 1}
    first_layer = NativeTarget.from_state(config, model.state_dict(), dtype=torch.float64)
    tokens = ids(1, 8)
    with torch.inference_mode():
        target.open(1, 16)
        first_layer.open(1, 16)
        target.forward(tokens[:, :5])
        target.commit(None, [5])
        view = target.partial(Skips(attention=(1,), mlp=(1,)))
        # sees the five tokens that the target committed
        drafted_BNV, _ = view.forward(tokens[:, 5:8])
        expected_BNV, _ = first_layer.forward(tokens)
        close(drafted_BNV, expected_BNV[:, 5:])
        logits_BNV, _ = target.forward(tokens[:, 5:8])
        target.commit(None, [2])
        view.follow(target)
        assert view.lengths_B == [7]
    close(logits_BNV[0], plain(model, tokens[0].tolist())[5:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_products_equal_plain_ones(dtype: torch.dtype) -> None:
    if not can_pack(torch.device("cpu"), dtype):
        pytest.skip(f"this processor has no packed {dtype} products")
    weight, bias = torch.randn(40, 32, dtype=dtype), torch.randn(40, dtype=dtype)
    for rows in (1, 2, 5, 64):
        x = torch.randn(2, rows, 32, dtype=dtype)
        for b in (bias, None):
            left, right = PackedLinear(weight, b)(x), PlainLinear(weight, b)(x)
            torch.testing.assert_close(
                left, right, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
            )


@pytest.mark.parametrize(
    ("intel", "dtype", "small_bytes", "kind"),
    [
        (True, torch.float32, 8 * 4 * 4, PlainLinear),
        (True, torch.float32, 8 * 4 * 4 - 1, PackedLinear),
        (True, torch.bfloat16, 1 << 20, PackedLinear),
        (False, torch.float32, 1 << 20, PackedLinear),
    ],
)
def test_small_weights_use_mkl_on_intel(
    intel: bool, dtype: torch.dtype, small_bytes: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_pack(torch.device("cpu"), dtype):
        pytest.skip(f"this processor has no packed {dtype} products")
    monkeypatch.setattr(linear, "mkl_is_fast", lambda: intel)
    monkeypatch.setattr(linear, "SMALL_BYTES", small_bytes)
    assert type(make_linear(torch.randn(8, 4, dtype=dtype), None, True)) is kind
    assert type(make_linear(torch.randn(8, 4, dtype=dtype), None, False)) is PlainLinear


def test_a_packed_target_equals_a_plain_one() -> None:
    model = hf_model("llama", dtype=torch.float32)
    if not can_pack(torch.device("cpu"), torch.float32):
        pytest.skip("this build of torch has no packed products")
    logits = []
    for packed in (True, False):
        target = native_of(model, packed=packed)
        target.open(1, 16)
        assert target.packed is packed
        logits.append(target.forward(ids(1, 7))[0])
    close(logits[0], logits[1])


def test_parameters_are_counted_as_transformers_does() -> None:
    for shape in SHAPES:
        model = hf_model(shape)
        assert native_of(model).num_parameters == model.num_parameters()


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_models_load(stories260k: Path, backend: str) -> None:
    from transformers import AutoModelForCausalLM

    target = load_target(stories260k, backend=backend)
    model = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32)
    tokens = [1, 20, 30, 40, 50]
    with torch.inference_mode():
        target.open(1)
        logits_BNV, _ = target.forward(torch.tensor([tokens]))
    close(logits_BNV[0], plain(model, tokens))
    assert (target.num_layers, target.vocab_size, target.max_length) == (5, 512, 512)


def test_gpt2_runs_on_hf() -> None:
    """Check ragged rows of GPT-2, whose learned positions depend on the passed position ids."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3
    )
    model = GPT2LMHeadModel(config).double().eval()
    target = HFTarget(model, "gpt2")
    with torch.inference_mode():
        target.open(2, 32)
        prefill(target, [[5, 6, 7], [8]])
        new = ids(2, 3)
        logits_BNV, _ = target.forward(new)
    close(logits_BNV[0], plain(model, [5, 6, 7, *new[0].tolist()])[-3:])
    close(logits_BNV[1], plain(model, [8, *new[1].tolist()])[-3:])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.long
def test_a_compiled_model_equals_the_eager_one() -> None:
    """Check equal outputs for ragged rows, chains, trees, moved paths and a larger cache.

    The number of traced forms is small, so lengths are not constants in the compiled code.
    """
    parents_BN = torch.tensor([[-1, 0, 0, 1, 1], [-1, 0, 1, 0, 3]])
    model = hf_model("llama")
    targets = [HFTarget(model, "tiny", execution=execution) for execution in ("eager", "compiled")]

    def both(tokens_BN: Tensor, parents_BN: Tensor | None = None) -> None:
        for left, right in zip(
            *(target.forward(tokens_BN, parents_BN) for target in targets), strict=True
        ):
            # Hugging Face's LLaMA computes norms, rotation and softmax in float32 for every
            # dtype, and compiled code rounds them otherwise on some processors: one unit in the
            # last place of the rotation moves these logits by 3e-6.
            close(left, right, tolerance=1e-5)
            if tokens_BN.shape[1] > 1:  # control: a shift by one position is far larger
                assert (left - right.roll(1, dims=1)).abs().max() > 1e-2

    with torch.inference_mode():
        for batch, capacity in ((2, 60), (1, 40), (2, 100)):
            for target in targets:
                target.open(batch, capacity)
                prefill(target, [[5, 6, 7, 8], [9]][:batch])
            for round_ in range(3):
                both(ids(batch, 5, seed=round_), parents_BN[:batch])
                for target in targets:
                    target.commit([[0, 2, 1, 3, 4], [0, 1, 2, 3, 4]][:batch], [2, 3][:batch])
                for tokens in (1, 2 + round_):
                    both(ids(batch, tokens, seed=round_))
                    for target in targets:
                        target.commit(None, [tokens] * batch)
            for target in targets:
                target.truncate([7, 3][:batch])
            both(ids(batch, 4))
    found = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < found <= 8, f"{found} forms were traced: a length is constant in the compiled code"


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.exhaustive
def test_compiled_gpt2_decodes_eager_text() -> None:
    """Check greedy text of compiled GPT-2, alone and with a compiled LLaMA drafter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3
    )
    model = GPT2LMHeadModel(config).double().eval()
    eager, compiled = (
        HFTarget(model, "gpt2", execution=execution) for execution in ("eager", "compiled")
    )
    drafter = ChainDrafter(model=HFTarget(hf_model("llama"), "drafter", execution="compiled"))
    prompts, settings = [[5, 6, 7], [8]], Settings(max_new_tokens=20, temperature=0.0)

    def texts(target: HFTarget, drafter: ChainDrafter | None) -> list[list[int]]:
        return [made.tokens for made in decode(target, drafter, prompts, settings)]

    expected = texts(eager, None)
    assert texts(compiled, None) == expected
    assert texts(compiled, drafter) == expected


@pytest.fixture
def fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_unknown_executions_are_refused(stories260k: Path) -> None:
    with pytest.raises(
        UserError, match="execution 'graph' is unknown, expected one of auto, eager, compiled"
    ):
        load_target(stories260k, backend="hf", execution="graph")
    with pytest.raises(
        UserError, match="execution 'graph' is unknown, expected one of eager, compiled"
    ):
        HFTarget(hf_model("llama"), "tiny", execution="graph")


def test_ancestors() -> None:
    parents_BN = torch.tensor([[-1, 0, 1, 0, -1]])
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert ancestors(parents_BN)[0].int().tolist() == expected
    deep = torch.arange(-1, 40)[None]
    assert torch.equal(ancestors(deep)[0], torch.ones(41, 41, dtype=torch.bool).tril())
