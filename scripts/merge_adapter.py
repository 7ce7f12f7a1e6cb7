"""Merge a LoRA adapter (a folder of PEFT) into its base model, as a folder that can be a target.

    python scripts/merge_adapter.py ADAPTER FOLDER [BASE] [--renamed]

BASE: folder or Hub name of the base model; by default the name in the adapter's
adapter_config.json. `--renamed` accepts a BASE whose name differs from that one, such as a local
copy under another name.

The weights are W + scale B A, with scale = lora_alpha / r (/ sqrt(r) with use_rslora), summed in
float32 and stored in the base's dtype. Files of weights keep their names and are merged one by one;
all other files are the base's, but tokenizer files in ADAPTER replace them. FOLDER appears under
its name when it is complete.
"""

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from decoding.errors import UserError
from decoding.models.folder import hash_input, read_headers, read_json
from decoding.models.folder import weight_files as files_of
from decoding.models.model_check import check_model
from decoding.models.paths import exists
from decoding.models.text.tokenizer import copy_tokenizer, has_tokenizer
from jobs.files import disk_error, save_tensors, write_text
from jobs.paths import resolve_model
from scripts.usage import run_script, show_usage

CONFIG, WEIGHTS, SOURCE = "adapter_config.json", "adapter_model.safetensors", "merged_adapter.json"
RENAMED = "--renamed"
PREFIX = "base_model.model."
FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
# settings of PEFT that change the sum, each with the only value that is merged here
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_qalora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
}
# initializations that leave the base's weights alone; PiSSA, OLoRA, CorDA and LoftQ train B A on a
# base that they changed
KEEP_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
INSTEAD = "Merge this adapter with PEFT (merge_and_unload), and use the folder that it saves."


class Adapter(NamedTuple):
    """An adapter: factors by layer, whole tensors by name, and the settings of its scale."""

    folder: Path
    config: dict[str, Any]
    factors: dict[str, dict[str, Tensor]]  # layer -> side (A or B) -> factor
    whole: dict[str, Tensor]  # of modules_to_save

    def scale(self, layer: str, rank: int) -> float:
        """Return the factor of B A. rank: r of the layer, which PEFT may override by a pattern."""
        alpha = _of_pattern(self.config.get("alpha_pattern"), layer, self.config["lora_alpha"])
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def read_adapter(folder: Path) -> Adapter:
    """Read a PEFT folder. Raises UserError for anything but a plain LoRA adapter."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} has no {name}, expected the folder of a LoRA adapter with weights in "
                f"safetensors, as PEFT's save_pretrained writes it."
            )
    config = read_json(folder / CONFIG)
    for key, expected in PLAIN.items():
        found = config.get(key, expected)
        if found != expected and found:
            raise UserError(
                f"{folder / CONFIG}: {key} is {found!r}, expected {expected!r}. {INSTEAD}"
            )
    start = config.get("init_lora_weights")
    if start not in KEEP_BASE:
        raise UserError(
            f"{folder / CONFIG}: init_lora_weights is {start!r}, which changes the base, expected "
            f"true or another start that does not. {INSTEAD}"
        )
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise UserError(f"{folder / CONFIG}: lora_alpha is {alpha!r}, expected a number.")
    factors: dict[str, dict[str, Tensor]] = {}
    whole = {}
    for stored, tensor in _read_tensors(folder / WEIGHTS).items():
        name = stored.removeprefix(PREFIX)
        if match := FACTOR.fullmatch(name):
            factors.setdefault(match["layer"], {})[match["side"]] = tensor
        elif "lora_" in name:
            raise UserError(
                f"{folder / WEIGHTS}: tensor '{stored}' is no factor of a linear layer. {INSTEAD}"
            )
        else:
            whole[re.sub(r"\.modules_to_save(\.default)?", "", name)] = tensor
    for layer, sides in factors.items():
        if sides.keys() != {"A", "B"} or sides["B"].shape[1] != sides["A"].shape[0]:
            found = {side: list(tensor.shape) for side, tensor in sides.items()}
            raise UserError(
                f"{folder / WEIGHTS}: {layer} has the factors {found}, expected A [r, inputs] and "
                f"B [outputs, r]. Copy the adapter again."
            )
    if not factors:
        raise UserError(f"{folder / WEIGHTS} holds no factors of LoRA. Copy the adapter again.")
    return Adapter(folder, config, factors, whole)


def base_of(adapter: Adapter, given: str, renamed: bool) -> Path:
    """Return the folder of the base model: `given`, or that which the adapter names.

    Raises UserError for a base of another name, unless it is `renamed`.
    """
    named = str(adapter.config.get("base_model_name_or_path") or "")
    if not given:
        if not named:
            raise UserError(
                f"{adapter.folder / CONFIG} names no base_model_name_or_path. Name the base model "
                f"after FOLDER."
            )
        return resolve_model(named)
    if named and not renamed and _short(named) != _short(given):
        raise UserError(
            f"{adapter.folder} is an adapter of {named}, not of {given}. Use that base, or add "
            f"{RENAMED} if {given} is the same model under another name."
        )
    return resolve_model(given)


def merge(adapter: Adapter, base: Path, folder: Path) -> int:
    """Write the merged model to a new folder; return the number of changed tensors.

    Raises UserError for an adapter that does not fit the base, a folder that is not empty, and a
    failed write.
    """
    if exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} is not empty, expected a new folder. Remove it, or use another name."
        )
    check_fits(adapter, base)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what an interrupted merge left
        partial.mkdir(parents=True)
        weights = files_of(base)
        for file in base.iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".bin", ".gguf"):
                shutil.copyfile(file, partial / file.name)
        if has_tokenizer(adapter.folder):
            copy_tokenizer(adapter.folder, partial)
        for file in weights:
            save_tensors(_merged(adapter, file), partial / file.name, {"format": "pt"})
        origin = {
            "adapter": adapter.folder.name,
            "adapter_hash": hash_input(adapter.folder),
            "base": str(adapter.config.get("base_model_name_or_path") or base.name),
            "base_hash": hash_input(base),
        }
        write_text(partial / SOURCE, json.dumps(origin, indent=1) + "\n")
        check_model(partial)
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        raise disk_error(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(adapter.factors) + len(adapter.whole)


def check_fits(adapter: Adapter, base: Path) -> None:
    """Raise UserError unless every tensor of the adapter fits one of the base."""
    headers = read_headers(base)
    shapes = {
        f"{layer}.weight": [len(sides["B"]), sides["A"].shape[1]]
        for layer, sides in adapter.factors.items()
    }
    shapes |= {name: list(tensor.shape) for name, tensor in adapter.whole.items()}
    for name, shape in shapes.items():
        found = headers[name].shape if name in headers else None
        if found == shape:
            continue
        has = "no such tensor" if found is None else f"one of the shape {found}"
        named = adapter.config.get("base_model_name_or_path") or "unnamed"
        raise UserError(
            f"{adapter.folder} does not fit {base}: the adapter changes {name} of the shape "
            f"{shape}, and the base has {has}. Use the base that it was trained on ({named})."
        )


def _merged(adapter: Adapter, file: Path) -> dict[str, Tensor]:
    """Return the tensors of one of the base's files, with the adapter merged."""
    found = {}
    for name, tensor in _read_tensors(file).items():
        sides = adapter.factors.get(name.removesuffix(".weight"))
        if name in adapter.whole:
            tensor = adapter.whole[name].to(tensor.dtype)
        if sides is not None and name.endswith(".weight"):
            wide = torch.promote_types(tensor.dtype, torch.float32)
            up_Or, down_rI = sides["B"].to(wide), sides["A"].to(wide)
            scale = adapter.scale(name.removesuffix(".weight"), len(down_rI))
            tensor = torch.addmm(tensor.to(wide), up_Or, down_rI, alpha=scale).to(tensor.dtype)
        found[name] = tensor.contiguous()
    return found


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises UserError if it is damaged."""
    try:
        with safe_open(file, "pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{file} is damaged or incomplete ({error}). Copy it again.") from error


def _of_pattern(patterns: dict[str, Any] | None, layer: str, usual: Any) -> Any:
    """Return the value of the first of PEFT's patterns that matches the end of a layer's name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return usual


def _short(name: str) -> str:
    """Return the last part of a path or of a Hub name, without its revision."""
    return Path(name.partition("@")[0]).name.lower()


def main() -> None:
    """Merge the adapter named on the command line."""
    show_usage(__doc__)
    given = [argument for argument in sys.argv[1:] if argument != RENAMED]
    if len(given) not in (2, 3):
        sys.exit(f"usage: python {sys.argv[0]} ADAPTER FOLDER [BASE] [{RENAMED}]")
    adapter = read_adapter(Path(given[0]))
    base = base_of(adapter, given[2] if len(given) == 3 else "", RENAMED in sys.argv)
    changed = merge(adapter, base, Path(given[1]))
    print(f"{given[1]}: {base} with {changed} tensors changed by {given[0]}")


if __name__ == "__main__":
    run_script(main)
