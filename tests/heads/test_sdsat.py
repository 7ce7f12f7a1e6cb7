"""SDSAT's slots: the drafter against transformers, folders, refused targets, and training."""

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
from decoding.interfaces import RoundCosts
from decoding.loop import decode
from decoding.models.hf import HFTarget
from decoding.models.load import load_target
from decoding.models.native.model import NativeTarget
from decoding.models.prefill import prefill
from decoding.rounds.settings import Settings
from heads.sdsat.checkpoint import LAYOUT, load_head
from heads.sdsat.config import SdsatOptions
from heads.sdsat.drafter import SdsatDrafter
from heads.sdsat.kind import KIND
from heads.sdsat.model import SdsatConfig, SdsatHead
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from tests.heads.test_heads_train import configured
from tests.support import tiny_heads as tiny
from tests.support.tiny_targets import SHAPES, VOCABULARY, hf_model, native_of, random_prompts
from training.heads import checkpoint
from training.heads.measure import measure

LAYERS, SLOTS, TEXT = 3, 4, 7


def head_for(model: Any, slots: int = SLOTS, rank: int = 0) -> SdsatHead:
    """Return random slots for a model, in its dtype."""
    head = SdsatHead(SdsatConfig.of_target(model.config.to_dict(), slots, rank))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=generator).mul_(0.3)
    return head.to(model.dtype).requires_grad_(False).eval()


def save(head: SdsatHead, folder: Path) -> Path:
    checkpoint.save_head(LAYOUT, head.config, head, folder)
    return folder


# ------------------------------------------------------------------------------------ drafting


@torch.inference_mode()
def drafted_logits(target: NativeTarget, head: SdsatHead, texts_BN: Tensor) -> Tensor:
    """Return the logits (B, K, V) of a draft after texts, whose last tokens are the tips."""
    drafter = SdsatDrafter(head=head)
    drafter.prepare(target, None)
    prompts_B = texts_BN.tolist()
    target.open(len(prompts_B), 32)
    prefill(target, [prompt[:-1] for prompt in prompts_B])
    drafter.open(prompts_B, None, 32)
    slots_S = VOCABULARY + torch.arange(head.config.num_slots)
    return drafter.model.forward(
        torch.cat((texts_BN[:, -1:], slots_S.expand(len(texts_BN), -1)), 1)
    )[0]


@torch.inference_mode()
def expected_logits(model: Any, head: SdsatHead, texts_BN: Tensor, changed_rows: int) -> Tensor:
    """Return these logits from transformers; the last `changed_rows` rows have the change."""
    text_BNC = model.get_input_embeddings()(texts_BN)
    inputs_BNC = torch.cat((text_BNC, head.slots.expand(len(texts_BN), -1, -1)), 1)
    hooks = []
    for layer, change in zip(model.model.layers, head.layers, strict=False):
        parts = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
        for names, added in zip(parts, (change.qkv, change.out), strict=True):
            hooks += _hooks(layer.self_attn, names, added, changed_rows)
        for names, added in (
            (("gate_proj", "up_proj"), change.gate_up),
            (("down_proj",), change.down),
        ):
            hooks += _hooks(layer.mlp, names, added, changed_rows)
    logits_BNV = model(inputs_embeds=inputs_BNC).logits
    for hook in hooks:
        hook.remove()
    return logits_BNV[:, texts_BN.shape[1] - 1 :]


def _hooks(module: Any, names: tuple[str, ...], change: Any, rows: int) -> list[Any]:
    """Add a change of fused products to the last rows of these products."""
    hooks, start = [], 0
    for name in names:
        part = slice(start, start + getattr(module, name).out_features)
        start = part.stop

        def add(_: Any, given: Any, found: Tensor, part: slice = part) -> Tensor:
            added = change(given[0])[..., part]
            added[:, : found.shape[1] - rows] = 0
            return found + added

        hooks.append(getattr(module, name).register_forward_hook(add))
    return hooks


@pytest.mark.parametrize("execution", ["eager", "fused", "graph"])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("family", SHAPES)
def test_slots_are_read_as_embeddings_after_the_text(
    family: str, rank: int, execution: str
) -> None:
    model = hf_model(family, layers=LAYERS)
    texts_BN = torch.randint(0, VOCABULARY, (3, TEXT), generator=torch.Generator().manual_seed(1))
    head = head_for(model, rank=rank)
    found = drafted_logits(native_of(model, execution=execution), head, texts_BN)
    expected = expected_logits(model, head, texts_BN, SLOTS)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)
    wrong = expected_logits(model, head, texts_BN, SLOTS + 1)
    changed = not torch.allclose(found, wrong, rtol=0.0, atol=1e-2)
    assert changed == bool(rank), "a change at the tip's row would change the target"


@pytest.mark.parametrize("rank", [0, 3])
def test_the_first_token_is_the_targets_own(rank: int) -> None:
    """Check that it is always accepted, and that later ones of random slots are not."""
    model = hf_model("llama", layers=LAYERS)
    drafter, rounds, later = SdsatDrafter(head=head_for(model, rank=rank)), 0, 0
    for rule in ("greedy", "token", "coupled"):
        sampled = {} if rule == "greedy" else {"temperature": 1.0, "verify": rule}
        settings = Settings(24, num_draft_tokens=3, **sampled)
        for done in decode(native_of(model), drafter, random_prompts(4), settings):
            assert done.accepted_by_depth[0] >= done.rounds - 1, "the last round may not draft"
            rounds, later = rounds + done.rounds, later + sum(done.accepted_by_depth[1:])
    assert later < rounds


def test_a_draft_is_at_most_one_longer_than_the_slots() -> None:
    model = hf_model("llama", layers=LAYERS)
    drafter = SdsatDrafter(head=head_for(model, slots=2))
    assert [drafter.width(gamma) for gamma in (1, 3, 8)] == [1, 3, 3]
    plain, drafted = (
        decode(native_of(model), each, random_prompts(4), Settings(24, num_draft_tokens=8))
        for each in (None, drafter)
    )
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert all(len(one.accepted_by_depth) <= 3 for one in drafted)


# -------------------------------------------------------------------------- in one forward a round


@pytest.mark.parametrize("execution", ["eager", "fused", "graph"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_round_is_one_forward_in_every_execution(
    rank: int, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forwards = hf_model("llama", layers=LAYERS), 0
    head, settings = head_for(model, rank=rank), Settings(24, num_draft_tokens=3, temperature=1.0)

    def sampled(execution: str, **options: Any) -> list[Any]:
        drafter = SdsatDrafter(head=head, **options)
        found = decode(native_of(model, execution=execution), drafter, random_prompts(4), settings)
        return [(one.tokens, one.tested_by_depth, one.accepted_by_depth) for one in found]

    expected = sampled("eager", one_forward=True)
    forward = NativeTarget.forward

    def counted(self: NativeTarget, *given: Any) -> tuple[Tensor, Tensor]:
        nonlocal forwards
        forwards += 1
        return forward(self, *given)

    monkeypatch.setattr(NativeTarget, "forward", counted)
    assert sampled(execution, one_forward=True) == expected
    rounds = max(len(tokens) - sum(accepted) for tokens, _, accepted in expected)
    assert forwards == rounds and sum(accepted[0] for _, _, accepted in expected) > 0
    sampled(execution)
    assert forwards - rounds > rounds, "control: without it, drafts take forwards as well"


def test_in_bfloat16_a_fused_target_keeps_its_bits_or_refuses() -> None:
    """Check that its text is the plain one; verified layer by layer it would not be."""
    model, prompts = hf_model("llama", layers=LAYERS), random_prompts(4)
    target = native_of(model, dtype=torch.bfloat16, execution="fused")
    settings = Settings(24, num_draft_tokens=3)
    plain = [one.tokens for one in decode(target, None, prompts, settings)]
    for rank, one_forward in ((0, True), (3, False)):
        drafter = SdsatDrafter(head=head_for(model, rank=rank), one_forward=one_forward)
        assert [one.tokens for one in decode(target, drafter, prompts, settings)] == plain
    drafter = SdsatDrafter(head=head_for(model, rank=3), one_forward=True)
    with pytest.raises(UserError, match="verifies layer by layer; in bfloat16 .*one_forward=false"):
        decode(target, drafter, prompts, settings)


def test_a_draft_from_riders_is_at_most_as_long_as_the_slots() -> None:
    model = hf_model("llama", layers=LAYERS)
    drafter = SdsatDrafter(head=head_for(model), one_forward=True, slots=2)
    # a chain, and two slots after the tip and after each token of the longest draft
    assert [drafter.width(gamma) for gamma in (1, 2, 8)] == [1 + 2, 2 + 6, 8 + 6]
    plain, drafted = (
        decode(native_of(model), each, random_prompts(4), Settings(24, num_draft_tokens=8))
        for each in (None, drafter)
    )
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert all(len(one.accepted_by_depth) <= 2 < one.verified for one in drafted)
    for wrong in (0, 5, 1.5):
        with pytest.raises(UserError, match=rf"slots is {wrong}, expected 1 to 4"):
            SdsatDrafter(head=head_for(model), slots=wrong)  # type: ignore[arg-type]


def test_a_pause_of_one_row_changes_no_other_row() -> None:
    """Check rows whose stopping policies pause in different rounds."""
    model = hf_model("llama", layers=LAYERS)
    head, prompts = head_for(model), random_prompts(6)
    costs = RoundCosts(0.0, (1.0, 1.4, 1.8, 2.2, 2.6))  # at which drafts hardly pay
    settings = Settings(
        40, num_draft_tokens=4, temperature=1.0, costs=costs, stopping="cost_ratio", seed=4
    )

    def sampled(prompts: list[list[int]], ids: list[int]) -> list[Any]:
        drafter = SdsatDrafter(head=head, one_forward=True)
        found = decode(native_of(model), drafter, prompts, settings, request_ids=ids)
        return [(one.tokens, one.rounds, one.tested_by_depth) for one in found]

    together = sampled(prompts, list(range(6)))
    alone = [sampled([prompt], [row])[0] for row, prompt in enumerate(prompts)]
    assert together == alone
    pauses = [rounds - 2 - tested[0] for _, rounds, tested in together]
    assert max(pauses) > 0, "only the first round and the last are without a draft"


def test_another_target_is_refused_with_all_differences() -> None:
    model = hf_model("llama", layers=LAYERS)
    drafter = SdsatDrafter(head=head_for(model))
    other = native_of(hf_model("llama_mha", layers=LAYERS + 1))
    words = r"target_layers is 3 for the slots and 4 in the target; key_size is 16 for .* and 32"
    with pytest.raises(UserError, match=words):
        drafter.prepare(other, None)
    with pytest.raises(UserError, match="hf backend does not support. Use target.backend=native"):
        drafter.prepare(HFTarget(model, "tiny"), None)
    drafter.prepare(native_of(model), None)


# ------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("rank", [0, 2])
def test_a_saved_folder_loads_equal(rank: int, tmp_path: Path) -> None:
    made = head_for(hf_model("qwen3", layers=LAYERS, dtype=torch.float32), rank=rank)
    back = load_head(save(made, tmp_path / "head"))
    assert back.config == made.config
    assert back.state_dict().keys() == made.state_dict().keys()
    assert all(torch.equal(back.state_dict()[name], t) for name, t in made.state_dict().items())
    with pytest.raises(UserError, match="model_type 'shallow_draft_sdsat' is not one of"):
        load_target(tmp_path / "head")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected 'shallow_draft_sdsat'"),
        ({"num_slots": 0}, "num_slots is 0, expected a whole number of 1 or more"),
        ({"rank": -1}, "rank is -1, expected a whole number of 0 or more"),
        ({"query_size": None}, "query_size is None, expected a whole number of 1 or more"),
        ({"num_slots": 5}, r"5 slots of width 32, rank 2\): slots has the shape \[4, 32\], .*5"),
        ({"rank": 0}, r"layers\.0\.qkv\.down\.weight is unknown"),
        ({"target_layers": 4}, r"layers\.3\.qkv\.down\.weight is missing"),
    ],
    ids=str,
)
def test_inconsistent_folders_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = hf_model("llama", layers=LAYERS, dtype=torch.float32)
    file = save(head_for(model, rank=2), tmp_path / "head") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=words):
        load_head(tmp_path / "head")


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    folder = save(head_for(hf_model("llama", dtype=torch.float32)), tmp_path / "head")
    state = load_file(folder / "model.safetensors")
    state["slots"][0, 0] = float("nan")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match="non-finite weights"):
        load_head(folder)


# ------------------------------------------------------------------------------------ training


def test_a_new_change_adds_nothing_and_the_target_does_not_learn() -> None:
    model = law_6.target()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, changed = (row for row in HEAD_ROWS if row.kind is KIND and not row.ahead)
    samples, batch = tiny.samples(), tiny.packed(tiny.samples())
    states = law_6.states_of(changed, model)
    predicted = []
    for row in (plain, changed):
        head = row.kind.empty(row.shape(model.config))
        KIND.initialize(head, SdsatOptions(), model.lm_head.weight)
        KIND.start_from_target(head, SdsatOptions(), model)
        predicted.append(law_6.predict(KIND, head, states, batch).q_NV)
    assert torch.equal(head.slots[0], model.get_input_embeddings().weight.mean(0))
    torch.testing.assert_close(predicted[1], predicted[0])
    losses = law_6.learn(changed, head, states, samples)
    assert losses[-1] < losses[0] and all(tensor.any() for tensor in head.state_dict().values())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("rank", [0, 2])
def test_flops_are_those_of_the_targets_layers(rank: int) -> None:
    model = hf_model("llama", layers=LAYERS, dtype=torch.float32)
    shape = SdsatConfig.of_target(model.config.to_dict(), SLOTS, rank)
    depths = shape.num_drafts
    text, C, F = depths + 2, shape.hidden_size, shape.intermediate_size
    Q, H = shape.query_size, shape.key_size
    qkv, rest = C * (Q + 2 * H), Q * C + 3 * C * F
    scores = 2 * Q * (text + depths)
    changes = rank * ((C + Q + 2 * H) + (Q + C) + (C + 2 * F) + (F + C))
    a_layer = text * qkv + depths * (qkv + rest + scores + changes)
    counted = measure(KIND, shape, depths, torch.float32, model.config)
    assert counted.flops == 2 * (LAYERS * a_layer + depths * C * shape.vocab_size)
    parts = {"slots": SLOTS * C} | ({"low rank": LAYERS * changes} if rank else {})
    assert counted.parts == parts and counted.outputs == 0 and counted.predictions == depths


SETTINGS = ["head=sdsat", "loss=forward_kl", "loss.predict_n_tokens=3"]


@pytest.mark.parametrize("rank", [0, 2])
def test_slots_are_trained_and_loaded_by_the_front_door(
    rank: int, tiny_target: Path, tmp_path: Path
) -> None:
    given = [*SETTINGS, f"head.rank={rank}", f"target.path={tiny_target}"]
    folder = heads.train.run(configured("heads.train", *given, f"output_dir={tmp_path / 'run'}"))
    card = json.loads((folder / "drafter_card.json").read_text())
    acceptance = card["acceptance"]
    assert acceptance["chain_block_efficiency"] == pytest.approx(acceptance["block_efficiency"])
    assert acceptance["block_efficiency"] > 1.9, "the first token is the target's own"
    assert "2 slot embeddings" in (folder / "README.md").read_text()
    plain = generate(load(tiny_target, dtype="float64"), "def add(a, b):", max_new_tokens=12)
    engine = load(tiny_target, folder, dtype="float64")
    assert isinstance(engine.drafter, SdsatDrafter)
    drafted = generate(engine, "def add(a, b):", max_new_tokens=12, stopping="fixed")
    assert drafted.tokens == plain.tokens and drafted.stats.tested > 0
    again = [*given, f"output_dir={tmp_path / 'again'}", f"head.path={folder}"]
    more = heads.train.run(configured("heads.train", *again))
    assert load_head(more).config == load_head(folder).config
    longer = configured("heads.train", *again, "loss.predict_n_tokens=4")
    with pytest.raises(UserError, match="3 slots for loss.predict_n_tokens=4, found 2"):
        heads.train.run(longer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("head.rank=-1", r"head.rank is -1, expected 0 \(none\) to 4096"),
        ("loss.predict_n_tokens=1", "loss.predict_n_tokens is 1, expected 2 or more"),
        ("loss.own_tokens=0.5", "no draft reads its own tokens"),
        ("on_policy.share=0.5", "none of whose predictions reads a token that it drafts"),
    ],
)
def test_invalid_settings_are_refused(change: str, words: str, tiny_target: Path) -> None:
    config = configured("heads.train", *SETTINGS, f"target.path={tiny_target}", change)
    with pytest.raises(UserError, match=words):
        heads.train.run(config)
