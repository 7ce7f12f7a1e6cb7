"""Ways to draft of part `exact`: the drafters that tests decode with, and further settings.

The table of drafters (tests/decoding/rows.py) needs no pytest. Nothing is trained. Drafters without
a head draft for the embedded target, whose first layers are their model. A recurrent head is
random, and so is its target, whose small vocabulary lets some drafts be accepted.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.remote import RemoteChain
from decoding.drafters.trees.multi_candidate import MultiCandidate
from decoding.interfaces import Drafter
from decoding.models.folder import load_state, read_config
from decoding.models.load import DTYPES
from decoding.models.native.model import NativeTarget
from decoding.models.native.weights import NativeConfig, Weights
from decoding.models.text.tokenizer import load_tokenizer
from decoding.schedules.by_name import VIRTUAL
from scripts.bench.random_models import llama, random_weights
from tests.decoding.rows import ROWS, Kit

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "assets" / "target"
VOCABULARY = 2048  # tokens of the embedded target
LAYERS = (14, 4)  # layers of the target and of its draft model
TOY_LAYERS = (2, 1)
# with less spread of its weights, it repeats one token
RANDOM = llama(2, 64, 4, 96, 2, 16, vocab_size=24, spread=0.3)
TREE_RULES = ("greedy", "token", "coupled")


@dataclass(frozen=True)
class DraftingMode:
    """A way to draft, and the rules that verify its drafts."""

    make: Callable[[Kit], Drafter]
    rules: tuple[str, ...] = TREE_RULES
    settings: Mapping[str, Any] = field(default_factory=dict)  # changes of the usual settings
    head: bool = False  # drafts with a random head for the random target
    # rounds wait once, unless the host computes a function of the text for every drafted token
    waits_once: bool = True
    one_row: bool = False  # takes one prompt at a time


def make_chain(kit: Kit) -> Drafter:
    """Return a chain drafter that runs the kit's draft model."""
    return ChainDrafter(model=kit.draft_model)


def make_tree(kit: Kit) -> Drafter:
    """Return a multi-candidate tree drafter that runs the kit's draft model."""
    return MultiCandidate(model=kit.draft_model, branching=(3, 2, 1))


def same_parity(text: Sequence[int]) -> Sequence[int]:
    """Return the ids with the parity of the text's last one, as a grammar that allows them."""
    return range(text[-1] % 2, VOCABULARY, 2)


def drafting_modes(folder: Path, device: str) -> dict[str, DraftingMode]:
    """Return all ways to draft by name.

    folder, device: model folder and device of the drafter in `pearl_wall`'s worker process.
    """
    found = {
        row.name: DraftingMode(
            row.make,
            row.rules,
            {"num_draft_tokens": row.gamma or 3},
            head=row.name.startswith("recurrent"),
        )
        for row in ROWS
        if not row.name.startswith("oracle")  # test oracles are no product
    }
    for name, schedule in VIRTUAL.items():
        found[name] = DraftingMode(
            make_chain, settings={"schedule": name}, one_row=schedule.one_row
        )
    found["pearl_wall"] = DraftingMode(
        lambda kit: RemoteChain(folder, dtype="float64", device=device, draft_cores=0),
        settings={"schedule": "pearl_wall"},
    )
    found["top-k and top-p"] = DraftingMode(make_chain, settings={"top_k": 20, "top_p": 0.9})
    found["cost ratio"] = DraftingMode(make_chain, settings={"stopping": "cost_ratio"})
    for name, make in (("chain", make_chain), ("tree", make_tree)):
        penalty, allowed = {"repetition_penalty": 1.3}, {"allowed": same_parity}
        found[f"repetition penalty, {name}"] = DraftingMode(make, settings=penalty)
        found[f"allowed tokens, {name}"] = DraftingMode(make, settings=allowed, waits_once=False)
    return found


def embedded_kit(dtype: str, device: str, execution: str, toy: bool = False) -> Kit:
    """Return a kit of the embedded target, with its first layers as the draft model."""
    config, state = read_config(TARGET), load_state(TARGET)

    def first_layers(count: int) -> NativeTarget:
        shape = NativeConfig.from_dict({**config, "num_hidden_layers": count})
        weights = Weights(shape, state, DTYPES[dtype], torch.device(device), packed=False)
        return NativeTarget(weights, f"{count} layers", execution=execution)

    target, draft_model = map(first_layers, TOY_LAYERS if toy else LAYERS)
    return Kit(target, target, draft_model, ())


def write_draft_model(folder: Path, toy: bool) -> None:
    """Write the draft model of `embedded_kit` to a folder."""
    layers = (TOY_LAYERS if toy else LAYERS)[1]
    model: Any = AutoModelForCausalLM.from_pretrained(
        TARGET, trust_remote_code=False, dtype="auto", num_hidden_layers=layers
    )
    model.save_pretrained(folder)


def make_kits(dtype: str, device: str, execution: str, toy: bool) -> dict[bool, Kit]:
    """Return the kits by `DraftingMode.head`: the embedded target's, and a random target's."""
    weights = random_weights(RANDOM, DTYPES[dtype], device)
    target = NativeTarget(weights, "random", 512, execution=execution)
    embedded = embedded_kit(dtype, device, execution, toy)
    return {False: embedded, True: Kit(target, target, target, ())}


def tokenize_prompts(count: int, longest: int = 128, head: bool = False) -> list[list[int]]:
    """Return the ids of the first `count` embedded prompts, each cut to `longest` tokens.

    head: whether to map the ids into the small vocabulary of the random target.
    """
    tokenizer = load_tokenizer(TARGET)
    lines = (ROOT / "assets" / "prompts.jsonl").read_text().splitlines()[:count]
    found = [tokenizer(json.loads(line)["turns"][0])["input_ids"][:longest] for line in lines]
    return [[token % RANDOM.vocab_size for token in prompt] for prompt in found] if head else found
