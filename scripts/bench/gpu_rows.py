"""Ways to draft of part `exact`: every drafter of the law table, and more settings of them.

The table (tests/decoding/rows.py) needs no pytest. Nothing is trained. Drafters without a head
draft for the embedded target, whose first layers are their model. A recurrent head is random, and
so is its target, whose small vocabulary lets some drafts be accepted.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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
from scripts.bench.random_models import Shape, random_weights
from tests.decoding.rows import ROWS, Kit

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "assets" / "target"
VOCABULARY = 2048  # tokens of the embedded target
DRAFT_LAYERS = 4
TOY_LAYERS = (2, 1)  # layers of the target and of its draft model
RANDOM = Shape(2, 64, 4, 96, 2, 16, 24)
SPREAD = 0.3  # spread of the random target's weights; with less it repeats one token
TREE_RULES = ("greedy", "token", "coupled")


@dataclass(frozen=True)
class DraftingMode:
    """Way to draft, and the rules that verify it."""

    make: Callable[[Kit], Drafter]
    rules: tuple[str, ...] = TREE_RULES
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings besides the usual ones
    head: bool = False  # drafts with a random head for the random target
    # rounds wait once; not where the host computes a function of the text for every drafted token
    waits_once: bool = True

    @property
    def alone(self) -> bool:
        """Whether this way takes one prompt at a time."""
        schedule = self.settings.get("schedule")
        return schedule in VIRTUAL and VIRTUAL[schedule].one_row


def chain(kit: Kit) -> Drafter:
    """Return a chain of the first layers."""
    return ChainDrafter(model=kit.draft_model)


def tree(kit: Kit) -> Drafter:
    """Return a multi-candidate tree of the first layers."""
    return MultiCandidate(model=kit.draft_model, branching=(3, 2, 1))


def even_or_odd(text: Sequence[int]) -> Sequence[int]:
    """Return the tokens of the same parity as the last one, as a grammar."""
    return range(text[-1] % 2, VOCABULARY, 2)


def uses(folder: Path, device: str) -> dict[str, DraftingMode]:
    """Return all ways by name. folder: the draft model of a worker."""
    found = {
        row.name: DraftingMode(
            row.make,
            row.rules,
            {"num_draft_tokens": row.gamma or 3},
            row.name.startswith("recurrent"),
        )
        for row in ROWS
        if not row.name.startswith("oracle")  # test oracles are no product
    }
    found |= {name: DraftingMode(chain, settings={"schedule": name}) for name in VIRTUAL}
    found["pearl_wall"] = DraftingMode(
        lambda kit: RemoteChain(folder, dtype="float64", device=device, draft_cores=0),
        settings={"schedule": "pearl_wall"},
    )
    found["top-k and top-p"] = DraftingMode(chain, settings={"top_k": 20, "top_p": 0.9})
    found["cost ratio"] = DraftingMode(chain, settings={"stopping": "cost_ratio"})
    found["repetition penalty, chain"] = DraftingMode(chain, settings={"repetition_penalty": 1.3})
    found["repetition penalty, tree"] = DraftingMode(tree, settings={"repetition_penalty": 1.3})
    found["allowed tokens, chain"] = DraftingMode(
        chain, settings={"allowed": even_or_odd}, waits_once=False
    )
    found["allowed tokens, tree"] = DraftingMode(
        tree, settings={"allowed": even_or_odd}, waits_once=False
    )
    return found


def embedded_kit(
    dtype: str, device: str, execution: str, toy: bool = False, folder: Path | None = None
) -> Kit:
    """Return the embedded target and its first layers, which are also written to `folder`."""
    config, state = read_config(TARGET), load_state(TARGET)
    layers = TOY_LAYERS if toy else (config["num_hidden_layers"], DRAFT_LAYERS)

    def of(count: int) -> NativeTarget:
        shape, place = (
            NativeConfig.from_dict({**config, "num_hidden_layers": count}),
            torch.device(device),
        )
        weights = Weights(shape, state, DTYPES[dtype], place, packed=False)
        return NativeTarget(weights, f"{count} layers", execution=execution)

    if folder is not None:
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers[1]}))
        above = tuple(
            f"model.layers.{index}." for index in range(layers[1], config["num_hidden_layers"])
        )
        kept = {
            name: tensor.contiguous()
            for name, tensor in state.items()
            if not name.startswith(above)
        }
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
    target = of(layers[0])
    return Kit(target, target, of(layers[1]), ())


def random_kit(dtype: str, device: str, execution: str) -> Kit:
    """Return a random target, for which the drafter makes a random head."""
    weights = random_weights(RANDOM, DTYPES[dtype], device, 512, SPREAD)
    target = NativeTarget(weights, "random", execution=execution)
    return Kit(target, target, target, ())


def prompts(count: int, longest: int = 128, head: bool = False) -> list[list[int]]:
    """Return held-out prompts. head: in the vocabulary of the random target."""
    tokenizer = load_tokenizer(TARGET)
    lines = (ROOT / "assets" / "prompts.jsonl").read_text().splitlines()[:count]
    found = [tokenizer(json.loads(line)["turns"][0])["input_ids"][:longest] for line in lines]
    return [[token % RANDOM.vocab_size for token in prompt] for prompt in found] if head else found
