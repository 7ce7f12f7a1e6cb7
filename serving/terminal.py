"""Chat on a terminal: messages, coloured answers as they are decoded, and their cost."""

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType

from rich.console import Console
from rich.text import Text

from decoding.errors import UserError
from jobs.interrupts import Terminated
from serving.config import GenerateConfig
from serving.session import ChatAnswer, ChatSession
from serving.setup import ChatModels

with suppress(ImportError):  # adds line editing and a history to input() where Python has it
    import readline  # noqa: F401

PROMPT = "chat> "
EXIT_COMMANDS = ("exit", "quit", "/exit", "/quit")
ACCEPTED = "green"
HINT = "exit, quit or Ctrl-D ends; Ctrl-C stops an answer; /reset starts a new conversation"


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed in the block.

    A second Ctrl-C raises KeyboardInterrupt there.
    """
    pressed: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def chat(loaded: ChatModels, cfg: GenerateConfig, console: Console) -> None:
    """Answer messages until exit, quit, the end of the input, or Ctrl-C twice at the prompt."""
    print_notice(console, loaded.about)
    session = ChatSession(loaded, cfg)
    if loaded.engine.drafter is not None:
        if console.color_system is not None and not console.no_color:
            print_notice(console, f"drafted and accepted tokens are {ACCEPTED}")
        else:
            print_notice(console, "the terminal has no colours: drafted tokens are not marked")
        if cfg.baseline_tokens:
            print_notice(
                console,
                f"the last {cfg.baseline_tokens} tokens of an answer are decoded again without the "
                f"drafter to measure the speedup",
            )
    print_notice(console, HINT)
    while (text := read_message(console)) is not None:
        if text == "/reset":
            session.reset()
            print_notice(console, "a new conversation")
        elif not text:
            print_notice(console, f"an empty message: type some text ({HINT})")
        else:
            try:
                answer_turn(session, text, console)
            except UserError as error:
                print_notice(console, f"error: {error}", "red")


def read_message(console: Console) -> str | None:
    """Return the next message, stripped, or None at exit, quit, Ctrl-D or a second Ctrl-C."""
    again = False
    while True:
        try:
            text = input(PROMPT).strip()
        except EOFError:
            console.print()
            return None
        except Terminated:
            raise
        except KeyboardInterrupt:
            console.print()
            if again:
                return None
            again = True
            print_notice(console, HINT)
            continue
        except UnicodeDecodeError as error:
            print_notice(
                console, f"error: the message is not UTF-8 ({error.reason}): type it again", "red"
            )
            continue
        # Invalid bytes from a terminal arrive as lone surrogates.
        text = text.encode("utf-8", "replace").decode("utf-8")
        return None if text.lower() in EXIT_COMMANDS else text


def answer_turn(session: ChatSession, text: str, console: Console) -> None:
    """Print one answer as it is decoded, and then its cost."""
    differs = None
    with interrupts() as interrupted:
        try:
            with closing(session.reply(text, interrupted)) as pieces:
                for piece in pieces:
                    console.print(
                        Text(visible(piece.text), ACCEPTED if piece.accepted else ""),
                        end="",
                        soft_wrap=True,
                    )
                    console.file.flush()
            console.print()
            if not interrupted():
                differs = session.time_plain()
        except Terminated:
            raise
        except KeyboardInterrupt:
            console.print()
    if session.last is not None:
        print_notice(console, cost_line(session, session.last))
    if differs is not None:
        print_notice(
            console,
            f"note: without the drafter, token {differs + 1} of the repeated ones differs, from "
            f"rounding or a near tie",
            "red",
        )


def cost_line(session: ChatSession, answer: ChatAnswer) -> str:
    """Return a line with an answer's speed, block efficiency, speedup, prompt tokens and ending."""
    generation, plain = answer.generation, session.plain_rate
    rate = generation.tokens_per_second
    words = [f"{len(generation.tokens)} tokens", f"{rate:.1f} tokens/s"]
    if session.engine.drafter is not None:
        words.append(f"block efficiency {generation.block_efficiency:.2f}")
        words.append(
            f"speedup {rate / plain:.2f}x over plain decoding ({plain:.1f} tokens/s, timed on "
            f"{session.plain_tokens} tokens)"
            if plain
            else "speedup not measured"
        )
    words.append(f"read {generation.prefilled} of {answer.prompt_tokens} prompt tokens")
    if answer.stopped:
        words.append("stopped")
    elif answer.context_full:
        words.append("the context is full: /reset starts a new conversation")
    elif generation.finish == "length":
        words.append(
            f"ended at max_new_tokens={session.settings.max_new_tokens} (--max_generation_length)"
        )
    return f"[{'; '.join(words)}]"


def print_notice(console: Console, text: str, style: str = "dim") -> None:
    """Print a message of the program itself, dimmed to set it apart from the model's answers.

    style: another style of `rich`, such as red for errors.
    """
    console.print(Text(text, style), soft_wrap=True)


def visible(text: str) -> str:
    """Return a text with its control characters escaped, so that it cannot control the terminal."""
    # C0 except tab and newline, DEL, and C1
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)
