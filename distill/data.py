"""The samples of a job: chats and texts from files, or from the standard library of this Python."""

from pathlib import Path
from typing import Any

from decoding.errors import UserError
from distill import corpus
from training.config import DataConfig, LoopConfig
from training.data import Chat, read_chats, read_texts
from training.packing import PackedData, Sample
from training.paths import resolve
from training.samples import chat_samples, text_samples


def packed_data(samples: list[Sample], data: DataConfig, loop: LoopConfig, seed: int) -> PackedData:
    """The samples in rows of data.max_length tokens, loop.tokens_per_step of them a step."""
    rows_per_step = loop.tokens_per_step // data.max_length
    if rows_per_step == 0:
        raise UserError(
            f"loop.tokens_per_step is {loop.tokens_per_step}, less than one row of data.max_length ({data.max_length}) tokens: raise the one "
            "or lower the other"
        )
    return PackedData(samples, data.max_length, rows_per_step, seed)


def data_files(data: DataConfig) -> list[Path]:
    """Files and folders that a job reads of both splits, for its manifest; `embedded:stdlib` is this Python's own, whose version is noted."""
    named = [*data.chats, *data.texts, *data.held_out_chats, *data.held_out_texts]
    return [resolve(path) for path in named if path != "embedded:stdlib"]


def read_samples(tokenizer: Any, data: DataConfig, split: corpus.Split, show: bool = True) -> list[Sample]:
    """Samples of the `train` or `held_out` split and, with `show`, a printed account of what was used and what was not."""
    chat_paths = data.chats if split == "train" else data.held_out_chats
    text_paths = data.texts if split == "train" else data.held_out_texts
    samples: list[Sample] = []
    documents: list[str] = []
    chats: list[Chat] = []
    if "embedded:stdlib" in text_paths:
        documents += corpus.documents(split)
    if "embedded:stdlib" in chat_paths:
        chats += [
            Chat(str(number), messages, f"embedded:stdlib:{number}")
            for number, messages in enumerate(corpus.chats(split))
        ]
    text_files = [resolve(path) for path in text_paths if path != "embedded:stdlib"]
    chat_files = [resolve(path) for path in chat_paths if path != "embedded:stdlib"]
    documents += read_texts(text_files, max_bad=data.max_bad)[0] if text_files else []
    chats += read_chats(chat_files, max_bad=data.max_bad)[0] if chat_files else []
    limit = data.max_samples or None
    for what, (new, account) in {
        "texts": text_samples(tokenizer, documents[:limit], data.max_length),
        "chats": chat_samples(tokenizer, chats[:limit], data.template, data.max_length, data.train_on, data.max_bad),
    }.items():
        if account.read and show:
            print(f"{split} {account.line(what)}")
        samples += new
    if not samples:
        raise UserError(
            f"the {split} split is empty: give data.{'' if split == 'train' else 'held_out_'}chats or _texts"
        )
    return samples
