"""Chat templates are untrusted programs: they render with limits, in every thread."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoding.engine import Engine, encode
from decoding.errors import UserError
from decoding.models.text import template_sandbox, templates
from decoding.models.text.templates import render
from decoding.models.text.tokenizer import load_tokenizer
from tests.support.tiny_targets import hf_model, native_of
from training.data.chat import render_chat, render_prompt

from .test_bad_input import ASSETS

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
LOOPS = "{{% for i in range(100000) %}}{{% for j in range(100000) %}}{}{{% endfor %}}{{% endfor %}}"
# grows slowly, so that the time limit ends it and not the size limit
SLOW = "{% for j in range(2000) %}{% endfor %}"
GROWS = (
    "{% set n = namespace(s='') %}{% for i in range(100000) %}"
    f"{SLOW}{{% set n.s = n.s + 'xx' %}}{{% endfor %}}"
)
MACRO = "{% macro f() %}" + LOOPS.format("x" * 100) + "{% endmacro %}{{ f() }}"
BAD = {
    "output without end": (
        LOOPS.format("x" * 100),
        "wrote more than 100,000 characters for one chat",
    ),
    # its output is joined at the end
    "output of a macro": (MACRO, "took more than 0.3 seconds"),
    "loops without output": (LOOPS.format(""), "took more than 0.3 seconds for one chat"),
    "a text that grows": (GROWS, "took more than 0.3 seconds"),
    "a macro that calls itself": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "fails on this chat .RecursionError",
    ),
    "division by zero": ("{{ 1 / 0 }}", "fails on this chat .ZeroDivisionError"),
    "a sum of text and number": ("{{ messages[0].content + 1 }}", "fails on this chat .TypeError"),
    "a range beyond the sandbox": (
        "{% for i in range(10000000) %}{% endfor %}",
        "fails on this chat .OverflowError",
    ),
}


TEXT, NUMBER = "a string or list of more than 16,000,000 ", "a whole number of more than 8,192 bits"
LONG = "'x' | center(9000000)"
# items that share their memory: without limits, this list is written as 10 million characters
LISTS = "{% set a = [['x' * 1000] * 1000] * 9 %}"
# each step doubles the text, but not the memory
GROWING = (
    "{{% set n = namespace(v=['xx']) %}}{{%for i in range(23)%}}{{%set n.v = {} %}}{{%endfor%}}"
    "{{{{ n.v }}}}"
)
LARGE = {
    "{{ 9**(9**9) }}": NUMBER,
    "{% set n = namespace(v=3) %}{%for i in range(40)%}{%set n.v = n.v * n.v%}{%endfor%}": NUMBER,
    "{{ 'x' * 10**9 }}": TEXT,
    "{{ [0] * 10**9 }}": TEXT,
    "{{ 10**9 * (messages[0].content,) }}": TEXT,
    "{% set n = namespace(v='xx') %}{%for i in range(60)%}{%set n.v = n.v + n.v%}{%endfor%}": TEXT,
    "{% set n = namespace(v='xx') %}{%for i in range(60)%}{%set n.v = n.v ~ n.v%}{%endfor%}": TEXT,
    "{{ '%1000000000d' % 1 }}": TEXT,
    "{{ '%.*f' % (1000000000, 1) }}": TEXT,
    "{{ '%(a)1000000000s' % {'a': 1} }}": TEXT,
    "{{ '%1000000000d' | format(1) }}": TEXT,
    "{{ 'x' | center(3000000000) }}": TEXT,
    "{{ ['x'] | map('center', 3000000000) | list }}": TEXT,
    "{{ 'x\ny' | indent(3000000000) }}": TEXT,
    "{{ ('x ' * 10000) | wordwrap(1, wrapstring='x' * 10000) }}": TEXT,
    "{{ ('x' * 10000) | replace('x', 'x' * 10000) }}": TEXT,
    "{{ range(100000) | join('x' * 1000) }}": TEXT,
    "{{ ([{'a': 'x' * 9000}] * 9000) | join(attribute='a') }}": TEXT,
    "{{ ([[0] * 6000000] * 4) | sum(start=[]) }}": TEXT,
    "{{ messages | batch(3000000000, 'x') | list }}": TEXT,
    "{{ messages | tojson(indent=3000000000) }}": TEXT,
    "{{ 7 | round(-1000000000) }}": "a number rounded to more than 1,000 digits",
    "{{ 'x'.center(3000000000) }}": TEXT,
    "{{ 'x'.ljust(3000000000) }}": TEXT,
    "{{ 'x'.rjust(3000000000, 'y') }}": TEXT,
    "{{ ('x' | safe).center(3000000000) }}": TEXT,
    "{{ 'x'.zfill(3000000000) }}": TEXT,
    "{{ '\t'.expandtabs(1000000000) }}": TEXT,
    "{{ ('x' * 10000).replace('x', 'x' * 10000) }}": TEXT,
    "{{ ('x' * 10000).translate({120: 'x' * 10000}) }}": TEXT,
    "{{ ('x' * 1000).join(range(100000) | map('string')) }}": TEXT,
    "{{ (1).to_bytes(3000000000, 'big') }}": TEXT,
    "{{ '{:1000000000}'.format(1) }}": TEXT,
    "{{ '{:{}}'.format(1, 1000000000) }}": TEXT,
    "{{ '{a:1000000000}'.format_map({'a': 1}) }}": TEXT,
    "{{ [['x' * 1000] * 1000] * 20 }}": TEXT,
    "{{ ([('x' * 1000,)] * 9000) + ([('x' * 1000,)] * 9000) }}": TEXT,
    GROWING.format("[n.v, n.v]"): TEXT,
    GROWING.format("(n.v, n.v)"): TEXT,
    GROWING.format("{1: n.v, 2: n.v}"): TEXT,
    GROWING.format("dict(a=n.v, b=n.v)"): TEXT,
    GROWING.format("namespace(a=n.v, b=n.v)"): TEXT,
    f"{LISTS}{{{{ a ~ a }}}}": TEXT,
    f"{LISTS}{{{{ '%s%s' % (a, a) }}}}": TEXT,
    f"{LISTS}{{{{ [1] | batch(9, a) | list }}}}": TEXT,
    f"{LISTS}{{{{ [1, 2] | map(attribute='x', default=a) | join }}}}": TEXT,
    f"{LISTS}{{{{ [1, 2] | map(attribute='x', default=a) | list }}}}": TEXT,
    f"{{% set a = {LONG} %}}{{{{ [a, a] | join }}}}": TEXT,
    f"{{% set a = {LONG} %}}{{{{ '{{0}}{{0}}'.format(a) }}}}": TEXT,
    f"{{% set a = {LONG} %}}{{{{ '%s%s' % (a, a) }}}}": TEXT,
}
ORDINARY = {
    "{{ 2**10 * 3 % 7 + 1.5 }}": "7.5",
    "{{ '-' * 3 + 'a' ~ 1 ~ [2] }}": "---a1[2]",
    "{% for a, b in [(1, [2]), (3, {4: 5})] %}{{ a }}{{ b }}{% endfor %}": "1[2]3{4: 5}",
    "{% set a, (b, c) = 1, (2, 3) %}{{ (c, b, a) | list }}{{ 'ab' | list }}": "[3, 2, 1]['a', 'b']",
    "{{ dict(a=1).items() | list }}{{ [[1], [1]] == [[1]] * 2 }}": "[('a', 1)]True",
    "{{ [0] * 2 + [1] }}": "[0, 0, 1]",
    "{{ '%5.1f|%-3s|%(a)s' % {'a': 1} if false else '%5.1f|%-3s|' % (1, 'b') }}": "  1.0|b  |",
    "{{ '%s and %d%%' | format('a', 5) }}": "a and 5%",
    "{{ 'a' | center(5) ~ 'a'.ljust(3) ~ '7'.zfill(3) }}": "  a  a  007",
    "{{ 'a\nb' | indent(2) ~ 'aXa' | replace('a', 'b', 1) }}": "a\n  bbXa",
    "{{ messages | map(attribute='role') | join('+') }}": "user+assistant",
    "{{ messages | join(', ', attribute='role') }}": "user, assistant",
    "{{ [1, 2.5] | sum }}{{ [{'a': [1]}, {'a': [2]}] | sum('a', []) }}": "3.5[1, 2]",
    "{{ '+'.join(['a', 'b']) ~ ['a', 'b'] | join }}": "a+bab",
    "{{ '{}, {b:>3}, {c:03d}'.format('a', b='b', c=5) }}": "a,   b, 005",
    "{{ '{a[0]}'.format_map({'a': ['<']}) ~ ('{}' | safe).format('<') }}": "<&lt;",
    "{{ ('<b>' | e) ~ '<' }}": "&lt;b&gt;<",
    "{{ {'a': [1]} | tojson(indent=1) }}": '{\n "a": [\n  1\n ]\n}',
    "{{ 3.14159 | round(2) }}": "3.14",
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ASSETS)


@pytest.fixture
def _tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CHARACTERS", 100_000)
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(templates, "_CHECK_SECONDS", 0.05)


@pytest.mark.usefixtures("_tight")
@pytest.mark.parametrize(("source", "message"), BAD.values(), ids=BAD)
def test_an_endless_template_is_stopped(
    tokenizer: PreTrainedTokenizerBase, source: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        render(tokenizer, CHAT, source)
    assert str(ASSETS) in str(caught.value)
    assert "Correct the template" in str(caught.value)
    assert "Hello" in render(tokenizer, CHAT), "nothing is left behind for the next chat"


@pytest.mark.parametrize("source", LARGE)
def test_an_operation_with_a_huge_result_is_refused(
    tokenizer: PreTrainedTokenizerBase, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 120.0)  # the size must end it on slow machines
    with pytest.raises(
        UserError, match=f"{LARGE[source]}.* expected .*Correct the template"
    ) as caught:
        render(tokenizer, CHAT, source)
    assert str(ASSETS) in str(caught.value)
    assert "loop" not in str(caught.value)


@pytest.mark.parametrize(("source", "text"), ORDINARY.items(), ids=ORDINARY)
def test_ordinary_operations_equal_jinjas(
    tokenizer: PreTrainedTokenizerBase, source: str, text: str
) -> None:
    assert render(tokenizer, CHAT, source) == text
    # `transformers` without limits
    assert tokenizer.apply_chat_template(CHAT, chat_template=source, tokenize=False) == text


@pytest.mark.usefixtures("_tight")
@pytest.mark.parametrize("way", ["encode", "render_chat", "render_prompt"])
def test_every_rendering_of_a_chat_has_the_limits(way: str) -> None:
    tokenizer = load_tokenizer(ASSETS)
    tokenizer.chat_template = LOOPS.format("")
    engine = Engine(native_of(hf_model(dtype=torch.float32)), None, tokenizer, ())
    ways: dict[str, Callable[[], object]] = {
        "encode": lambda: encode(engine, CHAT),
        "render_chat": lambda: render_chat(tokenizer, CHAT),
        "render_prompt": lambda: render_prompt(tokenizer, CHAT),
    }
    with pytest.raises(UserError, match=r"took more than 0\.3 seconds for one chat"):
        ways[way]()


@pytest.mark.usefixtures("_tight")
def test_each_thread_has_its_deadline(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that threads with an endless template get its error, and the others their text."""
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
        assert ("took more than" if number % 2 else "Hello") in text
    assert failed == []
    assert len(found) == 6


def test_rendered_chats_equal_those_of_transformers(tokenizer: PreTrainedTokenizerBase) -> None:
    for prompt in (True, False):
        plain = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
        assert render(tokenizer, CHAT, add_generation_prompt=prompt) == plain


def test_text_that_cannot_be_encoded_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=r"writes half a surrogate pair \('.ud83d'\), expected"):
        render(tokenizer, CHAT, "{{ '\\ud83d' }}{{ messages[0].content }}")


@pytest.mark.parametrize(
    "read", [lambda one: render(one, CHAT), lambda one: render_chat(one, CHAT)]
)
def test_one_of_several_templates_is_the_default(read: Callable[..., object]) -> None:
    tokenizer = load_tokenizer(ASSETS)
    source = str(tokenizer.chat_template)
    tokenizer.chat_template = {"default": source, "rag": "x"}
    expected = read(tokenizer)
    tokenizer.chat_template = source
    assert str(read(tokenizer)) == str(expected)
    tokenizer.chat_template = {"tool_use": source, "rag": "x"}
    with pytest.raises(UserError, match="the chat templates 'tool_use', 'rag', expected one named"):
        read(tokenizer)


def test_a_templates_rejection_is_reported() -> None:
    tokenizer = load_tokenizer(ASSETS)
    tokenizer.chat_template = "{{ raise_exception('no chats today.') }}"
    with pytest.raises(TemplateError, match="no chats today"):
        render(tokenizer, CHAT)
    engine = Engine(native_of(hf_model(dtype=torch.float32), name="tiny"), None, tokenizer, ())
    words = "the chat template of 'tiny' rejects the messages: no chats today[.] Correct the"
    with pytest.raises(UserError, match=words):
        encode(engine, CHAT)
    tokenizer.chat_template = "{% for %}"
    with pytest.raises(UserError, match="of 'tiny' is not valid Jinja: .* Correct the template"):
        encode(engine, CHAT)
