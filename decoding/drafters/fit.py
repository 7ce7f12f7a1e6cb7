"""Whether a head in a folder fits a target in a folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from decoding.models.folder import CARD, hash_input, is_gguf, read_config, read_json
from decoding.models.text.compatible import check_same_tokenizer
from decoding.models.text.mask_token import check_mask_token
from decoding.models.text.tokenizer import has_tokenizer

# keys of config.json that name the token of a head's mask elements, in the file or in an object
MASK_TOKENS = ("pard_token", "mask_token_id")
INNER = "dflash_config"


def check_fits(
    target_folder: str | Path, head_folder: str | Path, any_target: bool = False
) -> None:
    """Raise UserError for a head that was made for another target.

    The hidden size and vocabulary are compared, and the target's hash if the head's card has one.
    Published heads have no card; their tokenizer is compared if the folder has one. A GGUF file
    holds converted weights, whose hash is another one. The head's mask token, if it has one, must
    have no role in the target's texts. any_target: accept other weights of the same sizes.
    """
    target = read_config(target_folder)
    head = read_json(Path(head_folder) / "config.json")  # may lack a model_type
    where = f"{head_folder} cannot draft for {target_folder}:"
    for key in ("hidden_size", "vocab_size"):
        if key in head and target.get(key) != head[key]:
            raise UserError(
                f"{where} {key} is {target.get(key)} in the target and {head.get(key)} in the "
                f"head. Use a head that was trained for this target."
            )
    for key, mask in _mask_tokens(head):
        setting = f"{Path(head_folder) / 'config.json'}: {key}"
        size = int(target.get("vocab_size") or mask + 1)
        check_mask_token(setting, mask, size, _roles(target_folder, target))
    card = Path(head_folder) / CARD
    expected = read_json(card).get("target_hash") if card.is_file() else None
    if any_target or is_gguf(target_folder):
        return
    if expected is None:
        if has_tokenizer(head_folder):
            check_same_tokenizer(target_folder, head_folder, "Use a head for this tokenizer.")
        return
    found = hash_input(Path(target_folder))
    if expected != found:
        raise UserError(
            f"{where} {card} expects a target with hash {expected[:12]}, found {found[:12]}: the "
            f"weights, configuration or tokenizer differ. Use the target that the head was trained "
            f"on, or continue the head's training on this one (+experiment=retarget)."
        )


def _mask_tokens(head: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the mask tokens of a head's config.json with their keys."""
    inner = head.get(INNER)
    for values, where in ((head, ""), (inner if isinstance(inner, dict) else {}, f"{INNER}.")):
        for key in MASK_TOKENS:
            if type(values.get(key)) is int:
                yield where + key, values[key]


def _roles(target_folder: str | Path, config: Mapping[str, Any]) -> set[int]:
    """Return the ids of padding, starts and ends of texts in a target's JSON files."""
    file = Path(target_folder) / "generation_config.json"
    found: set[int] = set()
    for values in (config, read_json(file) if file.is_file() else {}):
        for role in ("bos", "eos", "pad"):
            ids = values.get(f"{role}_token_id")
            found |= {one for one in (ids if isinstance(ids, list) else [ids]) if type(one) is int}
    return found
