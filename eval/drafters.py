"""Drafters by what a user calls them: a model folder, a name in conf/drafter, or a mapping with `_target_`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decoding.compatible import check_same_tokenizer
from decoding.errors import UserError
from eval.records import CONTROL
from training.config import TargetConfig
from training.paths import resolve

CONF = Path(__file__).resolve().parent.parent / "conf" / "drafter"


def describe(entries: Sequence[Any], target: TargetConfig, control: bool) -> dict[str, dict[str, Any]]:
    """Drafter name -> the mapping that Hydra makes it from; the control row comes last unless it is named already.

    Raises UserError for an entry that is none of the three forms, and for two drafters of one name.
    """
    found: dict[str, dict[str, Any]] = {}
    for entry in [*entries, *([CONTROL] if control and CONTROL not in entries else [])]:
        mapping = _mapping(entry, target)
        name = str(mapping.get("name") or Path(str(mapping.get("folder", mapping["_target_"]))).name)
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
        drafters[name] = instantiate(mapping)
    return drafters


def _mapping(entry: Any, target: TargetConfig) -> dict[str, Any]:
    if isinstance(entry, dict):
        if "_target_" not in entry:
            raise UserError(
                f"drafters: the mapping {entry} has no _target_ (the class to make: decoding.chain.ChainDrafter, say)."
            )
        return dict(entry)
    if not isinstance(entry, str):
        raise UserError(
            f"drafters: {entry!r} is a {type(entry).__name__}; expected a folder, a name in conf/drafter or a mapping."
        )
    file = CONF / f"{entry}.yaml"
    if file.is_file():
        return _load(file)
    if not Path(entry).exists():
        names = ", ".join(sorted(path.stem for path in CONF.glob("*.yaml")))
        raise UserError(
            f"drafters: {entry!r} is neither a folder (looked in {Path.cwd()}) nor one of conf/drafter ({names})."
        )
    # A folder runs as the target does, so that the two differ in size alone.
    shared = {"backend": target.backend, "dtype": target.dtype, "device": target.device}
    return {"_target_": "decoding.chain.ChainDrafter", "folder": str(resolve(entry)), **shared}


def _load(file: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(file), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(
            f"{file}: {str(error).splitlines()[0]}. Give such a drafter as a mapping with all its fields."
        ) from error
    if not isinstance(loaded, dict) or "_target_" not in loaded:
        raise UserError(
            f"{file}: no _target_. A drafter's file names the class to make, such as decoding.chain.ChainDrafter."
        )
    return {str(key): value for key, value in loaded.items()}
