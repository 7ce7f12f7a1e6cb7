"""Published layouts of head folders as tables, from which folders are written, read and checked.

A path is a key of config.json, with dots between the keys of nested objects. A field is an
attribute of the head's shape. Layers are numbered as Hugging Face's hidden_states; a file may store
other numbers for the same states, and the table holds the difference.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.models.draft_vocabulary import D2T, T2D, is_drafted
from decoding.models.folder import WEIGHTS
from training.heads.config_keys import Key, architecture_note, get

EMBEDDING_COPY, LM_HEAD_COPY = "embed_tokens.weight", "lm_head.weight"  # of the target, in files
PROPOSALS = "speculators_config.proposal_methods"
OUTPUTS = -1  # the number of a decoder layer, from 0, whose output is hidden_states[number + 1]
HIDDEN_STATES = 0  # the number in hidden_states itself
_NUMBERS = {OUTPUTS: "decoder layers whose outputs these are", HIDDEN_STATES: "hidden_states"}
Renames = tuple[tuple[str, str], ...]  # regular expressions and their replacements


@dataclass(frozen=True)
class PublishedLayout:
    """A published layout, as a table (see `FolderLayout`)."""

    name: str
    fixed: Mapping[str, Any]  # path -> the value that it always has
    fields: Mapping[str, str]  # path -> field
    # path -> stored number less that of hidden_states; a reader uses the first path in the file
    layers: Mapping[str, int] = field(default_factory=dict)
    if_true: Mapping[str, str] = field(default_factory=dict)  # path -> field, left out if false
    only: Mapping[str, Any] = field(default_factory=dict)  # field -> the one value it can have
    # from tensors of the state dict to those of the file; `{field}` is a field of the shape
    renamed: Renames = ()
    left_out: frozenset[str] = frozenset()  # tensors of the state dict that are not written
    full_vocabulary: bool = False  # d2t and t2d are written for the full vocabulary too
    writes_t2d: bool = False  # t2d is written beside d2t though the head has none
    verifier: str = ""  # path of the target's name
    proposed: str = ""  # field: number of drafted tokens in speculators' method of proposal
    weights: str = WEIGHTS  # the file of tensors
    # object of config.json with the sizes, and the values that its writer leaves out
    inner: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def config(self, shape: Any, dtype: torch.dtype) -> dict[str, Any]:
        values: dict[str, Any] = {}
        given = {path: value for path, value in self.if_true.items() if getattr(shape, value)}
        for path, value in self.fixed.items():
            put(values, path, value)
        for path, name in {**self.fields, **given}.items():
            put(values, path, getattr(shape, name))
        for path, less in self.layers.items():
            if shape.taps:
                put(values, path, [tap + less for tap in shape.taps])
        if self.proposed:
            drafted = {"speculative_tokens": getattr(shape, self.proposed), "verifier_accept_k": 1}
            put(values, PROPOSALS, [{"proposal_type": "greedy", **drafted}])
        return values | {"torch_dtype": str(dtype).removeprefix("torch.")}

    def stored_name(self, name: str) -> str:
        return rename(name, self.renamed)

    def of_shape(self, shape: Any) -> "PublishedLayout":
        """Return the layout with the fields of a shape in the names of tensors."""
        fields = vars(shape)
        named = tuple((pattern, new.format(**fields)) for pattern, new in self.renamed)
        return replace(self, renamed=named)

    def extensions(self, shape: Any) -> list[str]:
        return []

    def tensors(self, state: Mapping[str, Tensor], shape: Any) -> dict[str, Tensor]:
        """Return the tensors that a file has, by their names in the state dict."""
        found = dict(state)
        if self.full_vocabulary and not shape.draft_vocab_size:
            found[D2T] = torch.zeros(shape.vocab_size, dtype=torch.long)
            found[T2D] = torch.ones(shape.vocab_size, dtype=torch.bool)
        if self.writes_t2d and D2T in found:
            found[T2D] = is_drafted(
                found[D2T] + torch.arange(len(found[D2T]), device=found[D2T].device),
                shape.vocab_size,
            )
        return {name: each for name, each in found.items() if name not in self.left_out}

    def with_names(self, stored: Mapping[str, Tensor], read_as: Renames) -> dict[str, Tensor]:
        """Return the tensors of a file by this layout's names. read_as: see `Contract`."""
        return {self.stored_name(rename(name, read_as)): each for name, each in stored.items()}

    def cannot_hold(self, shape: Any) -> list[str]:
        """Return what of a head the layout cannot describe."""
        wrong = [
            f"{name} is {_shown(getattr(shape, name))}, expected {_shown(value)}"
            for name, value in self.only.items()
            if getattr(shape, name) != value
        ]
        if self.layers and list(shape.taps) != sorted(shape.taps):
            wrong.append(
                f"taps are {list(shape.taps)}, expected rising layers, in whose order the states "
                f"are joined"
            )
        return wrong

    def check_holds(self, shape: Any, where: str) -> None:
        """Raise UserError for a head that the layout cannot describe. where: the head's folder."""
        if wrong := self.cannot_hold(shape):
            raise UserError(
                f"{where} cannot be written in the layout {self.name}: {'; '.join(wrong)}. Use "
                f"another layout, or train a head of this form."
            )

    def flatten(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with the keys of its inner object, and defaults, at the top level."""
        return {**self.defaults, **(values.get(self.inner) or {}), **values}

    def numbering(self, shape: Any) -> list[str]:
        """Describe where the file has the layers, and in which numbers."""
        return [
            f"hidden_states {listed(shape.taps)} are {[tap + less for tap in shape.taps]} in "
            f"{path} ({_NUMBERS[less]})"
            for path, less in self.layers.items()
            if shape.taps
        ]


class Launch(NamedTuple):
    """A command that serves a target with a head in the working folder."""

    command: str
    was_run: bool  # with a head of this form in this layout; False: written from its sources alone


def vllm_launch(target: str, was_run: bool, **speculative: Any) -> Launch:
    """Return vLLM's command. target: quoted for a shell. speculative: further keys."""
    given = json.dumps({"method": speculative.pop("method"), "model": ".", **speculative})
    return Launch(f"vllm serve {target} --speculative-config '{given}'", was_run)


def sglang_launch(target: str, algorithm: str, options: str) -> Launch:
    """Return SGLang's command. target: quoted for a shell. options: further ones."""
    return Launch(
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path . {options}",
        was_run=False,
    )


# target (quoted for a shell), layout, shape, tokens of a draft -> its command, if there is one
Launcher = Callable[[str, str, Any, int], Launch | None]


@dataclass(frozen=True)
class Server:
    """How a server reads folders of a kind of head."""

    name: str
    # path -> stored number less that of the state it reads; the first path in the file is used
    layers: Mapping[str, int] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)  # field -> value whatever the file has
    ignored: tuple[str, ...] = ()  # tensors that it skips
    refused: tuple[str, ...] = ()  # layouts that it does not read
    only: Mapping[str, Any] = field(default_factory=dict)  # field -> the one value that it reads
    # tensor -> field; without the tensor it does not load heads whose field is not 0
    needs: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[Key, ...] = ()  # that it may read otherwise than this project
    # layout -> architectures that it loads such heads by; it needs none in other layouts
    architectures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skips: Mapping[str, str] = field(default_factory=dict)  # paths -> what it does instead

    # layout, shape -> further reasons why it does not load a head, in words
    unreadable: Callable[[str, Any], list[str]] = lambda layout, shape: []
    launch: Launcher = lambda target, layout, shape, tokens: None

    def notes(
        self, layout: str, values: Mapping[str, Any], tensors: Sequence[str], shape: Any
    ) -> list[str]:
        """Describe what the server reads otherwise than the head was trained, or ignores.

        layout: the folder's. values: its config.json. tensors: their names in the file.
        """
        if refused := self.refusal(layout, shape):
            return [f"{self.name} {refused}"]
        notes = [self._layers_note(values, shape)] if self.layers else []
        notes += [
            f"ignores {name}={_shown(getattr(shape, name))} and computes with {_shown(value)}"
            for name, value in self.assumed.items()
            if getattr(shape, name) != value
        ]
        skipped = [name for name in tensors if name in self.ignored]
        notes += [f"ignores the tensors {', '.join(skipped)}"] if skipped else []
        notes += self.lacks(tensors, shape)
        notes += [
            architecture_note(values, self.architectures.get(layout, ())),
            *(key.note(layout, values, shape) for key in self.keys),
            *(
                f"ignores {path} and {does}"
                for path, does in self.skips.items()
                if get(values, path)
            ),
        ]
        return [f"{self.name} {note}" for note in notes if note]

    def launch_of(self, target: str, layout: str, shape: Any, tokens: int = 0) -> Launch | None:
        """Return the command that serves a target with the head; None if the server cannot.

        target: quoted for a shell. tokens: of a draft; 0: the usual number.
        """
        return None if self.refusal(layout, shape) else self.launch(target, layout, shape, tokens)

    def refusal(self, layout: str, shape: Any) -> str:
        """Return why the server does not load the head; empty if it does."""
        if layout in self.refused:
            return f"does not read the layout {layout}"
        wrong = [
            f"{name} {_shown(getattr(shape, name))}"
            for name, value in self.only.items()
            if getattr(shape, name) != value
        ]
        if wrong:
            return f"does not read a head with {', '.join(wrong)}"
        found = self.unreadable(layout, shape)
        return f"does not load the head: {'; '.join(found)}" if found else ""

    def lacks(self, tensors: Sequence[str], shape: Any) -> list[str]:
        """Return which tensors of the target the server needs beside those of the file."""
        return [
            f"needs {tensor} for {name} {getattr(shape, name)}: give export_head.py the target"
            for tensor, name in self.needs.items()
            if getattr(shape, name) and tensor not in tensors
        ]

    def misread_layers(self, values: Mapping[str, Any], shape: Any) -> str:
        """Return which other layers the server would read; empty if it reads the head's."""
        path, read = self._layers_in(values)
        if not path or read == tuple(shape.taps):
            return ""
        return (
            f"reads hidden_states {listed(read)} ({path}), NOT {listed(shape.taps)}: fewer "
            f"tokens would be accepted. Write the folder anew with scripts/export_head.py"
        )

    def _layers_in(self, values: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
        """Return the path that the server reads, and its layers as hidden_states."""
        for path, less in self.layers.items():
            if found := get(values, path):
                return path, tuple(number - less for number in found)
        return "", ()

    def _layers_note(self, values: Mapping[str, Any], shape: Any) -> str:
        path, read = self._layers_in(values)
        if not path:
            return f"finds no layers in {' or '.join(self.layers)} and reads its default ones"
        same = f"reads hidden_states {listed(read)} ({path}), as this project does"
        return self.misread_layers(values, shape) or same


@dataclass(frozen=True)
class Contract:
    """The published layouts of a kind of head, and the servers that read them."""

    layouts: Mapping[str, PublishedLayout]
    layout_of: Callable[[Mapping[str, Any]], PublishedLayout]  # from a config.json
    servers: tuple[Server, ...]
    read_as: Renames = ()  # from tensors of any layout to those of the state dict
    copies: frozenset[str] = frozenset()  # of the target's tensors in files, which are not read
    optional: frozenset[str] = frozenset()  # tensors that can be derived from others
    also_read: frozenset[str] = frozenset()  # keys of config.json that no layout writes


def rename(name: str, renames: Renames) -> str:
    """Return a tensor's name after all replacements."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path of config.json."""
    *outer, last = path.split(".")
    for key in outer:
        values = values.setdefault(key, {})
    values[last] = value


def within(key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return paths to the keys of an object of config.json."""
    return {f"{key}.{path}": value for path, value in values.items()}


def listed(numbers: Sequence[int]) -> str:
    """Return numbers in words."""
    return ", ".join(map(str, numbers))


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
