"""Construction of the drafters in `drafters=`, for the jobs that decode.

An entry is a folder, a name in the registry or in conf/drafter, or a mapping with `use` or
`_target_`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import MISSING, OmegaConf

from decoding.devices import device_of
from decoding.drafters.build import (
    check_folder,
    find_drafter_folder,
    options_of,
    refuse_unknown,
    with_target_settings,
)
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.options import check_options
from decoding.drafters.registry import DRAFTERS, TRAINED, drafter_of, head_of, imported
from decoding.drafters.remote import RemoteChain, RemoteParallelChain
from decoding.drafters.with_lookup import LookupFirst, check_lookup_before
from decoding.errors import UserError
from decoding.interfaces import Drafter
from decoding.models.distributed.parallel import processes_of
from decoding.models.folder import CARD, read_json
from decoding.models.hub import revision_of
from decoding.models.load import AUTO, choose_execution
from decoding.schedules.by_name import WALL
from jobs.aliases import current_target
from jobs.config import TargetConfig
from jobs.drafter_use import ALONE, USE, DrafterUse
from jobs.paths import data_folder, resolve_model

CONTROL = "prompt_lookup"  # the drafter without a model that every report shows
# a chain drafter -> that in a worker process, for schedules that run it with the target
IN_WORKER: dict[type, type[RemoteChain]] = {
    imported(kind.kind): kind for kind in (RemoteChain, RemoteParallelChain)
}
WORKERS = {kind: f"{made.__module__}.{made.__qualname__}" for kind, made in IN_WORKER.items()}
CONF = data_folder("conf") / "drafter"
# dotted names of the classes whose options have the meaning of decoding/drafters/options.py
_OURS = {*WORKERS.values(), *(entry.kind for entry in DRAFTERS.values())}


def with_execution(target: TargetConfig, folder: Path) -> TargetConfig:
    """Return the settings with `auto` replaced by the device and the execution that it stands for.

    Drafters run as their target does, also those that `auto` alone would run eagerly. folder: the
    target's. An empty execution, of configurations from before `auto`, is graph on a GPU and eager
    on a CPU, so that a run continues as it began.
    """
    device = device_of(target.device)
    if not target.execution:
        target = replace(target, execution="eager" if device == "cpu" else AUTO)
    if target.execution != AUTO:
        return replace(target, device=device)
    count = processes_of(target.parallel, target.processes, target.backend, device)
    execution = choose_execution(
        folder, backend=target.backend, dtype=target.dtype, device=device, processes=count
    )
    return replace(target, device=device, execution=execution)


def describe(
    entries: Sequence[Any], target: TargetConfig, control: bool, may_be_empty: bool = False
) -> dict[str, dict[str, Any]]:
    """Return drafter name -> the mapping that Hydra instantiates.

    control: add the control row at the end, unless an entry names it already. Raises UserError for
    an empty result (unless may_be_empty), an invalid entry, an unknown option, a class that cannot
    be imported, and two drafters of the same name.
    """
    found: dict[str, dict[str, Any]] = {}
    asked = _expand_folders(entries)
    if control and CONTROL not in entries:
        asked.append(CONTROL)
    for entry in asked:
        mapping = _build_mapping(entry, target)
        name = _name_of(mapping)
        if name in found:
            raise UserError(
                f"drafters: two entries are called {name!r}. Give one of them another name, as a "
                f"mapping: drafters=[{{use: {mapping.get('folder', 'NAME')}, name: another}}]."
            )
        found[name] = {**mapping, "name": name}
        _check_options(name, found[name], [_find_class(name, mapping)])
    if not found and not may_be_empty:
        raise UserError(
            "drafters is empty and the control is off. Name at least one drafter, such as "
            "drafters=[runs/mine]."
        )
    return found


def _name_of(mapping: Mapping[str, Any]) -> str:
    """Return a drafter's `name` or, without one, its folder or class and its loop options."""
    if "name" in mapping:
        return str(mapping["name"])
    options = [mapping[key] for key in ("schedule", "stopping", "verify") if key in mapping]
    options += ["lookup"] * ("lookup" in mapping)
    return "+".join([_folder_name(mapping.get("folder", mapping["_target_"])), *map(str, options)])


def _folder_name(folder: str | Path) -> str:
    """Return the last part of a path, or of the repository's name for the Hub's cache."""
    found = revision_of(Path(folder))
    return Path(folder if found is None else found[0]).name


def _expand_folders(entries: Sequence[Any]) -> list[Any]:
    """Replace patterns such as `runs/sweep/*/drafter` by the folders that match.

    The matches get the names on their cards, and so do folders whose last parts are equal
    (`runs/a/drafter`, `runs/b/drafter`). Raises UserError for a pattern without a match.
    """
    found: list[Any] = []
    texts = {entry for entry in entries if isinstance(entry, str)}
    last = Counter(Path(entry).name for entry in texts if "*" not in entry)
    for entry in entries:
        if not isinstance(entry, str):
            found.append(entry)
        elif "*" in entry:
            folders = sorted(path for path in glob(entry) if Path(path, "config.json").is_file())
            if not folders:
                raise UserError(
                    f"drafters: no folder with a config.json matches {entry!r} (working folder: "
                    f"{Path.cwd()}). Correct the pattern."
                )
            found += [{"use": path, "name": read_card_name(Path(path))} for path in folders]
        elif "/" in entry and last[Path(entry).name] > 1 and resolve_model(entry).is_dir():
            found.append({"use": entry, "name": read_card_name(resolve_model(entry))})
        else:
            found.append(entry)
    return found


def read_card_name(folder: Path) -> str:
    """Return the name on a drafter folder's card, or the folder's path if it has no card."""
    card = folder / CARD
    return str(read_json(card)["name"]) if card.is_file() else str(folder)


def check_entries(entries: Sequence[Any]) -> None:
    """Raise UserError for unknown and contradictory options of drafters.

    Nothing is loaded. A folder may be missing, as a stage of the experiment may still write it.
    """
    for entry in entries:
        if not isinstance(entry, dict) or not {"use", "_target_"} & entry.keys():
            continue
        use = str(entry.get("use", ""))
        name = str(entry.get("name") or use or current_target(str(entry["_target_"])))
        if "_target_" in entry:
            mappings = [{**entry, "_target_": current_target(str(entry["_target_"]))}]
        elif use in _known_names():
            mappings = [_class_and_options(use)]
        else:  # a folder: of a model, or of a head
            known = [drafter_of(use)] if Path(use).exists() else ["chain", *TRAINED]
            mappings = [_class_and_options(kind) for kind in known]
        kinds = [_find_class(name, mapping) for mapping in mappings]
        given = {key: value for key, value in entry.items() if key not in ("use", "folder")}
        _check_options(name, {**given, "name": name}, kinds)
        DrafterUse(**{key: entry[key] for key in USE if key in entry})
        if entry.get("lookup") is not None:
            check_lookup_before(kinds[0])


def _check_options(name: str, options: Mapping[str, Any], kinds: Sequence[type]) -> None:
    """Raise UserError for an option that neither the decoding loop nor any of the classes accepts.

    Values are checked too, except those of classes outside of the registry.
    """
    # Some schedules move a chain drafter into a worker.
    kinds = [*kinds, *(IN_WORKER[kind] for kind in kinds if kind in IN_WORKER)]
    accepted = [options_of(kind) for kind in kinds]
    if accepted[0] is not None:
        known = {*USE}.union(*(options or () for options in accepted))
        refuse_unknown(
            f"drafters: {name}", kinds[0], [key for key in options if key != "_target_"], known
        )
    if f"{kinds[0].__module__}.{kinds[0].__qualname__}" in _OURS:
        check_options(f"drafters: {name}", options)


def _find_class(name: str, mapping: Mapping[str, Any]) -> type:
    """Import the class that a mapping names. Raises UserError if that fails."""
    try:
        found = imported(str(mapping["_target_"]))
        if not isinstance(found, type):
            raise ImportError(f"it is a {type(found).__name__}")
    except ImportError as error:
        raise UserError(
            f"drafters: the class {mapping['_target_']} of {name} cannot be imported: {error}"
        ) from error
    return found


def uses(mappings: dict[str, dict[str, Any]], default: DrafterUse) -> dict[str, DrafterUse]:
    """Return drafter name -> loop options: those in its mapping, and the default for the others.

    The control takes the others from `DrafterUse()`, not from `default`.
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
    worker_devices: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Instantiate the drafters, in a worker process if the schedule needs one.

    worker_devices: the target's device -> the device of a drafter in a worker process. It does not
    apply to a mapping that names RemoteChain or another device. Raises UserError if a model does
    not share every token id with the target, if a head does not match the target's sizes or hash,
    if a drafter that must decode alone is not a model, and if a drafter cannot be created.
    """
    drafters = {}
    for name, mapping in mappings.items():
        made = {key: value for key, value in mapping.items() if key not in USE}
        if "folder" in mapping:
            found = _find_class(name, mapping)
            made |= check_folder(target_folder, mapping["folder"], found, uses[name].any_target)
        if uses[name].schedule in WALL and _find_class(name, mapping) in IN_WORKER:
            made["_target_"] = WORKERS[_find_class(name, mapping)]
            if worker_devices and made.get("device") in worker_devices:
                made["device"] = worker_devices[made["device"]]
        if (lookup := uses[name].lookup) is not None:
            kind = made["_target_"]
            made |= {"_target_": WITH_LOOKUP, "kind": kind, "min_match": lookup}
        try:
            drafters[name] = instantiate(made)
        except InstantiationException as error:
            # Hydra wraps the error of the drafter.
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise UserError(
                f"drafters: {name} could not be created from {mapping}: {error.__cause__ or error}"
            ) from error
        if uses[name].schedule == ALONE and not isinstance(drafters[name], ChainDrafter):
            raise UserError(
                f"drafters: {name} has schedule={ALONE}, but a {type(drafters[name]).__name__} "
                f"cannot decode without the target. Use the folder of a model."
            )
    return drafters


def build_with_lookup(kind: str, min_match: int, **options: Any) -> Drafter:
    """Build a drafter with suffix lookup before it.

    kind: dotted name of the drafter's class. min_match: shortest match of the lookup, in tokens.
    options: arguments of the class. Raises UserError for a class that lookup cannot precede.
    """
    check_lookup_before(imported(kind))
    return LookupFirst(imported(kind)(**options), min_match)


WITH_LOOKUP = f"{__name__}.{build_with_lookup.__name__}"


def _build_mapping(entry: Any, target: TargetConfig) -> dict[str, Any]:
    """Return the mapping that Hydra instantiates for an entry.

    A drafter with a model folder takes the target's backend, dtype, device and execution, unless
    its file or the entry sets them. Raises UserError for an invalid entry.
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
            f"drafters: {entry!r} names no model. Set draft_model=FOLDER for the experiment."
        )
    if use in _known_names():
        name = use
    else:
        folder = str(find_drafter_folder("drafters:", use, _known_names()))
        name = drafter_of(folder)
        named = {"name": _folder_name(folder)} if head_of(folder) else {}
        given = {"folder": folder, **named, **given}
    mapping = {**_class_and_options(name), **given}
    missing = [key for key, value in mapping.items() if value == MISSING]
    if missing:
        raise UserError(
            f"drafters: {name} needs {missing[0]}. Set it in a mapping: "
            f"{{use: {name}, {missing[0]}: ...}}."
        )
    if "folder" not in mapping:
        return {"name": name, **mapping}
    return with_target_settings(
        _find_class(use, mapping),
        {**mapping, "folder": str(resolve_model(mapping["folder"]))},
        backend=target.backend,
        dtype=target.dtype,
        device=target.device,
        execution=target.execution,
    )


def _known_names() -> list[str]:
    """Return the names of the registry and of the files in conf/drafter."""
    return sorted({*DRAFTERS, *(path.stem for path in CONF.glob("*.yaml"))})


def _class_and_options(name: str) -> dict[str, Any]:
    """Return the `_target_` and options of a name.

    Values in conf/drafter/NAME.yaml override the registry's. Raises UserError for a name without a
    `_target_`.
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
            f"{file} has no _target_, and the registry has no drafter {name}. Add its class, "
            f"such as _target_: decoding.drafters.chain.ChainDrafter."
        )
    return written
