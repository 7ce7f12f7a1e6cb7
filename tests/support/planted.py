"""A tiny trained target that chats, drafters made of it in a second, and faults planted in them.

The language: a question names a verb and a word; the answer follows a chain of words that the verb
decides, up to a terminal word. So answers depend on prompts, and words begin hard and end easily.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.models.folder import CARD, hash_input
from tests.heads import law_6
from tests.heads.rows import HeadRow
from tests.support import tiny_folders
from training.data.chat import render_chat
from training.data.packing import Sample, best_fit, collate
from training.heads.checkpoint import save_head
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.models.attention import PACKED
from training.models.build import load_causal_lm
from training.objectives import LanguageModelling, freeze

# made by `write_target` and, with the rows eagle3 (taps 3 and 2) and dflash of tests/heads/rows.py,
# by `write_head`, which take minutes
MODELS = Path(__file__).resolve().parents[1] / "doctor_models"
WORDS = ("fox", "kit", "sea", "ice", "net", "oak", "jar", "hen", "map", "sun", "end", "bay")
TERMINAL = ("end", "bay")
VERBS = ("what", "how")
ROW = 96
SYSTEM = "be brief"
OTHER_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}# {{ message['content'] }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] }}; {% else %}\n"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\n{% endif %}"
)
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<u>{{ message['content'] }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] }}{% else %}<a>"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def answer(verb: str, word: str, step: int = 5) -> str:
    """Return the answer to a question. step: of the chain; another one is another author's."""
    stride = step if verb == "what" else step + 2
    said, index = [], WORDS.index(word)
    for _ in range(5):
        index = (index + stride) % len(WORDS)
        said.append(WORDS[index])
        if said[-1] in TERMINAL:
            break
    return " ".join(said) + "."


def question(verb: str, word: str) -> str:
    return f"{verb} is {word}?"


def dialogue(verb: str, word: str, system: str = "", step: int = 5) -> list[dict[str, str]]:
    """Return a chat of one question and its answer."""
    first = [{"role": "system", "content": system}] if system else []
    return [
        *first,
        {"role": "user", "content": question(verb, word)},
        {"role": "assistant", "content": answer(verb, word, step)},
    ]


PAIRS = [(verb, word) for verb in VERBS for word in WORDS]


def samples_of(template: str, system: str = "", step: int = 5, end: bool = True) -> list[Sample]:
    """Return all questions with their answers as samples. end: whether the end tokens are kept."""
    words = tiny_folders.tokenizer()
    words.chat_template = template
    found = []
    for pair in PAIRS:
        one = render_chat(words, dialogue(*pair, system=system, step=step))
        ids, mask = np.asarray(one.ids, dtype=np.int32), np.asarray(one.mask)
        if not end:  # another question follows at once
            ids = np.where(ids == words.eos_token_id, words.convert_tokens_to_ids("<u>"), ids)
        found.append(Sample(ids, mask))
    return found


def fit(model: Any, samples: Sequence[Sample], steps: int, lr: float = 5e-3) -> Any:
    """Train a model on samples, all of them in every step."""
    rows = best_fit([len(sample.ids) for sample in samples], ROW)
    batch = collate(samples, rows, ROW)
    objective = LanguageModelling(model.requires_grad_(True).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (objective(batch)[0] / batch.supervised).backward()
        optimizer.step()
        schedule.step()
    return model.requires_grad_(False).eval()


def write_target(folder: Path, steps: int = 500) -> Path:
    """Train and write the target, which answers under both templates and with a system prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_folders.tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=192,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    config._attn_implementation = PACKED
    model = LlamaForCausalLM(config)
    fit(
        model,
        [
            *samples_of(TEMPLATE),
            *samples_of(OTHER_TEMPLATE),
            *samples_of(TEMPLATE, SYSTEM),
        ],
        steps,
        lr=1e-2,
    )
    return write_model(folder, model.half())


def write_prompts(path: Path, pairs: Sequence[tuple[str, str]] = PAIRS, before: str = "") -> Path:
    """Write the questions as prompts, in a category for each verb."""
    lines = [
        {"id": f"{verb} {word}", "category": verb, "turns": [before + question(verb, word)]}
        for verb, word in pairs
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_chats(
    path: Path,
    system: str = "",
    step: int = 5,
    pairs: Sequence[tuple[str, str]] = PAIRS,
    before: str = "",
) -> Path:
    """Write the questions with their answers as training chats. before: beginning of answers."""
    chats: list[dict[str, Any]] = [
        {"id": " ".join(pair), "messages": dialogue(*pair, system=system, step=step)}
        for pair in pairs
    ]
    for chat in chats:
        chat["messages"][-1]["content"] = before + chat["messages"][-1]["content"]
    path.write_text(json.dumps(chats), encoding="utf-8")
    return path


def noisy(folder: Path, noise: float = 0.01, seed: int = 1) -> Any:
    """Return a copy of the target in a folder with noise in all weights, relative to their size."""
    model = load_causal_lm(folder, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = noise * parameter.std(correction=0)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def write_drafter(
    folder: Path,
    target: Path,
    model: Any,
    template: str = TEMPLATE,
    acceptance: dict[str, Any] | None = None,
    change: Callable[[Path], None] | None = None,
) -> Path:
    """Write a drafter's folder with its card.

    acceptance: held-out figures on the card. change: what happens to the folder after its card.
    """
    write_model(folder, model, template)
    write_card(folder, target, acceptance)
    if change is not None:
        change(folder)
    return folder


def write_head(
    folder: Path,
    target: Path,
    row: HeadRow,
    changed: Callable[[Any], Any] = lambda shape: shape,
    steps: int = 120,
) -> Path:
    """Train and write a head for the target, with its card.

    row: of the table of heads. changed: returns the shape that config.json has.
    """
    model = freeze(load_causal_lm(target, torch.float32))
    shape = row.shape(model.config)
    head, states = law_6.head_of(row, model), law_6.states_of(row, model)
    samples = samples_of(TEMPLATE)
    packed = best_fit([len(sample.ids) for sample in samples], ROW)
    batch = collate(samples, packed, ROW)
    depths = row.kind.longest_draft(shape) or 3
    loss = HeadLossConfig("cross_entropy", predict_n_tokens=depths)
    objective = HeadObjective(row.kind, head.requires_grad_(True), states, loss)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (objective(batch)[0] / batch.supervised).backward()
        optimizer.step()
    save_head(row.kind.layout, changed(shape), head.requires_grad_(False), folder)
    write_tokenizer(folder)
    write_card(folder, target)
    return folder


def write_model(folder: Path, model: Any, template: str = TEMPLATE) -> Path:
    """Write a model's folder with the tokenizer."""
    model.save_pretrained(folder)
    write_tokenizer(folder, template)
    return folder


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """Write the tokenizer to a folder."""
    words = tiny_folders.tokenizer()
    words.chat_template = template
    words.save_pretrained(folder)


def write_card(folder: Path, target: Path, acceptance: dict[str, Any] | None = None) -> None:
    """Write the card that a training would write."""
    card = {
        "name": folder.name,
        "target": str(target),
        "target_hash": hash_input(target),
        "drafter_hash": hash_input(folder),
        "data": {"sources": [], "template": "auto"},
        "acceptance": {"temperature": 0.0, **(acceptance or {})},
    }
    (folder / CARD).write_text(json.dumps(card), encoding="utf-8")


def shuffled(seed: int = 0) -> list[tuple[str, str]]:
    """Return all questions in random order."""
    pairs = [*PAIRS]
    random.Random(seed).shuffle(pairs)
    return pairs
