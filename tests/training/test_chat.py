"""Test chat rendering: golden texts of built-in templates, and masks of exactly the answers."""

import json
import re
from itertools import groupby
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from decoding.errors import UserError
from training.data.chat import Rendered, render_chat, render_prompt
from training.data.templates import QWEN, TEMPLATES, VICUNA, find_family

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi, you."},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Fine."},
]
GOLDEN = {
    "vicuna": "<s>Be brief. USER: Hello! ASSISTANT: Hi, you.</s>USER: How are you? ASSISTANT: "
    "Fine.</s>",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello! [/INST] Hi, you. </s><s>[INST] How "
    "are you? [/INST] Fine. </s>",
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi, you.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHow are you?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nFine.<|eot_id|>"
    ),
    "qwen": (
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nHi, "
        "you.<|im_end|>\n"
        "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\nFine.<|im_end|>\n"
    ),
    "mistral": "<s>[INST] Be brief.\n\nHello![/INST] Hi, you.</s>[INST] How are you?[/INST] "
    "Fine.</s>",
}
SUPERVISED = {
    "vicuna": [" Hi, you.</s>", " Fine.</s>"],
    "llama2": [" Hi, you. </s>", " Fine. </s>"],
    "llama3": ["Hi, you.<|eot_id|>", "Fine.<|eot_id|>"],
    "qwen": ["Hi, you.<|im_end|>", "Fine.<|im_end|>"],
    "mistral": [" Hi, you.</s>", " Fine.</s>"],
}
SPECIAL = {
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen": {"eos_token": "<|im_end|>"},
}
MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def load(folder: Path, family: str = "", chat_template: str | None = None):
    """Load the embedded tokenizer with a family's special tokens and, if given, a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **SPECIAL.get(family, {}))
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def answers(tokenizer, rendered: Rendered) -> list[str]:
    """Return the decoded runs of supervised tokens."""
    runs = groupby(zip(rendered.ids, rendered.mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for supervised, run in runs if supervised]


@pytest.mark.parametrize("family", TEMPLATES)
def test_golden_renders(embedded_target: Path, family: str) -> None:
    tokenizer = load(embedded_target, family)
    rendered = render_chat(tokenizer, CHAT, template=family)
    assert tokenizer.decode(rendered.ids) == GOLDEN[family]
    assert answers(tokenizer, rendered) == SUPERVISED[family]


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_prompt_is_the_text_before_the_answer(embedded_target: Path, family: str) -> None:
    tokenizer = load(embedded_target, family)
    rendered = render_chat(tokenizer, CHAT[:3], template=family)
    assert (
        render_prompt(tokenizer, CHAT[:2], template=family)
        == rendered.ids[: rendered.mask.index(True)]
    )


@pytest.mark.parametrize("family", TEMPLATES)
def test_prefix_rendering_finds_the_marked_answers(embedded_target: Path, family: str) -> None:
    tokenizer = load(embedded_target, family, chat_template=MARKS.sub("", TEMPLATES[family]))
    assert render_chat(tokenizer, CHAT) == render_chat(tokenizer, CHAT, template=family)


def test_contents_that_a_template_rewrites_are_located(embedded_target: Path) -> None:
    """Check answers of which the template drops blanks, beside those that it writes as they are."""
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    tokenizer = load(embedded_target, chat_template=template)
    padded = [{**message, "content": f"\n {message['content']}  "} for message in CHAT]
    rendered = render_chat(tokenizer, CHAT)
    assert answers(tokenizer, rendered) == ["Hi, you.</s>", "Fine.</s>"]
    assert render_chat(tokenizer, padded) == rendered


def test_chats_without_a_system_turn_are_rendered(embedded_target: Path) -> None:
    tokenizer = load(embedded_target)
    texts = {
        name: tokenizer.decode(render_chat(tokenizer, CHAT[1:3], template=name).ids)
        for name in TEMPLATES
    }
    assert texts["vicuna"].startswith(
        "<s>A chat between a curious user and an artificial intelligence assistant. "
    )
    assert texts["vicuna"].endswith("questions. USER: Hello! ASSISTANT: Hi, you.</s>")
    assert texts["llama2"] == "<s>[INST] Hello! [/INST] Hi, you. </s>"
    assert texts["mistral"] == "<s>[INST] Hello![/INST] Hi, you.</s>"
    assert (
        texts["qwen"]
        == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\nHi, you.<|im_end|>\n"
    )


def test_marks_agree_with_transformers(embedded_target: Path) -> None:
    """Check that ids and masks equal those of transformers if the template marks generations.

    The chat has line ends, runs of spaces and multibyte characters; one template's marks trim
    blanks.
    """
    chat = [
        *CHAT,
        {"role": "user", "content": "if x:\n\tпривет  🙂"},
        {"role": "assistant", "content": "    return 'é'\n\n"},
    ]
    trimming = (
        "{{- bos_token }}\n{%- for message in messages %}\n    {%- if message.role == 'assistant' "
        "%}\n"
        "        {{- '<|assistant|>' }}\n        {%- generation %}\n            {{- "
        "message.content + eos_token }}\n"
        "        {%- endgeneration %}\n    {%- else %}\n        {{- '<|user|>' + message.content "
        "}}\n    {%- endif %}\n{%- endfor %}"
    )
    untrimmed = (
        "{{ bos_token }}\n{% for m in messages %}\n{% if m.role == 'assistant' %}\n  {% generation "
        "%}\n{{ m.content + eos_token }}\n"
        "  {% endgeneration %}\nend\n{% else %}\n{{ m.content }}\n{% endif %}\n{% endfor %}"
    )
    for template in (None, trimming, untrimmed):
        tokenizer = load(embedded_target, chat_template=template)
        expected = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        rendered = render_chat(tokenizer, chat)
        assert rendered.ids == expected["input_ids"]
        assert rendered.mask == [bool(value) for value in expected["assistant_masks"]]


def test_embedded_chats(embedded_target: Path) -> None:
    tokenizer = load(embedded_target)
    for record in json.loads((embedded_target.parent / "held_out_chats.json").read_text())[:150]:
        turns = record["conversations"]
        messages = [
            {"role": "user" if turn["from"] == "human" else "assistant", "content": turn["value"]}
            for turn in turns
        ]
        rendered = render_chat(tokenizer, messages)
        assert answers(tokenizer, rendered) == [
            turn["value"] + "</s>" for turn in turns if turn["from"] == "gpt"
        ]
        assert rendered.ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    "name", ["mt_bench_101", "gpteacher_codegen", "sgd_dialogues", "oasst1_threads"]
)
def test_real_chats_with_a_template_without_marks(
    chat24m: Path, shared_data: Path, name: str
) -> None:
    """Check that real chats are rendered and masked correctly by a template without marks.

    Answers are located by rendering prefixes. An answer's first token includes the blank before it,
    which the comparison removes.
    """
    tokenizer = AutoTokenizer.from_pretrained(chat24m)
    for record in json.loads((shared_data / "chat" / f"{name}.json").read_text())[:100]:
        turns = record["conversations"]
        messages = [
            {"role": "user" if turn["from"] == "human" else "assistant", "content": turn["value"]}
            for turn in turns
        ]
        rendered = render_chat(tokenizer, messages)
        assert rendered.ids == tokenizer.apply_chat_template(messages, return_dict=False)
        assert rendered.ids[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in rendered.ids[1:]
        expected = [turn["value"].strip() + "</s>" for turn in turns if turn["from"] == "gpt"]
        assert [answer.removeprefix(" ") for answer in answers(tokenizer, rendered)] == expected


def test_a_blank_at_the_end_of_the_prompt_may_merge_with_the_answer(embedded_target: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }} A: {% else %}{{ "
        "m.content + eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = load(embedded_target, chat_template=template)
    chat = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "return it"}]
    rendered = render_chat(tokenizer, chat)
    prompt = render_prompt(tokenizer, chat[:1])
    assert rendered.ids[: len(prompt)] != prompt, (
        "the tokenizer does not merge here: the test shows nothing"
    )
    assert answers(tokenizer, rendered) == [" return it</s>"]


def test_a_template_that_rewrites_earlier_turns_is_replaced_by_ours(
    embedded_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that a template that rewrites earlier turns is replaced by the built-in one.

    The template renders an empty thought in the last answer only, as Qwen3's does.
    """
    rewriting = MARKS.sub("", QWEN).replace(
        "{{ message['content'] + '<|im_end|>' }}{{ '\n' }}",
        "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ message['content'] + "
        "'<|im_end|>\n' }}",
    )
    tokenizer = load(embedded_target, "qwen", chat_template=rewriting)
    rendered = render_chat(tokenizer, CHAT)
    assert answers(tokenizer, rendered) == SUPERVISED["qwen"]
    assert "rendered with ours: 'qwen'" in capsys.readouterr().err


def test_an_unknown_family_that_rewrites_turns_is_refused(embedded_target: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content if loop.last else m.content | upper }}{{ "
        "eos_token }}{% endfor %}"
    )
    with pytest.raises(
        UserError,
        match=r"turn 3 \(assistant\) is rendered differently .* choose one of ours .*vicuna",
    ):
        render_chat(load(embedded_target, chat_template=template), CHAT)


def test_a_template_that_drops_marked_turns_is_refused(embedded_target: Path) -> None:
    template = (
        "{{ messages[1].content }}{% generation %}{{ messages[2].content }}{% endgeneration %}"
    )
    with pytest.raises(UserError, match="marks 1 answers, but the chat has 2"):
        render_chat(load(embedded_target, chat_template=template), CHAT)


@pytest.mark.parametrize("template", ["auto", *TEMPLATES])
def test_unknown_roles_name_the_turn(embedded_target: Path, template: str) -> None:
    chat = [*CHAT[1:3], {"role": "tool", "content": "42"}, CHAT[4]]
    with pytest.raises(
        UserError, match=r"turn 3 \(tool\): .*role tool is unknown to this template"
    ):
        render_chat(load(embedded_target), chat, template=template)


def test_chats_that_cannot_be_rendered_are_refused(embedded_target: Path) -> None:
    tokenizer = load(embedded_target)
    with pytest.raises(UserError, match="1 turns and no answer"):
        render_chat(tokenizer, CHAT[:1])
    with pytest.raises(
        UserError, match=r"chat template 'vikuna' is unknown, expected one of auto, vicuna"
    ):
        render_chat(tokenizer, CHAT, template="vikuna")
    with pytest.raises(UserError, match=r"turn 2 \(assistant\) holds U\+FDD0"):
        render_chat(tokenizer, [CHAT[1], {"role": "assistant", "content": "a\ufdd0b"}])
    with pytest.raises(UserError, match="turn 1 is from the assistant"):
        render_chat(load(embedded_target, chat_template=MARKS.sub("", VICUNA)), CHAT[2:])
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"no chat template. Choose one of ours"):
        render_chat(tokenizer, CHAT)


@pytest.mark.parametrize("wrong", [1, 2, 700, 999, 1000])
def test_the_turn_that_a_template_rejects_is_found_in_few_renderings(
    wrong: int, embedded_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = """{% for message in messages %}{% if message['content'] == 'no' %}
        {{ raise_exception('it refuses') }}{% endif %}{% endfor %}"""
    tokenizer, renderings = load(embedded_target, chat_template=template), 0
    apply = type(tokenizer).apply_chat_template

    def counted(*given: object, **named: object) -> object:
        nonlocal renderings
        renderings += 1
        return apply(*given, **named)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", counted)
    roles = ("user", "assistant") * 500
    chat = [{"role": role, "content": "yes"} for role in roles]
    chat[wrong - 1]["content"] = "no"
    words = rf"rejects turn {wrong} \({roles[wrong - 1]}\): it refuses"
    with pytest.raises(UserError, match=words):
        render_prompt(tokenizer, chat)
    assert renderings < 12, "the whole chat, and one rendering for each halving"


def test_families_are_recognized_by_their_markers() -> None:
    assert {find_family(template) for template in TEMPLATES.values()} == set(TEMPLATES)
    assert find_family("{{ messages }}") is None
