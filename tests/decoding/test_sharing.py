"""An engine shared by threads: calls queue, an overtaken stream raises, and texts never mix."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decoding.costs.timing import time_parts
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.prompt_lookup import PromptLookup
from decoding.engine import Engine, generate
from decoding.errors import UserError
from decoding.loop import decode, prefill_batch
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.claims import Claim
from decoding.rounds.settings import Settings
from decoding.rounds.ties import choice_scores
from decoding.sessions.conversations import ConversationBatches, Session
from tests.support.tiny_targets import hf_model, native_of, random_prompts

TOKENIZER = Path(__file__).resolve().parents[2] / "assets" / "target"
FIXED = {"max_new_tokens": 12, "num_draft_tokens": 3, "stopping": "fixed"}
OVERTAKEN = "this call cannot continue: another call has used the target"


@pytest.fixture(params=["chain", "lookup"])
def engine(request: pytest.FixtureRequest) -> Engine:
    model = hf_model()
    drafter = (
        PromptLookup()
        if request.param == "lookup"
        else ChainDrafter(model=native_of(model, noise=0.05))
    )
    return Engine(native_of(model), drafter, load_tokenizer(TOKENIZER), ())


def plain(prompts: list[list[int]], **changes: object) -> list[list[int]]:
    """Return the autoregressive text of each prompt, decoded alone."""
    settings = replace(Settings(max_new_tokens=12), **changes)  # type: ignore[arg-type]
    return [decode(native_of(hf_model()), None, [prompt], settings)[0].tokens for prompt in prompts]


def test_eight_threads_get_autoregressive_text(engine: Engine) -> None:
    """Check law 1 for calls from eight threads."""
    prompts = random_prompts(24)
    gate = threading.Barrier(8)

    def ask(mine: list[list[int]]) -> list[list[int]]:
        gate.wait()
        return [generate(engine, prompt, **FIXED).tokens for prompt in mine]

    with ThreadPoolExecutor(8) as pool:
        found = [
            tokens for part in pool.map(ask, [prompts[i::8] for i in range(8)]) for tokens in part
        ]
    assert found == plain([prompt for i in range(8) for prompt in prompts[i::8]])


def test_streams_in_threads_are_complete_or_refused(engine: Engine) -> None:
    """Check that a stream yields a prefix of its text, and an error if its caches were taken."""
    prompts = random_prompts(16)
    whole = [engine.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in plain(prompts)]
    gate, errors = threading.Barrier(8), []

    def read(number: int) -> list[tuple[str, bool]]:
        gate.wait()
        found = []
        for prompt in prompts[number::8]:
            text = ""
            try:
                for piece in generate(engine, prompt, stream=True, **FIXED):
                    text += piece
                found.append((text, True))
            except UserError as error:
                found.append((text, False))
                errors.append(str(error))
        return found

    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(read, range(8)))
    assert all(OVERTAKEN in error for error in errors)
    assert any(finished for part in parts for _, finished in part), (
        "nothing overtakes the stream that began last"
    )
    for number, part in enumerate(parts):
        for (text, finished), expected in zip(part, whole[number::8], strict=True):
            assert text == expected if finished else expected.startswith(text.rstrip("\ufffd"))


def test_costs_are_measured_once_by_threads() -> None:
    model = hf_model()
    engine = Engine(
        native_of(model), ChainDrafter(model=native_of(model)), load_tokenizer(TOKENIZER), ()
    )
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(
                lambda _: generate(engine, [4, 5], max_new_tokens=2, num_draft_tokens=1).tokens,
                range(4),
            )
        )
    assert found == plain([[4, 5]] * 4, max_new_tokens=2)
    assert len(engine.costs) == 1


def test_an_overtaken_stream_raises(engine: Engine) -> None:
    first, second = [5, 6, 7], [9, 8]
    overtaken = generate(engine, first, stream=True, **FIXED)
    next(overtaken)
    other = generate(engine, second, stream=True, **FIXED)
    begun = next(other)
    with pytest.raises(UserError, match=OVERTAKEN):
        list(overtaken)
    text = begun + "".join(other)  # the error does not disturb the latest stream
    assert text == engine.tokenizer.decode(plain([second])[0], skip_special_tokens=True)
    assert list(overtaken) == []


def test_unread_and_finished_streams_disturb_no_call(engine: Engine) -> None:
    waiting = generate(engine, [5, 6, 7], stream=True, **FIXED)
    whole = generate(engine, [9, 8], **FIXED).text
    assert "".join(waiting) == generate(engine, [5, 6, 7], **FIXED).text
    assert "".join(generate(engine, [9, 8], stream=True, **FIXED)) == whole


def test_a_nested_call_cannot_mix_two_texts(engine: Engine) -> None:
    """Check that a nested call, which the re-entrant lock admits, ends the outer one's claim."""
    with pytest.raises(UserError, match=OVERTAKEN):
        decode(
            engine.target,
            engine.drafter,
            [[5, 6]],
            Settings(max_new_tokens=12),
            on_tokens=lambda *_: generate(engine, [9], **FIXED),
        )


@pytest.mark.parametrize("between", ["decode", "timing", "scores", "a session", "turns"])
def test_every_use_of_the_caches_overtakes_a_stream(engine: Engine, between: str) -> None:
    target, drafter, settings = engine.target, engine.drafter, Settings(max_new_tokens=4)
    batch = prefill_batch(target, drafter, [[5, 6, 7]], Settings(max_new_tokens=12))
    with torch.inference_mode():
        batch.round()
    {
        "decode": lambda: decode(target, None, [[4]], settings),
        "timing": lambda: time_parts(target, None, [4], repeats=1, warmup=0),
        "scores": lambda: choice_scores(target, [4, 5], settings, 0),
        "a session": lambda: Session(target, drafter, settings).start([4, 5]),
        "turns": lambda: ConversationBatches(target, drafter).decode(
            ["one"], [[4, 5]], [False], settings
        ),
    }[between]()
    with torch.inference_mode(), pytest.raises(UserError, match=OVERTAKEN):
        batch.round()


def test_an_overtaken_session_reads_its_text_again(engine: Engine) -> None:
    settings = Settings(max_new_tokens=6, num_draft_tokens=3)
    session = Session(engine.target, engine.drafter, settings)

    def turn(prompt: list[int]) -> tuple[list[int], int]:
        batch = session.start(prompt)
        generation = batch.rows[0].generation
        with torch.inference_mode():
            while batch.rows:
                batch.round()
        return generation.tokens, generation.prefilled

    first = [5, 6, 7]
    answer, _ = turn(first)
    second = [*first, *answer, 11, 12]
    undisturbed, read = turn(second)
    assert read < len(second) - 1, "the caches hold the beginning of the text"
    third = [*second, *undisturbed, 13]
    decode(engine.target, engine.drafter, [[9, 9, 9, 9]], settings)
    found, read = turn(third)
    assert read == len(third) - 1, "another text was in the caches"
    assert [undisturbed, found] == plain([second, third], max_new_tokens=6)


def test_a_sessions_earlier_turn_cannot_continue(engine: Engine) -> None:
    session = Session(engine.target, engine.drafter, Settings(max_new_tokens=12))
    earlier = session.start([5, 6, 7])
    session.start([9, 8])
    with torch.inference_mode(), pytest.raises(UserError, match=OVERTAKEN):
        earlier.round()


def test_two_sets_of_conversations_do_not_mix(engine: Engine) -> None:
    """Check two sets of conversations that take turns on one target's stored caches."""
    settings = Settings(max_new_tokens=5, num_draft_tokens=3)
    sets = [ConversationBatches(engine.target, engine.drafter) for _ in range(2)]
    texts = [[5, 6, 7], [9, 8, 10, 11]]
    for _ in range(2):
        for turns, text in zip(sets, texts, strict=True):
            (done,) = turns.decode(["one"], [text], [False], settings)
            assert [done.tokens] == plain([text], max_new_tokens=5)
            text += [*done.tokens, 12]


def test_claims_of_several_models_never_deadlock() -> None:
    """Check that claims lock in one order, whatever the order of their models."""
    models = [native_of(hf_model(layers=1)) for _ in range(3)]
    turns = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)]
    held = []

    def use(pair: tuple[int, int]) -> None:
        for _ in range(300):
            with Claim(*(models[i] for i in pair)) as claim:
                claim.take()
                held.append(claim.holds)

    threads = [threading.Thread(target=use, args=(pair,), daemon=True) for pair in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(held) == 1800
    assert all(held)
