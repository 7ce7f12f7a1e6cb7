"""The chat: turns that keep their caches, text and colours as they stream, what an answer cost, and a terminal's keys."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from decoding.engine import text_of
from decoding.errors import UserError
from decoding.loop import decode
from recurrent_drafting.chat import cost_line, interrupts, visible
from recurrent_drafting.chat_session import ChatSession, Piece
from recurrent_drafting.checkpoint import save_head
from recurrent_drafting.generate_config import GenerateConfig
from recurrent_drafting.generate_setup import Loaded, load
from recurrent_drafting.head import HeadConfig, RecurrentHead
from training.chat import render_next, render_prompt
from training.config import TargetConfig
from training.job import CONF


def config_of(target: Path, drafter: str, **fields: object) -> GenerateConfig:
    """A greedy chat with short answers, in float64: nothing may differ from plain decoding."""
    values = {"temperature": 0.0, "max_new_tokens": 24, "by_cost": False, "stopping": "fixed", "seed": 1, **fields}
    shared = TargetConfig(path=str(target), dtype="float64", device="cpu")
    return GenerateConfig(job="recurrent_drafting.generate", target=shared, drafter={"use": drafter}, **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def head(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained head of the tiny target."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("head")
    save_head(RecurrentHead(HeadConfig(vocab_size=2048, hidden_size=32, exit_dim=64, num_draft_layers=1)), folder)
    return folder


def said(session: ChatSession, text: str) -> list[Piece]:
    return list(session.reply(text))


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "itself", "head"])
def test_every_turn_is_a_fresh_decode_of_the_conversation(drafter: str, tiny_target: Path, head: Path):
    folder = {"itself": str(tiny_target), "head": str(head)}.get(drafter, drafter)
    cfg = config_of(tiny_target, folder, system="Be brief.")
    loaded, other = load(cfg), load(cfg)
    session = ChatSession(loaded, cfg)
    messages = [{"role": "system", "content": "Be brief."}]
    for turn, text in enumerate(["Hello there", "And what then?", "¿Qué? 你好"], 1):
        messages.append({"role": "user", "content": text})
        pieces = said(session, text)
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
        assert any(piece.accepted for piece in pieces) <= (generation.accepted > 0)
        assert session.time_plain() is None, "the end of the answer, decoded plainly, is the same"
        if turn > 1:
            new = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            assert generation.prefilled <= new + 4, "what was said before is in the cache"
    if drafter == "itself":
        assert generation.block_efficiency > 3
        assert sum(piece.accepted for piece in pieces) > len(pieces) / 2
    if drafter != "none":
        assert session.plain_rate is not None and session.plain_rate > 0


@pytest.mark.parametrize("drafter", ["prompt_lookup", "head"])
def test_measuring_plain_draws_leaves_the_answer_in_the_cache(drafter: str, tiny_target: Path, head: Path):
    cfg = config_of(tiny_target, str(head) if drafter == "head" else drafter, temperature=1.0)
    loaded = load(cfg)
    session = ChatSession(loaded, cfg)
    for turn, text in enumerate(["Hello there", "And what then?", "Why"]):
        said(session, text)
        assert session.last is not None
        generation, ids = session.last.generation, session.prompt
        assert session.time_plain() is None, "draws are not compared"
        new = len(loaded.engine.tokenizer(text, add_special_tokens=False)["input_ids"])
        assert not turn or generation.prefilled <= new + 4 < len(ids)
    assert session.plain_tokens > 20


def test_an_answer_in_other_tokens_than_the_tokenizers_is_kept_as_it_was_written(tiny_target: Path):
    tokenizer = load(config_of(tiny_target, "none")).engine.tokenizer
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "return x"},
        {"role": "user", "content": "So"},
    ]
    usual = tokenizer("return x", add_special_tokens=False)["input_ids"]
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "return\u2581x"]
    assert letters != usual and tokenizer.decode(letters) == "return x"
    prompt, anew = render_prompt(tokenizer, turns[:1]), render_prompt(tokenizer, turns)
    for answer in (letters, [*letters, tokenizer.eos_token_id]):
        ids = render_next(tokenizer, turns, prompt, answer)
        assert ids[: len(prompt) + len(answer)] == [*prompt, *answer]
        assert tokenizer.decode(ids) == tokenizer.decode(anew)
    assert render_next(tokenizer, turns, prompt, [*usual, tokenizer.eos_token_id]) == anew
    trimmed = [turns[0], {"role": "assistant", "content": "something else"}, turns[2]]
    other = tokenizer.convert_tokens_to_ids("<|user|>")  # an end that the template does not write
    assert render_next(tokenizer, trimmed, prompt, [*letters, other]) == render_prompt(tokenizer, trimmed)


def test_a_new_conversation_forgets_and_a_stopped_answer_stays(tiny_target: Path):
    cfg = config_of(tiny_target, "prompt_lookup", max_new_tokens=200)
    session = ChatSession(load(cfg), cfg)
    rounds = iter([False, False, True])
    pieces = list(session.reply("Tell me more", lambda: next(rounds)))
    assert session.last is not None and session.last.stopped and len(session.last.generation.tokens) < 20
    assert session.messages[1]["content"].startswith("".join(piece.text for piece in pieces))
    said(session, "Go on")
    assert len(session.messages) == 4
    session.reset()
    assert session.messages == []


def test_a_message_without_room_is_refused_with_what_to_do_and_forgotten(tiny_target: Path):
    cfg = config_of(tiny_target, "prompt_lookup")
    session = ChatSession(load(cfg), cfg)
    with pytest.raises(
        UserError,
        match=r"your message as the chat template renders it is \d+ tokens, and .* holds 512 .*Say it shorter",
    ):
        said(session, "word " * 600)
    said(session, "Hello")
    with pytest.raises(UserError, match=r"with all turns before it .* /reset starts a new conversation"):
        said(session, "word " * 600)
    assert len(session.messages) == 2
    strict = config_of(tiny_target, "prompt_lookup", max_prompt_tokens=8)
    with pytest.raises(UserError, match="over max_prompt_tokens=8"):
        said(ChatSession(load(strict), strict), "one two three four five six seven eight")


def test_the_context_may_end_an_answer_and_the_line_says_so(tiny_target: Path):
    cfg = config_of(tiny_target, "prompt_lookup", max_new_tokens=600)
    loaded = load(cfg)
    long = "la " * 200
    session = ChatSession(Loaded(loaded.engine, loaded.settings, ""), cfg)
    session.settings = session.session.settings
    said(session, long)
    assert session.last is not None
    line = cost_line(session, session.last)
    if session.last.generation.finish == "length":
        assert session.last.context_full and "the context is full: /reset" in line
    assert re.match(
        r"\[\d+ tokens; [\d.]+ tokens/s; block efficiency [\d.]+; speedup not measured; read \d+ of \d+ prompt tokens",
        line,
    )
    session.time_plain()
    assert re.search(
        r"speedup [\d.]+x over plain decoding \([\d.]+ tokens/s: 16 tokens of these answers",
        cost_line(session, session.last),
    )


def test_what_does_not_fit_is_told_before_the_chat(
    tiny_target: Path, head: Path, tmp_path: Path, embedded_target: Path
):
    with pytest.raises(UserError, match="is neither a folder .* nor one of conf/drafter"):
        load(config_of(tiny_target, "runs/none"))
    with pytest.raises(UserError, match="hf download lmsys/vicuna-7b-v1.3"):
        load(config_of(Path("lmsys/vicuna-7b-v1.3"), "none"))
    with pytest.raises(UserError, match="hidden_size is"):
        load(config_of(embedded_target, str(head)))
    cfg = config_of(tiny_target, "prompt_lookup")
    cfg.drafter = {"use": "prompt_lookup", "verify": "coupled"}
    with pytest.raises(UserError, match="has verify=coupled, which eval.run alone follows"):
        load(cfg)
    cfg = config_of(tiny_target, "none", template="mine")
    loaded = load(cfg)
    with pytest.raises(UserError, match="unknown chat template 'mine'"):
        ChatSession(loaded, cfg)


def test_control_characters_of_a_model_are_spelled_out():
    assert visible("a\tb\nc é 你") == "a\tb\nc é 你"
    assert visible("\x1b[31mred\x07\x9b") == "\\x1b[31mred\\x07\\x9b"


def test_the_first_interrupt_asks_and_the_next_one_ends():
    with interrupts() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # the usual meaning is back
        signal.raise_signal(signal.SIGINT)


class Terminal:
    """The command on a pseudo-terminal of its own: keys go in, what it shows comes out."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "recurrent_drafting.cmd.generate", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=CONF.parent,
            env={**os.environ, "TERM": "xterm-256color", **environment},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.shown, self.read_to = "", 0
        self._bytes = b""

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def expect(self, words: str, seconds: float = 60.0) -> str:
        """Wait for words behind those expected before; returns what was shown up to their end."""
        until = time.monotonic() + seconds
        while words not in self.shown[self.read_to :]:
            if time.monotonic() > until or not self._more():
                raise AssertionError(f"{words!r} is not in {self.shown[self.read_to :]!r}")
        start, self.read_to = self.read_to, self.shown.index(words, self.read_to) + len(words)
        return self.shown[start : self.read_to]

    def _more(self) -> bool:
        if not select.select([self.fd], [], [], 0.5)[0]:
            return self.process.poll() is None
        try:
            got = os.read(self.fd, 65536)
        except OSError:  # the other end is closed
            return False
        self._bytes += got
        self.shown = self._bytes.decode("utf-8", "ignore")
        return bool(got)

    def ends(self) -> int:
        while self._more():
            pass
        return self.process.wait(timeout=20)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    one = Terminal(list(arguments), environment)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        os.close(one.fd)


def test_a_chat_on_a_terminal(tiny_target: Path):
    flags = f"--hf_llm={tiny_target} --hf_drafter={tiny_target} --greedy_search --use_gpu=-1 --max_generation_length 40".split()
    with terminal(*flags, "target.dtype=float64", "stopping=fixed") as screen:
        start = screen.expect("chat> ")
        assert "drafted and accepted tokens are green" in start and "exit, quit or Ctrl-D ends" in start
        screen.type("\n")
        screen.expect("an empty message")
        screen.expect("chat> ")
        screen.type("Hello there\n")
        answer = screen.expect("chat> ")
        assert "\x1b[32m" in answer, "accepted tokens in green"
        assert re.search(
            r"\[\d+ tokens; [\d.]+ tokens/s; block efficiency [\d.]+; speedup [\d.]+x over plain decoding", answer
        )
        screen.type("And then?\n")
        second = screen.expect("chat> ")
        new, whole = (int(n) for n in re.search(r"read (\d+) of (\d+) prompt tokens", second).groups())  # type: ignore[union-attr]
        assert new < whole - 20
        screen.type("/reset\n")
        screen.expect("a new conversation")
        screen.expect("chat> ")
        screen.type("word " * 550 + "\n")
        assert "context holds 512" in screen.expect("chat> ", seconds=60)
        time.sleep(0.5)  # a key that comes between Python's prompt and its waiting for input is seen with the next one
        screen.type("\x03")
        screen.expect("Ctrl-C stops an answer")
        screen.expect("chat> ")
        screen.type("quit\n")
        assert screen.ends() == 0


@pytest.mark.long
def test_keys_stop_an_answer_and_end_the_chat_and_no_color_is_respected(tiny_target: Path):
    flags = f"--hf_llm={tiny_target} --autoregression --greedy_search --use_gpu=-1 --max_generation_length 480".split()
    with terminal(*flags, "target.dtype=float64", "target.backend=hf", NO_COLOR="1") as screen:
        screen.expect("chat> ")
        screen.type("Hello there\n")
        screen.expect("Hello there\r\n")
        time.sleep(0.1)
        screen.type("\x03")
        answer = screen.expect("chat> ")
        assert "stopped]" in answer
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", screen.shown), "no colour"
        screen.type("\x04")
        assert screen.ends() == 0


def test_without_a_terminal_lines_are_read_and_nothing_is_coloured(tiny_target: Path):
    flags = f"--hf_llm={tiny_target} --temperature 1 --use_gpu=-1 --max_generation_length 12".split()
    done = subprocess.run(
        [sys.executable, "-m", "recurrent_drafting.cmd.generate", *flags],
        input="Hello\n\n/reset\nHello again",
        capture_output=True,
        text=True,
        cwd=CONF.parent,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert (
        done.stdout.count("tokens/s; ") == 2
        and "a new conversation" in done.stdout
        and "an empty message" in done.stdout
    )
    assert "drafted tokens are not marked" in done.stdout


def test_an_error_of_the_command_line_is_one_line(tiny_target: Path):
    done = subprocess.run(
        [sys.executable, "-m", "recurrent_drafting.cmd.generate", "--hf_lm", str(tiny_target)],
        capture_output=True,
        text=True,
        cwd=CONF.parent,
    )
    assert done.returncode == 2
    assert done.stderr == "error: unknown flag '--hf_lm'; the nearest is --hf_llm (--help lists all)\n"
