"""Whether a head's folder belongs to a target's: published heads have no tokenizer files, so sizes and the card's hash are compared."""

from pathlib import Path

from decoding.errors import UserError
from decoding.folder import read_config, read_json
from recurrent_drafting.checkpoint import MODEL_TYPE, read_head_config
from training.run_folder import hash_input

CARD = "drafter_card.json"


def is_head(folder: str | Path) -> bool:
    """Whether the folder holds a recurrent head, by its config.json's model_type."""
    config = Path(folder) / "config.json"
    return config.is_file() and read_json(config).get("model_type") == MODEL_TYPE


def check_fits(target_folder: str | Path, head_folder: str | Path) -> None:
    """Raise UserError for a head whose hidden size or vocabulary differ from the target's, or whose card names another target's hash.

    A head without a card (any published one) is told by its sizes alone.
    """
    target, head = read_config(target_folder), read_head_config(Path(head_folder))
    where = f"{head_folder} cannot draft for {target_folder}:"
    for key, own in (("hidden_size", head.hidden_size), ("vocab_size", head.vocab_size)):
        if target.get(key) != own:
            raise UserError(
                f"{where} {key} is {target.get(key)} in the target and {own} in the head. Take the head of this target."
            )
    card = Path(head_folder) / CARD
    if not card.is_file():
        return
    expected, found = read_json(card).get("target_hash"), hash_input(Path(target_folder))
    if expected != found:
        raise UserError(
            f"{where} by {card} the head was trained on a target of the hash {str(expected)[:12]}, this one's is {found[:12]}. Weights, "
            "configuration or tokenizer differ: take the target that it was trained on, or train the head again."
        )
