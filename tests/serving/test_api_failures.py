"""A round that fails in mid-batch ends its requests alone: what follows is that of a new server."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from decoding.engine import Engine, load
from decoding.loop import decode
from tests.support.api_server import Served, make_engine, serve
from tests.support.planted import MODELS, PAIRS, question
from tests.support.tiers import tiered
from tests.support.tiny_targets import random_prompts

ROWS, TOKENS = 4, 24
TRAINED = "a trained eagle3"  # its drafts are accepted, unlike those of random heads


def engine_of(drafter: str) -> Engine:
    if drafter == TRAINED:
        return load(MODELS / "target", MODELS / "eagle3", dtype="float64")
    return make_engine(drafter)


def prompts_of(drafter: str, engine: Engine) -> list[list[int]]:
    if drafter != TRAINED:
        return random_prompts(ROWS, longest=20, seed=8)
    return [engine.tokenizer(f"<u>{question(*pair)}<a>")["input_ids"] for pair in PAIRS[:ROWS]]


def ask(served: Served, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the token ids of greedy texts, decoded together as choices of one request."""
    body = {"model": served.model, "prompt": prompts, "temperature": 0, "max_tokens": TOKENS}
    answer = served.post({**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    served.wait_until_empty()
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def texts_alone(served: Served, prompts: Sequence[list[int]]) -> list[tuple[list[int], float]]:
    """Ask one prompt after another; return their token ids and numbers of accepted tokens.

    Texts do not depend on drafts, but a drafter with a wrong state drafts other tokens.
    """
    found = []
    for prompt in prompts:
        before = served.metric("accepted_tokens_total")
        (ids,) = ask(served, [prompt])
        found.append((ids, served.metric("accepted_tokens_total") - before))
    return found


def fail_round(served: Served, prompts: Sequence[list[int]], method: str) -> None:
    """Let a method of the target or the drafter fail in the second round of all rows."""
    owner: Any = type(served.engine.target if method == "forward" else served.engine.drafter)
    real, calls = getattr(owner, method), []

    def failing(*given: Any, **named: Any) -> Any:
        calls.append(served.service.scheduler.running)
        if calls.count(len(prompts)) == 2:
            raise MemoryError("planted")
        return real(*given, **named)

    body = {"model": served.model, "prompt": prompts, "temperature": 0, "max_tokens": TOKENS}
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(owner, method, failing)
        answer = served.post(body)
    assert answer.status_code == 500 and "MemoryError" in answer.text


@pytest.mark.parametrize("method", ["forward", "observe"])
@pytest.mark.parametrize(
    "drafter", tiered(["chain", "recurrent", "eagle3", TRAINED], [TRAINED, "recurrent"])
)
def test_a_failed_round_of_many_rows_leaves_no_state(drafter: str, method: str) -> None:
    """Fail after the drafts, or after the commit, when the drafter has not seen the new tokens."""
    engine = engine_of(drafter)
    prompts = prompts_of(drafter, engine)
    with serve(engine, max_rows=ROWS) as served:
        before = texts_alone(served, prompts)
        settings = replace(served.settings, temperature=0, max_new_tokens=TOKENS)
        alone = decode(engine_of(drafter).target, None, prompts, settings)
        assert [ids for ids, _ in before] == [one.tokens for one in alone]
        assert drafter not in ("chain", TRAINED) or sum(accepted for _, accepted in before) > 0
        fail_round(served, prompts, method)
        assert ask(served, prompts) == [ids for ids, _ in before]
        assert texts_alone(served, prompts) == before


def test_a_drafter_with_the_rows_of_a_failed_round_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: a drafter that begins the next text with the state of the failed round."""
    engine = engine_of(TRAINED)
    prompts = prompts_of(TRAINED, engine)
    with serve(engine, max_rows=ROWS) as served:
        before = texts_alone(served, prompts[:1])
        fail_round(served, prompts, "forward")
        with monkeypatch.context() as planted:
            planted.setattr(type(engine.drafter), "open", lambda *_: None)
            with pytest.raises(AssertionError):
                assert texts_alone(served, prompts[:1]) == before
        assert texts_alone(served, prompts[:1]) == before
