"""Models on the Hugging Face Hub: names such as OWNER/NAME and OWNER/NAME@REVISION.

A name is looked up in the Hub's cache first, so that a run which starts again reads the same commit
and a machine without a network needs none. What the cache lacks is downloaded once.
"""

import re
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from decoding.errors import UserError
from decoding.models.folder import INDEX, indexed_files, is_gguf
from decoding.models.paths import exists

_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?")
_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]+)(/|$)")
_TEXT = ["*.json", "*.jinja", "*.py", "tokenizer.model", "vocab.txt", "merges.txt"]
_WEIGHTS = ["*.safetensors"]
# Files of subfolders, and a second copy of Mistral's weights in another layout.
_IGNORED = ["*/*", "consolidated*"]


class HubName(NamedTuple):
    """A model on the Hub; without a revision, the cached commit or else the newest one."""

    repository: str
    revision: str | None


def parse_hub_name(text: str | Path) -> HubName | None:
    """Return the Hub name that a text is; None for anything else, such as a path or a GGUF file."""
    found = _NAME.fullmatch(str(text))
    if found is None or exists(Path(text)) or is_gguf(text):
        return None
    try:
        validate_repo_id(found["repository"])
    except HFValidationError:
        return None
    return HubName(found["repository"], found["revision"])


def find_folder(name: str | Path, weights: bool = True) -> Path:
    """Return an existing path, or the local folder of a Hub name, which is downloaded if needed.

    weights: False downloads no weights. Raises UserError for a name that neither exists as a path
    nor can be found on the Hub.
    """
    hub_name = parse_hub_name(name)
    if hub_name is None:
        path = Path(name).expanduser()
        if not exists(path):
            raise UserError(f"{missing_model(name)}. Correct the path or the name")
        return path
    return find_cached(name, weights) or _download(str(name), hub_name, weights)


def missing_model(name: str | Path) -> str:
    """Return the beginning of an error for a text that is neither a path nor a Hub name."""
    return (
        f"{name} does not exist, expected a model folder or a GGUF file (working folder: "
        f"{Path.cwd()}), or a name on the Hugging Face Hub (OWNER/NAME or OWNER/NAME@REVISION)"
    )


def find_cached(name: str | Path, weights: bool = True) -> Path | None:
    """Return the folder of a Hub name in the Hub's cache; None if it or a file of it is missing."""
    hub_name = parse_hub_name(name)
    if hub_name is None:
        return None
    try:
        # raises for files that the cached list of the repository names and the cache lacks
        folder = _snapshot(hub_name, weights, cached=True)
    except EntryNotFoundError:
        return None
    return folder if _is_complete(folder, weights) else None


def _snapshot(name: HubName, weights: bool, cached: bool) -> Path:
    """Return the folder of a model's needed files. cached: whether to use no network."""
    return Path(
        snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=_TEXT + _WEIGHTS * weights,
            ignore_patterns=_IGNORED,
            local_files_only=cached,
        )
    )


def _is_complete(folder: Path, weights: bool) -> bool:
    """Return whether a folder of the cache holds a tokenizer or, with weights, a whole model."""
    if not weights:
        return any(folder.glob("tokenizer*"))
    if (folder / INDEX).is_file():
        return all(file.is_file() for file in indexed_files(folder))
    return any(folder.glob("*.safetensors"))


def _download(name: str, hub_name: HubName, weights: bool) -> Path:
    missing = f"{name} is no file or folder (working folder: {Path.cwd()}), and as a name on the "
    try:
        folder = _snapshot(hub_name, weights, cached=False)
    except GatedRepoError as error:  # a kind of RepositoryNotFoundError
        raise UserError(
            f"{missing}Hugging Face Hub it is gated. Accept its terms on "
            f"https://huggingface.co/{hub_name.repository}, and run hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{missing}Hugging Face Hub it is unknown. Correct the path or the name; for a private "
            f"model run hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(
            f"{missing}Hugging Face Hub it has no revision '{hub_name.revision}'. Use a branch, a "
            f"tag or a commit of https://huggingface.co/{hub_name.repository}"
        ) from error
    except (EntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, HTTPError) as error:
        raise UserError(
            f"{missing}Hugging Face Hub it is not in the local cache, and the Hub cannot be "
            f"reached or HF_HUB_OFFLINE is set ({type(error).__name__}). Correct the path, or with "
            f"a network run hf download {hub_name.repository}"
            + (f" --revision {hub_name.revision}" if hub_name.revision else "")
        ) from error
    if not _is_complete(folder, weights):
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:6]) or "nothing"
        raise UserError(
            f"{name}: its folder in the Hub's cache, {folder}, lacks "
            f"{'safetensors' if weights else 'a tokenizer'} (found {found}). After an interrupted "
            f"download run hf download {hub_name.repository}; if the model has only .bin files, "
            f"add --local-dir FOLDER, run python scripts/to_safetensors.py FOLDER, and use FOLDER"
        )
    return folder


def revision_of(path: Path) -> tuple[str, str] | None:
    """Return the repository and the commit of a file or folder in the Hub's cache, or None."""
    found = _SNAPSHOT.search(path.absolute().as_posix())
    return None if found is None else (f"{found[1]}/{found[2]}", found[3])


def name_of(folder: str | Path) -> str:
    """Return the name of a model: of its folder, or of its repository in the Hub's cache."""
    found = revision_of(Path(folder))
    return Path(folder).resolve().name if found is None else found[0].split("/")[1]
