"""Head folders in other published layouts, and the check of a folder's form.

`scripts/export_head.py` and `scripts/check_head.py` are their commands. The tables of layouts are
those of the kinds of heads (`HeadKind.contract`).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.models.folder import (
    CARD,
    Tensors,
    hash_input,
    load_state,
    read_config,
    read_headers,
    read_json,
)
from decoding.models.native.weights import NativeConfig
from decoding.models.text.tokenizer import copy_tokenizer, has_tokenizer
from decoding.values import check_choice
from heads.registry import kind_in
from jobs.files import write_text
from training.heads.checkpoint import FolderLayout, check_sizes, write_head_files
from training.heads.folder import launch_blocks
from training.heads.kind import HeadKind
from training.heads.published import EMBEDDING_COPY, LM_HEAD_COPY, Contract, put, rename
from training.model_card import OURS, front_matter
from training.models.build import known_config


class Entry(NamedTuple):
    """One tensor of a folder, or one that config.json describes."""

    name: str  # in the file
    expected: list[int] | None  # shape; None: no reader knows the tensor
    found: list[int] | None  # shape; None: the file lacks it
    optional: bool = False  # may be left out

    @property
    def fault(self) -> str:
        """Return what is wrong with the tensor; empty if nothing is."""
        if self.expected is None:
            return "unknown"
        if self.found is None:
            return "" if self.optional else "missing"
        return "" if self.found == self.expected else f"has the shape {self.found}"

    def __str__(self) -> str:
        state = self.fault.upper() or ("left out" if self.found is None else "ok")
        return f"{self.name:<44} {self.expected or self.found!s:<16} {state}"


class Form(NamedTuple):
    """The form of a head folder."""

    layout: str
    tensors: list[Entry]
    notes: list[str]  # where the layers are, what servers ignore or read otherwise

    def check(self, folder: Path) -> None:
        """Raise UserError, naming all tensors that are wrong."""
        wrong = [f"{entry.name} {fault}" for entry in self.tensors if (fault := entry.fault)]
        if wrong:
            raise UserError(
                f"{folder} does not hold the head that config.json describes: {'; '.join(wrong)}. "
                f"Use config.json and weights of the same head."
            )


def contract_of(kind: HeadKind, folder: Path) -> Contract:
    """Return the published layouts of a kind. Raises UserError for a kind that no server reads."""
    if kind.contract is None:
        raise UserError(
            f"{folder} holds a head of the kind {kind.name}, which has no published layout but the "
            f"one that it is in. Expected an EAGLE, P-EAGLE, Medusa or block head."
        )
    return kind.contract


def export(
    folder: Path, name: str, out: Path, target: Path | None = None, block_layout: str | None = None
) -> list[str]:
    """Write a head in the layout `name`, and return notes on what was converted.

    target: a folder, whose embedding and output rows are written too if servers read them from such
    a head. block_layout: of the slots of a block drafter whose config.json does not name it. The
    weights keep their dtype and bits; tokenizer and card are copied, and a README names the
    commands that serve the head. Raises UserError for an unknown layout, a head that it cannot
    describe, another target, and a folder `out` that exists.
    """
    sizes = None if target is None else known_config(target)
    kind = kind_in(folder).assume(block_layout, sizes.num_hidden_layers if sizes else 0)
    contract = contract_of(kind, folder)
    check_choice("layout", name, [*contract.layouts])
    if out.exists():
        raise UserError(f"{out} exists already. Delete it, or name another folder.")
    shape = kind.read_shape(folder)
    layout = contract.layouts[name].of_shape(shape)
    layout.check_holds(shape, str(folder))
    stored_in = contract.layout_of(read_json(folder / "config.json")).weights
    head, dtype = kind.load(folder), _dtype_of(folder, stored_in)
    tensors = layout.tensors(head.state_dict(), shape)
    state = {layout.stored_name(name): tensor for name, tensor in tensors.items()}
    if target is not None:
        check_sizes(folder, shape, sizes)
        state |= target_ends(target, contract.copies, getattr(head, "token_ids_V", None))
    card = read_json(folder / CARD) if (folder / CARD).is_file() else {}
    values = layout.config(shape, dtype)
    if layout.verifier:
        put(values, layout.verifier, card.get("target"))
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    write_head_files(out, state, text, dtype, layout.weights)
    if has_tokenizer(folder):
        copy_tokenizer(folder, out)
    if card:
        copied = {"copy_of": {"drafter_hash": hash_input(folder)}, "layout": name}
        write_text(out / CARD, json.dumps(card | copied | {"drafter_hash": hash_input(out)}))
    notes = form_of(kind, out, shape).notes
    write_text(out / "README.md", readme(kind, shape, name, card, values, [*state], notes))
    return notes


def readme(
    kind: HeadKind,
    shape: Any,
    layout: str,
    card: Mapping[str, Any],
    values: Mapping[str, Any],
    tensors: Sequence[str],
    notes: Sequence[str],
) -> str:
    """Return the README of a head in a published layout, in the Hugging Face Hub's form.

    card: the head's, or {}. values: config.json. tensors: their names in the file. notes: see
    `Form`.
    """
    assert kind.contract is not None
    about = {"target": "TARGET", "num_draft_tokens": 0, **card, "shape": vars(shape)}
    parts = kind.readme(about)
    lines = launch_blocks(
        kind.contract.servers, shape, layout, about, parts.launch[:1], values, tensors
    )
    unknown = "" if "target" in card else " Put the target's path in the place of TARGET."
    return f"""{front_matter(about, OURS, parts.tag)}# {card.get("name", kind.name)} in the layout {layout}

{parts.title} for `{about["target"]}`: {parts.form}.
It only proposes tokens; the target decides every one of them, so the output is the target's. It reads that target's {parts.reads},
and works with no other. The weights are those of the exported folder, bit for bit.

## Run it

Run these lines in this folder, which they name `.`.{unknown} A line that is marked `run` was run with a head of this form.

{lines}

## The layout

{chr(10).join(f"- {note}" for note in notes) or "Servers ignore nothing in this folder."}

Made with Shallow Draft.
"""  # noqa: E501


def target_ends(target: Path, names: Collection[str], ids_N: Tensor | None) -> dict[str, Tensor]:
    """Return copies of a target's embedding and lm_head, those of `names`.

    ids_N: the draft vocabulary, whose rows the lm_head's copy has; None: all tokens.
    """
    state, sizes = load_state(target), NativeConfig.from_dict(read_config(target))
    embedding_VH = state["model.embed_tokens.weight"]
    rows_VH = embedding_VH if sizes.tied else state[LM_HEAD_COPY]
    ends = {
        EMBEDDING_COPY: embedding_VH,
        LM_HEAD_COPY: rows_VH if ids_N is None else rows_VH[ids_N],
    }
    return {name: each.clone() for name, each in ends.items() if name in names}


def _dtype_of(folder: Path, weights: str) -> torch.dtype:
    """Return the dtype of a folder's floating-point tensors; float32 if they differ."""
    stored = load_state(folder, weights=weights).values()
    found = {each.dtype for each in stored if each.is_floating_point()}
    return found.pop() if len(found) == 1 else torch.float32


def form_of(kind: HeadKind, folder: Path, shape: Any) -> Form:
    """Compare the tensors of a folder with those of a head of this shape.

    Raises UserError for files that cannot be read.
    """
    with torch.device("meta"):
        state = kind.empty(shape).state_dict()
    if kind.contract is None:
        headers = read_headers(folder)
        in_state = {kind.layout.stored_name(name): name for name in state}
        named = {in_state.get(name, name): name for name in headers}
        return Form("", _entries(state, kind.layout, named, headers, frozenset()), [])
    contract, values = kind.contract, read_json(folder / "config.json")
    layout = contract.layout_of(values).of_shape(shape)
    headers = read_headers(folder, layout.weights)
    named = {rename(name, contract.read_as): name for name in headers}
    named = {key: name for key, name in named.items() if key not in contract.copies}
    wanted = state | layout.tensors(state, shape)
    derived = contract.optional | (wanted.keys() - state.keys())
    notes = layout.numbering(shape)
    for server in contract.servers:
        notes += server.notes(layout.name, values, [*headers], shape)
    return Form(layout.name, _entries(wanted, layout, named, headers, derived), notes)


def _entries(
    wanted: Mapping[str, Tensor],
    layout: FolderLayout,
    named: Mapping[str, str],
    headers: Tensors,
    derived: frozenset[str],
) -> list[Entry]:
    """Return the entries of all tensors, by their names in the file.

    wanted: expected tensors by their names in the state dict. named: from these names to those of
    the file. derived: tensors that may be left out.
    """
    found = []
    for key in [*wanted, *(key for key in named if key not in wanted)]:
        name = named.get(key, layout.stored_name(key))
        shape = list(wanted[key].shape) if key in wanted else None
        stored = headers[name].shape if key in named else None
        found.append(Entry(name, shape, stored, key in derived))
    return found
