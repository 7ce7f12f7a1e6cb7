"""Drafters by what a user calls them: a model folder, a name in conf/drafter, or a mapping with
`_target_`; for every job that decodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from glob import glob
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decoding.devices import device_of
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.registry import HEADS, check_fits, head_of
from decoding.drafters.remote import RemoteChain
from decoding.drafters.with_lookup import ChainWithLookup, LookupFirst, check_lookup_before
from decoding.errors import UserError
from decoding.interfaces import Drafter
from decoding.models.folder import CARD, read_json
from decoding.models.native.linear import draft_dtype
from decoding.models.text.compatible import check_same_tokenizer
from decoding.schedules.by_name import WALL
from jobs.aliases import current_target
from jobs.config import TargetConfig
from jobs.drafter_use import ALONE, USE, Use
from jobs.paths import imported, resolve

CONTROL = "prompt_lookup"  # the drafter without a model that every report shows
AUTO = "auto"  # as a drafter's dtype: see decoding.models.native.linear.draft_dtype
CHAIN = "decoding.drafters.chain.ChainDrafter"
CONF = Path(__file__).resolve().parent.parent / "conf" / "drafter"


def describe(
    entries: Sequence[Any], target: TargetConfig, control: bool
) -> dict[str, dict[str, Any]]:
    """Drafter name -> the mapping that Hydra makes it from; the control row comes last unless it is
    named already.

    Raises UserError for an entry that is none of the three forms, and for two drafters of one name.
    """
    found: dict[str, dict[str, Any]] = {}
    for entry in [
        *_told_apart(_expanded(entries)),
        *([CONTROL] if control and CONTROL not in entries else []),
    ]:
        mapping = _mapping(entry, target)
        name = str(
            mapping.get("name") or Path(str(mapping.get("folder", mapping["_target_"]))).name
        )
        if "name" not in mapping:
            name += "".join(
                f"+{mapping[key]}" for key in ("schedule", "stopping", "verify") if key in mapping
            )
            name += "+lookup" * ("lookup" in mapping)
        if name in found:
            raise UserError(
                f"drafters: two entries are called {name!r}. Give one of them another name, as a "
                f"mapping: drafters=[{{use: {mapping.get('folder', 'NAME')}, name: another}}]."
            )
        found[name] = {**mapping, "name": name}
        _check_keys(name, found[name])
    if not found:
        raise UserError(
            "drafters is empty and so is the control. Name at least one, such as "
            "drafters=[runs/mine]."
        )
    return found


def _expanded(entries: Sequence[Any]) -> list[Any]:
    """The entries, a pattern such as `runs/sweep/*/drafter` replaced by the folders that it names,
    each called as its card says.

    Raises UserError for a pattern that names no folder.
    """
    found: list[Any] = []
    for entry in entries:
        if not isinstance(entry, str) or "*" not in entry:
            found.append(entry)
            continue
        folders = sorted(path for path in glob(entry) if Path(path, "config.json").is_file())
        if not folders:
            raise UserError(
                f"drafters: {entry!r} names no folder with a config.json in it (looked in "
                f"{Path.cwd()})."
            )
        found += [{"use": folder, "name": name_on_card(Path(folder))} for folder in folders]
    return found


def _told_apart(entries: Sequence[Any]) -> list[Any]:
    """The entries, folders that end in the same name (`runs/a/drafter`, `runs/b/drafter`) called as
    their cards say.
    """
    last = [Path(entry).name for entry in {entry for entry in entries if isinstance(entry, str)}]
    return [
        {"use": entry, "name": name_on_card(resolve(entry))}
        if isinstance(entry, str)
        and last.count(Path(entry).name) > 1
        and "/" in entry
        and resolve(entry).is_dir()
        else entry
        for entry in entries
    ]


def name_on_card(folder: Path) -> str:
    """What a drafter folder's card calls it; the folder where it has none."""
    card = folder / CARD
    return str(read_json(card)["name"]) if card.is_file() else str(folder)


def check_entries(entries: Sequence[Any]) -> None:
    """Raise UserError for keys that an entry's drafter does not take, and for ways to use it that
    there are not.

    Nothing is loaded and no model has to be there: a stage of an experiment may yet write it.
    """
    for entry in entries:
        if isinstance(entry, dict) and {"use", "_target_"} & entry.keys():
            use = str(entry.get("use", ""))
            kinds = (
                [current_target(str(entry["_target_"]))] if "_target_" in entry else _possible(use)
            )
            given = {key: value for key, value in entry.items() if key != "use"}
            _check_keys(
                str(entry.get("name") or use or kinds[0]),
                {**given, "_target_": kinds[0]},
                kinds[1:],
            )
            Use(**{key: entry[key] for key in USE if key in entry})
            if entry.get("lookup") is not None:
                check_lookup_before(imported(str(kinds[0])))


def _possible(use: str) -> list[str]:
    """The classes that may come of `use`: of a folder that a stage has yet to write nobody knows
    whether it holds a model or a head.
    """
    if use in _names():
        return [_target(use)]
    if Path(use).exists():
        return [_target(head) if (head := head_of(use)) else CHAIN]
    return [CHAIN, *map(_target, HEADS.values())]


def _target(name: str) -> str:
    return str(_written(CONF / f"{name}.yaml")["_target_"])


def _check_keys(name: str, mapping: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Raise UserError for a class that is not there, and for a key that neither it nor the loop
    takes, with the nearest one.

    others: classes that it may turn out to be instead.
    """
    kind = _kind(name, mapping)
    taken = _arguments(kind)
    if taken is None:
        return
    for other in others:
        taken = taken | (_arguments(imported(other)) or set())
    if kind is ChainDrafter:  # some schedules move it into a worker
        taken |= _arguments(RemoteChain) or set()
    known = sorted({*taken, *USE} - {"model", "self"})
    for key in mapping:
        if key not in known and key != "_target_":
            near = get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise UserError(
                f"drafters: {name} has the key '{key}', which {kind.__name__} does not take; the "
                f"nearest is '{near}' (of {', '.join(known)})."
            )


def _kind(name: str, mapping: Mapping[str, Any]) -> type:
    """The class that a mapping names."""
    try:
        return imported(str(mapping["_target_"]))  # type: ignore[no-any-return]
    except ImportError as error:
        raise UserError(
            f"drafters: {name} wants the class {mapping['_target_']}, which cannot be had: {error}"
        ) from error


def _arguments(kind: type) -> set[str] | None:
    """Names that a class can be made with, those it hands on to its bases among them; None: any."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = signature(vars(base)["__init__"]).parameters.values()
        names |= {
            one.name
            for one in parameters
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        }
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            return names
        # what these do not take themselves is their chain drafter's
        if base in (RemoteChain, ChainWithLookup):
            return names | (_arguments(ChainDrafter) or set())
    return None


def uses(mappings: dict[str, dict[str, Any]], default: Use) -> dict[str, Use]:
    """How each drafter is used: as its mapping says, else as all are. The control is always used
    plainly.
    """
    return {
        name: replace(
            Use() if name == CONTROL else default,
            **{key: mapping[key] for key in USE if key in mapping},
        )
        for name, mapping in mappings.items()
    }


def build(
    mappings: dict[str, dict[str, Any]],
    uses: dict[str, Use],
    target_folder: Path,
    beside: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Make the drafters, in a worker process where the schedule needs that.

    Those with a model folder must share every token id with the target, a head its sizes and its
    card's hash (UserError). beside: the target's device -> the one for a drafter that works at the
    same time; one whose mapping names RemoteChain or another device stays where that says.
    """
    drafters = {}
    for name, mapping in mappings.items():
        if "folder" in mapping:
            check = check_fits if head_of(mapping["folder"]) else check_same_tokenizer
            check(target_folder, Path(mapping["folder"]))
        try:
            made = {key: value for key, value in mapping.items() if key not in USE}
            if uses[name].schedule in WALL and made["_target_"] == CHAIN:
                made["_target_"] = "decoding.drafters.remote.RemoteChain"
                if beside and made.get("device") in beside:
                    made["device"] = beside[made["device"]]
            lookup = uses[name].lookup
            if lookup is not None:
                made |= {
                    "_target_": "jobs.drafters.looked_up",
                    "kind": made["_target_"],
                    "min_match": lookup,
                }
            drafters[name] = instantiate(made)
            if uses[name].schedule == ALONE and not isinstance(drafters[name], ChainDrafter):
                raise UserError(
                    f"drafters: {name} has schedule={ALONE}, but a {type(drafters[name]).__name__} "
                    f"cannot write a text of its own: give the folder of a model."
                )
        except InstantiationException as error:
            # Hydra wraps what the drafter itself had to say
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise UserError(
                f"drafters: {name} could not be made from {mapping}: {error.__cause__ or error}"
            ) from error
    return drafters


def looked_up(kind: str, min_match: int, **named: Any) -> Drafter:
    """A drafter of this class with suffix lookup before it; named: what the drafter takes."""
    check_lookup_before(imported(kind))
    return LookupFirst(imported(kind)(**named), min_match)


def _mapping(entry: Any, target: TargetConfig) -> dict[str, Any]:
    """The mapping of an entry; a drafter with a model folder runs as the target does, but for what
    its file and the entry say.
    """
    if isinstance(entry, dict) and "_target_" in entry:
        return {**entry, "_target_": current_target(str(entry["_target_"]))}
    given = dict(entry) if isinstance(entry, dict) else {"use": entry}
    use = given.pop("use", None)
    if not isinstance(use, str):
        raise UserError(
            f"drafters: {entry!r} is a {type(entry).__name__} without `use` or `_target_`; "
            f"expected a folder, a name in conf/drafter, or a mapping with `use` (one of these) or "
            f"`_target_` (the class to make, such as decoding.drafters.chain.ChainDrafter)."
        )
    if not use or given.get("folder") == "":
        raise UserError(
            f"drafters: {entry!r} names no model. Give draft_model=FOLDER to an experiment whose "
            f"drafters share one."
        )
    file = CONF / f"{use}.yaml"
    if file.is_file():
        mapping = _load(file, given)
    elif Path(use).exists():
        head = head_of(use)
        mapping = {"_target_": CHAIN, "folder": use, **given}
        if head:
            mapping = _load(CONF / f"{head}.yaml", {"name": Path(use).name, "folder": use, **given})
    else:
        near = get_close_matches(use, _names(), n=1)
        raise UserError(
            f"drafters: {use!r} is neither a folder (looked in {Path.cwd()}) nor one of "
            f"conf/drafter ({', '.join(_names())})"
            + (f"; the nearest is '{near[0]}'." if near else ".")
        )
    if "folder" in mapping:
        # Beside a native target a drafter of another family runs on the hf backend: None lets it
        # choose.
        backend = "hf" if target.backend == "hf" else None
        shared = {"backend": backend, "dtype": target.dtype, "device": target.device}
        if target.execution:
            shared["execution"] = target.execution
        taken = _arguments(_kind(use, mapping))
        shared = {key: value for key, value in shared.items() if taken is None or key in taken}
        mapping = {**shared, **mapping, "folder": str(resolve(mapping["folder"]))}
        if mapping.get("dtype") == AUTO:
            mapping["dtype"] = draft_dtype(target.dtype, torch.device(device_of(mapping["device"])))
    return mapping


def _names() -> list[str]:
    """The files of conf/drafter that make a drafter; the others are shapes to train."""
    return sorted(path.stem for path in CONF.glob("*.yaml") if "_target_" in path.read_text())


def _written(file: Path) -> DictConfig:
    """A file of conf/drafter as it stands. Raises UserError for one that makes no drafter."""
    written = OmegaConf.load(file)
    if not isinstance(written, DictConfig) or "_target_" not in written:
        raise UserError(
            f"{file}: no _target_. A drafter's file names the class to make, such as "
            f"decoding.drafters.chain.ChainDrafter."
        )
    return written


def _load(file: Path, given: dict[str, Any]) -> dict[str, Any]:
    """A file of conf/drafter with the given keys in it. Raises UserError for what is missing."""
    written = _written(file)
    try:
        loaded = OmegaConf.to_container(
            OmegaConf.merge(written, given), resolve=True, throw_on_missing=True
        )
    except OmegaConfBaseException as error:
        raise UserError(
            f"{file}: {str(error).splitlines()[0]}. Give such a drafter as a mapping: {{use: "
            f"{file.stem}, folder: ...}}."
        ) from error
    assert isinstance(loaded, dict), "it was one"
    return {str(key): value for key, value in loaded.items()}
