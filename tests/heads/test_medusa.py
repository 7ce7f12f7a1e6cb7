"""Medusa heads: both published layouts, the static tree and its size from costs, and training."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu

import heads.train
from decoding import generate, load
from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from heads.medusa.checkpoint import load_heads
from heads.medusa.drafter import MedusaDrafter
from heads.medusa.layouts import ORIGINAL, VLLM
from heads.medusa.model import MedusaConfig, MedusaHeads
from heads.rank_trees import choose_tree, default_tree, grow_tree
from tests.heads.test_heads_train import configured
from training.heads import checkpoint

SHAPE = MedusaConfig(vocab_size=11, hidden_size=6, num_heads=3, num_layers=2)


def random_heads(**fields: Any) -> MedusaHeads:
    torch.manual_seed(0)
    made = MedusaHeads(replace(SHAPE, **fields))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made.eval().requires_grad_(False)


def save(made: MedusaHeads, folder: Path) -> Path:
    checkpoint.save_head(VLLM, made.config, made, folder)
    return folder


def save_original(made: MedusaHeads, folder: Path) -> Path:
    """Save heads in the original layout, as FasterDecoding/Medusa does."""
    heads, layers = made.config.num_heads, made.config.num_layers
    folder.mkdir()
    config = {"medusa_num_heads": heads, "medusa_num_layers": layers, "version": "2"}
    (folder / "config.json").write_text(json.dumps(config))
    layout = ORIGINAL.of_shape(made.config)
    state = {layout.stored_name(name): each for name, each in made.state_dict().items()}
    save_file(state, folder / "medusa_lm_head.safetensors")
    return folder


# ------------------------------------------------------------------------------------ layouts


def test_heads_are_residual_blocks_and_a_projection_each():
    """Compare outputs with the published equations, on weights under their published names."""
    made, state = random_heads(), torch.randn(5, SHAPE.hidden_size)
    named = {VLLM.stored_name(name): each for name, each in made.state_dict().items()}
    expected = []
    for head in range(3):
        x_MH = state
        for block in range(2):
            at = f"blocks.{head}.layers.{block}"
            x_MH = x_MH + silu(linear(x_MH, named[f"{at}.weight"], named[f"{at}.bias"]))
        expected.append(linear(x_MH, named[f"lm_heads.{head}.weight"]))
    torch.testing.assert_close(made(state), torch.stack(expected, 1))


@pytest.mark.parametrize(
    "fields",
    [{}, {"shared": True}, {"draft_vocab_size": 4}, {"accuracy": ((0.5, 0.25),) * 3}],
    ids=str,
)
def test_a_saved_folder_loads_equal_in_vllms_layout(fields: dict[str, Any], tmp_path: Path):
    made = random_heads(**fields)
    if made.token_ids_V is not None:
        made.token_ids_V = torch.tensor([1, 3, 4, 9])
    back = load_heads(save(made, tmp_path / "heads"))
    assert back.config == made.config
    assert all(torch.equal(back.state_dict()[name], t) for name, t in made.state_dict().items())
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert (config["model_type"], config["medusa_fc_bias"]) == ("medusa", True)
    assert config["original_lm_head"] == made.config.shared


def test_a_saved_folder_loads_equal_in_the_original_layout(tmp_path: Path):
    made = random_heads()
    save_original(made, tmp_path / "heads")
    names = load_file(tmp_path / "heads" / "medusa_lm_head.safetensors").keys()
    assert {"0.0.linear.weight", "0.1.linear.bias", "2.2.weight"} <= names
    back = load_heads(tmp_path / "heads")
    assert back.config == SHAPE
    assert all(torch.equal(back.state_dict()[name], t) for name, t in made.state_dict().items())


def test_the_front_door_drafts_from_the_original_layout(tiny_target: Path, tmp_path: Path):
    torch.manual_seed(0)
    made = MedusaHeads(MedusaConfig(vocab_size=2048, hidden_size=32, num_heads=2))
    save_original(made, tmp_path / "heads")
    engine = load(tiny_target, {"use": str(tmp_path / "heads"), "shape": "chain"}, dtype="float64")
    assert isinstance(engine.drafter, MedusaDrafter)
    plain = generate(load(tiny_target, dtype="float64"), "def f(x):", max_new_tokens=8)
    drafted = generate(engine, "def f(x):", max_new_tokens=8, stopping="fixed")
    assert drafted.tokens == plain.tokens and drafted.stats.tested > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected 'medusa'"),
        ({"num_heads": 0}, "num_heads is 0, expected a whole number of 1 or more"),
        ({"num_heads": 4}, r"lm_heads\.3\.weight is missing"),
        ({"hidden_size": 7}, r"has the shape \[6, 6\], expected \[7, 7\]"),
        (
            {"truncated_vocab_size": 12},
            "truncated_vocab_size is 12, expected a whole number from 0 to 11",
        ),
        ({"original_lm_head": "yes"}, "original_lm_head is 'yes', expected true or false"),
        ({"medusa_accuracy": [[2.0]]}, "expected a list of shares from 0 to 1"),
    ],
    ids=str,
)
def test_inconsistent_folders_are_refused(change: dict[str, Any], words: str, tmp_path: Path):
    file = save(random_heads(), tmp_path / "heads") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=words):
        load_heads(tmp_path / "heads")


def test_damaged_weights_and_pickles_are_refused(tmp_path: Path):
    folder = save(random_heads(), tmp_path / "heads")
    state = load_file(folder / "model.safetensors")
    state["lm_heads.1.weight"][0, 0] = float("nan")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match="non-finite weights"):
        load_heads(folder)
    original = tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 2}')
    with pytest.raises(UserError, match="Copy the folder again"):
        load_heads(original)
    (original / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(UserError, match="a pickle, which can run code"):
        load_heads(original)


# ------------------------------------------------------------------------------------ the tree

ACCURACY = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.4, 0.3, 0.1]]


def value(path: tuple[int, ...]) -> float:
    return math.prod(row[rank] for row, rank in zip(ACCURACY, path, strict=False))


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_the_tree_of_every_size_is_the_best(size: int):
    """Check that no tree of the size has a larger sum of path probabilities.

    The grown tree is compared with all trees of the ten likeliest paths in which every node has
    its parent.
    """
    grown = dict(grow_tree(ACCURACY, size))
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    likely = sorted(paths, key=value, reverse=True)[:10]
    best = max(
        sum(map(value, chosen))
        for chosen in itertools.combinations(likely, size)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )
    assert sum(grown.values()) == pytest.approx(best)
    assert all(share == pytest.approx(value(path)) for path, share in grown.items())
    assert all(len(path) == 1 or path[:-1] in grown for path in grown)


def test_the_size_has_the_most_tokens_per_millisecond():
    steep = RoundCosts(0.1, tuple(1 + 0.2 * n for n in range(70)))
    rates = {}
    for size in range(1, 40):
        tokens = 1 + sum(share for _, share in grow_tree(ACCURACY, size))
        rates[size] = tokens / steep.drafted_ms(steep.t_draft_ms, size)
    assert len(choose_tree(ACCURACY, steep)) == max(rates, key=rates.__getitem__)
    flat = RoundCosts(0.1, (1.0,) * 70)
    assert len(choose_tree(ACCURACY, flat, most=30)) == 30, "forwards of any width cost the same"
    assert choose_tree(ACCURACY, RoundCosts(9.0, (1.0, 2.0))) == [], "no draft pays"
    assert len(choose_tree(ACCURACY, None, most=7)) == 7


def test_heads_without_accuracies_draft_a_tree_around_the_chain_of_best_tokens():
    paths = default_tree(3)
    assert {(0,), (0, 0), (0, 0, 0), (1,), (0, 1)} <= set(paths)
    assert all(path[:-1] in paths for path in paths if len(path) > 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "bush"}, "shape is 'bush', expected tree or chain"),
        ({"choices": [[0, 0, 0, 0]]}, "expected paths of at most 3 ranks"),
        ({"choices": [[11]]}, "from 0 to 10"),
        ({"choices": []}, "expected paths"),
        ({"max_nodes": 0}, "max_nodes is 0, expected 1 or more"),
        ({"children": "drawn"}, "children is 'drawn'"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        MedusaDrafter(heads=random_heads(), **options)


def test_heads_of_a_fused_target_compute_the_same(tmp_path: Path):
    """Compare fused heads with eager ones, and check that those in memory keep their gradients."""
    folder = save(random_heads(draft_vocab_size=4), tmp_path / "heads")
    states = torch.randn(5, SHAPE.hidden_size)
    eager, fused = (MedusaDrafter(folder, execution=each).heads for each in ("eager", "fused"))
    torch.testing.assert_close(fused(states), eager(states))
    assert "forward" in vars(fused.projections[0]) and "forward" not in vars(eager.projections[0])
    trained = random_heads().requires_grad_(True)
    MedusaDrafter(heads=trained, execution="fused")
    trained(states).sum().backward()
    assert trained.projections[0].weight.grad is not None


# ------------------------------------------------------------------------------------ the job


def test_heads_are_trained_and_loaded_by_the_front_door(tiny_target: Path, tmp_path: Path):
    """Check that heads trained from chats draft, and that greedy output stays the target's.

    Changed accuracies in the folder's config.json change the tree.
    """
    given = ["head=medusa", f"target.path={tiny_target}", f"output_dir={tmp_path / 'run'}"]
    folder = heads.train.run(configured("heads.train", *given))
    config = json.loads((folder / "config.json").read_text())
    assert len(config["medusa_accuracy"]) == config["num_heads"] == 4
    assert all(0 <= sum(row) <= 1 for row in config["medusa_accuracy"])
    card = json.loads((folder / "drafter_card.json").read_text())
    assert card["acceptance"]["tree_block_efficiency"] >= 1
    plain = generate(load(tiny_target, dtype="float64"), "def add(a, b):", max_new_tokens=12)
    engine = load(tiny_target, {"use": str(folder), "by_cost": False}, dtype="float64")
    assert isinstance(engine.drafter, MedusaDrafter) and engine.drafter.depth > 0
    drafted = generate(engine, "def add(a, b):", max_new_tokens=12, stopping="fixed")
    assert drafted.tokens == plain.tokens and drafted.stats.tested > 0
    sure = {**config, "medusa_accuracy": [[1.0]] * 4}
    (folder / "config.json").write_text(json.dumps(sure))
    assert MedusaDrafter(folder).width(9) == 4 < engine.drafter.width(9)


def test_own_tokens_are_refused():
    """Check that loss.own_tokens is refused, because no Medusa head reads its own tokens."""
    config = configured("heads.train", "head=medusa", "target=embedded", "loss.own_tokens=0.5")
    with pytest.raises(UserError, match="no draft reads its own tokens"):
        heads.train.run(config)
