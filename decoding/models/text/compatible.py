"""Comparison of two folders' tokenizers: the token of every id, and the ids of probe texts."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.models.folder import has_config, read_config
from decoding.models.text.tokenizer import has_tokenizer, load_tokenizer
from decoding.models.text.tokenizer_repair import PROBES, differences, encoder, probes_of

SHOWN = 3  # differing ids that a message lists
ADVICE = "Use a drafter with the target's tokenizer."


def check_same_tokenizer(
    target_folder: str | Path, drafter_folder: str | Path, advice: str = ADVICE
) -> None:
    """Raise UserError, with the first difference, unless both folders have the same tokenizer.

    advice: the end of the message.

    The token of every id is compared (added and special tokens included), the ids of the beginning
    and end of text, and the ids of probe texts. Either vocabulary may end in added tokens that the
    other lacks, such as [PAD]. Text after special tokens is not compared, since drafters read the
    target's ids.
    """
    # if no target is loaded, its folder may hold the tokenizer alone
    target = load_tokenizer(target_folder, of_model=has_config(target_folder))
    drafter = load_tokenizer(drafter_folder)
    where = f"{drafter_folder} cannot draft for {target_folder}: their tokenizers differ"
    difference = _describe_differing_ids(target, drafter, "drafter")
    difference = difference or _describe_differing_text(target, drafter, list(PROBES))
    if difference:
        raise UserError(f"{where} {difference}. {advice}")
    for role in ("bos_token_id", "eos_token_id"):
        ours, theirs = getattr(target, role), getattr(drafter, role)
        if ours != theirs:
            raise UserError(
                f"{where}: {role} is {ours} in the target and {theirs} in the drafter. {advice}"
            )


def check_tokenizer_of(
    tokenizer: PreTrainedTokenizerBase, target_folder: str | Path, where: str
) -> None:
    """Raise UserError, beginning with `where`, for a tokenizer that is not the target's.

    Its ids must lie in the target's vocabulary. If the target's folder has a tokenizer, the tokens
    of all ids and the ids of probe texts are compared too.
    """
    highest = max(tokenizer.get_vocab().values())
    vocab_size = read_config(target_folder).get("vocab_size")
    if isinstance(vocab_size, int) and highest >= vocab_size:
        raise UserError(
            f"{where} has ids up to {highest}, but the vocabulary of {target_folder} has "
            f"{vocab_size} tokens. Use the tokenizer that the target was trained with."
        )
    if has_tokenizer(target_folder):
        target = load_tokenizer(target_folder)
        difference = _describe_differing_ids(
            target, tokenizer, "given one"
        ) or _describe_differing_text(target, tokenizer, probes_of(target))
        if difference:
            raise UserError(
                f"{where} is not the tokenizer of {target_folder}: they differ {difference}. Omit "
                f"it to use the target's tokenizer."
            )


def _describe_differing_ids(
    target: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, name: str
) -> str:
    """Describe the ids with different tokens; return an empty string if there are none."""
    ours, theirs = ({i: token for token, i in each.get_vocab().items()} for each in (target, other))
    last = min(max(ours), max(theirs))  # of the ids that both have
    beyond = target.added_tokens_decoder.keys() | other.added_tokens_decoder.keys()
    ids = sorted(ours.keys() | theirs.keys())
    differing = [i for i in ids if ours.get(i) != theirs.get(i) and not (i > last and i in beyond)]
    shown = "; ".join(
        f"id {i} is {ours.get(i)!r} in the target and {theirs.get(i)!r} in the {name}"
        for i in differing[:SHOWN]
    )
    return f"in {len(differing)} of {len(ids)} ids: {shown}" if differing else ""


def _describe_differing_text(
    target: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, texts: list[str]
) -> str:
    """Describe the first text with different ids; return an empty string if there is none."""
    found = differences(encoder(other), encoder(target), texts)
    return f"though every id is the same token: {found[0]}" if found else ""
