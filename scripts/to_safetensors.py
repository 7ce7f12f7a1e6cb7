"""Convert the pickled weights (.bin) of a model folder to safetensors.

    python scripts/to_safetensors.py FOLDER

Pickles can run code when they are opened, so no job opens them. This script reads them with
`weights_only=True`, which refuses anything but tensors. The .bin files are kept. Shards are
converted one by one. Tensors of a file that share storage (tied heads) are stored once.
"""

import json
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from decoding.errors import UserError
from decoding.models.folder import INDEX, WEIGHTS, read_json
from jobs.files import save_tensors, write_text
from scripts.usage import run_script, show_usage

PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"


def convert(folder: Path) -> Path:
    """Write model.safetensors, or shards with their index, from a folder's .bin files.

    Returns the path of model.safetensors or of the index. Raises UserError for a folder without
    such files or with converted ones, for a missing or damaged shard, and for an index that names
    other tensors than the shards hold.
    """
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if not pickles and not (folder / PICKLE_INDEX).is_file():
        raise UserError(
            f"{folder} has no pytorch_model*.bin. Expected a Hugging Face model folder with "
            f"pickled weights."
        )
    for name in (WEIGHTS, INDEX):
        if (folder / name).exists():
            raise UserError(f"{folder / name} exists already. Delete it to convert again.")
    if (folder / PICKLE_INDEX).is_file():
        return _convert_shards(folder)
    if PICKLE not in pickles:
        raise UserError(
            f"{folder} has the shard {pickles[0]}, but no {PICKLE_INDEX}, which lists all shards. "
            f"Copy or download it too."
        )
    _convert_file(folder / PICKLE, folder / WEIGHTS)
    return folder / WEIGHTS


def _convert_shards(folder: Path) -> Path:
    """Convert every file of the index, and write the new index last."""
    index = read_json(folder / PICKLE_INDEX)
    named = index.get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(one, str) for one in named.values()):
        raise UserError(
            f"{folder / PICKLE_INDEX} has no weight_map, expected the file of every tensor. "
            f"Download the index again."
        )
    shards = sorted(set(named.values()))
    for shard in shards:
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise UserError(
                f"{folder}: the shard {shard} is missing, one of {len(shards)} in {PICKLE_INDEX}. "
                f"Copy or download it again."
            )
    weight_map: dict[str, str] = {}
    for shard in shards:
        file = Path(shard.replace("pytorch_model", "model")).with_suffix(".safetensors").name
        expected = {name for name, place in named.items() if place == shard}
        written = _convert_file(folder / shard, folder / file, expected)
        weight_map |= dict.fromkeys(written, file)
    content = {"metadata": index.get("metadata", {}), "weight_map": weight_map}
    write_text(folder / INDEX, json.dumps(content, indent=2, sort_keys=True) + "\n")
    return folder / INDEX


def _convert_file(source: Path, file: Path, expected: set[str] | None = None) -> list[str]:
    """Convert one .bin file, and return the names of the tensors that are written.

    expected: names of all tensors in the file. Raises UserError for others and for a damaged file.
    """
    try:
        tensors = torch.load(source, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise UserError(
            f"{source} holds more than tensors, or is damaged ({' '.join(str(error).split())[:200]}"
            f"). It was not opened; copy or download it again."
        ) from error
    if expected is not None and expected != set(tensors):
        other = sorted(expected ^ set(tensors))
        raise UserError(
            f"{source} and {PICKLE_INDEX} differ in {len(other)} tensors (such as '{other[0]}'). "
            f"Copy or download both again."
        )
    weights: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        # a tensor with two names is tied, and is written once
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.contiguous()
    partial = file.with_name(f".{file.name}.partial")
    save_tensors(weights, partial, {"format": "pt"})
    partial.replace(file)
    return list(weights)


def main() -> None:
    """Convert the folder named on the command line."""
    show_usage(__doc__)
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER")
    print(convert(Path(sys.argv[1])))


if __name__ == "__main__":
    run_script(main)
