"""Drafters as users name them, for every job that decodes.

An entry is a folder, a name of the registry or of conf/drafter, or a mapping with `_target_`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, OmegaConf

from decoding.drafters.build import check_folder, options_of, refuse_unknown, with_target_settings
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.registry import DRAFTERS, HEADS, head_of, imported, unknown_drafter
from decoding.drafters.remote import RemoteChain
from decoding.drafters.with_lookup import LookupFirst, check_lookup_before
from decoding.errors import UserError
from decoding.interfaces import Drafter
from decoding.models.folder import CARD, read_json
from decoding.schedules.by_name import WALL
from jobs.aliases import current_target
from jobs.config import TargetConfig
from jobs.drafter_use import ALONE, USE, DrafterUse
from jobs.paths import data_folder, resolve

CONTROL = "prompt_lookup"  # the drafter without a model that every report shows
# class of a chain drafter whose schedule runs it at the same time as the target
WORKER = f"{RemoteChain.__module__}.{RemoteChain.__qualname__}"
CONF = data_folder("conf") / "drafter"


def describe(
    entries: Sequence[Any], target: TargetConfig, control: bool
) -> dict[str, dict[str, Any]]:
    """Return drafter name -> the mapping that Hydra instantiates.

    control: add the control row at the end, unless an entry names it already. Raises UserError for
    an entry of none of the three forms, and for two drafters of the same name.
    """
    found: dict[str, dict[str, Any]] = {}
    for entry in [
        *_disambiguate(_expand_patterns(entries)),
        *([CONTROL] if control and CONTROL not in entries else []),
    ]:
        mapping = _build_mapping(entry, target)
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
            "drafters is empty and the control is off. Name at least one drafter, such as "
            "drafters=[runs/mine]."
        )
    return found


def _expand_patterns(entries: Sequence[Any]) -> list[Any]:
    """Replace patterns such as `runs/sweep/*/drafter` by the folders that match.

    Each folder is named as on its card. Raises UserError for a pattern without a match.
    """
    found: list[Any] = []
    for entry in entries:
        if not isinstance(entry, str) or "*" not in entry:
            found.append(entry)
            continue
        folders = sorted(path for path in glob(entry) if Path(path, "config.json").is_file())
        if not folders:
            raise UserError(
                f"drafters: no folder with a config.json matches {entry!r} (working folder: "
                f"{Path.cwd()}). Correct the pattern."
            )
        found += [{"use": folder, "name": read_card_name(Path(folder))} for folder in folders]
    return found


def _disambiguate(entries: Sequence[Any]) -> list[Any]:
    """Name folders with equal last parts (`runs/a/drafter`, `runs/b/drafter`) as on their cards."""
    last = [Path(entry).name for entry in {entry for entry in entries if isinstance(entry, str)}]
    return [
        {"use": entry, "name": read_card_name(resolve(entry))}
        if isinstance(entry, str)
        and last.count(Path(entry).name) > 1
        and "/" in entry
        and resolve(entry).is_dir()
        else entry
        for entry in entries
    ]


def read_card_name(folder: Path) -> str:
    """Return the name on a drafter folder's card, or the folder where it has no card."""
    card = folder / CARD
    return str(read_json(card)["name"]) if card.is_file() else str(folder)


def check_entries(entries: Sequence[Any]) -> None:
    """Raise UserError for options that a drafter does not take and for invalid ways to use it.

    Loads nothing and needs no model on the disk, as a stage of the experiment may still have to
    write it.
    """
    for entry in entries:
        if isinstance(entry, dict) and {"use", "_target_"} & entry.keys():
            use = str(entry.get("use", ""))
            kinds = (
                [current_target(str(entry["_target_"]))]
                if "_target_" in entry
                else _possible_classes(use)
            )
            given = {key: value for key, value in entry.items() if key != "use"}
            _check_keys(
                str(entry.get("name") or use or kinds[0]),
                {**given, "_target_": kinds[0]},
                kinds[1:],
            )
            DrafterUse(**{key: entry[key] for key in USE if key in entry})
            if entry.get("lookup") is not None:
                check_lookup_before(imported(str(kinds[0])))


def _possible_classes(use: str) -> list[str]:
    """Return the classes that `use` may stand for.

    A folder that a stage has yet to write may hold a model or a head.
    """
    if use in _known_names():
        return [_class_path(use)]
    if Path(use).exists():
        return [_class_path(head_of(use) or "chain")]
    return [_class_path(name) for name in ("chain", *HEADS.values())]


def _class_path(name: str) -> str:
    return str(_class_and_options(name)["_target_"])


def _check_keys(name: str, mapping: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Raise UserError for a missing class and for a key that neither it nor the loop takes.

    others: further classes that the entry may turn out to be.
    """
    kind = _find_class(name, mapping)
    taken = options_of(kind)
    if taken is None:
        return
    for other in others:
        taken = taken | (options_of(imported(other)) or set())
    if kind is ChainDrafter:  # some schedules move it into a worker
        taken |= options_of(RemoteChain) or set()
    given = [key for key in mapping if key != "_target_"]
    refuse_unknown(f"drafters: {name}", kind, given, {*taken, *USE})


def _find_class(name: str, mapping: Mapping[str, Any]) -> type:
    """Import the class that a mapping names. Raises UserError where that fails."""
    try:
        return imported(str(mapping["_target_"]))  # type: ignore[no-any-return]
    except ImportError as error:
        raise UserError(
            f"drafters: the class {mapping['_target_']} of {name} cannot be imported: {error}"
        ) from error


def uses(mappings: dict[str, dict[str, Any]], default: DrafterUse) -> dict[str, DrafterUse]:
    """Return how each drafter is used: its own options over the default ones.

    The control always has the plain options.
    """
    return {
        name: replace(
            DrafterUse() if name == CONTROL else default,
            **{key: mapping[key] for key in USE if key in mapping},
        )
        for name, mapping in mappings.items()
    }


def build(
    mappings: dict[str, dict[str, Any]],
    uses: dict[str, DrafterUse],
    target_folder: Path,
    beside: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Instantiate the drafters, in a worker process where the schedule needs one.

    beside: the target's device -> the device for a drafter that works at the same time. A mapping
    that names RemoteChain or another device keeps it. Raises UserError where a model folder does
    not share every token id with the target, and where a head does not match the target's sizes or
    hash.
    """
    drafters = {}
    for name, mapping in mappings.items():
        if "folder" in mapping:
            check_folder(target_folder, mapping["folder"])
        try:
            made = {key: value for key, value in mapping.items() if key not in USE}
            if uses[name].schedule in WALL and _find_class(name, mapping) is ChainDrafter:
                made["_target_"] = WORKER
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
                    f"cannot decode without the target. Give the folder of a model."
                )
        except InstantiationException as error:
            # Hydra wraps the drafter's own error.
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise UserError(
                f"drafters: {name} could not be created from {mapping}: {error.__cause__ or error}"
            ) from error
    return drafters


def looked_up(kind: str, min_match: int, **named: Any) -> Drafter:
    """Return a drafter of this class behind suffix lookup.

    named: arguments of the drafter.
    """
    check_lookup_before(imported(kind))
    return LookupFirst(imported(kind)(**named), min_match)


def _build_mapping(entry: Any, target: TargetConfig) -> dict[str, Any]:
    """Return the mapping of an entry.

    A drafter with a model folder takes the target's backend, dtype and device, unless its file or
    the entry sets them.
    """
    if isinstance(entry, dict) and "_target_" in entry:
        return {**entry, "_target_": current_target(str(entry["_target_"]))}
    given = dict(entry) if isinstance(entry, dict) else {"use": entry}
    use = given.pop("use", None)
    if not isinstance(use, str):
        raise UserError(
            f"drafters: {entry!r} is a {type(entry).__name__} without `use` or `_target_`; "
            f"expected a folder, the name of a drafter, or a mapping with `use` (one of these) or "
            f"`_target_` (a class such as decoding.drafters.chain.ChainDrafter)."
        )
    if not use or given.get("folder") == "":
        raise UserError(
            f"drafters: {entry!r} names no model. Give the experiment draft_model=FOLDER."
        )
    if use in _known_names():
        mapping = _fill_mapping(use, given)
    elif Path(use).exists():
        head = head_of(use)
        named = {"name": Path(use).name} if head else {}
        mapping = _fill_mapping(head or "chain", {**named, "folder": use, **given})
    else:
        raise unknown_drafter("drafters:", use, _known_names())
    if "folder" in mapping:
        mapping = with_target_settings(
            _find_class(use, mapping),
            {**mapping, "folder": str(resolve(mapping["folder"]))},
            backend=target.backend,
            dtype=target.dtype,
            device=target.device,
            execution=target.execution,
        )
    return mapping


def _known_names() -> list[str]:
    """Return the names of the registry and of the files in conf/drafter."""
    return sorted({*DRAFTERS, *(path.stem for path in CONF.glob("*.yaml"))})


def _class_and_options(name: str) -> dict[str, Any]:
    """Return the class of a name with the options from its file in conf/drafter and the registry.

    Raises UserError for a name without a class.
    """
    file, entry = CONF / f"{name}.yaml", DRAFTERS.get(name)
    written: dict[str, Any] = {}
    if entry is not None:
        needed = {entry.needs: MISSING} if entry.needs else {}
        written = {"_target_": entry.kind, **needed, **entry.options}
    if file.is_file():
        values = OmegaConf.to_container(OmegaConf.load(file))
        written |= values if isinstance(values, dict) else {}  # type: ignore[arg-type]
    if "_target_" not in written:
        raise UserError(
            f"{file}: no _target_, and {name} is no name of the registry. Add the drafter's class, "
            f"such as _target_: decoding.drafters.chain.ChainDrafter."
        )
    return written


def _fill_mapping(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping of a name with the given keys. Raises UserError for a missing one."""
    mapping = {**_class_and_options(name), **given}
    missing = [key for key, value in mapping.items() if value == MISSING]
    if missing:
        raise UserError(
            f"drafters: {name} needs {missing[0]}. Give it as a mapping: "
            f"{{use: {name}, {missing[0]}: ...}}."
        )
    return mapping if "folder" in mapping else {"name": name, **mapping}
