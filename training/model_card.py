"""The front matter of a drafter folder's README, which the Hugging Face Hub reads."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from decoding.errors import UserError
from decoding.models.hub import parse_hub_name
from training.data.hugging_face import PREFIX, parse_source

UNKNOWN = "unknown"  # the Hub's identifier of a licence that nobody states
# libraries that load a folder, as the Hub names them
TRANSFORMERS, OURS = "transformers", "shallow-draft"
NOT_RUN = "not run; written from its documentation"  # of an engine's launch line
_FRONT = re.compile(r"\A---\n(.*?\n)---\n", re.DOTALL)
_LICENSE_KEYS = ("license", "license_name", "license_link")
# the Hub's identifier of a licence -> words at the beginning of its text, in lower case
_LICENSES = {
    "apache-2.0": r"apache license\s+version 2\.0",
    "mit": r"mit license|permission is hereby granted, free of charge",
    "bsd-3-clause": r"bsd 3-clause",
    "llama3.1": r"llama 3\.1 community license",
    "llama3.2": r"llama 3\.2 community license",
    "llama3.3": r"llama 3\.3 community license",
    "llama3": r"meta llama 3 community license",
    "llama2": r"llama 2 community license",
    "gpl-3.0": r"gnu general public license\s+version 3",
}
_BEGINNING = 2000  # characters of a licence's text that are searched


def front_matter(card: Mapping[str, Any], library: str, *tags: str) -> str:
    """Return the YAML block at the top of a README, with its lines of dashes.

    card: a drafter's card. A target or data without a name on the Hub is left out, as the Hub
    refuses other names. library: TRANSFORMERS or OURS. tags: those of this kind of drafter.
    """
    target = parse_hub_name(card["target"])
    datasets = _datasets_on_hub(card.get("data", {}).get("sources", ()))
    fields = {
        **({"base_model": target.repository} if target else {}),
        **({"datasets": datasets} if datasets else {}),
        **(card.get("license") or {"license": UNKNOWN}),
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "drafter", *tags],
    }
    body = yaml.safe_dump(
        fields, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000
    )
    return f"---\n{body}---\n"


def read_front_matter(path: Path) -> tuple[dict[str, Any], str]:
    """Return the front matter of a README and the text after it.

    Raises UserError for front matter that is no YAML mapping.
    """
    text = path.read_text(encoding="utf-8")
    found = _FRONT.match(text)
    if not found:
        return {}, text
    try:
        front = yaml.safe_load(found[1]) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{path}: the front matter between --- is not YAML ({error}).") from error
    if not isinstance(front, dict):
        raise UserError(f"{path}: the front matter is a {type(front).__name__}, expected keys.")
    return front, text[found.end() :]


def license_of(target: Path) -> dict[str, str]:
    """Return the licence that a model states, as keys of the front matter.

    It is that of the README in its folder, or else of a text such as LICENSE, if it is a common
    one; otherwise UNKNOWN. target: a model folder, or a GGUF file in one.
    """
    folder = target.parent if target.is_file() else target
    readme = folder / "README.md"
    if readme.is_file():
        try:
            front, _ = read_front_matter(readme)
        except (UserError, UnicodeDecodeError):  # the README of somebody else
            front = {}
        stated = {key: front[key] for key in _LICENSE_KEYS if isinstance(front.get(key), str)}
        if "license" in stated:
            return stated
    for path in sorted(folder.glob("LICEN[CS]E*")):
        text = path.read_text(encoding="utf-8", errors="replace")[:_BEGINNING].lower()
        for name, words in _LICENSES.items():
            if re.search(words, text):
                return {"license": name}
    return {"license": UNKNOWN}


def _datasets_on_hub(sources: Sequence[str]) -> list[str]:
    """Return the names of those sources of training data that are datasets on the Hub."""
    named = [parse_source(one).name for one in sources if one.startswith(PREFIX)]
    found = [parse_hub_name(name) for name in named]  # what follows its @ is a configuration
    return [*dict.fromkeys(one.repository for one in found if one)]
