"""Chat sessions: cached turns, streamed text, and the cost of an answer."""

import re
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decoding.engine import text_of
from decoding.errors import UserError
from decoding.loop import decode
from jobs.config import TargetConfig
from recurrent_drafting.checkpoint import save_head
from recurrent_drafting.head import HeadConfig, RecurrentHead
from serving import setup
from serving.config import GenerateConfig
from serving.session import ChatSession, TextPiece
from serving.setup import ChatModels, load
from serving.terminal import cost_line, interrupts, visible
from training.data.chat import render_next, render_prompt


def config_of(target: Path, drafter: str, **fields: object) -> GenerateConfig:
    """Return the settings of a short greedy chat.

    The target has float64, so that drafted answers equal plain decoding.
    """
    values = {
        "temperature": 0.0,
        "max_new_tokens": 24,
        "by_cost": False,
        "stopping": "fixed",
        "seed": 1,
        **fields,
    }
    shared = TargetConfig(path=str(target), dtype="float64", device="cpu")
    return GenerateConfig(
        job="recurrent_drafting.generate", target=shared, drafter={"use": drafter}, **values
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def head(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an untrained head of the tiny target and return its folder."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("head")
    save_head(
        RecurrentHead(HeadConfig(vocab_size=2048, hidden_size=32, exit_dim=64, num_draft_layers=1)),
        folder,
    )
    return folder


def reply_to(session: ChatSession, text: str) -> list[TextPiece]:
    """Return the pieces of the answer to a message."""
    return list(session.reply(text))


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "itself", "head"])
def test_every_turn_equals_decoding_the_conversation_from_its_start(
    drafter: str, tiny_target: Path, head: Path
):
    folder = {"itself": str(tiny_target), "head": str(head)}.get(drafter, drafter)
    cfg = config_of(tiny_target, folder, system="Be brief.")
    loaded, other = load(cfg), load(cfg)
    session = ChatSession(loaded, cfg)
    messages = [{"role": "system", "content": "Be brief."}]
    for turn, text in enumerate(["Hello there", "And what then?", "¿Qué? 你好"], 1):
        messages.append({"role": "user", "content": text})
        pieces = reply_to(session, text)
        assert session.last is not None
        generation, ids, tokenizer = session.last.generation, session.prompt, other.engine.tokenizer
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        (fresh,) = decode(other.engine.target, None, [ids], other.settings, request_ids=[turn])
        assert generation.tokens == fresh.tokens
        answer = text_of(other.engine, fresh.tokens)
        assert "".join(piece.text for piece in pieces) == answer.rstrip("\ufffd")
        messages.append({"role": "assistant", "content": answer.rstrip("\ufffd")})
        assert session.messages == messages
        assert drafter != "none" or not generation.accepted
        assert any(piece.accepted for piece in pieces) == (generation.accepted > 0)
        assert session.time_plain() is None, "plain decoding gives the same tokens"
        if turn > 1:
            new = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            assert generation.prefilled <= new + 4, "earlier turns are in the cache"
    if drafter == "itself":
        assert generation.block_efficiency > 3
        assert sum(piece.accepted for piece in pieces) > len(pieces) / 2
    if drafter != "none":
        assert session.plain_rate is not None and session.plain_rate > 0


@pytest.mark.parametrize("drafter", ["prompt_lookup", "head"])
def test_timing_plain_sampling_keeps_the_answer_in_the_cache(
    drafter: str, tiny_target: Path, head: Path
):
    cfg = config_of(tiny_target, str(head) if drafter == "head" else drafter, temperature=1.0)
    loaded = load(cfg)
    session = ChatSession(loaded, cfg)
    for turn, text in enumerate(["Hello there", "And what then?", "Why"]):
        reply_to(session, text)
        assert session.last is not None
        generation, ids = session.last.generation, session.prompt
        assert session.time_plain() is None, "samples are not compared"
        new = len(loaded.engine.tokenizer(text, add_special_tokens=False)["input_ids"])
        assert not turn or generation.prefilled <= new + 4 < len(ids)
    assert session.plain_tokens > 20


def test_the_tokens_of_an_answer_are_kept_where_the_tokenizer_splits_otherwise(tiny_target: Path):
    tokenizer = load(config_of(tiny_target, "none")).engine.tokenizer
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "return x"},
        {"role": "user", "content": "So"},
    ]
    usual = tokenizer("return x", add_special_tokens=False)["input_ids"]
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "return\u2581x"]
    assert letters != usual and tokenizer.decode(letters) == "return x"
    prompt, rendered = render_prompt(tokenizer, turns[:1]), render_prompt(tokenizer, turns)
    for answer in (letters, [*letters, tokenizer.eos_token_id]):
        ids = render_next(tokenizer, turns, prompt, answer)
        assert ids[: len(prompt) + len(answer)] == [*prompt, *answer]
        assert tokenizer.decode(ids) == tokenizer.decode(rendered)
    assert render_next(tokenizer, turns, prompt, [*usual, tokenizer.eos_token_id]) == rendered
    trimmed = [turns[0], {"role": "assistant", "content": "something else"}, turns[2]]
    other = tokenizer.convert_tokens_to_ids("<|user|>")  # not the template's end token
    assert render_next(tokenizer, trimmed, prompt, [*letters, other]) == render_prompt(
        tokenizer, trimmed
    )


def test_a_stopped_answer_stays_until_the_conversation_is_reset(tiny_target: Path):
    cfg = config_of(tiny_target, "prompt_lookup", max_new_tokens=200)
    session = ChatSession(load(cfg), cfg)
    rounds = iter([False, False, True])
    pieces = list(session.reply("Tell me more", lambda: next(rounds)))
    assert (
        session.last is not None
        and session.last.stopped
        and len(session.last.generation.tokens) < 20
    )
    assert session.messages[1]["content"].startswith("".join(piece.text for piece in pieces))
    reply_to(session, "Go on")
    assert len(session.messages) == 4
    session.reset()
    assert session.messages == []


def test_a_message_that_is_too_long_leaves_the_conversation_unchanged(tiny_target: Path):
    cfg = config_of(tiny_target, "prompt_lookup")
    session = ChatSession(load(cfg), cfg)
    with pytest.raises(
        UserError,
        match=r"your message as the chat template renders it is \d+ tokens, and .* holds 512 .*"
        r"Shorten it",
    ):
        reply_to(session, "word " * 600)
    reply_to(session, "Hello")
    with pytest.raises(
        UserError, match=r"with all turns before it .* Type /reset for a new conversation"
    ):
        reply_to(session, "word " * 600)
    assert len(session.messages) == 2
    strict = config_of(tiny_target, "prompt_lookup", max_prompt_tokens=8)
    with pytest.raises(UserError, match="over max_prompt_tokens=8"):
        reply_to(ChatSession(load(strict), strict), "one two three four five six seven eight")


def test_the_cost_line_reports_a_full_context(tiny_target: Path):
    cfg = config_of(tiny_target, "prompt_lookup", max_new_tokens=600)
    loaded = load(cfg)
    # No stop token may end the answer.
    endless = ChatModels(loaded.engine, replace(loaded.settings, ignore_eos=True), "")
    session = ChatSession(endless, cfg)
    reply_to(session, "la " * 200)
    assert session.last is not None and session.last.generation.finish == "length"
    line = cost_line(session, session.last)
    assert session.last.context_full and "the context is full: /reset" in line
    assert (
        len(session.prompt) + len(session.last.generation.tokens) == loaded.engine.target.max_length
    )
    assert re.match(
        r"\[\d+ tokens; [\d.]+ tokens/s; block efficiency [\d.]+; speedup not measured; read \d+ "
        r"of \d+ prompt tokens",
        line,
    )
    session.time_plain()
    assert re.search(
        r"speedup [\d.]+x over plain decoding \([\d.]+ tokens/s, timed on 16 tokens\)",
        cost_line(session, session.last),
    )


def test_misfits_are_refused_before_the_chat(
    tiny_target: Path,
    head: Path,
    embedded_target: Path,
    stories260k: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    with pytest.raises(UserError, match="is neither a folder .* nor the name of a drafter"):
        load(config_of(tiny_target, "runs/none"))
    with pytest.raises(UserError, match="hf download lmsys/vicuna-7b-v1.3"):
        load(config_of(Path("lmsys/vicuna-7b-v1.3"), "none"))
    with pytest.raises(UserError, match="hidden_size is"):
        load(config_of(embedded_target, str(head)))
    other = config_of(tiny_target, "none")
    other.tokenizer = str(stories260k)
    with pytest.raises(
        UserError,
        match=r"--hf_tokenizer\) is not the tokenizer of .*: they differ in \d+ of 2048 ids: id",
    ):
        load(other)
    cfg = config_of(tiny_target, "prompt_lookup")
    cfg.drafter = {"use": "prompt_lookup", "verify": "coupled"}
    with pytest.raises(UserError, match="has verify=coupled, which only eval.run supports"):
        load(cfg)
    for width, fits in ((10, False), (1, True)):
        cfg = config_of(tiny_target, str(head), verify="block", temperature=1.0, beam_width=width)
        with monkeypatch.context() as patch:
            if not fits:
                # the error comes before the target is loaded
                patch.setattr(setup, "load_job_target", None)
            with (
                nullcontext()
                if fits
                else pytest.raises(UserError, match="proposes trees, .* beam_width=1")
            ):
                load(cfg)
    cfg = config_of(tiny_target, "none", template="mine")
    loaded = load(cfg)
    with pytest.raises(UserError, match="chat template 'mine' is unknown"):
        ChatSession(loaded, cfg)


def test_control_characters_of_a_model_are_escaped():
    assert visible("a\tb\nc é 你") == "a\tb\nc é 你"
    assert visible("\x1b[31mred\x07\x9b") == "\\x1b[31mred\\x07\\x9b"


def test_the_first_interrupt_ends_the_round_and_the_second_the_answer():
    with interrupts() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # the default handler is back
        signal.raise_signal(signal.SIGINT)
