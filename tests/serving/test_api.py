"""The server under load, asked by OpenAI's own client: all tokens are those of a decode alone."""

import asyncio
import re
import time
from typing import Any

import httpx2
import pytest

from decoding.models.native.model import NativeTarget
from serving.api.errors import RequestError
from serving.api.scheduler import Delivery, Job, Scheduler
from tests.decoding.test_law_controls import key_noise_by_place
from tests.support.api_requests import (
    WITH_IDS,
    ask_all,
    check_nothing_is_left,
    expected,
    questions,
)
from tests.support.api_server import Served, serve
from tests.support.tiers import tiered
from tests.support.tiny_targets import random_prompts

DRAFTERS = ("recurrent", "ranked_tree", "block_tree", "recurrent_drawn", "eagle3", "none")
# drafters that remember texts
KEEPERS = ("suffix_lookup", "prompt_lookup", "lookahead", "chain_with_lookup")
KEEPERS += ("ouroboros_with_lookup",)


def check_texts(served: Served, count: int) -> None:
    """Check the law for `count` requests at once, and that no row is left."""
    asked = questions(count)
    found = asyncio.run(ask_all(served, asked))
    served.wait_until_empty()
    for number, (prompt, given) in enumerate(asked):
        if number % 2 == 0:
            assert found[number] == expected(served, prompt, given), f"request {number}"


def outcomes(served: Served) -> dict[str, int]:
    """Return the number of requests by how they ended."""
    lines = served.service.metrics.text().decode().splitlines()
    found = [re.match(r'shallow_draft_requests_total{outcome="(\w+)"} (.+)', one) for one in lines]
    return {one[1]: int(float(one[2])) for one in found if one}


@pytest.mark.parametrize("drafter", tiered(DRAFTERS, ["recurrent"]))
def test_200_requests_at_once_have_the_texts_of_decodes_alone(drafter: str) -> None:
    with serve(drafter, max_rows=6) as served:
        check_texts(served, 200)
        ended = outcomes(served)
    assert sum(ended.values()) == 200 and not ended.keys() - {"stop", "length", "cancelled"}
    # Half of the requests leave. Of 200 tokens a few of these meet a stop token before they do.
    assert 90 <= ended["cancelled"] <= 100
    check_nothing_is_left()


@pytest.mark.parametrize("rule", tiered(["token", "block"], ["token"]))
def test_rules_that_test_q_have_the_texts_of_decodes_alone(rule: str) -> None:
    """Check that rows do not depend on their neighbours, where texts depend on drafts."""
    with serve("chain", rule=rule) as served:
        asked = questions(24)[1::3]  # one sampling setting, another seed each
        asked = [
            (prompt, {**given, "seed": number}) for number, (prompt, given) in enumerate(asked)
        ]

        async def ask() -> list[str]:
            async with served.async_client() as client:
                answers = await asyncio.gather(
                    *(
                        client.completions.create(model=served.model, prompt=prompt, **given)
                        for prompt, given in asked
                    )
                )
            return [answer.choices[0].text for answer in answers]

        together = asyncio.run(ask())
        one_by_one = [
            served.post({"model": served.model, "prompt": prompt, **given}).json()["choices"][0][
                "text"
            ]
            for prompt, given in asked
        ]
        assert together == one_by_one


def test_the_law_rejects_noise_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    key_noise_by_place(monkeypatch)
    with serve("chain", max_rows=4) as served, pytest.raises(AssertionError, match="request"):
        check_texts(served, 24)


def test_a_stream_has_the_text_of_the_whole_answer() -> None:
    with serve() as served, served.client() as client:
        given: dict[str, Any] = {"max_tokens": 20, "seed": 3, "temperature": 0.8, "n": 2}
        messages: Any = [{"role": "user", "content": "Name a colour."}]
        asked: dict[str, Any] = {"model": served.model, "messages": messages, **given}
        without = client.chat.completions.create(**asked)
        assert not any(hasattr(choice, "token_ids") for choice in without.choices)
        whole = client.chat.completions.create(**asked, extra_body=WITH_IDS)
        texts, ends, usage = ["", ""], [None, None], None
        ids: list[list[int]] = [[], []]
        stream = client.chat.completions.create(
            model=served.model,
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=WITH_IDS,
            **given,
        )
        parts = 0
        for part in stream:
            usage = part.usage or usage
            for choice in part.choices:
                parts += bool(choice.delta.content)
                texts[choice.index] += choice.delta.content or ""
                ids[choice.index] += getattr(choice, "token_ids", [])
                ends[choice.index] = choice.finish_reason or ends[choice.index]
        assert texts == [choice.message.content for choice in whole.choices]
        assert ids == [getattr(choice, "token_ids") for choice in whole.choices]  # noqa: B009
        assert sum(map(len, ids)) == whole.usage.completion_tokens  # type: ignore[union-attr]
        assert ends == [choice.finish_reason for choice in whole.choices]
        assert parts > 2 and texts[0] != texts[1]
        assert usage == whole.usage and usage is not None and usage.completion_tokens <= 40


@pytest.mark.parametrize("stream", [True, False])
def test_a_whole_answer_is_handed_over_once(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[list[tuple[int, int, str | None]]] = []
    submit = Scheduler.submit

    def counted(scheduler: Scheduler, job: Job) -> None:
        deliver = job.deliver

        def count(news: Delivery) -> None:
            assert not isinstance(news, RequestError)
            handed.append([(one.choice, len(one.tokens), one.finish) for one in news])
            deliver(news)

        job.deliver = count
        submit(scheduler, job)

    monkeypatch.setattr(Scheduler, "submit", counted)
    with serve() as served:
        prompts = random_prompts(2, seed=4)
        body = {"model": served.model, "prompt": prompts, "max_tokens": 24, "temperature": 0}
        assert served.post({**body, "stream": stream}).status_code == 200
        served.wait_until_empty()
        assert served.metric("first_token_seconds_count") == 1
        assert served.metric("first_token_seconds_sum") < served.metric("request_seconds_sum")
    if stream:
        assert len(handed) > 4, "a control: once a round"
        assert all(tokens <= 4 for news in handed for _, tokens, _ in news)
    else:
        ((first, second),) = handed
        assert {first[0], second[0]} == {0, 1}
        assert all(tokens == 24 and finish == "length" for _, tokens, finish in (first, second))


def test_a_seed_gives_the_same_text_and_none_another() -> None:
    with serve() as served, served.client() as client:

        def ask(**given: Any) -> str:
            done = client.completions.create(
                model=served.model, prompt="def add(", max_tokens=16, **given
            )
            return done.choices[0].text

        assert ask(seed=1) == ask(seed=1) != ask(seed=2)
        assert ask() != ask()


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_before_its_stop_string(stream: bool) -> None:
    with serve() as served, served.client() as client:
        given: dict[str, Any] = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 30}
        text = client.completions.create(model=served.model, **given).choices[0].text
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        asked = {**given, "stop": ["never found", stop], "stream": stream}
        done: Any = client.completions.create(model=served.model, **asked)
        parts = list(done) if stream else [done]
        found = "".join(part.choices[0].text for part in parts)
        assert found == text[: text.index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"


def test_a_client_that_leaves_frees_its_rows() -> None:
    with serve(max_rows=2) as served, served.client() as client:
        streams = [
            client.completions.create(
                model=served.model, prompt=[4, 5, 6], max_tokens=240, temperature=0, stream=True
            )
            for _ in range(2)
        ]
        for stream in streams:
            next(iter(stream))
        for stream in streams:
            stream.close()
        began = time.monotonic()
        answer = client.completions.create(model=served.model, prompt=[7, 8], max_tokens=4)
        assert answer.usage is not None and answer.usage.completion_tokens <= 4
        served.wait_until_empty()
        assert time.monotonic() - began < 20
        assert 'outcome="cancelled"} 2.0' in served.service.metrics.text().decode()


@pytest.mark.parametrize("drafter", tiered(KEEPERS, ["chain_with_lookup"]))
def test_pools_stay_with_their_key(drafter: str, tmp_path: Any) -> None:
    """Check that a key's second request drafts from its first, and another key's does not."""
    keys = tmp_path / "keys"
    keys.write_text("alpha\nbeta\n")
    with serve(drafter, key_file=str(keys), keep_pools=True) as served:

        def ask(key: str) -> tuple[str, float]:
            before = served.metric("row_rounds_total")
            done = served.client(key).completions.create(
                model=served.model, prompt=random_prompts(1, seed=9)[0], max_tokens=60, seed=4
            )
            served.wait_until_empty()
            return done.choices[0].text, served.metric("row_rounds_total") - before

        (text, first), again, other = ask("alpha"), ask("alpha"), ask("beta")
        assert again[0] == other[0] == text
        assert again[1] < first and other[1] == first


def test_clients_without_keys_share_a_pool() -> None:
    """Check that a client's request drafts from another's. With keys it does not (above)."""
    with serve("chain_with_lookup", keep_pools=True) as served:
        rounds, texts = [], set()
        for name in ("alpha", "beta"):
            before = served.metric("row_rounds_total")
            done = served.client(name).completions.create(
                model=served.model, prompt=random_prompts(1, seed=9)[0], max_tokens=60, seed=4
            )
            served.wait_until_empty()
            texts.add(done.choices[0].text)
            rounds.append(served.metric("row_rounds_total") - before)
        assert rounds[1] < rounds[0] and len(texts) == 1


def test_no_pool_is_kept_by_default() -> None:
    with serve("suffix_lookup") as served:
        body = {"model": served.model, "prompt": [9, 8, 7], "max_tokens": 60, "seed": 4}
        rounds = []
        for _ in range(2):
            before = served.metric("row_rounds_total")
            assert served.post(body).status_code == 200
            served.wait_until_empty()
            rounds.append(served.metric("row_rounds_total") - before)
        assert rounds[0] == rounds[1]


def test_metrics_show_acceptance_by_depth_and_the_time_of_a_token() -> None:
    """Compare with the batch's own counts; a control without a drafter has no depths."""
    accepted, tested = (
        f"spec_decode_num_{name}_tokens_per_pos_total" for name in ("accepted", "tested")
    )
    pace = "time_per_output_token_seconds"
    with serve() as served:
        body = {"model": served.model, "prompt": random_prompts(2, seed=4), "temperature": 0}
        assert served.post({**body, "max_tokens": 24}).status_code == 200
        served.wait_until_empty()

        def at(name: str, position: int) -> float:
            return served.metric(f'{name}{{position="{position}"}}')

        assert served.metric(accepted) == served.metric("accepted_tokens_total") > 0
        assert served.metric(tested) <= served.metric("drafted_tokens_total")
        assert 0 < at(tested, 0) <= served.metric("row_rounds_total")
        assert at(tested, 1) <= at(accepted, 0) <= at(tested, 0)
        assert at(tested, 99) == 0, "control: no draft is as long"
        assert served.metric(f"{pace}_count") == 2, "one of each row"
        assert 0 < served.metric(f"{pace}_sum") < served.metric("request_seconds_sum")
        text = served.service.metrics.text().decode()
        assert f'{pace}_bucket{{le="0.001"}}' in text and f'{pace}_bucket{{le="0.3"}}' in text
        assert served.post({**body, "max_tokens": 1}).status_code == 200
        served.wait_until_empty()
        assert served.metric(f"{pace}_count") == 2, "control: one token has no next one"
    with serve("none") as served:
        assert served.post({**body, "max_tokens": 5}).status_code == 200
        served.wait_until_empty()
        assert served.metric(accepted) == served.metric(tested) == 0
        assert served.metric(f"{pace}_count") == 2


def test_metrics_and_health() -> None:
    with serve() as served, served.client() as client:
        client.completions.create(model=served.model, prompt=[4, 5], max_tokens=9, temperature=0)
        assert served.metric("prompt_tokens_total") == 2
        assert served.metric("generated_tokens_total") == 9
        assert served.metric("accepted_tokens_total") <= served.metric("drafted_tokens_total")
        assert served.metric("row_rounds_total") + served.metric("accepted_tokens_total") == 9
        assert [one.id for one in client.models.list()] == [served.model]
        assert client.models.retrieve(served.model).id == served.model
        health = httpx2.get(f"{served.url}/health").json()
        assert health == {"status": "ok", "running": 0, "waiting": 0}


def test_the_models_fail_loudly_and_the_server_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as served:
        body = {"model": served.model, "prompt": [4, 5], "max_tokens": 3, "temperature": 0}
        with monkeypatch.context() as broken:
            broken.setattr(NativeTarget, "forward", _fail)
            answer = served.post(body)
            assert answer.status_code == 500
            assert "decoding failed" in answer.json()["error"]["message"]
            assert "decoding failed" in served.post({**body, "stream": True}).text
        assert outcomes(served) == {"failed": 2}
        with monkeypatch.context() as broken:
            broken.setattr(type(served.engine.tokenizer), "__call__", _fail)
            answer = served.post({**body, "prompt": "def"})
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "the server failed: MemoryError."
        assert outcomes(served) == {"failed": 3}
        assert served.metric("request_seconds_count") == 0, "of complete answers alone"
        assert served.post(body).status_code == 200
        served.wait_until_empty()
        assert served.post({**body, "logprobs": 5}).status_code == 400
        assert outcomes(served) == {"failed": 3, "length": 1, "refused": 1}
        assert served.metric("request_seconds_count") == 1


def _fail(*_: object, **__: object) -> None:
    raise MemoryError("planted")
