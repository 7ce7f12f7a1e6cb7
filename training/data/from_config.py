"""Samples of a job, from files or from Python's standard library."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from decoding.errors import UserError
from decoding.models.folder import CARD
from jobs.paths import is_here, resolve
from training.config import DataConfig, LoopConfig
from training.data import corpus
from training.data.cache import Report, load_or_tokenize
from training.data.counts import Counts
from training.data.hugging_face import PREFIX, HuggingFaceSource, parse_source
from training.data.mixture import MixedData
from training.data.packing import PackedData, Sample
from training.data.readers import (
    CHATS_EXPECTED,
    TEXTS_EXPECTED,
    Chat,
    iterate_chats,
    iterate_texts,
)
from training.data.records import Source
from training.data.samples import (
    Account,
    ChatRules,
    chat_batches,
    store_chats,
    store_texts,
    text_batches,
    tokenize_chats,
    tokenize_texts,
)
from training.data.shares import with_initial_shares
from training.data.token_store import Sink, sample_lengths
from training.data.workers import map_batches

Item = TypeVar("Item")

_STDLIB = "embedded:stdlib"


def training_data(
    tokenizer: Any,
    data: DataConfig,
    loop: LoopConfig,
    seed: int,
    show: bool = True,
    printed: list[str] | None = None,
) -> PackedData:
    """Return the train split in packed rows, loop.tokens_per_step tokens per optimizer step.

    Domains, if any, are mixed. show: print counts and warnings. printed: receives the lines of
    counts. Raises UserError for an empty split, unreadable data, or a step that holds no row.
    """
    texts = training_texts(tokenizer, data, show, printed)
    made = row_data(texts, data, rows_of_step(data, loop), seed)
    if show and isinstance(made, MixedData):
        print(made.describe())
    return made


def training_texts(
    tokenizer: Any, data: DataConfig, show: bool = True, printed: list[str] | None = None
) -> dict[str, Sequence[Sample]]:
    """Return the samples of the train split by domain; without domains, under the name "".

    printed: receives the lines of counts.
    """
    if show and (shared := trained_and_held_out(data)):
        print(
            f"warning: both trained on and held out: {', '.join(shared)}. Figures measured there "
            f"do not generalize to other text. Hold out another file"
        )
    if not data.domains:
        return {"": read_samples(tokenizer, data, "train", show, printed=printed)}
    return {
        name: _domain_samples(tokenizer, data, name, "train", show, printed)
        for name in data.domains
    }


def row_data(
    texts: dict[str, Sequence[Sample]], data: DataConfig, rows_per_step: int, seed: int
) -> PackedData:
    """Pack the samples of `training_texts` into rows of data.max_length tokens.

    Domains, if any, are mixed according to their shares. Raises UserError, which names the key
    of the data, if no token is supervised, and if data.shares_from does not fit.
    """
    if data.domains:
        return MixedData(texts, with_initial_shares(data), rows_per_step, seed)
    try:
        return PackedData(texts[""], data.max_length, rows_per_step, seed)
    except UserError as error:
        raise UserError(f"data: {error}") from error


def held_out_domains(
    tokenizer: Any, data: DataConfig, show: bool = True
) -> dict[str, Sequence[Sample]]:
    """Return about data.held_out_tokens held-out tokens of every domain, as samples by domain.

    A domain without held-out text is left out. Raises UserError if none of a domain's tokens is
    supervised.
    """
    found = {}
    for name, domain in data.domains.items():
        if not (domain.held_out_chats or domain.held_out_texts):
            if show:
                print(f"domain {name} has no held-out text and is not measured")
            continue
        samples = _domain_samples(tokenizer, data, name, "held_out", show)
        found[name] = sample_evenly(samples, data.held_out_tokens)
        if not any(sample.mask.any() for sample in found[name]):
            raise UserError(
                f"data.domains.{name}: no token of its held-out text is supervised. Check the "
                f"chat template and data.train_on"
            )
    return found


def held_out_samples(
    tokenizer: Any, data: DataConfig, show: bool = True
) -> dict[str, Sequence[Sample]]:
    """Return the held-out samples by domain; without domains, under the name "".

    Raises UserError if there is no held-out text.
    """
    if not data.domains:
        return {"": read_samples(tokenizer, data, "held_out", show)}
    found = held_out_domains(tokenizer, data, show)
    if not found:
        raise UserError(
            f"no domain has held-out text ({', '.join(data.domains)}). Set held_out_chats or "
            f"held_out_texts for at least one domain"
        )
    return found


def _domain_samples(
    tokenizer: Any,
    data: DataConfig,
    name: str,
    split: corpus.Split,
    show: bool,
    printed: list[str] | None = None,
) -> Sequence[Sample]:
    key = f"data.domains.{name}"
    return read_samples(tokenizer, domain_data(data, name), split, show, key, printed)


def sample_evenly(samples: Sequence[Sample], tokens: int) -> Sequence[Sample]:
    """Return every n-th sample, so that about `tokens` tokens remain; all samples if it is 0."""
    total = int(sample_lengths(samples).sum())
    return samples[:: max(1, math.ceil(total / tokens))] if tokens else samples


def domain_data(data: DataConfig, name: str) -> DataConfig:
    """Return the data of one domain as a DataConfig, with its paths relative to data.root."""
    domain = data.domains[name]
    rooted: dict[str, Any] = {
        key: [
            path if path.startswith(("embedded:", PREFIX)) else str(Path(data.root, path))
            for path in vars(domain)[key]
        ]
        for key in ("chats", "texts", "held_out_chats", "held_out_texts")
    }
    return dataclasses.replace(data, **rooted, domains={})


def each_data(data: DataConfig) -> list[DataConfig]:
    """Return the data of every domain; without domains, the data itself."""
    return [domain_data(data, name) for name in data.domains] or [data]


def sources(data: DataConfig) -> list[str]:
    """Return the configured paths of the training data."""
    return [path for one in each_data(data) for path in one.chats + one.texts]


def trained_and_held_out(data: DataConfig) -> list[str]:
    """Return the paths that both splits name.

    `embedded:stdlib` is left out, as its splits are disjoint.
    """
    held_out = {path for one in each_data(data) for path in one.held_out_chats + one.held_out_texts}
    return [path for path in dict.fromkeys(sources(data)) if path in held_out - {_STDLIB}]


def rows_of_step(data: DataConfig, loop: LoopConfig) -> int:
    """Return the number of rows per optimizer step. Raises UserError if it is 0."""
    rows_per_step = loop.tokens_per_step // data.max_length
    if rows_per_step == 0:
        raise UserError(
            f"loop.tokens_per_step is {loop.tokens_per_step}, less than one row of data.max_length "
            f"({data.max_length}) tokens. Raise loop.tokens_per_step or lower data.max_length"
        )
    return rows_per_step


def data_files(data: DataConfig, dry_run: bool = False) -> list[Path]:
    """Return the files and folders of both splits, and the card of shares, for the manifest.

    `embedded:stdlib` is left out, as the manifest records the Python version, and so are datasets
    on the Hub, whose names the configuration records. dry_run: print a note
    about missing files, which an earlier stage may still write, and leave them out.
    """
    named = [
        path
        for one in each_data(data)
        for path in one.chats + one.texts + one.held_out_chats + one.held_out_texts
        if path != _STDLIB and not path.startswith(PREFIX)
    ]
    named += [str(source.folder) for source in _datasets(data) if source.folder]
    if data.shares_from and not dry_run:
        named.append(str(Path(data.shares_from, CARD)))
    absent = [path for path in named if not is_here(path)]
    if dry_run and absent:
        print(f"note: {', '.join(absent)} does not exist yet, so its tokens are not counted")
        named = [path for path in named if path not in absent]
    return [resolve(path) for path in named]


def _datasets(data: DataConfig) -> list[HuggingFaceSource]:
    """Return the sources hf:... of both splits."""
    return [
        parse_source(path)
        for one in each_data(data)
        for path in one.chats + one.texts + one.held_out_chats + one.held_out_texts
        if path.startswith(PREFIX)
    ]


def split_chats(data: DataConfig, split: corpus.Split) -> tuple[list[Chat], Counts]:
    """Return the chats of the `train` or `held_out` split and the counts of their records."""
    counts = Counts()
    chats = list(_iterate_chats(data, split, counts))
    counts.check("chats", CHATS_EXPECTED, data.max_bad)
    counts.used = len(chats)
    return chats, counts


def _iterate_chats(data: DataConfig, split: corpus.Split, counts: Counts) -> Iterator[Chat]:
    """Yield the chats of a split, and count those of files."""
    if _STDLIB in _paths(data, "chats", split):
        for number, messages in enumerate(corpus.chats(split)):
            yield Chat(str(number), messages, f"{_STDLIB}:{number}")
    if files := _files(data, "chats", split):
        yield from iterate_chats(files, counts)


def _iterate_texts(data: DataConfig, split: corpus.Split, counts: Counts) -> Iterator[str]:
    """Yield the documents of a split, and count those of files."""
    if _STDLIB in _paths(data, "texts", split):
        yield from corpus.documents(split)
    if files := _files(data, "texts", split):
        yield from iterate_texts(files, counts)


def _paths(data: DataConfig, what: str, split: corpus.Split) -> list[str]:
    found: list[str] = vars(data)[what if split == "train" else f"held_out_{what}"]
    return found


def _files(data: DataConfig, what: str, split: corpus.Split) -> list[Source]:
    """Return the files, folders and datasets of a split."""
    return [
        parse_source(path, data.streaming) if path.startswith(PREFIX) else resolve(path)
        for path in _paths(data, what, split)
        if path != _STDLIB
    ]


def read_samples(
    tokenizer: Any,
    data: DataConfig,
    split: corpus.Split,
    show: bool = True,
    key: str = "data",
    printed: list[str] | None = None,
) -> Sequence[Sample]:
    """Return the samples of the `train` or `held_out` split; with `show`, print their counts.

    key: configuration key of the paths, for messages. printed: receives the lines of counts.
    Raises UserError for an empty split.
    """
    samples, report = load_or_tokenize(
        tokenizer,
        data,
        _files(data, "texts", split),
        _files(data, "chats", split),
        f"{split} {[_STDLIB in _paths(data, what, split) for what in ('texts', 'chats')]}",
        lambda sink, workers: _tokenize(tokenizer, data, split, sink, workers),
        show,
    )
    domain = key.removeprefix("data").removeprefix(".domains.")
    for line in report.lines if show else ():
        print(counted := f"{domain} {split} {line}".lstrip())
        if printed is not None:
            printed.append(counted)
    if len(samples):
        return samples
    held = "" if split == "train" else "held_out_"
    raise UserError(
        f"the {split} split is empty: "
        + (
            f"zero supervised tokens in {report.found:,} texts and chats of {key}. The line above "
            f"gives the reasons. Check data.max_length, the chat template and data.train_on"
            if report.found
            else f"set {key}.{held}chats=[CHATS.json], {key}.{held}texts=[TEXT.txt], or both"
        )
    )


def _tokenize(
    tokenizer: Any, data: DataConfig, split: corpus.Split, sink: Sink, workers: int
) -> Report:
    """Write the samples of a split to a sink, texts first, and return what was printed."""
    report, rules = Report(), ChatRules(data.template, data.max_length, data.train_on)
    text_counts, chat_counts, texts, chats = Counts(), Counts(), Account(), Account()
    over: Counter[str] = Counter()

    def limited(items: Iterable[Item], what: str) -> Iterator[Item]:
        for number, item in enumerate(items):
            report.found += 1
            if data.max_samples and number >= data.max_samples:
                over[what] += 1
            else:
                yield item

    documents = text_batches(limited(_iterate_texts(data, split, text_counts), "texts"))
    parts = map_batches(tokenize_texts, tokenizer, documents, (data.max_length,), workers)
    store_texts(parts, texts, sink)
    report.notes += text_counts.check("texts", TEXTS_EXPECTED, data.max_bad)
    dialogues = chat_batches(limited(_iterate_chats(data, split, chat_counts), "chats"))
    parts = map_batches(tokenize_chats, tokenizer, dialogues, (rules,), workers)
    notes = store_chats(parts, chats, sink, data.max_bad)
    report.notes += chat_counts.check("chats", CHATS_EXPECTED, data.max_bad) + notes
    for what, counts, account in (("texts", text_counts, texts), ("chats", chat_counts, chats)):
        for reason, places in counts.bad.items():
            account.dropped[reason] += len(places)
        account.dropped["over data.max_samples"] += over[what]
        if account.read:
            report.lines.append(account.line(what))
    return report
