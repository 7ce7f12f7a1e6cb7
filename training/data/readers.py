"""Readers of chats, texts and prompts, which report used and skipped records by file and line.

Formats: ShareGPT (`{"id", "conversations": [{"from", "value"}]}`), `{"messages": [{"role",
"content"}]}` or Alpaca (`{"instruction", "output"}`, as alpaca_eval writes its outputs), as a JSON
array or one object a line; texts as `.jsonl` with "text", `.txt`, `.py` and `.md`, or folders of
them; prompts as `{"id", "category", "turns": [...]}`, or as benchmarks are published: `{"prompt"}`
(HumanEval, HellaSwag's contexts) or `{"question"}` (GSM8K, MGSM). Chats and texts may also be
tables with the same columns (Parquet, Arrow, saved datasets). A bad record is skipped, counted and
named in a note on stderr; above a limit the file is refused.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.models.folder import exists
from jobs.run_files import json_kind
from training.data.chat import Rendered, render_chat, template_source
from training.data.counts import Counts
from training.data.tables import TABLE_SUFFIXES, is_saved_dataset, table_records

# ShareGPT names the product that answered.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
    "system": "system",
}
# Keys of a prompt's turns and of its number in published benchmarks.
TURN_KEYS, NUMBER_KEYS = (
    ("turns", "prompt", "question"),
    ("id", "question_id", "task_id", "prompt_id"),
)
CHAT_KEYS = ("conversations", "messages", "instruction")
MAX_BAD = 0.01
_TOO_DEEP = "values nested too deeply"
_HALF = re.compile(r"[\ud800-\udfff]")
_TEXT_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
CHAT_SUFFIXES = (".json", ".jsonl", *TABLE_SUFFIXES)
TEXT_SUFFIXES = (".jsonl", ".txt", ".py", ".md", *TABLE_SUFFIXES)

Paths = str | Path | Sequence[str | Path]
Read = TypeVar("Read")


@dataclass(frozen=True)
class Chat:
    """One dialogue: `messages` are {"role": user | assistant | system, "content"}.

    source: "file:line".
    """

    id: str
    messages: list[dict[str, str]]
    source: str


@dataclass(frozen=True)
class Prompt:
    """One evaluation prompt: the user's turns, in order."""

    id: str
    category: str
    turns: list[str]


class _BadRecordError(Exception):
    """Reason why a record is skipped; records are counted by this text."""


def read_chats(paths: Paths, *, max_bad: float = MAX_BAD) -> tuple[list[Chat], Counts]:
    """Read ShareGPT or messages files (or folders of them); see the module for the formats.

    Answers before a chat's first request are cut off and counted: ShareGPT's long chats were split
    anywhere, and no chat template begins with an answer.

    Raises UserError for a missing or empty file, a broken JSON array, or more bad records than the
    share `max_bad`.
    """
    files = _files(paths, CHAT_SUFFIXES)
    expected = "ShareGPT objects (conversations) or objects with messages"
    chats, counts = _read(files, _chat, "chats", expected, max_bad, warn=False)
    for chat in chats:
        first = next(
            (place for place, message in enumerate(chat.messages) if message["role"] != "system"), 0
        )
        requests = [
            place for place, message in enumerate(chat.messages) if message["role"] == "user"
        ]
        if requests and first < requests[0]:
            del chat.messages[first : requests[0]]
            counts.cut.setdefault("answers before the first request", []).append(chat.source)
    counts.check("chats", expected, max_bad)
    return chats, counts


def read_prompts(path: str | Path, *, max_bad: float = MAX_BAD) -> list[Prompt]:
    """Read evaluation prompts of any format; of a chat, the system and first user turns.

    Raises UserError as `read_chats` does.
    """
    expected = 'objects {"turns": [...]}, {"prompt"} or {"question"}, or ShareGPT objects'
    return _read(_files(path, (".jsonl", ".json")), _prompt, "prompts", expected, max_bad)[0]


def read_texts(paths: Paths, *, max_bad: float = MAX_BAD) -> tuple[list[str], Counts]:
    """Read plain documents: "text" of each record (.jsonl, tables), or .txt, .py, .md files.

    Folders are searched. Raises UserError as `read_chats` does.
    """
    documents: list[str] = []
    counts = Counts()
    for file in _files(paths, TEXT_SUFFIXES):
        if file.suffix in (".jsonl", *TABLE_SUFFIXES) or file.is_dir():
            found, of_file = _read(
                [file], _text, "texts", 'objects with "text"', max_bad=1.0, warn=False
            )
            documents += found
            counts.read, counts.used = counts.read + of_file.read, counts.used + of_file.used
            for reason, places in of_file.bad.items():
                counts.bad.setdefault(reason, []).extend(places)
            continue
        counts.read += 1
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            counts.skip("not UTF-8", str(file))
            continue
        if text.strip():
            documents.append(text)
            counts.used += 1
        else:
            counts.skip("no text", str(file))
    counts.check("texts", 'UTF-8 text, or objects with "text"', max_bad)
    return documents, counts


def render_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    *,
    template: str = "auto",
    max_bad: float = MAX_BAD,
) -> tuple[list[Rendered], Counts]:
    """Render every chat; skip and count those that the template rejects, like bad lines.

    `Counts.used` of the result matches the list. Raises UserError above the share `max_bad`, and
    for a tokenizer without a template.
    """
    if chats:
        template_source(tokenizer, template)
    counts, rendered = Counts(), []
    for chat in chats:
        counts.read += 1
        try:
            rendered.append(render_chat(tokenizer, chat.messages, template=template))
        except UserError as error:
            counts.skip(str(error), chat.source)
    counts.used = len(rendered)
    counts.check("chats", "turns that the chat template accepts", max_bad)
    return rendered, counts


def _read(
    files: Sequence[Path],
    parse: Callable[[Any, str], Read],
    what: str,
    expected: str,
    max_bad: float,
    warn: bool = True,
) -> tuple[list[Read], Counts]:
    """Parse every record of `files` with `parse`.

    It receives the decoded JSON and its place, and raises _BadRecordError.
    """
    counts, found = Counts(), []
    for file in files:
        before = counts.read
        for place, record in _records(file):
            counts.read += 1
            try:
                if isinstance(record, _BadRecordError):
                    raise record
                if not isinstance(record, dict):
                    raise _BadRecordError(f"found {json_kind(record)}, expected a JSON object")
                found.append(parse(record, place))
            except _BadRecordError as reason:
                counts.skip(str(reason), place)
            except RecursionError:
                counts.skip(_TOO_DEEP, place)
        if counts.read == before:
            raise UserError(f"{file}: no records; expected {expected}")
    counts.used = len(found)
    if warn:
        counts.check(what, expected, max_bad)
    return found, counts


def _files(paths: Paths, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the existing, non-empty files that `paths` name; folders are sorted by name."""
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(path)
        if not exists(path):
            raise UserError(f"{path}: no such file or folder; expected {', '.join(suffixes)}")
        if is_saved_dataset(path):
            files.append(path)
        elif path.is_dir():
            inside = sorted(
                file for file in path.rglob("*") if file.suffix in suffixes and file.is_file()
            )
            if not inside:
                raise UserError(f"{path}: the folder holds no {', '.join(suffixes)} file")
            files += inside
        elif not path.is_file():
            raise UserError(
                f"{path}: is neither a file nor a folder; expected {', '.join(suffixes)}"
            )
        elif path.suffix not in suffixes:
            raise UserError(
                f"{path}: unknown kind of file '{path.suffix}'; expected {', '.join(suffixes)}"
            )
        elif path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty; expected data ({', '.join(suffixes)})")
        else:
            files.append(path)
    if not files:
        raise UserError(f"no data files given; expected at least one path ({', '.join(suffixes)})")
    return files


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield ("file:line", decoded JSON or _BadRecordError) of an array, lines or a table."""
    if file.is_dir() or file.suffix in TABLE_SUFFIXES:
        yield from table_records(file)
        return
    try:
        stream = file.open("rb")
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror}); check its permissions"
        ) from error
    with stream:
        start = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(0)
        if start.startswith(b"["):
            yield from _array(file, stream.read())
            return
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:  # JSONDecodeError or UnicodeDecodeError
                record = _BadRecordError("not JSON")
            except RecursionError:
                record = _BadRecordError(_TOO_DEEP)
            yield f"{file}:{number}", record


def _array(file: Path, content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the elements of a JSON array with their first line, numbered if several share it."""
    decoder, separators = json.JSONDecoder(), " \t\r\n,"
    place, line, number, last_line = 0, 1, 0, 0
    try:
        text = content.decode("utf-8-sig")
        place = text.index("[") + 1
        line += text.count("\n", 0, place)
        while True:
            begin = place
            while place < len(text) and text[place] in separators:
                place += 1
            line += text.count("\n", begin, place)
            if text[place : place + 1] == "]":
                if text[place + 1 :].strip():
                    raise json.JSONDecodeError("text after the end of the array", text, place + 1)
                break
            record: Any
            try:
                record, end = decoder.raw_decode(text, place)
            except json.JSONDecodeError:
                raise
            except (RecursionError, ValueError) as error:
                why = (
                    _TOO_DEEP
                    if isinstance(error, RecursionError)
                    else "a number of too many digits"
                )
                record, end = _BadRecordError(why), _end_of_value(text, place)
            number += 1
            yield f"{file}:{line}" + (f", record {number}" if line == last_line else ""), record
            last_line = line
            line += text.count("\n", place, end)
            place = end
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: not UTF-8 at byte {error.start}; expected a JSON array in UTF-8"
        ) from error
    except RecursionError as error:
        raise UserError(
            f"{file}:{line}: a record is nested too deeply to be read; fix the file"
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file}:{error.lineno}: broken JSON array: {error.msg} (column {error.colno}); "
            "fix the file, or write one object a line (.jsonl), where bad ones can be skipped"
        ) from error


def _end_of_value(text: str, place: int) -> int:
    """Return the end of the array or object at a place, ignoring brackets inside strings."""
    depth = 0
    for match in _TEXT_OR_BRACKET.finditer(text, place) if text[place] in "[{" else ():
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    raise json.JSONDecodeError("an element without an end", text, place)


def _chat(record: dict[str, Any], place: str) -> Chat:
    """Return the chat in a record of any format."""
    if "instruction" in record:
        record = {**record, "conversations": _turns_of_instruction(record)}
    key = "conversations" if "conversations" in record else "messages"
    role_key, text_key = ("from", "value") if key == "conversations" else ("role", "content")
    turns = record.get(key)
    if not isinstance(turns, list) or not turns:
        raise _BadRecordError("no turns (conversations or messages)")
    messages = []
    for turn in turns:
        role, text = (
            (turn.get(role_key), turn.get(text_key)) if isinstance(turn, dict) else (None, None)
        )
        if not isinstance(role, str | None):
            raise _BadRecordError(f"a role is {json_kind(role)}, expected a string")
        if role not in ROLES:
            raise _BadRecordError(f"unknown role {role!r} (known: {', '.join(ROLES)})")
        if not isinstance(text, str) or not text.strip():
            raise _BadRecordError(f"a turn of {role} without text")
        messages.append({"role": ROLES[role], "content": _checked_text(text)})
    return Chat(_checked_text(str(record.get("id", place))), messages, place)


def _checked_text(text: str) -> str:
    """Return a text unchanged. Raises _BadRecordError for half a character in a JSON escape."""
    if _HALF.search(text):
        raise _BadRecordError("half a character (an unpaired surrogate), such as a cut emoji")
    return text


def _turns_of_instruction(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an Alpaca record (instruction, optional input, output) as ShareGPT turns."""
    request, further = record["instruction"], record.get("input")
    if isinstance(request, str) and isinstance(further, str) and further.strip():
        request = f"{request}\n\n{further}"
    return [{"from": "human", "value": request}, {"from": "gpt", "value": record.get("output")}]


def _prompt(record: dict[str, Any], place: str) -> Prompt:
    """Return the prompt in an evaluation record, or the part of a chat before its first answer."""
    if "turns" not in record and any(key in record for key in CHAT_KEYS):
        return _prompt_of(_chat(record, place), _checked_text(str(record.get("category", "chat"))))
    key = next((key for key in TURN_KEYS if key in record), None)
    if key is None:
        raise _BadRecordError(f"no prompt ({', '.join((*TURN_KEYS, *CHAT_KEYS))})")
    turns = record[key]
    if key != "turns" and isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise _BadRecordError(
            f"{key} is not a list of strings" if key == "turns" else f"{key} is not a string"
        )
    if not all(turn.strip() for turn in turns):
        raise _BadRecordError("a turn is empty")
    number = next((record[name] for name in NUMBER_KEYS if name in record), place)
    category = str(record.get("category", "none"))
    return Prompt(
        _checked_text(str(number)), _checked_text(category), [_checked_text(turn) for turn in turns]
    )


def _prompt_of(chat: Chat, category: str) -> Prompt:
    """Return the part of a chat before its first answer, as one turn."""
    roles = [message["role"] for message in chat.messages]
    if "user" not in roles:
        raise _BadRecordError("no human turn")
    first = roles.index("user")
    before = [
        message["content"] for message in chat.messages[:first] if message["role"] == "system"
    ]
    return Prompt(chat.id, category, ["\n\n".join([*before, chat.messages[first]["content"]])])


def _text(record: dict[str, Any], place: str) -> str:
    """Return the text of a record."""
    text = record.get("text")
    if not isinstance(text, str):
        raise _BadRecordError('no "text"')
    if not text.strip():
        raise _BadRecordError('an empty "text"')
    return _checked_text(text)
