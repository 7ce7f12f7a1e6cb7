"""Drafters by what a user calls them: a model folder, a name in conf/drafter, or a mapping with `_target_`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decoding.compatible import check_same_tokenizer
from decoding.errors import UserError
from eval.records import CONTROL
from training.config import TargetConfig
from training.paths import resolve

# How a drafter is used, not how it is made: these keys of a mapping are the loop's.
USE = ("stopping", "stopping_threshold")
CONF = Path(__file__).resolve().parent.parent / "conf" / "drafter"


def describe(entries: Sequence[Any], target: TargetConfig, control: bool) -> dict[str, dict[str, Any]]:
    """Drafter name -> the mapping that Hydra makes it from; the control row comes last unless it is named already.

    Raises UserError for an entry that is none of the three forms, and for two drafters of one name.
    """
    found: dict[str, dict[str, Any]] = {}
    for entry in [*entries, *([CONTROL] if control and CONTROL not in entries else [])]:
        mapping = _mapping(entry, target)
        name = str(mapping.get("name") or Path(str(mapping.get("folder", mapping["_target_"]))).name)
        if "stopping" in mapping and "name" not in mapping:
            name += f"+{mapping['stopping']}"
        if name in found:
            raise UserError(
                f"drafters: two entries are called {name!r}. Give one of them another name, as a mapping: "
                f"drafters=[{{_target_: {mapping['_target_']}, folder: ..., name: another}}]."
            )
        found[name] = {**mapping, "name": name}
    if not found:
        raise UserError("drafters is empty and so is the control. Name at least one, such as drafters=[runs/mine].")
    return found


def build(mappings: dict[str, dict[str, Any]], target_folder: Path) -> dict[str, Any]:
    """Make the drafters. Those with a model folder must share every token id with the target (UserError)."""
    drafters = {}
    for name, mapping in mappings.items():
        if "folder" in mapping:
            check_same_tokenizer(target_folder, Path(mapping["folder"]))
        try:
            drafters[name] = instantiate({key: value for key, value in mapping.items() if key not in USE})
        except InstantiationException as error:
            if isinstance(error.__cause__, UserError):  # Hydra wraps what the drafter itself had to say
                raise error.__cause__ from None
            raise UserError(f"drafters: {name} could not be made from {mapping}: {error.__cause__ or error}") from error
    return drafters


def _mapping(entry: Any, target: TargetConfig) -> dict[str, Any]:
    """The mapping of an entry; a drafter with a model folder runs as the target does, so that the two differ in size alone."""
    if isinstance(entry, dict) and "_target_" in entry:
        return dict(entry)
    given = dict(entry) if isinstance(entry, dict) else {"use": entry}
    use = given.pop("use", None)
    if not isinstance(use, str):
        raise UserError(
            f"drafters: {entry!r} is a {type(entry).__name__} without `use` or `_target_`; expected a folder, a name in conf/drafter, "
            "or a mapping with `use` (one of these) or `_target_` (the class to make, such as decoding.chain.ChainDrafter)."
        )
    file = CONF / f"{use}.yaml"
    if file.is_file():
        mapping = _load(file, given)
    elif Path(use).exists():
        mapping = {"_target_": "decoding.chain.ChainDrafter", "folder": use, **given}
    else:
        names = ", ".join(sorted(path.stem for path in CONF.glob("*.yaml")))
        raise UserError(
            f"drafters: {use!r} is neither a folder (looked in {Path.cwd()}) nor one of conf/drafter ({names})."
        )
    if "folder" in mapping:
        # Beside a native target a drafter of another family runs on the hf backend: None lets it choose.
        backend = "hf" if target.backend == "hf" else None
        shared = {"backend": backend, "dtype": target.dtype, "device": target.device}
        mapping = {**shared, **mapping, "folder": str(resolve(mapping["folder"]))}
    return mapping


def _load(file: Path, given: dict[str, Any]) -> dict[str, Any]:
    try:
        merged = OmegaConf.merge(OmegaConf.load(file), given)
        loaded = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{file}: {str(error).splitlines()[0]}. Give such a drafter as a mapping: {{use: {file.stem}, folder: ...}}."
        ) from error
    if not isinstance(loaded, dict) or "_target_" not in loaded:
        raise UserError(
            f"{file}: no _target_. A drafter's file names the class to make, such as decoding.chain.ChainDrafter."
        )
    return {str(key): value for key, value in loaded.items()}
