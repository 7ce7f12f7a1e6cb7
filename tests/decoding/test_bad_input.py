"""Invalid settings, prompts, token ids, devices and folders each raise a UserError."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.engine import Engine, Reply, encode, generate, load, stop_tokens
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.settings import Settings
from decoding.sessions.conversations import Session
from decoding.values import RULES
from tests.support.tiny_targets import hf_model, native_of

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "target"
CONTEXT = 64
NAN, INF = math.nan, math.inf
HUGE = 10**5000  # more digits than Python prints
SURROGATE = "cut in two: \ud83d"


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = load_tokenizer(ASSETS)
    model = hf_model(vocab_size=len(tokenizer), dtype=torch.float32)
    target, drafter = (
        native_of(model, max_length=CONTEXT),
        ChainDrafter(model=native_of(model, noise=0.05)),
    )
    return Engine(target, drafter, tokenizer, (2,))


NUMBERS = [NAN, INF, -INF, -1, True, "1", None, [1], HUGE, 1j]
WHOLE = [*NUMBERS, 1.5, -HUGE]
WORDS = ["mood", "", 3, True, ["token"], SURROGATE]
BAD_SETTINGS: dict[str, list[Any]] = {
    "temperature": [*NUMBERS, 1e-300, 1e-6, 1e6, -1e-9],
    "top_p": [*NUMBERS, 0, 1.0001],
    "min_p": [*NUMBERS, 1.5],
    "repetition_penalty": [*NUMBERS, 0, 1e-300, 1e300],
    "stopping_threshold": [NAN, INF, -1, True, "1", 2],
    "max_new_tokens": [*WHOLE, 0],
    "top_k": WHOLE,
    "num_draft_tokens": [*WHOLE, CONTEXT + 1, 1_000_000],
    "seed": [*WHOLE, 2**64, -(2**63)],
    "verify": [*WORDS, None],
    "stopping": WORDS,
    "schedule": [*WORDS, None, "pearl"],
    "stop_token_ids": [3, "3", [True], [-1], ["a"], [1.0], None],
    "stop_strings": ["end", [""], [3], 3, [SURROGATE], None],
    "allowed": [3, "x", [1]],
    "text_of": [3, "x"],
    "ignore_eos": [1, 0, "yes", None],
    "costs": [3, "cheap", {}],
    "stream": [1, "yes", None],
}
GOOD_SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1e-5},
    {"temperature": 1e5},
    {"temperature": 1, "top_p": 1e-9},
    {"temperature": 1, "min_p": 1},
    {"temperature": 1.0, "top_k": 10**9},
    {"temperature": 1.0, "seed": 2**64 - 1},
    {"num_draft_tokens": CONTEXT, "max_new_tokens": 3},
    {"num_draft_tokens": 0},
    {"max_new_tokens": 2**31 - 1},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 100},
    {"stop_token_ids": [5]},
    {"stop_strings": ["end"]},
    {"stopping": "confidence", "stopping_threshold": 1},
    {"verify": "greedy"},
]
BAD_SETTING_CASES = [(name, value) for name, values in BAD_SETTINGS.items() for value in values]


def name_of(value: object) -> str:
    return ascii(value)[:30] if not isinstance(value, int) or abs(value) < 2**70 else "huge"


@pytest.mark.parametrize(("name", "value"), BAD_SETTING_CASES, ids=name_of)
def test_invalid_settings_are_refused(engine: Engine, name: str, value: Any) -> None:
    with pytest.raises(UserError, match="expected") as caught:
        generate(engine, [4, 5], **{"max_new_tokens": 2, "stopping": "fixed", name: value})
    said = str(caught.value)
    assert name in said
    assert len(said) < 400


def test_the_table_has_every_setting() -> None:
    assert set(vars(Settings())) | {"stream"} == set(BAD_SETTINGS)
    assert len(BAD_SETTING_CASES) + len(BAD_PROMPTS) + len(BAD_PLACES) >= 150
    assert set(RULES) - {
        "device",
        "max_length",
        "processes",
        "batch_size",
        "trust_remote_code",
    } <= set(BAD_SETTINGS)


@pytest.mark.parametrize("settings", GOOD_SETTINGS, ids=", ".join)
def test_a_setting_at_its_bounds_decodes(engine: Engine, settings: dict[str, Any]) -> None:
    reply = generate(engine, [4, 5], **{"max_new_tokens": 2, "stopping": "fixed", **settings})
    assert isinstance(reply, Reply)
    assert 1 <= len(reply.tokens) <= CONTEXT


def message(content: Any = "Hello", role: Any = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


BAD_PROMPTS: dict[str, Any] = {
    "nothing": [],
    "no text": None,
    "a number": 3,
    "an array without dimensions": np.array(3),
    "a tensor without dimensions": torch.tensor(3),
    "a tensor of rows": torch.tensor([[4, 5]]),
    "bytes": b"Hello",
    "one message": message(),
    "a set of ids": {4, 5},
    "a frozen set of ids": frozenset({4, 5}),
    "a text in a list": ["Hello"],
    "a surrogate": SURROGATE,
    "a list in a list": [[message()]],
    "no content": [{"role": "user"}],
    "no role": [{"content": "Hello"}],
    "neither": [{}],
    "a content that is None": [message(None)],
    "a content that is a number": [message(3)],
    "a content in parts": [message([{"type": "text", "text": "Hello"}])],
    "a user's empty content": [message("")],
    "a user's blank content": [message(" \n")],
    "an unknown role": [message(role="wizard")],
    "a role that is None": [message(role=None)],
    "a role that is a list": [message(role=["user"])],
    "a surrogate in a message": [message(SURROGATE)],
    "a text behind a message": [message(), "Hello"],
    "an id behind a message": [message(), 3],
    "a message behind an id": [3, message()],
    "a negative id": [4, -1],
    "an id beyond the vocabulary": [4, 10**6],
    "an id beyond 64 bits": [4, HUGE],
    "an id that is a bool": [4, True],
    "an id that is a float": [4, 5.0],
    "an id that is NaN": [NAN],
    "an id that is None": [4, None],
    "an id that is a text": [4, "5"],
    "more ids than the context": [4] * CONTEXT,
    "a longer text than the context": "word " * 200,
    "messages longer than the context": [message("word " * 200)],
}


def ask(engine: Engine, prompt: Any, stream: bool) -> None:
    """Generate a reply, or only the first piece of one if `stream`."""
    found = generate(engine, prompt, stream=stream, max_new_tokens=2, stopping="fixed")  # type: ignore[call-overload]
    if isinstance(found, Iterator):
        next(found)


@pytest.mark.parametrize("prompt", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_invalid_prompts_are_refused(engine: Engine, prompt: Any, stream: bool) -> None:
    with pytest.raises(UserError, match="expected|Shorten the prompt") as caught:
        ask(engine, prompt, stream)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "prompt",
    [[4, 5, 6], (4, 5, 6), np.array([4, 5, 6]), torch.tensor([4, 5, 6])],
    ids=["list", "tuple", "numpy", "torch"],
)
def test_token_ids_are_a_prompt(engine: Engine, prompt: Any) -> None:
    settings = {"max_new_tokens": 6, "stopping": "fixed"}
    assert encode(engine, prompt) == [4, 5, 6]
    plain = decode(
        engine.target, None, [[4, 5, 6]], Settings(max_new_tokens=6, stop_token_ids=(2,))
    )[0].tokens
    assert generate(engine, prompt, **settings).tokens == plain


@pytest.mark.parametrize("content", ["", "ünï 🎉 \u202e", "{{ 7 * 7 }}", "</s> <s>", "\0"])
def test_unusual_contents_are_accepted(engine: Engine, content: str) -> None:
    chat = [message(content, role="system"), message("Hello")]
    assert generate(engine, chat, max_new_tokens=1, stopping="fixed").tokens


def test_an_invalid_message_is_numbered(engine: Engine) -> None:
    with pytest.raises(
        UserError,
        match="the role of message 2 of the chat is 'wizard', expected one of system, user",
    ):
        generate(engine, [message(), message(role="wizard")])


@pytest.mark.parametrize("token", [-1, 10**6, True, 1.0, "4", None, HUGE], ids=name_of)
def test_decode_and_sessions_refuse_the_same_ids(engine: Engine, token: Any) -> None:
    with pytest.raises(
        UserError, match=r"prompt 1 holds .*expected token ids: whole numbers from 0 to \d+"
    ):
        decode(engine.target, engine.drafter, [[4], [5, token]], Settings())
    with pytest.raises(UserError, match="prompt 0 holds .*expected token ids"):
        Session(engine.target, engine.drafter, Settings()).start([5, token])


BAD_PLACES: list[tuple[str, Any]] = [
    *(
        ("device", value)
        for value in (
            "foo",
            "",
            "cuda:",
            "cuda:-1",
            "cuda:x",
            "CPU",
            "cuda:99",
            0,
            None,
            True,
            ["cpu"],
        )
    ),
    *(("dtype", value) for value in ("int8", "", 32, None, True, torch.float32, ["float32"])),
    *(("backend", value) for value in ("onnx", "", 1, None, True, ["hf"])),
    *(("max_length", value) for value in (0, 1, -1, 10**9, HUGE, True, "64", 64.0, NAN)),
    *(("parallel", value) for value in ("rows", "", 1, None, True, ["tp"])),
    *(("processes", value) for value in (-1, 2, True, "2", 1.5, None, HUGE)),
    *(
        ("target", value)
        for value in (
            3,
            None,
            b"x",
            "/nowhere",
            "n" * 5000,
            "a\0b",
            str(ASSETS / "config.json"),
            "\ud83d",
        )
    ),
    *(
        ("drafter", value)
        for value in (3, b"x", "/nowhere", "n" * 5000, "a\0b", True, str(ASSETS / "config.json"))
    ),
]


@pytest.mark.parametrize(("name", "value"), BAD_PLACES, ids=name_of)
def test_invalid_arguments_of_load_are_refused(name: str, value: Any) -> None:
    named = {"target": ASSETS, name: value}
    with pytest.raises(
        UserError,
        match=r"expected|looked in|no CUDA device|does not exist|more than the "
        r"model's|processes is",
    ):
        load(**named)


def test_load_target_checks_its_other_arguments() -> None:
    for name, value in (
        ("batch_size", 0),
        ("batch_size", True),
        ("trust_remote_code", "no"),
        ("execution", 3),
    ):
        with pytest.raises(UserError, match=f"{name}.* expected"):
            load_target(ASSETS, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["two", [2, "three"], True, -1, 2.0, {"id": 2}], ids=str)
def test_invalid_end_tokens_name_their_file(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        UserError,
        match=r"generation_config.json: eos_token_id is .*, expected a tuple of token ids",
    ):
        stop_tokens(tmp_path, load_tokenizer(ASSETS))


def test_end_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ASSETS)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 2048}))
    for value, fits in ((2047, True), (2048, False), ([2, 3000], False)):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        if fits:
            assert 2047 in stop_tokens(tmp_path, tokenizer)
            continue
        with pytest.raises(
            UserError,
            match=r"generation_config.json: eos_token_id is .* expected ids from 0 to 2047",
        ):
            stop_tokens(tmp_path, tokenizer)


def test_end_tokens_come_from_the_folder_and_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ASSETS)
    for value, expected in ((None, set()), (7, {7}), ([7, 9], {7, 9})):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert set(stop_tokens(tmp_path, tokenizer)) == expected | {tokenizer.eos_token_id}
