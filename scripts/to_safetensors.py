"""Convert the pickled weights (.bin) of a model folder to safetensors.

    python scripts/to_safetensors.py FOLDER

Pickles can run code when they are opened, so no job opens them. This script reads them with
`weights_only=True`, which refuses anything but tensors. The .bin files are kept. Tensors that share
storage (tied heads) are stored once.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from decoding.errors import UserError
from jobs.files import save_tensors


def convert(folder: Path) -> Path:
    """Write FOLDER/model.safetensors from pytorch_model*.bin.

    Raises UserError if the folder has no such files, or has model.safetensors already.
    """
    files = sorted(folder.glob("pytorch_model*.bin"))
    target = folder / "model.safetensors"
    if not files:
        raise UserError(
            f"{folder} has no pytorch_model*.bin. Expected a Hugging Face model folder with "
            f"pickled weights."
        )
    if target.exists():
        raise UserError(f"{target} exists already. Delete it to convert again.")
    weights: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    # all shards stay in memory: a freed tensor's address could be reused, and look like a tied one
    shards = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    for shard in shards:
        for name, tensor in shard.items():
            # a tensor with two names is tied, and is written once
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                weights[name] = tensor.contiguous()
    partial = folder / ".model.safetensors.partial"
    save_tensors(weights, partial, {"format": "pt"})
    partial.replace(target)
    return target


def main() -> None:
    """Convert the folder named on the command line."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER")
    try:
        print(convert(Path(sys.argv[1])))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
