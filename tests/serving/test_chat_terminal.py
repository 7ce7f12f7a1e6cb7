"""The chat command on a pseudo-terminal, with its keys and colours, and without one."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs.job import CONF
from tests.support.forks import run_forked


class Terminal:
    """A chat command that runs on a pseudo-terminal."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.fd, child_fd = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "recurrent_drafting.cmd.generate", *arguments],
            stdin=child_fd,
            stdout=child_fd,
            stderr=child_fd,
            cwd=CONF.parent,
            env={**os.environ, "TERM": "xterm-256color", **environment},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(child_fd)
        self.shown, self.read_to = "", 0
        self._bytes = b""

    def type(self, keys: str) -> None:
        """Send keys to the command."""
        os.write(self.fd, keys.encode())

    def expect(self, words: str, seconds: float = 60.0) -> str:
        """Wait until `words` appears in the output after the text that was expected last.

        Returns that output up to the end of `words`. Raises AssertionError if the command ends or
        `seconds` pass first.
        """
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

    def wait(self) -> int:
        """Wait until the command ends and return its exit status."""
        while self._more():
            pass
        return self.process.wait(timeout=20)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """Run the command inside the block, and kill it at the end if it still runs."""
    one = Terminal(list(arguments), environment)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        os.close(one.fd)


@pytest.mark.long
def test_a_chat_on_a_terminal_streams_answers_and_their_cost(tiny_target: Path):
    flags = (
        f"--hf_llm={tiny_target} --hf_drafter={tiny_target} --greedy_search --use_gpu=-1 "
        f"--max_generation_length 40"
    ).split()
    with terminal(*flags, "target.dtype=float64", "stopping=fixed") as screen:
        start = screen.expect("chat> ")
        assert (
            "drafted and accepted tokens are green" in start
            and "exit, quit or Ctrl-D ends" in start
        )
        screen.type("\n")
        screen.expect("an empty message")
        screen.expect("chat> ")
        screen.type("Hello there\n")
        answer = screen.expect("chat> ")
        assert "\x1b[32m" in answer, "accepted tokens in green"
        assert re.search(
            r"\[\d+ tokens; [\d.]+ tokens/s; block efficiency [\d.]+; speedup [\d.]+x over plain "
            r"decoding",
            answer,
        )
        screen.type("And then?\n")
        second = screen.expect("chat> ")
        new, total = (
            int(n) for n in re.search(r"read (\d+) of (\d+) prompt tokens", second).groups()
        )  # type: ignore[union-attr]
        assert new < total - 20
        screen.type("/reset\n")
        screen.expect("a new conversation")
        screen.expect("chat> ")
        screen.type("word " * 550 + "\n")
        assert "context holds 512" in screen.expect("chat> ", seconds=60)
        # Python notices a key between its prompt and its wait for input only with the next key.
        time.sleep(0.5)
        screen.type("\x03")
        screen.expect("Ctrl-C stops an answer")
        screen.expect("chat> ")
        screen.type("quit\n")
        assert screen.wait() == 0


@pytest.mark.long
def test_keys_stop_an_answer_and_end_a_chat_without_colours(tiny_target: Path):
    flags = (
        f"--hf_llm={tiny_target} --autoregression --greedy_search --use_gpu=-1 "
        f"--max_generation_length 480"
    ).split()
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
        assert screen.wait() == 0


@pytest.mark.long
def test_a_chat_without_a_terminal_reads_lines_and_has_no_colours(tiny_target: Path):
    flags = (
        f"--hf_llm={tiny_target} --temperature 1 --use_gpu=-1 --max_generation_length 12".split()
    )
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


@pytest.mark.long
def test_an_error_of_the_command_line_is_one_line(tiny_target: Path):
    done = run_forked("recurrent_drafting.cmd.generate", "--hf_lm", str(tiny_target))
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: flag '--hf_lm' is unknown. The nearest is --hf_llm; --help lists all.\n"
    )
