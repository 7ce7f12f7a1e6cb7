"""Early-exit heads: the drafter against transformers, folders, refused targets, and training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import heads.train
from decoding import generate, load
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.hf import HFTarget
from decoding.models.load import load_target
from decoding.models.native.model import NativeTarget
from decoding.models.prefill import prefill
from decoding.rounds.settings import Settings
from heads.early_exit.checkpoint import LAYOUT, load_head
from heads.early_exit.config import EarlyExitOptions
from heads.early_exit.drafter import EarlyExitDrafter
from heads.early_exit.kind import KIND
from heads.early_exit.model import EarlyExitConfig, EarlyExitHead
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from tests.heads.test_heads_train import configured
from tests.support import tiny_heads as tiny
from tests.support.tiny_targets import SHAPES, VOCABULARY, hf_model, native_of, random_prompts
from training.features.states import TargetStates
from training.heads import checkpoint
from training.heads.loss_config import HeadLossConfig
from training.heads.measure import measure
from training.heads.objective import HeadObjective
from training.objectives import hidden_states

LAYERS, EXIT = 4, 2


def head_from(model: Any, start: str = "last", **fields: int) -> EarlyExitHead:
    """Return the head with which training starts, in the model's dtype."""
    shape = EarlyExitConfig.of_target(model.config.to_dict(), **{"exit_layer": EXIT, **fields})
    head = EarlyExitHead(shape)
    if fields.get("draft_vocab_size"):
        head.token_ids_V = torch.arange(3, 3 + shape.num_drafted)
    KIND.start_from_target(head, EarlyExitOptions(start=start), model)
    return head.to(model.dtype).requires_grad_(False).eval()


def save(head: EarlyExitHead, folder: Path) -> Path:
    checkpoint.save_head(LAYOUT, head.config, head, folder)
    return folder


# ------------------------------------------------------------------------------------ drafting


@torch.inference_mode()
def drafted_logits(target: NativeTarget, head: EarlyExitHead, tokens_BN: Tensor) -> Tensor:
    """Return the drafter's logits at the last two tokens of a text.

    The target reads the tokens before them, and the drafter drafts from there.
    """
    drafter = EarlyExitDrafter(head=head)
    texts_B = tokens_BN.tolist()
    drafter.prepare(target, None)
    target.open(len(texts_B), 32)
    read_B = [text[:-2] for text in texts_B]
    states_BNC = prefill(target, read_B, True, drafter.capabilities.taps)
    drafter.open([text[:-1] for text in texts_B], states_BNC, 32)
    return drafter.model.forward(tokens_BN[:, -2:])[0]


@pytest.mark.parametrize("execution", ["eager", "fused", "graph"])
@pytest.mark.parametrize("family", SHAPES)
def test_logits_equal_those_of_the_first_layers_and_the_heads(family: str, execution: str) -> None:
    """Compare with a model of transformers that consists of these layers."""
    model = hf_model(family, layers=LAYERS)
    generator = torch.Generator().manual_seed(1)
    tokens_BN = torch.randint(0, VOCABULARY, (3, 9), generator=generator)
    target = native_of(model, execution=execution)
    found = drafted_logits(target, head_from(model), tokens_BN)
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleList([*layers[:EXIT], layers[-1]])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    expected = model(tokens_BN).logits[:, -2:]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
    model.model.layers[-1] = layers[EXIT]
    assert not torch.allclose(found, model(tokens_BN).logits[:, -2:], rtol=0.0, atol=1e-2), (
        "the control"
    )


def test_a_fused_target_drafts_the_same() -> None:
    """Compare texts and accepted tokens with those of the eager execution, in rows that differ.

    The trained layer reads accepted tokens in the compiled step there. Control: another layer.
    """
    model = hf_model("qwen3", layers=LAYERS)
    settings = Settings(24, temperature=1.0, num_draft_tokens=4, seed=1)

    def decoded(execution: str, start: str = "last") -> list[tuple[list[int], list[int]]]:
        drafter = EarlyExitDrafter(head=head_from(model, start))
        found = decode(native_of(model, execution=execution), drafter, random_prompts(5), settings)
        return [(one.tokens, one.accepted_by_depth) for one in found]

    assert decoded("fused") == decoded("eager") != decoded("eager", "random")


@pytest.mark.parametrize("packed", [False, True])
def test_a_draft_vocabulary_keeps_rows_of_the_lm_head(packed: bool) -> None:
    model = hf_model("llama", layers=LAYERS, dtype=torch.float32)
    target = native_of(model, packed=packed)
    tokens_BN = torch.tensor([[5, 9, 3, 40, 7]])
    whole, some = (
        drafted_logits(target, head_from(model, draft_vocab_size=size), tokens_BN)
        for size in (0, 10)
    )
    torch.testing.assert_close(some[..., 3:13], whole[..., 3:13])
    assert torch.isinf(some[..., :3]).all() and torch.isinf(some[..., 13:]).all()


@pytest.mark.parametrize("start", ["last", "random"])
def test_a_head_after_all_layers_but_one_starts_as_the_target(start: str) -> None:
    """Check that all tokens of four drafts are accepted; with a random layer, not all are."""
    model = hf_model("llama", layers=2)
    drafter = EarlyExitDrafter(head=head_from(model, start, exit_layer=1))
    settings = Settings(20, num_draft_tokens=4)
    for done in decode(native_of(model), drafter, random_prompts(4), settings):
        assert done.rounds == 4 if start == "last" else done.rounds > 4


def test_a_cache_that_is_open_keeps_its_content() -> None:
    """Check that a target drafts with a head after it has decoded without one, and goes on."""
    model = hf_model("llama", layers=LAYERS)
    target, prompts, settings = native_of(model), random_prompts(4), Settings(12)
    target.open(1, 16)
    target.forward(torch.tensor([[5, 9, 3]]))
    target.commit(None, [3])
    expected = target.forward(torch.tensor([[8]]))[0]
    target.reserve_layer()
    assert torch.equal(target.forward(torch.tensor([[8]]))[0], expected)
    plain = decode(target, None, prompts, settings)
    drafted = decode(target, EarlyExitDrafter(head=head_from(model)), prompts, settings)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_another_target_is_refused_with_all_differences() -> None:
    model = hf_model("llama", layers=LAYERS)
    drafter = EarlyExitDrafter(head=head_from(model))
    other = native_of(hf_model("llama_mha", layers=LAYERS + 1))
    words = r"num_layers is 4 for the head and 5 in the target; num_kv_heads is 2 for .* and 4"
    with pytest.raises(UserError, match=words):
        drafter.prepare(other, None)
    turned = hf_model("llama", layers=LAYERS, rope_parameters={"rope_type": "default"})
    with pytest.raises(UserError, match="than 'in-memory': rope is {.*llama3.* for the head and"):
        drafter.prepare(native_of(turned), None)
    with pytest.raises(UserError, match="hf backend does not support. Use target.backend=native"):
        drafter.prepare(HFTarget(model, "tiny"), None)
    drafter.prepare(native_of(model), None)


# ------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("family", ["llama_bias", "qwen2", "qwen3"])
def test_a_saved_folder_loads_equal(family: str, tmp_path: Path) -> None:
    model = hf_model(family, layers=LAYERS, dtype=torch.float32)
    made = head_from(model, draft_vocab_size=6)
    back = load_head(save(made, tmp_path / "head"))
    assert back.config == made.config
    assert back.state_dict().keys() == made.state_dict().keys()
    assert all(torch.equal(back.state_dict()[name], t) for name, t in made.state_dict().items())
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["model_type"] == "shallow_draft_early_exit"
    assert (config["exit_layer"], config["target_layers"]) == (EXIT, LAYERS)
    with pytest.raises(UserError, match="model_type 'shallow_draft_early_exit' is not one of"):
        load_target(tmp_path / "head")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected 'shallow_draft_early_exit'"),
        ({"exit_layer": 4}, "exit_layer is 4, expected a whole number from 1 to 3"),
        (
            {"target_layers": 1},
            "target_layers is 1, expected a whole number from 2; exit_layer is 2, .* from 1 to 0",
        ),
        (
            {"hidden_size": "x", "num_kv_heads": 3, "tied": None},
            r"hidden_size is 'x', .* from 1; num_kv_heads is 3, expected a divisor of num_heads "
            r"\(4\); tied is None, expected true or false",
        ),
        ({"draft_vocab_size": 49}, "draft_vocab_size is 49, expected a whole number from 0 to 48"),
        ({"family": "gpt2"}, "family is 'gpt2', expected one of llama, "),
        ({"rope": []}, r"rope is \[\], expected the target's rope parameters"),
        ({"rope": {"rope_type": "yarn"}}, "rope_type 'yarn' is not known"),
        ({"norm_eps": "small"}, "norm_eps is 'small', expected a number from 0"),
        (
            {"intermediate_size": 41, "out_bias": True},
            r"out\.bias is missing; gate_up\.weight has the shape \[80, 32\], expected \[82, 32\]",
        ),
    ],
    ids=str,
)
def test_inconsistent_folders_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = hf_model("llama", layers=LAYERS, dtype=torch.float32)
    file = save(head_from(model), tmp_path / "head") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=words):
        load_head(tmp_path / "head")


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    model = hf_model("llama", layers=LAYERS, dtype=torch.float32)
    folder = save(head_from(model, draft_vocab_size=6), tmp_path / "head")
    state = load_file(folder / "model.safetensors")
    save_file(state | {"token_ids": state["token_ids"].flip(0)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="token_ids is not a rising list of token ids"):
        load_head(folder)
    state["norm"][0] = float("inf")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match="non-finite weights"):
        load_head(folder)


# ------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("name", ["early exit", "medusa"])
def test_a_token_is_predicted_alike_at_all_depths(name: str) -> None:
    """Check that depth k of a draft is depth 0 of the draft k tokens later; Medusa's is not."""
    row = next(row for row in HEAD_ROWS if row.name == name)
    model = law_6.target()
    batch = tiny.packed(tiny.samples())
    found = law_6.predict(row.kind, law_6.head_of(row, model), law_6.states_of(row, model), batch)
    numbers = {place: number for number, place in enumerate(found.places)}
    pairs = [
        (number, numbers[begin + depth, 0])
        for (begin, depth), number in numbers.items()
        if depth and (begin + depth, 0) in numbers
    ]
    deep, first = (torch.tensor(side) for side in zip(*pairs, strict=True))
    assert len(pairs) > 50
    assert torch.allclose(found.q_NV[deep], found.q_NV[first]) == row.kind.computes_states


def test_the_loss_counts_each_token_once() -> None:
    """Compare with the divergence at every supervised token from the third of its text on."""
    row = next(row for row in HEAD_ROWS if row.name == "early exit")
    model, batch = law_6.target(), tiny.packed(tiny.samples())
    head = law_6.head_of(row, model)
    states = TargetStates(model, taps=row.kind.taps(head.config))
    objective = HeadObjective(row.kind, head, states, HeadLossConfig("forward_kl"))
    loss, sums = objective(batch)
    assert objective.metric_names == ("early_exit0_acceptance", "early_exit0_loss")
    predicted = law_6.predict(row.kind, head, law_6.states_of(row, model), batch)
    p_FV = torch.softmax(model.lm_head(hidden_states(model, batch)).flatten(0, 1), dim=-1)
    expected, counted = torch.zeros(()), 0
    for number, (begin, depth) in enumerate(predicted.places):
        if depth == 0:
            p_V, q_V = p_FV[begin + 1], predicted.q_NV[number]
            expected, counted = expected + (p_V * (p_V / q_V).log()).sum(), counted + 1
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(sums[1], expected, rtol=1e-4, atol=0.0)
    assert counted == sum(int(sample.mask[2:].sum()) for sample in tiny.samples())


def test_flops_are_those_of_one_token() -> None:
    model = hf_model("llama", layers=LAYERS, dtype=torch.float32)
    shape = head_from(model).config
    H, F, D = shape.hidden_size, shape.intermediate_size, shape.head_dim
    attention = (shape.num_heads + 2 * shape.num_kv_heads) * D * H + shape.num_heads * D * H
    products = attention + 3 * H * F + H * shape.vocab_size
    scores = 2 * shape.num_heads * D
    for dtype in (torch.float32, torch.bfloat16):
        counted = measure(KIND, shape, 5, dtype)
        assert counted.flops == 2 * (products + scores) and counted.predictions == 1
        assert counted.parts.keys() == {"layer", "norm"} and counted.outputs == 0


SETTINGS = ["head=early_exit", "loss=forward_kl", "head.exit_layer=2", "head.draft_vocab_size=300"]


@pytest.mark.long
def test_a_head_is_trained_and_loaded_by_the_front_door(tiny_target: Path, tmp_path: Path) -> None:
    """Check that a trained head drafts, with EESD's stopping rule, and keeps greedy text."""
    given = [*SETTINGS, f"target.path={tiny_target}", f"output_dir={tmp_path / 'run'}"]
    folder = heads.train.run(configured("heads.train", *given))
    card = json.loads((folder / "drafter_card.json").read_text())
    acceptance = card["acceptance"]
    assert acceptance["chain_block_efficiency"] == pytest.approx(acceptance["block_efficiency"])
    assert "after layer 2" in (folder / "README.md").read_text()
    plain = generate(load(tiny_target, dtype="float64"), "def add(a, b):", max_new_tokens=12)
    engine = load(tiny_target, folder, dtype="float64")
    assert isinstance(engine.drafter, EarlyExitDrafter)
    for stopping in ("fixed", "thompson_published"):
        drafted = generate(engine, "def add(a, b):", max_new_tokens=12, stopping=stopping)
        assert drafted.tokens == plain.tokens and drafted.stats.tested > 0
    again = [*given[:-1], f"output_dir={tmp_path / 'again'}", f"head.path={folder}"]
    more = heads.train.run(configured("heads.train", *again))
    assert load_head(more).config == load_head(folder).config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("head.exit_layer=4", "head.exit_layer is 4, expected 1 to 3"),
        ("head.exit_layer=5", "reads layer 5 of the target, expected a layer from 0"),
        ("head.start=first", "head.start is first, expected one of last, random"),
        ("head.draft_vocab_size=-1", "expected 1 or more, or 0 for all tokens"),
        (
            "loss.decay=0.8",
            "loss.decay is 0.8, expected 1, because a token's prediction",
        ),
        ("loss.depth_weights=d_pace", "loss.depth_weights is d_pace, expected decay"),
        ("loss.own_tokens=0.5", "no draft reads its own tokens"),
        ("loss.name=continuations", "reads the target's states of the text's own tokens"),
        ("on_policy.share=0.5", "none of whose predictions reads a token that it drafts"),
    ],
)
def test_invalid_settings_are_refused(change: str, words: str, tiny_target: Path) -> None:
    config = configured("heads.train", *SETTINGS, f"target.path={tiny_target}", change)
    with pytest.raises(UserError, match=words):
        heads.train.run(config)
