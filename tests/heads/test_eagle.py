"""EAGLE-3 heads: the layer and its training-time test, the served layout, drafting, and training.

Laws 1 to 6 are in the tables of tests/decoding/rows.py and tests/heads/rows.py.

Shapes: T tokens, H hidden size, Q query heads, D head size, V vocabulary.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import heads.train
from decoding import generate, load
from decoding.drafters.registry import head_of
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.draft_vocabulary import draft_vocab_size
from decoding.models.native.rope import rope_parameters
from decoding.rounds.settings import Settings
from heads.eagle.checkpoint import load_head
from heads.eagle.drafter import EagleDrafter
from heads.eagle.kind import KIND
from heads.eagle.layouts import SERVED, SERVED_FIRST, SERVED_PARALLEL
from heads.eagle.model import EagleConfig, EagleHead, default_taps
from tests.decoding.row_kinds.eagle import random_eagle
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from tests.heads.test_heads_train import configured
from tests.support.eagle_drafts import check_drafts
from tests.support.tiny_targets import LLAMA3_ROPE, hf_model, native_of, random_prompts
from training.heads import checkpoint

LAYERS = "eagle_aux_hidden_state_layer_ids"
ROPE = {"rope_type": "default", "rope_theta": 100.0}
SHAPE = EagleConfig(
    vocab_size=11,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=12,
    taps=(2, 4, 5),
    rope=ROPE,
    max_positions=64,
)


def random_head(**fields: Any) -> EagleHead:
    torch.manual_seed(0)
    head = EagleHead(replace(SHAPE, **fields))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head.eval().requires_grad_(False)


def save(head: EagleHead, folder: Path, **changes: Any) -> Path:
    """Save a head, with changes of its config.json."""
    layout = SERVED_PARALLEL if head.config.parallel else SERVED
    layout = SERVED_FIRST if head.config.predicts_states else layout
    checkpoint.save_head(layout, head.config, head, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


# ------------------------------------------------------------------------------------- the layer


def reference(
    head: EagleHead, rope: LlamaRotaryEmbedding, tokens_TH: Tensor, states_TC: Tensor, depth: int
) -> Tensor:
    """Return the lm_head's input at step `depth` of a draft, from the published equations.

    tokens_TH: embeddings of the verified tokens from the second on, and of the drafted ones.
    states_TC: the target's states at the verified tokens but the tip, and the learned states of the
    mask elements of a head that has them. The elements are computed one after another, each with
    all keys before it.
    """
    layer, n = head.midlayer, len(tokens_TH) - depth
    fused = [part.chunk(3, -1) for part in states_TC]
    normed = [torch.cat([norm(x) for norm, x in zip(head.fc_norm, parts)]) for parts in fused]
    hidden = [head.fc(each) for each in normed]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    features = torch.empty(0)
    for place in range(n + depth):
        g_H = hidden[place]
        inputs = torch.cat((layer.input_layernorm(tokens_TH[place]), layer.hidden_norm(g_H)))
        attention = layer.self_attn
        q_Q1D, k_Q1D, v_Q1D = (
            project(inputs).view(-1, 1, 4)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = rope(inputs, torch.tensor([[place]]))
        q_1Q1D, k_1Q1D = apply_rotary_pos_emb(q_Q1D[None], k_Q1D[None], cos, sin)
        keys.append(k_1Q1D[0].repeat_interleave(2, 0))
        values.append(v_Q1D.repeat_interleave(2, 0))
        shares = (q_1Q1D[0] @ torch.cat(keys, 1).transpose(1, 2) / 2).softmax(-1)
        mixed_H = attention.o_proj((shares @ torch.cat(values, 1)).flatten())
        mixed_H = mixed_H + g_H
        states_H = mixed_H + layer.mlp(layer.post_attention_layernorm(mixed_H))
        features = head.norm(states_H)
        if place >= n - 1:
            hidden.append(features)
    return features


@pytest.mark.parametrize("rope", [ROPE, LLAMA3_ROPE], ids=["default", "llama3"])
def test_the_training_time_test_equals_the_published_equations(rope: dict[str, Any]):
    """Compare all drafts of two packed texts with drafts that read one element after another."""
    head = random_head(rope=rope, max_positions=64).double()
    config = LlamaConfig(
        hidden_size=16, num_attention_heads=4, max_position_embeddings=64, rope_parameters=rope
    )
    rotary = LlamaRotaryEmbedding(config)
    check_drafts(
        head, 24, lambda embedded, states, step: reference(head, rotary, embedded, states, step)
    )


@pytest.mark.parametrize(
    ("layers", "taps"),
    [(32, (2, 16, 29)), (12, (2, 6, 9)), (7, (2, 3, 4)), (4, (1, 2, 4)), (2, (1, 2)), (1, (1,))],
)
def test_the_default_taps_are_different_layers(layers: int, taps: tuple[int, ...]):
    assert default_taps(layers) == taps


# ------------------------------------------------------------------------------------- the layout


@pytest.mark.parametrize(("chosen", "length"), [(None, 3), (2, 2)])
def test_the_vllm_line_has_the_chosen_draft_length(chosen: int | None, length: int):
    card = {"target": "org/name", "shape": vars(SHAPE), "num_draft_tokens": chosen}
    assert f'"num_speculative_tokens": {length}}}' in KIND.readme(card).launch[1]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"draft_vocab_size": 4},
        {"fc_norm": False, "norm_output": False, "norm_before_residual": True},
        {"taps": (3, 1), "rope": rope_parameters({"rope_scaling": LLAMA3_ROPE})},
    ],
    ids=str,
)
def test_a_saved_folder_loads_equal(fields: dict[str, Any], tmp_path: Path):
    head = random_head(**fields)
    if head.token_ids_V is not None:
        head.token_ids_V = torch.tensor([1, 3, 4, 9])
    back = load_head(save(head, tmp_path / "head"))
    assert back.config == head.config
    assert all(torch.equal(back.state_dict()[name], t) for name, t in head.state_dict().items())
    assert head_of(tmp_path / "head") == "eagle3"
    assert draft_vocab_size(tmp_path / "head") == head.config.draft_vocab_size


def test_config_json_has_what_servers_read(tmp_path: Path):
    """Check the layers' numbers above all: SGLang and vLLM read the same key one layer apart."""
    head = random_head(draft_vocab_size=4)
    head.token_ids_V = torch.tensor([1, 3, 4, 9])
    folder = save(head, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (4, 8)
    assert (config["taps"], config["taps_convention"]) == ([2, 4, 5], "hidden_states")
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    state = load_file(folder / "model.safetensors")
    assert state["d2t"].tolist() == [1, 2, 2, 6] and state["d2t"].dtype == torch.int64
    assert state["t2d"].nonzero().flatten().tolist() == [1, 3, 4, 9]
    assert state["midlayer.self_attn.q_proj.weight"].shape == (16, 16)
    assert {"fc.weight", "fc_norm.2.weight", "norm.weight", "lm_head.weight"} <= state.keys()


def test_other_names_of_the_tensors_load_too(tmp_path: Path):
    head = random_head(draft_vocab_size=4)
    folder = save(head, tmp_path / "head")
    state = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in state.items()}
    del renamed["t2d"]
    renamed["embed_tokens.weight"] = torch.zeros(11, 8)
    save_file(renamed, folder / "model.safetensors")
    back = load_head(folder).state_dict()
    assert all(torch.equal(back[name], each) for name, each in head.state_dict().items())


@pytest.mark.parametrize("kept", [LAYERS, "eagle_config"])
def test_layers_in_either_servers_numbers_are_the_same(kept: str, tmp_path: Path):
    folder = save(random_head(), tmp_path / "head")
    drop_layers(folder, kept)
    assert load_head(folder).config.taps == (2, 4, 5)


def drop_layers(folder: Path, kept: str = "") -> None:
    """Remove the layers' numbers from config.json, but for those under one key."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key in {"taps", LAYERS, "eagle_config"} - {kept}:
        del config[key]
    file.write_text(json.dumps(config))


def test_layers_that_a_file_leaves_out_are_the_servers_default(tmp_path: Path):
    folder = save(random_head(), tmp_path / "head")
    drop_layers(folder)
    shape = load_head(folder).config
    assert shape.taps == () and shape.taps_of(32) == (2, 16, 29)
    drafter = EagleDrafter(folder)
    target = native_of(hf_model(layers=7, vocab_size=11, hidden_size=8, head_dim=4))
    drafter.prepare(target, None)
    assert drafter.capabilities.taps == (2, 3, 4)
    with pytest.raises(UserError, match="low, middle and high of its target, but this target has"):
        shape.taps_of(2)
    with pytest.raises(UserError, match="names no layers, and .* Name the target too"):
        KIND.read_shape(folder)
    assert KIND.assume(target_layers=32).read_shape(folder).taps == (2, 16, 29)


def test_every_wrong_tensor_is_listed(tmp_path: Path):
    folder = save(random_head(), tmp_path / "head")
    state = load_file(folder / "model.safetensors")
    del state["fc_norm.1.weight"]
    state["input_norm.weight"] = torch.ones(24)
    state["lm_head.weight"] = torch.ones(10, 8)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError) as raised:
        load_head(folder)
    for words in (
        "3 taps, 11 drafted tokens, fc_norm=true",
        "fc_norm.1.weight is missing",
        "input_norm.weight is unknown",
        r"lm_head.weight has the shape [10, 8], expected [11, 8]",
    ):
        assert words in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "expected .*Eagle3.*, an EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, expected 1"),
        ({"attention_bias": True}, "attention_bias is true, expected false"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is true, expected false"),
        ({"norm_output": "yes"}, "norm_output is 'yes', expected true or false"),
        ({"hidden_size": 0}, "hidden_size is 0, expected a whole number of 1 or more"),
        ({"draft_vocab_size": 12}, "draft_vocab_size is 12, expected a whole number from 1 to 11"),
        ({"target_hidden_size": 16}, "target_hidden_size is 16, which does not fit"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, which does not fit"),
        ({"taps": [2, 2, 5]}, r"tapped layers are \[2, 2, 5\], expected 3 different layers"),
        ({"taps": [2, 5]}, "expected 3 different layers"),
        (
            {"taps": [1, 3, 4]},
            rf"{LAYERS} \[2, 4, 5\] are hidden_states \[2, 4, 5\], but taps is \[1, 3, 4\]",
        ),
        (
            {"eagle_config": {LAYERS: [2, 4, 5]}},
            rf"eagle_config.{LAYERS} \[2, 4, 5\] are hidden_states \[3, 5, 6\], but taps is ",
        ),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a small number"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is of the type 'yarn', which"),
        ({"taps_convention": "output"}, "taps_convention is 'output', expected 'hidden_states'"),
    ],
    ids=str,
)
def test_other_forms_and_invalid_values_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path
):
    with pytest.raises(UserError, match=words):
        load_head(save(random_head(), tmp_path / "head", **change))


def test_damaged_draft_vocabularies_are_refused(tmp_path: Path):
    head = random_head(draft_vocab_size=4)
    folder = save(head, tmp_path / "head")
    state = load_file(folder / "model.safetensors")
    save_file({**state, "d2t": torch.tensor([0, -1, 0, 0])}, folder / "model.safetensors")
    with pytest.raises(UserError, match="not a rising list of token ids"):
        load_head(folder)
    save_file({**state, "t2d": torch.ones(11, dtype=torch.bool)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="t2d and d2t hold different draft vocabularies"):
        load_head(folder)


# ------------------------------------------------------------------------------------- drafting


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "bush"}, "shape is 'bush', expected tree or chain"),
        ({"frontier": 0}, "frontier is 0"),
        ({"children": "drawn"}, "children is 'drawn'"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        EagleDrafter(head=random_head(), **options)


def test_a_head_of_another_target_is_refused():
    target = native_of(hf_model(layers=2))
    for head, words in (
        (random_head(), "trained for a hidden size of 8"),
        (random_eagle(target, taps=(1, 3)), r"reads the layers \[1, 3\] .* but this target has 2"),
    ):
        with pytest.raises(UserError, match=words):
            EagleDrafter(head=head).prepare(target, None)


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [("chain", "serial"), ("tree", "serial"), ("chain", "pearl_virtual")],
)
def test_verified_text_is_never_read_again(shape: str, schedule: str):
    """Check the numbers of elements that the head computes in each call, after the prompt."""
    target = native_of(hf_model(layers=2))
    head, gamma = random_eagle(target), 3
    drafter = EagleDrafter(head=head, shape=shape, frontier=2)
    sizes: list[int] = []
    head.midlayer.self_attn.k_proj.register_forward_hook(
        lambda _, given, found: sizes.append(found.shape[1])
    )
    settings = Settings(40, num_draft_tokens=gamma, schedule=schedule)
    (done,) = decode(target, drafter, random_prompts(1), settings)
    nodes = 2 if shape == "tree" else 1
    assert len(done.tokens) == 40 and max(sizes[1:]) <= max(gamma + 1, nodes)
    if shape == "chain":  # each chunk's elements, and once those whose states are known
        assert sum(sizes[1:]) <= done.drafted + 40


def test_a_prompt_of_one_token_drafts_like_its_evaluation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(law_6, "PROMPTS", [[5], [9], [40, 2, 9]])
    for row in HEAD_ROWS:
        if row.name == "eagle3":
            law_6.check_the_chain_is_real_decoding(row)


def test_a_head_in_bfloat16_keeps_greedy_text():
    target = native_of(hf_model(layers=2))
    prompts, settings = random_prompts(8), Settings(24, num_draft_tokens=3)
    plain = [done.tokens for done in decode(target, None, prompts, settings)]
    for shape in ("chain", "tree"):
        head = random_eagle(target, 3.0).bfloat16()
        drafted = decode(target, EagleDrafter(head=head, shape=shape), prompts, settings)
        assert [done.tokens for done in drafted] == plain


def test_a_head_of_a_fused_target_computes_the_same(tmp_path: Path):
    folder = save(random_head(), tmp_path / "head")
    states = torch.randn(2, 3, 24)
    eager, fused = (EagleDrafter(folder, execution=each).cache.head for each in ("eager", "fused"))
    torch.testing.assert_close(fused.fuse(states), eager.fuse(states))
    assert "forward" in vars(fused.lm_head) and "forward" not in vars(eager.lm_head)


# ------------------------------------------------------------------------------------- the job


@pytest.mark.long
def test_a_head_is_trained_and_loaded_by_the_front_door(tiny_target: Path, tmp_path: Path):
    """Check that a head trained from chats drafts, and that greedy output stays the target's."""
    given = ["head=eagle3", f"target.path={tiny_target}", f"output_dir={tmp_path / 'run'}"]
    given += ["loss=forward_kl", "head.draft_vocab_size=300", "loss.own_tokens=0.5"]
    folder = heads.train.run(configured("heads.train", *given))
    card = json.loads((folder / "drafter_card.json").read_text())
    assert card["acceptance"]["tree_block_efficiency"] >= 1
    plain = generate(load(tiny_target, dtype="float64"), "def add(a, b):", max_new_tokens=12)
    for options in ({"shape": "chain"}, {"by_cost": False}):
        engine = load(tiny_target, {"use": str(folder), **options}, dtype="float64")
        assert isinstance(engine.drafter, EagleDrafter)
        drafted = generate(engine, "def add(a, b):", max_new_tokens=12, stopping="fixed")
        assert drafted.tokens == plain.tokens and drafted.stats.tested > 0


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("head.start=zeros", "expected one of lm_head, random"),
        ("head.taps=[1,1]", "expected different layers of the target"),
        ("head.taps=[40]", "reads layer 40 of the target"),
        ("head.intermediate_size=-1", "expected 1 or more, or 0"),
        ("head.draft_vocab_size=-1", "expected 1 or more, or 0 for all tokens"),
    ],
)
def test_invalid_settings_are_refused(setting: str, words: str):
    given = ["head=eagle3", "target=embedded", setting]
    with pytest.raises(UserError, match=words):
        heads.train.run(configured("heads.train", *given))
