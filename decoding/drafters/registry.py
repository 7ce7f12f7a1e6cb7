"""Folders that hold a head on the target's hidden states and no language model: which they are, and
whether one belongs to a target.

Published heads have no tokenizer files, and read the target's own embeddings: so sizes are
compared, and the hash of the target that a card names.
"""

from pathlib import Path

from decoding.errors import UserError
from decoding.models.folder import CARD, hash_input, read_config, read_json

# model_type -> the file of conf/drafter that drafts with it.
HEADS = {"recurrent_drafting_drafter": "recurrent"}


def head_of(folder: str | Path) -> str:
    """The file of conf/drafter that drafts with a folder which holds a head; empty for
    all others.
    """
    file = Path(folder) / "config.json"
    return HEADS.get(str(read_json(file).get("model_type")), "") if file.is_file() else ""


def check_fits(target_folder: str | Path, head_folder: str | Path) -> None:
    """Raise UserError for a head whose hidden size or vocabulary differ from the target's, or whose
    card names another target's hash.

    A head without a card, as any published one, is told by its sizes alone.
    """
    target, head = read_config(target_folder), read_config(head_folder)
    where = f"{head_folder} cannot draft for {target_folder}:"
    for key in ("hidden_size", "vocab_size"):
        if target.get(key) != head.get(key):
            raise UserError(
                f"{where} {key} is {target.get(key)} in the target and {head.get(key)} in the "
                f"head. Take the head of this target."
            )
    card = Path(head_folder) / CARD
    expected = read_json(card).get("target_hash") if card.is_file() else None
    if expected is None:
        return
    found = hash_input(Path(target_folder))
    if expected != found:
        raise UserError(
            f"{where} {card} names a target of the hash {expected[:12]}, and this one's is "
            f"{found[:12]}: its weights, configuration or tokenizer are others. Take the target "
            f"that the head was trained on, or train the head again."
        )
