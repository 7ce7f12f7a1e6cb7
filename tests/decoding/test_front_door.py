"""`load` and `generate` with every drafter of the registry, and the drafters that they refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding import Engine, UserError, generate, load
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.parallel import ParallelChain
from decoding.drafters.registry import DRAFTERS, TRAINED, drafter_of, head_of, imported
from decoding.models.native import linear
from recurrent_drafting.checkpoint import save_head
from recurrent_drafting.head import HeadConfig, RecurrentHead
from tests.heads.rows import HEAD_ROWS
from training.heads import checkpoint

PROMPT = "def add(a, b):"


def write_recurrent(folder: Path, **sizes: int) -> None:
    """Write a recurrent head with random weights for the tiny target."""
    torch.manual_seed(3)
    shape = {"vocab_size": 2048, "hidden_size": 32, "exit_dim": 64, "num_draft_layers": 1}
    save_head(RecurrentHead(HeadConfig(**{**shape, **sizes})), folder)  # type: ignore[arg-type]


def write_head(name: str, target: Any, folder: Path) -> None:
    """Write a head with random weights to `folder`.

    name: a drafter with heads. target: the Hugging Face configuration of the head's target.
    """
    torch.manual_seed(3)
    row = next(row for row in HEAD_ROWS if row.kind.name == name)
    shape = row.shape(target)
    checkpoint.save_head(row.kind.layout, shape, row.kind.empty(shape), folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """Return a folder with a target, a model of its first layer, skips and every kind of head."""
    from training.models.build import load_causal_lm

    folder = tmp_path_factory.mktemp("front_door")
    shutil.copytree(tiny_target, folder / "target")
    shutil.copytree(tiny_target, folder / "model")
    model = load_causal_lm(tiny_target, torch.float32)
    for name in TRAINED:
        write_head(name, model.config, folder / name)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    model.save_pretrained(folder / "model")
    (folder / "skips").mkdir()
    (folder / "skips" / "skips.json").write_text(json.dumps({"attention": [2], "mlp": [1, 2]}))
    shutil.copytree(folder / "model", folder / "parallel")
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"pard_token": 6, "num_parallel_tokens": 4}
    (folder / "parallel" / "config.json").write_text(json.dumps(config))
    return folder


def asked(name: str, home: Path) -> dict[str, Any]:
    """Return the mapping that selects a drafter, with the options that it needs."""
    entry = DRAFTERS[name]
    folders = {
        "": {},
        "skips": {"skips": str(home / "skips")},
        "folder": {"folder": str(home / (name if (home / name).exists() else "model"))},
    }
    return {"use": name, **folders[entry.needs]}


def text(engine: Engine, **settings: Any) -> list[int]:
    return generate(engine, PROMPT, max_new_tokens=32, temperature=0.0, **settings).tokens


@pytest.fixture(scope="module")
def plain(home: Path) -> list[int]:
    return text(load(home / "target", dtype="float64"))


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_entry_is_a_class_that_takes_its_options(name: str) -> None:
    from decoding.drafters.build import options_of

    entry = DRAFTERS[name]
    kind = imported(entry.kind)
    assert {"propose", "observe", "open"} <= {*dir(kind)}
    assert {*entry.options, *([entry.needs] if entry.needs else [])} <= (options_of(kind) or set())


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_loads_by_name_and_keeps_greedy_text(
    name: str, home: Path, plain: list[int]
) -> None:
    engine = load(home / "target", asked(name, home), dtype="float64")
    assert type(engine.drafter) is imported(DRAFTERS[name].kind)
    assert text(engine) == plain


def test_control_the_draft_model_alone_writes_another_text(home: Path, plain: list[int]) -> None:
    assert text(load(home / "model", dtype="float64")) != plain


@pytest.mark.parametrize("name", [name for name, entry in DRAFTERS.items() if not entry.needs])
def test_a_drafter_without_a_folder_is_loaded_by_name(name: str, home: Path) -> None:
    assert type(load(home / "target", name).drafter) is imported(DRAFTERS[name].kind)


def test_a_folder_selects_the_drafter_of_its_model(home: Path, plain: list[int]) -> None:
    assert type(load(home / "target", home / "model").drafter) is ChainDrafter
    parallel: Any = load(home / "target", home / "parallel", dtype="float64").drafter
    assert type(parallel) is ParallelChain
    assert (parallel.tokens, parallel.mask_token) == (4, 6)
    shorter: Any = {"use": str(home / "parallel"), "tokens": 2}
    assert load(home / "target", shorter).drafter.width(9) == 2  # type: ignore[union-attr]
    as_chain = {"use": "chain", "folder": str(home / "parallel")}
    assert type(load(home / "target", as_chain).drafter) is ChainDrafter
    for name in TRAINED:
        found, entry = json.loads((home / name / "config.json").read_text()), DRAFTERS[name]
        assert found["model_type"] == entry.model_type or (
            {*found["architectures"]} & {*entry.architectures} or {*entry.marks} & found.keys()
        )
        assert head_of(home / name) == name
        engine = load(home / "target", home / name, dtype="float64")
        assert type(engine.drafter) is imported(DRAFTERS[name].kind)
        assert text(engine) == plain
    with_options = {"use": str(home / "recurrent"), "beam_width": 3, "name": "mine"}
    drafter: Any = load(home / "target", with_options).drafter
    assert (drafter.name, drafter.beam_width, drafter.capabilities.needs_costs) == ("mine", 3, True)


def test_a_block_drafter_of_deepspec_is_recognized(home: Path, plain: list[int]) -> None:
    """Check a folder whose options are at the top level of config.json, without a layout."""
    folder = shutil.copytree(home / "block", home / "deepspec")
    values = json.loads((folder / "config.json").read_text())
    options = values.pop("dflash_config")
    layout = "anchor_first" if values.pop("sample_from_anchor") else "fill_in"
    del options["taps"], options["projector_type"]
    (folder / "config.json").write_text(json.dumps({**values, **options}))
    assert head_of(folder) == drafter_of(folder) == "block"
    engine = load(home / "target", {"use": str(folder), "layout": layout}, dtype="float64")
    assert type(engine.drafter) is imported(DRAFTERS["block"].kind)
    assert text(engine) == plain
    with pytest.raises(UserError, match="Set layout=fill_in for files of z-lab's"):
        load(home / "target", folder)


def test_a_drafter_has_its_targets_dtype_and_backend_unless_specified(home: Path) -> None:
    model = str(home / "model")
    given: Any = load(home / "target", {"use": "ranked_tree", "folder": model}, dtype="float64")
    assert (given.drafter.model.dtype, given.drafter.model.backend) == ("float64", "native")
    given = load(home / "target", {"use": model, "dtype": "bfloat16"}, dtype="float64")
    assert given.drafter.model.dtype == "bfloat16"
    assert load(home / "target", model, backend="hf").drafter.model.backend == "hf"  # type: ignore[union-attr]


@pytest.mark.parametrize("execution", ["eager", "fused"])
def test_target_and_drafter_run_in_the_chosen_execution(execution: str, home: Path) -> None:
    engine: Any = load(home / "target", home / "model", execution=execution)
    assert (engine.target.execution, engine.drafter.model.execution) == (execution, execution)
    with pytest.raises(UserError, match="execution 'swift' is unknown, expected one of auto"):
        load(home / "target", execution="swift")


@pytest.mark.parametrize("name", ["eagle3", "block"])
def test_a_head_drafts_in_bfloat16_where_the_machine_multiplies_it(
    name: str, home: Path, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "native_dtype", lambda device: "bfloat16")
    for dtype, expected in (("float64", torch.float64), ("float32", torch.bfloat16)):
        engine = load(home / "target", home / name, dtype=dtype)
        drafter: Any = engine.drafter
        head = drafter.cache.head if name == "eagle3" else drafter.head
        assert {weight.dtype for weight in head.parameters()} == {expected}
        assert text(engine) == plain


def test_a_drafter_in_memory_is_used_unchanged(home: Path, plain: list[int]) -> None:
    mine = ChainDrafter(home / "model", dtype="float64")
    engine = load(home / "target", mine, dtype="float64")
    assert engine.drafter is mine
    assert text(engine) == plain


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ranked_tre", r"'ranked_tre' is neither a folder .*; the nearest is 'ranked_tree'\.$"),
        ("zzz", r"neither a folder \(looked in .*\) nor the name of a drafter \(block, .*\)"),
        ("chain", r"'chain' has no folder, .* Use a mapping, \{'use': 'chain', 'folder': ...\}"),
        ("self_speculation", "has no skips, which is required"),
        ({"folder": "x"}, "mapping with `use`"),
        ({}, "mapping with `use`"),
        ({"use": None}, "mapping with `use`"),
        ({"use": "chain", "folder": ""}, "has no folder"),
        ({"use": "chain", "folder": 3}, "folder is 3, expected a path"),
        ({"use": "chain", "folder": "/nowhere"}, "does not exist, expected a model folder"),
        (
            {"use": "prompt_lookup", "max_ngrams": 3},
            "has the key 'max_ngrams', which PromptLookup does not take; the nearest is "
            "'max_ngram'",
        ),
        ({"use": "prompt_lookup", "folder": "x"}, "has the key 'folder', which PromptLookup"),
        ({"use": "prompt_lookup", 3: 4}, "has the key '3', which PromptLookup does not take"),
        ({"use": "prompt_lookup", "min_ngram": 4}, "expected 1 <= min_ngram <= max_ngram"),
        ({"use": "prompt_lookup", "max_ngram": "x"}, "max_ngram is 'x', expected a whole number"),
        ({"use": "parallel", "folder": "{home}/model"}, "has no pard_token, .* 'chain'"),
        ({"use": "{home}/parallel", "tokens": 5}, "tokens is 5, expected 1 to 4"),
        ({"use": "{home}/parallel", "tokens": 0}, "tokens is 0, expected 1 to 4"),
        ({"use": "{home}/parallel", "mask_token": 7}, "is 7, expected the stored pard_token 6"),
        (
            {"use": "parallel", "folder": "{home}/model", "mask_token": 6},
            "has no num_parallel_tokens, .* tokens=8",
        ),
        (
            {"use": "parallel", "folder": "{home}/model", "mask_token": 2048, "tokens": 4},
            "pard_token is 2048, expected an id from 0 to 2047",
        ),
        ({"use": "recurrent", "folder": "{home}/model"}, "model_type is 'llama', expected"),
        ({"use": "chain", "folder": "{home}/recurrent"}, "recurrent"),
        ("{home}/wide", "hidden_size is 32 in the target and 48 in the head"),
        ("{home}/worded", "their tokenizers differ"),
    ],
    ids=str,
)
def test_invalid_drafters_are_refused(given: Any, words: str, home: Path) -> None:
    if not (home / "wide").exists():
        write_recurrent(home / "wide", hidden_size=48)
        shutil.copytree(home / "model", home / "worded")
        (home / "worded" / "tokenizer.model").unlink(missing_ok=True)
        tokenizer = home / "worded" / "tokenizer.json"
        found = json.loads(tokenizer.read_text())
        vocabulary = found["model"]["vocab"]
        if isinstance(vocabulary, dict):
            first, second = list(vocabulary)[300:302]
            vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        else:
            vocabulary[300][0], vocabulary[301][0] = vocabulary[301][0], vocabulary[300][0]
        tokenizer.write_text(json.dumps(found))

    def at_home(value: Any) -> Any:
        return value.replace("{home}", str(home)) if isinstance(value, str) else value

    if isinstance(given, dict):
        given = {key: at_home(value) for key, value in given.items()}
    with pytest.raises(UserError, match=words):
        load(home / "target", at_home(given))
