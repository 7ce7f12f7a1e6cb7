"""Readers of chats, texts and prompts, which report used and skipped records by file and line.

Chats: ShareGPT (`{"id", "conversations": [{"from", "value"}]}`), `{"messages": [{"role",
"content"}]}` or Alpaca (`{"instruction", "output"}`, as alpaca_eval writes its outputs), in a JSON
array or one object per line. Texts: `.jsonl` with "text", `.txt`, `.py` and `.md`, or folders of
them. Prompts: `{"id", "category", "turns": [...]}`, `{"prompt"}` or `{"question"}`; eval.tasks adds
the forms of published benchmarks. Chats, texts and prompts may also be tables with the same columns
(Parquet, Arrow, saved datasets). A bad record is skipped, counted and named in a note on stderr;
too many are an error.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.values import lone_surrogate
from jobs.run_files import json_kind
from training.data.chat import Encoded, render_batch
from training.data.counts import TOO_DEEP, BadRecordError, Counts, print_note
from training.data.records import (
    PROMPT_FILES,
    TABLES,
    TEXT_FILES,
    Paths,
    find_files,
    read_records,
)

# Roles of ShareGPT include the product that answered.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
    "system": "system",
}
# keys of a prompt's turns and id in published benchmarks
TURN_KEYS = ("turns", "prompt", "question")
NUMBER_KEYS = ("id", "question_id", "task_id", "prompt_id")
CHAT_KEYS = ("conversations", "messages", "instruction")
MAX_BAD = 0.01
# valid records, for errors
PROMPTS_EXPECTED = 'objects {"turns": [...]}, {"prompt"} or {"question"}, or ShareGPT objects'
CHATS_EXPECTED = "ShareGPT objects (conversations) or objects with messages"
TEXTS_EXPECTED = 'UTF-8 text, or objects with "text"'
RENDERED_EXPECTED = "turns that the chat template accepts"

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Chat:
    """One dialogue: `messages` are {"role": user | assistant | system, "content"}."""

    id: str
    messages: list[dict[str, str]]
    source: str  # "file:line"


@dataclass(frozen=True)
class Prompt:
    """One evaluation prompt: the user's turns, in order."""

    id: str
    category: str
    turns: list[str]


def read_chats(paths: Paths, *, max_bad: float = MAX_BAD) -> tuple[list[Chat], Counts]:
    """Read ShareGPT, messages or Alpaca files, or folders of them, and count their records.

    Answers before a chat's first request are removed and counted: long chats of ShareGPT were split
    at arbitrary turns, and no chat template begins with an answer. Raises UserError for a missing
    or empty file, a broken JSON array, or if more than the share `max_bad` of the records is bad.
    """
    counts = Counts()
    chats = list(iterate_chats(paths, counts))
    counts.check("chats", CHATS_EXPECTED, max_bad)
    return chats, counts


def iterate_chats(paths: Paths, counts: Counts) -> Iterator[Chat]:
    """Yield the chats of `read_chats` one by one and count them; the caller checks the counts."""
    files = find_files(paths, (".json", ".jsonl", *TABLES))
    for chat in _parse(files, _parse_chat, CHATS_EXPECTED, counts):
        roles = [message["role"] for message in chat.messages]
        first = next((place for place, role in enumerate(roles) if role != "system"), 0)
        if "user" in roles and first < roles.index("user"):
            del chat.messages[first : roles.index("user")]
            counts.cut.setdefault("answers before the first request", []).append(chat.source)
        yield chat


def read_prompts(
    paths: Paths,
    *,
    max_bad: float = MAX_BAD,
    parse: Callable[[dict[str, Any], str], Prompt] | None = None,
    expected: str = PROMPTS_EXPECTED,
    counts: Counts | None = None,
) -> list[Prompt]:
    """Read evaluation prompts of any format.

    A chat becomes one prompt: its system turn, if any, and its first user turn. Ids are unique: a
    repeated one gets a number, which a note reports. parse: receives a record and its place
    ("file:line"), and raises BadRecordError to skip it; None: `parse_prompt`. expected: the records
    that `parse` accepts, for errors. counts: receives the numbers of used and skipped records.
    Raises UserError under the conditions of `read_chats`.
    """
    counts = Counts() if counts is None else counts
    files = find_files(paths, PROMPT_FILES)
    prompts = list(_parse(files, parse or parse_prompt, expected, counts))
    counts.check("prompts", expected, max_bad)
    return _with_unique_ids(prompts)


def _with_unique_ids(prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts; each id that an earlier prompt has gets the first free number."""
    found: dict[str, Prompt] = {}
    renamed = []
    for prompt in prompts:
        free = prompt.id
        for number in count(2):
            if free not in found:
                break
            free = f"{prompt.id} ({number})"
        if free != prompt.id:
            renamed.append(free)
        found[free] = replace(prompt, id=free)
    if renamed:
        print_note(
            f"prompts: {len(renamed):,} have the id of an earlier one and were numbered, such as "
            f"{renamed[0]!r}"
        )
    return list(found.values())


def read_texts(paths: Paths, *, max_bad: float = MAX_BAD) -> tuple[list[str], Counts]:
    """Read plain documents: "text" of each record (.jsonl, tables), or .txt, .py, .md files.

    Folders are searched. Also returns the counts of the records. Raises UserError under the
    conditions of `read_chats`.
    """
    counts = Counts()
    documents = list(iterate_texts(paths, counts))
    counts.check("texts", TEXTS_EXPECTED, max_bad)
    return documents, counts


def iterate_texts(paths: Paths, counts: Counts) -> Iterator[str]:
    """Yield the texts of `read_texts` one by one and count them; the caller checks the counts."""
    files = find_files(paths, (".jsonl", *TEXT_FILES, *TABLES))
    return _parse(files, _parse_text, TEXTS_EXPECTED, counts)


def render_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    *,
    template: str = "auto",
    max_bad: float = MAX_BAD,
) -> tuple[list[Encoded], Counts]:
    """Render every chat; skip and count those that the template rejects.

    Raises UserError if it rejects more than the share `max_bad`, and for a tokenizer without a
    template.
    """
    counts = Counts()
    rendered = render_counted(tokenizer, chats, template, counts) if chats else []
    counts.check("chats", RENDERED_EXPECTED, max_bad)
    return rendered, counts


def render_counted(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], template: str, counts: Counts
) -> list[Encoded]:
    """Render chats in one batch and count them; the caller checks the counts."""
    rendered = []
    results = render_batch(tokenizer, [chat.messages for chat in chats], template=template)
    for chat, result in zip(chats, results, strict=True):
        if isinstance(result, UserError):
            counts.skip(str(result), chat.source)
        else:
            rendered.append(result)
    counts.used += len(rendered)
    return rendered


def _parse(
    files: Sequence[Any],
    parse: Callable[[dict[str, Any], str], Parsed],
    expected: str,
    counts: Counts,
) -> Iterator[Parsed]:
    """Yield every valid record of `files`, parsed, and count the records.

    parse: receives an object and its place ("file:line"), and raises BadRecordError to skip it.
    Raises UserError for a file without records. expected: the valid records, for that error.
    """
    for file in files:
        before = counts.read
        for place, record in read_records(file):
            try:
                if isinstance(record, BadRecordError):
                    raise record
                if not isinstance(record, dict):
                    raise BadRecordError(f"found {json_kind(record)}, expected a JSON object")
                parsed = parse(record, place)
            except BadRecordError as reason:
                counts.skip(str(reason), place)
            except RecursionError:
                counts.skip(TOO_DEEP, place)
            else:
                counts.used += 1
                yield parsed
        if counts.read == before:
            raise UserError(f"{file} holds no records; expected {expected}")


def _parse_chat(record: dict[str, Any], place: str) -> Chat:
    """Return the chat in a record of any format. Raises BadRecordError for an invalid one."""
    if "instruction" in record:
        record = {**record, "conversations": _alpaca_turns(record)}
    key = "conversations" if "conversations" in record else "messages"
    role_key, text_key = ("from", "value") if key == "conversations" else ("role", "content")
    turns = record.get(key)
    if not isinstance(turns, list) or not turns:
        raise BadRecordError("no turns (conversations or messages)")
    messages = []
    for turn in turns:
        given = turn if isinstance(turn, dict) else {}
        role, text = given.get(role_key), given.get(text_key)
        if not isinstance(role, str | None):
            raise BadRecordError(f"a role is {json_kind(role)}, expected a string")
        if role not in ROLES:
            raise BadRecordError(f"unknown role {role!r} (known: {', '.join(ROLES)})")
        if not isinstance(text, str) or not text.strip():
            raise BadRecordError(f"a turn of {role} without text")
        messages.append({"role": ROLES[role], "content": check_text(text)})
    return Chat(check_text(str(record.get("id", place))), messages, place)


def _alpaca_turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an Alpaca record (instruction, optional input, output) as ShareGPT turns."""
    request, further = record["instruction"], record.get("input")
    if isinstance(request, str) and isinstance(further, str) and further.strip():
        request = f"{request}\n\n{further}"
    return [{"from": "human", "value": request}, {"from": "gpt", "value": record.get("output")}]


def parse_prompt(record: dict[str, Any], place: str) -> Prompt:
    """Return the prompt in an evaluation record, or the part of a chat before its first answer.

    place: "file:line", the id of a record without one. Raises BadRecordError for an invalid record.
    """
    if "turns" not in record and any(key in record for key in CHAT_KEYS):
        chat = _parse_chat(record, place)
        category = check_text(str(record.get("category", "chat")))
        return Prompt(chat.id, category, [_first_request(chat)])
    key = next((key for key in TURN_KEYS if key in record), None)
    if key is None:
        raise BadRecordError(f"no prompt ({', '.join((*TURN_KEYS, *CHAT_KEYS))})")
    turns = record[key]
    if key != "turns" and isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise BadRecordError(f"{key} is not a {'list of strings' if key == 'turns' else 'string'}")
    if not all(turn.strip() for turn in turns):
        raise BadRecordError("a turn is empty")
    numbers = (record[name] for name in NUMBER_KEYS if record.get(name) is not None)
    number = next(numbers, place)
    category = str(record.get("category", "none"))
    return Prompt(check_text(str(number)), check_text(category), [*map(check_text, turns)])


def _first_request(chat: Chat) -> str:
    """Return the system turn, if any, and the first user turn of a chat as one string."""
    roles = [message["role"] for message in chat.messages]
    if "user" not in roles:
        raise BadRecordError("no human turn")
    turns = chat.messages[: roles.index("user") + 1]
    return "\n\n".join(turn["content"] for turn in turns if turn["role"] != "assistant")


def _parse_text(record: dict[str, Any], place: str) -> str:
    text = record.get("text")
    if not isinstance(text, str):
        raise BadRecordError('no "text"')
    if not text.strip():
        raise BadRecordError("an empty text")
    return check_text(text)


def check_text(text: str) -> str:
    """Return `text` unchanged. Raises BadRecordError for an unpaired surrogate."""
    if lone_surrogate(text) is not None:
        raise BadRecordError("half a character (an unpaired surrogate), such as a cut emoji")
    return text
