"""Loading and copying of a folder's tokenizer, with the ids that the model was trained on.

A tokenizer that gives other ids is repaired (decoding/models/text/tokenizer_repair.py): a
tokenizer.json with the right ids, and settings that load it as it is, replace the folder's files in
memory and in all exports.
"""

import hashlib
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from decoding.errors import UserError, print_note
from decoding.models.folder import is_gguf, read_config, read_json, untrusted_code_error
from decoding.models.model_check import check_config
from decoding.models.text.tokenizer_repair import CORE, MODEL, SETTINGS, Repair, find_repair

# a repaired tokenizer.json holds their tokens
_IN_CORE = ("special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES = (CORE, MODEL, SETTINGS, *_IN_CORE, "chat_template.jinja")

# by the hashes of a folder's tokenizer files, so that each is probed once
_repairs: dict[str, Repair | None] = {}


def has_tokenizer(folder: str | Path) -> bool:
    """Return whether a folder holds any tokenizer file; a GGUF file always has a tokenizer."""
    return is_gguf(folder) or any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(
    folder: str | Path, trust_remote_code: bool = False, *, of_model: bool = True
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder or of a GGUF file.

    trust_remote_code: run the Python code of the folder, if its tokenizer needs it. of_model: False
    for a folder that only holds a tokenizer. Raises UserError for a folder or tokenizer that cannot
    be read, ids that differ from SentencePiece's and cannot be repaired, and ids outside the
    model's vocabulary.
    """
    folder = Path(folder)
    if is_gguf(folder):
        return _of_gguf(folder)
    config = read_config(folder) if of_model else {}
    # Checked first, since transformers reads all of config.json to load a tokenizer.
    if config:
        check_config(folder, config, complete=False)
    vocab_size = config.get("vocab_size")
    repair, tokenizer = _repair_of(folder, trust_remote_code)
    if repair is not None:
        try:
            with TemporaryDirectory() as place:
                copy_tokenizer(folder, Path(place))
                tokenizer = _read(Path(place), trust_remote_code)
        except OSError as error:
            raise UserError(
                f"{folder}: its repaired tokenizer cannot be written to a temporary folder "
                f"({error}). Free some space, or set TMPDIR to another folder."
            ) from error
        tokenizer.name_or_path = str(folder)
    elif tokenizer is None:
        tokenizer = _read(folder, trust_remote_code)
    _check_size(folder, tokenizer, vocab_size)
    return tokenizer


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a bound on the characters of a token: those of the vocabulary's longest entry."""
    return max(map(len, tokenizer.get_vocab()))


def _of_gguf(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file. Raises UserError as `tokenizer_of` does."""
    from decoding.models.gguf.file import read_gguf
    from decoding.models.gguf.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(read_gguf(path))
    tokenizer.name_or_path = str(path)
    _check_size(path, tokenizer, read_config(path)["vocab_size"])
    return tokenizer


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files of `source` to `folder`, repaired if necessary.

    Raises UserError as `load_tokenizer` does.
    """
    if source.resolve() == folder.resolve():
        return
    repair, _ = _repair_of(source)
    written = {} if repair is None else {CORE: repair.core, SETTINGS: repair.settings}
    for name in TOKENIZER_FILES:
        if name in written:
            (folder / name).write_text(written[name], encoding="utf-8")
        elif (source / name).is_file() and not (written and name in _IN_CORE):
            shutil.copyfile(source / name, folder / name)


def _repair_of(
    folder: Path, trust_remote_code: bool = False
) -> tuple[Repair | None, PreTrainedTokenizerBase | None]:
    """Return the repair that a folder's tokenizer needs, and the tokenizer if it was loaded.

    The first time, a repair is reported on standard error.
    """
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    held = {file.name: file.read_bytes() for file in files}
    if MODEL not in held and CORE not in held:
        return None, None
    is_model = (folder / "config.json").is_file()
    model_type = read_config(folder)["model_type"] if is_model else None
    hashes = [f"{name}:{hashlib.sha256(content).hexdigest()}" for name, content in held.items()]
    digest = " ".join([*hashes, f"model_type:{model_type}"])
    if digest in _repairs:
        return _repairs[digest], None
    tokenizer = _read(folder, trust_remote_code)
    repair, note = None, ""
    try:
        repair = find_repair(folder, tokenizer, held, model_type)
        note = "" if repair is None else repair.note
    except ModuleNotFoundError as error:
        if error.name != "sentencepiece":
            raise
        note = f"its ids were not compared with {MODEL}: install sentencepiece for that"
    _repairs[digest] = repair
    if note and os.environ.get("RANK", "0") == "0":
        print_note(f"{folder}: {note}")
    return repair, tokenizer


def _read(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a folder's tokenizer with `transformers`; raise UserError if that fails."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except RecursionError as error:  # the first LLaMA folders on the Hub
        _refuse_damaged(folder, trust_remote_code)
        raise UserError(
            f"{folder}: its tokenizer cannot be loaded, since its special tokens are empty "
            f"strings. Write bos_token <s>, eos_token </s> and unk_token <unk> into {SETTINGS}."
        ) from error
    # all types: transformers raises many for damaged files, and tokenizers bare Exceptions
    except Exception as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise untrusted_code_error(folder) from error
        _refuse_damaged(folder, trust_remote_code)
        raise UserError(
            f"{folder}: its tokenizer cannot be loaded ({_reason(error)}). Copy the tokenizer "
            f"files again."
        ) from error


def _refuse_damaged(folder: Path, trust_remote_code: bool) -> None:
    """Raise UserError if a single file is the reason that a folder's tokenizer cannot be loaded."""
    for name in (SETTINGS, CORE, *_IN_CORE):
        if (folder / name).is_file():
            read_json(folder / name)
    if (folder / CORE).is_file():
        try:
            Tokenizer.from_file(str(folder / CORE))
        except Exception as error:  # the type that tokenizers raises for every file
            raise UserError(
                f"{folder / CORE} cannot be read as a tokenizer ({_reason(error)}), expected what "
                f"save_pretrained writes. Copy the file again."
            ) from error
    file = folder / "config.json"
    if file.is_file() and read_json(file).get("model_type") in CONFIG_MAPPING:
        try:
            AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # of any type, as above
            raise UserError(
                f"{file}: transformers cannot read it ({_reason(error)}), expected the values of a "
                f"model's config.json. Copy the file again."
            ) from error


def _reason(error: Exception) -> str:
    """Return an error's message on one line, or its type if there is none."""
    return " ".join(str(error).split()) or type(error).__name__


def _check_size(folder: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: Any) -> None:
    """Raise UserError for a tokenizer with ids outside the model's vocabulary."""
    token, highest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if isinstance(vocab_size, int) and highest >= vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has ids up to {highest} ({token!r}), but vocab_size in "
            f"config.json is {vocab_size}, expected ids below that. Remove the tokens that were "
            f"added to the tokenizer, or add rows for them to the model's embedding and lm_head."
        )
