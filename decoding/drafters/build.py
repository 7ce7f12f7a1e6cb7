"""Make a drafter from a user's choice: its class, its options, and checks before loading."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from decoding.devices import device_of
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.fit import check_fits
from decoding.drafters.options import check_options
from decoding.drafters.other_vocabulary import OtherVocabulary
from decoding.drafters.registry import (
    AUTO,
    DRAFTERS,
    drafter_of,
    head_of,
    imported,
    unknown_drafter,
)
from decoding.drafters.remote import RemoteChain
from decoding.drafters.with_lookup import ChainWithLookup
from decoding.errors import UserError, without_stop
from decoding.interfaces import Drafter
from decoding.models.folder import read_config
from decoding.models.hub import find_folder, parse_hub_name
from decoding.models.native.linear import draft_dtype
from decoding.models.paths import exists
from decoding.models.text.compatible import ADVICE, check_same_tokenizer
from decoding.values import quote

TARGET_FOLDER = "target_folder"  # of classes that read the target's tokenizer
# arguments that are no options: those for models in memory, and the target's folder
_GIVEN = {"model", "vocabularies", TARGET_FOLDER}


@dataclass(frozen=True)
class DrafterChoice:
    """The class and the options of a drafter to make."""

    kind: type
    options: dict[str, Any]


def options_of(kind: type) -> set[str] | None:
    """Return the option names of a class, and of its bases if it forwards keyword arguments.

    Returns None if the class accepts any name.
    """
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = signature(vars(base)["__init__"]).parameters.values()
        names |= {
            one.name
            for one in parameters
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        } - {"self"}
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            return names
        # these forward all other options to their chain drafter
        if issubclass(kind, RemoteChain):
            return names | (options_of(imported(kind.kind)) or set())
        if base in (ChainWithLookup, OtherVocabulary):
            return names | (options_of(ChainDrafter) or set())
    return None


def refuse_unknown(where: str, kind: type, given: Iterable[Any], known: set[str]) -> None:
    """Raise UserError for the first given option that is unknown, naming the nearest known one.

    where: the beginning of the message. A model in memory is not an option.
    """
    choices = sorted(known - _GIVEN)
    for key in given:
        if key not in choices:
            near = get_close_matches(str(key), choices, n=1, cutoff=0.0)[0]
            raise UserError(
                f"{where} has the key '{key}', which {kind.__name__} does not take; the nearest "
                f"is '{near}'. Use one of {', '.join(choices)}."
            )


def with_target_settings(
    kind: type, given: Mapping[str, Any], *, backend: str, dtype: str, device: str, execution: str
) -> dict[str, Any]:
    """Return the options of a drafter with a folder, with the target's settings as defaults.

    With a native target the backend is None, since a drafter of another family runs on hf.
    execution: `auto` keeps the drafter's default. A dtype of `auto` is replaced by the dtype that
    suits the device.
    """
    shared: dict[str, Any] = {
        "backend": "hf" if backend == "hf" else None,
        "dtype": dtype,
        "device": device,
    }
    if execution != AUTO:
        shared["execution"] = execution
    taken = options_of(kind)
    options = {key: value for key, value in shared.items() if taken is None or key in taken}
    options |= given
    if options.get("dtype") == AUTO:
        options["dtype"] = draft_dtype(dtype, torch.device(device_of(options["device"])))
    return options


def check_folder(
    target_folder: str | Path,
    folder: str | Path,
    kind: type = ChainDrafter,
    any_target: bool = False,
) -> dict[str, str]:
    """Raise UserError for a drafter's folder that does not fit the target.

    A model needs the target's tokenizer, unless its class reads both tokenizers; a head must match
    the target's sizes and, unless any_target is set, its hash. Returns the further arguments of the
    class: the target's folder, if it takes one.
    """
    if TARGET_FOLDER not in (options_of(kind) or ()):
        if head_of(folder):
            check_fits(target_folder, folder, any_target)
        else:
            instead = f"let this one draft in its own: {{use: other_vocabulary, folder: {folder}}}."
            check_same_tokenizer(target_folder, folder, f"{ADVICE[:-1]}, or {instead}")
        return {}
    if head := head_of(folder):
        raise UserError(
            f"{folder} cannot draft for {target_folder}: it is a head ({head}), which reads the "
            f"target's hidden states, expected a model with another tokenizer. Use the folder of a "
            f"language model."
        )
    return {TARGET_FOLDER: str(target_folder)}


def choose_drafter(asked: str | Path | Mapping[str, Any]) -> DrafterChoice:
    """Return the class and options of the drafter that a user asks for, without loading weights.

    asked: a name, a folder, or a mapping {"use": name or folder, option: value}. Raises UserError
    for any other value, an unknown, missing or invalid option, and a folder without a valid
    config.json.
    """
    given = dict(asked) if isinstance(asked, Mapping) else {"use": asked}
    use = given.pop("use", None)
    if not isinstance(use, str | Path):
        raise UserError(
            f"drafter is {quote(asked)}, expected a name, a folder or a mapping with `use`. Use, "
            f"for example, {{'use': 'ranked_tree', 'folder': FOLDER}}."
        )
    name = str(use)
    if use not in DRAFTERS:
        folder = find_drafter_folder("drafter", use, sorted(DRAFTERS))
        name, given = drafter_of(folder), {"folder": folder, **given}
    entry = DRAFTERS[name]
    kind: type = imported(entry.kind)
    options = {**entry.options, **given}
    refuse_unknown(f"drafter '{use}'", kind, given, options_of(kind) or set())
    if entry.needs and not options.get(entry.needs):
        raise UserError(
            f"drafter '{use}' has no {entry.needs}, which is required. Use a mapping, "
            f"{{'use': '{name}', '{entry.needs}': ...}}."
        )
    check_options(f"drafter '{use}'", given)
    if "folder" in options:
        options["folder"] = _local(options["folder"])
        if not head_of(options["folder"]):
            read_config(options["folder"])
    return DrafterChoice(kind, options)


def find_drafter_folder(where: str, use: str | Path, names: list[str]) -> str | Path:
    """Return a drafter's existing path unchanged, and the folder of a name on the Hub.

    where: the start of a message. names: of drafters without a folder. Raises UserError for
    anything else.
    """
    if exists(Path(use)):
        return use
    unknown = unknown_drafter(where, str(use), names)
    if parse_hub_name(use) is None:
        raise unknown
    try:
        return _local(use)
    except UserError as error:
        raise UserError(f"{unknown} {without_stop(error)}.") from error


def _local(folder: str | Path) -> str | Path:
    """Return a path unchanged, and the folder of a name on the Hub."""
    return str(find_folder(folder)) if parse_hub_name(folder) else folder


def make_drafter(
    choice: DrafterChoice,
    target_folder: str | Path,
    *,
    backend: str,
    dtype: str,
    device: str,
    execution: str,
) -> Drafter:
    """Check a chosen drafter's folder and make the drafter, with the target's settings as defaults.

    Raises UserError if the folder does not fit the target, or the class rejects an option.
    """
    kind, options = choice.kind, choice.options
    if "folder" in options:
        more = check_folder(target_folder, options["folder"], kind)
        options = more | with_target_settings(
            kind, options, backend=backend, dtype=dtype, device=device, execution=execution
        )
    try:
        return kind(**options)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{kind.__name__} rejects the options {dict(options)}: {without_stop(error)}. "
            f"Correct or remove the option."
        ) from error
