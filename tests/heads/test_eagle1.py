"""EAGLE-1 heads: the published equations, the losses of states and tokens, noise, folders, the job.

Laws 1 to 6 are in the tables of tests/decoding/rows.py and tests/heads/rows.py.

Shapes: T tokens, H hidden size, P positions, N predictions, V vocabulary.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import heads.train
from decoding import generate, load
from decoding.drafters.registry import head_of
from decoding.errors import UserError
from heads.eagle.checkpoint import load_head
from heads.eagle.drafter import EagleDrafter
from heads.eagle.kind import FIRST, KIND
from heads.eagle.layouts import SERVED_FIRST
from heads.eagle.model import EagleHead
from jobs.interrupts import Interrupted
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from tests.heads.test_eagle import random_head, save
from tests.heads.test_heads_train import configured
from tests.support.eagle_drafts import check_drafts
from tests.support.interrupted_data import stop_after_step
from training.bounds import START, Bounds, Place
from training.data.packing import PackedBatch, Sample, collate
from training.features.states import TargetStates
from training.heads import checkpoint
from training.heads import train as job
from training.heads.loss_config import HeadLossConfig, describe_head_loss
from training.heads.next_states import state_noise
from training.heads.objective import HeadObjective
from training.losses.eager import kl
from training.objectives import hidden_states

FORM = {"predicts_states": True, "taps": (), "fc_norm": False, "norm_output": False}
ROW = next(row for row in HEAD_ROWS if row.name == "eagle1 with a bias")


def first(**fields: Any) -> EagleHead:
    return random_head(**(FORM | fields))


# ------------------------------------------------------------------------------------- the layer


def published_layer(head: EagleHead) -> LlamaDecoderLayer:
    """Return the layer of `transformers` with a head's weights, without its first norm."""
    config, ours = head.config, head.midlayer
    layer = LlamaDecoderLayer(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.norm_eps,
            attn_implementation="eager",
        ),
        0,
    ).double()
    layer.input_layernorm = nn.Identity()
    layer.load_state_dict(ours.state_dict())
    return layer.requires_grad_(False)


def reference(head: EagleHead, tokens_TH: Tensor, states_TH: Tensor) -> Tensor:
    """Return the next state that the published equations predict from whole texts.

    tokens_TH: embeddings of all tokens but the first, drafted ones included. states_TH: the
    target's states at the verified tokens but the tip; those of the drafted tokens are predicted.
    """
    layer, config = published_layer(head), head.config
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.num_heads * config.head_dim,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.max_positions,
            rope_parameters=dict(config.rope),
        )
    )
    last, T = len(tokens_TH), len(states_TH)
    while True:
        joined_1TH = head.fc(torch.cat((tokens_TH[:T], states_TH), 1))[None]
        mask = torch.full((1, 1, T, T), float("-inf"), dtype=torch.float64).triu(1)
        places = torch.arange(T)[None]
        given = {"attention_mask": mask, "position_ids": places}
        found = layer(joined_1TH, position_embeddings=rotary(joined_1TH, places), **given)
        next_1H = (found[0] if isinstance(found, tuple) else found).view(-1, T, 8)[0, -1:]
        if last == T:
            return next_1H[0]
        states_TH, T = torch.cat((states_TH, next_1H)), T + 1


@pytest.mark.parametrize("bias", [False, True])
def test_drafts_in_training_equal_the_published_equations(bias: bool) -> None:
    """Compare all drafts of two packed texts with one text at a time in `transformers`' layer."""
    head = first(fc_bias=bias).double()
    check_drafts(head, 8, lambda embedded, states, _: reference(head, embedded, states))


# ------------------------------------------------------------------------------------- the losses


def text_batch() -> PackedBatch:
    """Return three texts in two rows, whose first tokens are not supervised."""
    random = np.random.default_rng(0)
    samples = [
        Sample(random.integers(0, law_6.VOCABULARY, n).astype(np.int32), np.arange(n) > 3)
        for n in (20, 11, 30)
    ]
    return collate(samples, [[0, 1], [2]], law_6.ROW)


def objective_of(seed: int = 5, **loss: Any) -> tuple[HeadObjective, Any]:
    """Return the objective of a random head in float64, and the target."""
    model = law_6.target().double()
    head = law_6.head_of(ROW, model).double().requires_grad_(True)
    settings = HeadLossConfig(**({"name": "forward_kl", "predict_n_tokens": 3} | loss))
    states = TargetStates(model)
    return HeadObjective(FIRST, head, states, settings, seed=seed), model


def eager_loss(
    objective: HeadObjective, model: Any, batch: PackedBatch, shift: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss from its formulas, and the sums of the states' distances by depth.

    shift: places by which the wanted states are too late (0, except in the control).
    """
    head, loss, states = objective.head, objective.loss, objective.states
    final_RTH = hidden_states(model, batch)
    where, states_PC = objective.read_target(batch)
    features_NH = FIRST.features(head, states, batch, where, states_PC)
    tips_N = where.kept_P[where.drafts_M[where.draft_N]] + 1
    wanted_NH = final_RTH.flatten(0, 1)[tips_N + where.head_N + shift]
    p_NV, q_NV = ((each @ states.lm_head.T).softmax(-1) for each in (wanted_NH, features_NH))
    apart_NH = (features_NH - wanted_NH).abs()
    apart_N = torch.where(apart_NH < 1, apart_NH**2 / 2, apart_NH - 0.5).mean(-1)
    each_N = loss.token_weight * kl(p_NV, q_NV) + loss.state_weight * apart_N
    total = (loss.decay ** where.head_N.double() * each_N).sum()
    return total, [apart_N[where.head_N == k].sum() for k in range(objective.depths)]


WEIGHTS = {"token_weight": 0.1, "state_weight": 1.0}


@pytest.mark.parametrize(("depths", "decay"), [(1, 1.0), (2, 0.8), (0, 0.8)])
def test_the_loss_and_its_gradient_equal_the_formulas_in_float64(depths: int, decay: float) -> None:
    batch = text_batch()
    objective, model = objective_of(train_depths=depths, decay=decay, **WEIGHTS)
    loss, sums = objective(batch)
    eager, apart_K = eager_loss(objective, model, batch)
    torch.testing.assert_close(loss, eager, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(sums[2 * objective.depths :], torch.stack(apart_K))
    assert len(objective.metric_names) == len(sums) == 3 * (depths or 3)
    parameters = [*objective.head.parameters()]
    ours, theirs = (torch.autograd.grad(each, parameters) for each in (loss, eager))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-9, atol=1e-9)


def test_states_of_the_next_place_are_rejected() -> None:
    objective, model = objective_of(train_depths=1, **WEIGHTS)
    late, _ = eager_loss(objective, model, text_batch(), shift=1)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(objective(text_batch())[0], late, rtol=1e-10, atol=1e-10)


def test_the_text_can_replace_the_targets_distribution() -> None:
    """Check that a loss on the text's tokens still learns the target's states."""
    batch = text_batch()
    plain, _ = objective_of(name="cross_entropy", train_depths=1)
    both, _ = objective_of(name="cross_entropy", train_depths=1, **WEIGHTS)
    soft, _ = objective_of(train_depths=1, **WEIGHTS)
    apart = both(batch)[1][2]
    torch.testing.assert_close(both(batch)[0], 0.1 * plain(batch)[0] + apart)
    torch.testing.assert_close(soft(batch)[1][2], apart)


# ------------------------------------------------------------------------------------- the noise


def test_noise_depends_on_seed_step_row_and_position_alone() -> None:
    batch = text_batch()
    kept_P = torch.from_numpy(np.flatnonzero(batch.host.documents_RT > 0))
    like_PC = torch.zeros(len(kept_P), 6, dtype=torch.float64)
    whole = state_noise(batch, kept_P, like_PC, 0.2, (5, 3))
    alone_P = kept_P[kept_P >= law_6.ROW] - law_6.ROW
    alone = state_noise(batch.row(1), alone_P, like_PC[: len(alone_P)], 0.2, (5, 3))
    assert torch.equal(whole[-len(alone) :], alone) and whole.dtype == torch.float64
    for other in ((5, 4), (6, 3)):
        assert not torch.equal(state_noise(batch, kept_P, like_PC, 0.2, other), whole)


def test_noise_is_uniform_in_a_width_that_falls_with_the_texts_length() -> None:
    batch = text_batch()
    kept_P = torch.from_numpy(np.flatnonzero(batch.host.documents_RT > 0))
    found_PC = state_noise(batch, kept_P, torch.zeros(len(kept_P), 500), 0.2, (0, 0))
    for part_TC in found_PC.split((20, 11, 30)):
        half = 0.1 * 512 / len(part_TC)
        assert 0.98 * half < part_TC.abs().max() <= half
        assert abs(part_TC.mean()) < 0.05 * half
        assert part_TC.var() == pytest.approx(half**2 / 3, rel=0.05)


def test_only_training_reads_noise() -> None:
    """Check that noise moves the loss, equally for equal steps, and no state that is learnt."""
    batch = text_batch()
    noisy, _ = objective_of(state_noise=0.01, train_depths=1, **WEIGHTS)
    clean, _ = objective_of(train_depths=1, **WEIGHTS)
    found = []
    for step in (3, 3, 4):
        noisy.begin(step, Place(START, Bounds()), batch.rows)
        found.append(noisy(batch)[0])
    assert found[0] == found[1] != found[2] and clean(batch)[0] not in found
    (where, noisy_PC), (_, clean_PC) = noisy.read_target(batch), clean.read_target(batch)
    assert torch.equal(noisy_PC, clean_PC) and len(where.kept_P)


# ------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize("bias", [False, True])
def test_a_saved_folder_has_the_published_names_and_loads_equal(bias: bool, tmp_path: Path) -> None:
    head = first(fc_bias=bias)
    checkpoint.save_head(SERVED_FIRST, head.config, head, tmp_path)
    back = load_head(tmp_path)
    assert back.config == head.config
    assert all(torch.equal(back.state_dict()[name], t) for name, t in head.state_dict().items())
    layer = [f"self_attn.{part}_proj" for part in "qkvo"]
    layer += [f"mlp.{part}_proj" for part in ("gate", "up", "down")] + ["post_attention_layernorm"]
    expected = {f"layers.0.{name}.weight" for name in layer} | {"fc.weight"}
    expected |= {"fc.bias"} if bias else set()
    assert load_file(tmp_path / "model.safetensors").keys() == expected
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"]
    assert (config["model_type"], config["num_hidden_layers"], config["bias"]) == ("llama", 1, bias)
    assert not {"taps", "draft_vocab_size", "eagle_config"} & config.keys()
    assert head_of(tmp_path) == "eagle1"


def change(folder: Path, **values: Any) -> Path:
    file = folder / "config.json"
    kept = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in kept.items() if value != "absent"}))
    return folder


def test_a_file_of_a_server_loads(tmp_path: Path) -> None:
    """Check other prefixes, an embedding, and a bias that config.json leaves to its default."""
    head = first(fc_bias=True)
    checkpoint.save_head(SERVED_FIRST, head.config, head, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    renamed = {f"model.{name}": each for name, each in state.items()}
    save_file(renamed | {"embed_tokens.weight": torch.zeros(11, 8)}, tmp_path / "model.safetensors")
    back = load_head(change(tmp_path, bias="absent", architectures=["LlamaForCausalLMEagle"]))
    assert all(torch.equal(back.state_dict()[name], t) for name, t in head.state_dict().items())
    with pytest.raises(UserError, match=r"fc\.bias is unknown"):
        load_head(change(tmp_path, bias=False))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"draft_vocab_size": 5}, "draft_vocab_size is 5, expected 11, .* no EAGLE-1 head"),
        ({"taps": [4]}, r"taps is \[4\], expected null"),
        ({"norm_output": True}, "norm_output is true, expected false"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, expected 1"),
        ({"bias": "yes"}, "bias is 'yes', expected true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    ],
    ids=str,
)
def test_other_forms_are_refused(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    head = first()
    checkpoint.save_head(SERVED_FIRST, head.config, head, tmp_path)
    with pytest.raises(UserError, match=words):
        load_head(change(tmp_path, **values))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    head = first()
    checkpoint.save_head(SERVED_FIRST, head.config, head, tmp_path)
    with pytest.raises(UserError, match=r"fc\.bias is missing"):
        load_head(change(tmp_path, bias=True))


# ------------------------------------------------------------------------------------- the job
PUBLISHED = ["head=eagle1"]


def losses_in(folder: Path) -> list[tuple[float, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [(one["loss"], one["eagle0_state_loss"]) for one in records if "loss" in one]


@pytest.mark.long
def test_a_head_is_trained_resumed_bit_for_bit_and_drafts(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(name: str) -> Any:
        given = [f"target.path={tiny_target}", f"output_dir={tmp_path / name}"]
        return configured("heads.train", *PUBLISHED, *given, "loop.checkpoint_every=2")

    loss = config("x").loss
    assert loss.state_noise > 0
    assert describe_head_loss(loss) == "0.1 forward_kl + 1 smooth L1 of states"
    folder, read = heads.train.run(config("straight")), job.training_data
    with monkeypatch.context() as patch:
        patch.setattr(job, "training_data", lambda *given: stop_after_step(read(*given), 3))
        with pytest.raises(Interrupted):
            heads.train.run(config("stopped"))
    again = heads.train.run(config("stopped"))
    whole, resumed = (load_file(each / "model.safetensors") for each in (folder, again))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert losses_in(tmp_path / "straight") == losses_in(tmp_path / "stopped")
    card = json.loads((folder / "drafter_card.json").read_text())
    assert card["acceptance"]["tree_block_efficiency"] >= 1
    assert "EAGLE-1" in (folder / "README.md").read_text()
    plain = generate(load(tiny_target, dtype="float64"), "def add(a, b):", max_new_tokens=12)
    for options in ({"shape": "chain"}, {"by_cost": False}):
        engine = load(tiny_target, {"use": str(folder), **options}, dtype="float64")
        assert isinstance(engine.drafter, EagleDrafter)
        drafted = generate(engine, "def add(a, b):", max_new_tokens=12, stopping="fixed")
        assert drafted.tokens == plain.tokens and drafted.stats.tested > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["head.taps=[1]"], "head.taps is .*state after the final norm alone"),
        (["head.draft_vocab_size=64"], "expected 0, as head=eagle1 predicts all tokens"),
        (["head.fc_norm=true"], "head.fc_norm is True, expected false, as head=eagle1 has no such"),
        (["loss.train_depths=6"], "expected 1 to loss.predict_n_tokens, or 0"),
        (["loss.token_weight=0", "loss.state_weight=0"], "more than 0 without loss.state_weight"),
        (["loss.state_noise=-1"], "loss.state_noise is -1.0, expected 0 or more"),
        (["loss.own_tokens=0.5"], "with loss.train_depths=1 no draft reads its own tokens"),
        (["loss.name=continuations"], "0 with loss.name=continuations, whose tokens"),
        (["on_policy.share=0.5"], "with loss.train_depths=1, at which no"),
        (["head=eagle3", "loss.state_weight=1"], "expected 0 with this head, which predicts no"),
        (["head=eagle3", "loss.train_depths=1"], "expected 0 with this head, which predicts no"),
        (["head=eagle3", "head.fc_bias=true"], "expected false, as only head=eagle1 has a bias"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(settings: list[str], words: str) -> None:
    given = ["target=embedded", *settings]
    if not settings[0].startswith("head=eagle3"):
        given = ["head=eagle1", *given]
    with pytest.raises(UserError, match=words):
        heads.train.run(configured("heads.train", *given))


def test_the_targets_last_layer_may_be_named() -> None:
    sizes = law_6.target().config
    config = configured("heads.train", *PUBLISHED, f"head.taps=[{law_6.LAYERS}]", "target.path=x")
    assert FIRST.shape(config, sizes) == replace(ROW.shape(sizes), fc_bias=False)


@pytest.mark.parametrize("kind", [FIRST, KIND])
def test_a_folder_of_the_other_form_is_not_continued(kind: Any, tmp_path: Path) -> None:
    other = first() if kind is KIND else random_head()
    folder = save(other, tmp_path / "head")
    shape = kind.read_shape(folder)
    config = configured("heads.train", f"head={kind.name}", "target.path=x", f"head.path={folder}")
    valid, expected = kind.rules(config, shape)["head.path"]
    assert not valid and expected == f"a folder of head={kind.name}"
