"""Chat templates are programs of whoever made the model: they run with limits, in every thread, and a quick one costs next to nothing."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoding import templates
from decoding.compatible import load_tokenizer
from decoding.engine import Engine, encode
from decoding.errors import UserError
from decoding.templates import render
from training.chat import render_chat, render_prompt

from .test_bad_input import ASSETS
from .tiny import hf_model, native_of

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
LOOPS = "{{% for i in range(100000) %}}{{% for j in range(100000) %}}{}{{% endfor %}}{{% endfor %}}"
GROWS = "{% set n = namespace(s='') %}" + LOOPS.format("{% set n.s = n.s + 'xx' %}")
MACRO = "{% macro f() %}" + LOOPS.format("x" * 100) + "{% endmacro %}{{ f() }}"
BAD = {
    "output without end": (LOOPS.format("x" * 100), "wrote more than 100,000 characters for one chat"),
    "output of a macro": (MACRO, "computed for more than 0.3 seconds"),  # it is put together at the end
    "loops without output": (LOOPS.format(""), "computed for more than 0.3 seconds on one chat"),
    "a text that grows": (GROWS, "computed for more than 0.3 seconds"),
    "a macro that calls itself": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "fails on this chat .RecursionError",
    ),
    "division by zero": ("{{ 1 / 0 }}", "fails on this chat .ZeroDivisionError"),
    "a sum of text and number": ("{{ messages[0].content + 1 }}", "fails on this chat .TypeError"),
    "a range beyond the sandbox": ("{% for i in range(10000000) %}{% endfor %}", "fails on this chat .OverflowError"),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ASSETS)


@pytest.fixture
def _tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_CHARACTERS", 100_000)
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(templates, "_LOOK_SECONDS", 0.05)


@pytest.mark.usefixtures("_tight")
@pytest.mark.parametrize(("source", "message"), BAD.values(), ids=BAD)
def test_a_template_without_end_is_stopped(tokenizer: PreTrainedTokenizerBase, source: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        render(tokenizer, CHAT, source)
    assert str(ASSETS) in str(caught.value)
    assert "Mend the template" in str(caught.value)
    assert "Hello" in render(tokenizer, CHAT), "nothing is left behind for the next chat"


@pytest.mark.usefixtures("_tight")
@pytest.mark.parametrize("way", ["encode", "render_chat", "render_prompt"])
def test_every_way_to_a_chats_tokens_has_the_limits(way: str) -> None:
    tokenizer = load_tokenizer(ASSETS)
    tokenizer.chat_template = LOOPS.format("")
    engine = Engine(native_of(hf_model(dtype=torch.float32)), None, tokenizer, ())
    ways: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(engine, CHAT),
        "render_chat": lambda: render_chat(tokenizer, CHAT),
        "render_prompt": lambda: render_prompt(tokenizer, CHAT),
    }
    with pytest.raises(UserError, match=r"computed for more than 0\.3 seconds on one chat"):
        ways[way]()


@pytest.mark.usefixtures("_tight")
def test_threads_are_stopped_each_for_itself(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad chats in three threads, good ones in three more at the same time: no thread gets another's error."""
    found: dict[int, str] = {}
    until = time.monotonic() + 1.0

    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)

    def good(number: int) -> None:
        while number not in found or time.monotonic() < until:
            found[number] = render(tokenizer, CHAT)

    def bad(number: int) -> None:
        while number not in found or time.monotonic() < until:
            try:
                render(tokenizer, CHAT, LOOPS.format(""))
            except UserError as error:
                found[number] = str(error)

    threads = [threading.Thread(target=(good, bad)[n % 2], args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, text in sorted(found.items()):
        assert ("computed for more than" if number % 2 else "Hello") in text
    assert failed == []
    assert len(found) == 6


def test_a_chat_is_what_it_was(tokenizer: PreTrainedTokenizerBase) -> None:
    for prompt in (True, False):
        plain = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
        assert render(tokenizer, CHAT, add_generation_prompt=prompt) == plain


def test_a_template_that_refuses_a_chat_says_so() -> None:
    tokenizer = load_tokenizer(ASSETS)
    tokenizer.chat_template = "{{ raise_exception('no chats today') }}"
    with pytest.raises(TemplateError, match="no chats today"):
        render(tokenizer, CHAT)
    engine = Engine(native_of(hf_model(dtype=torch.float32), name="tiny"), None, tokenizer, ())
    with pytest.raises(UserError, match="the chat template of 'tiny' refuses the messages: no chats today"):
        encode(engine, CHAT)
