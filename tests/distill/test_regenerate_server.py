"""Test `distill.regenerate server=`: equal answers, faults, an exact resume and its errors."""

import json
import re
import signal
from pathlib import Path

import pytest

from decoding.errors import UserError
from distill.regenerate.resume import read_journal
from tests.support.openai_server import Served, serve
from tests.support.regeneration import (
    CHATS,
    configured,
    metrics,
    regenerated,
    run,
    start,
    wait_for_answers,
    with_stops,
    write_chats,
)
from tests.support.tiers import tiered

MANY = [
    {
        "id": f"{chat['id']} {n}",
        "conversations": [(role, f"{text} {n}") for role, text in chat["conversations"]],
    }
    for n in range(2)
    for chat in CHATS
]
EVERY = 12  # every 12th token ends a text
FAST = ("server_retry_s=0.01", "server_retries=3")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    folder = tmp_path_factory.mktemp("regenerate_server")
    with_stops(tiny_target, folder / "target", every=EVERY)
    write_chats(folder / "chats.jsonl", MANY)
    return folder


@pytest.fixture(scope="module")
def local(home: Path) -> bytes:
    regenerated(home / "target", home / "chats.jsonl", home / "local", "temperature=0")
    return (home / "local" / "chats.json").read_bytes()


@pytest.fixture(scope="module")
def requests(home: Path, local: bytes) -> int:
    """Return the number of requests of a run."""
    return len(read_journal(journal(home / "local")))


def ask(home: Path, served: Served, folder: Path, *overrides: str) -> bytes:
    """Run the job with a server, and return the bytes of its output."""
    given = ("temperature=0", f"server={served.url}", *FAST, *overrides)
    return run(configured(home / "target", home / "chats.jsonl", folder, *given)).read_bytes()


def journal(folder: Path) -> Path:
    return folder / "answers" / "rank_0.jsonl"


def count_ended(folder: Path, reason: str) -> int:
    """Return the number of chats that ended for a reason, with or without an answer."""
    found = metrics(folder)
    return int(found["failed"].get(reason, 0) + found["ended_early"].get(reason, 0))


# ------------------------------------------------------------------------------------ equal answers
@pytest.mark.parametrize("prompts", ["tokens", "messages"])
def test_a_server_gives_the_bytes_of_a_local_run(
    prompts: str, home: Path, local: bytes, requests: int, tmp_path: Path
):
    with serve(home / "target", lambda number: "slow" if number % 5 == 0 else "") as served:
        found = ask(home, served, tmp_path, f"server_prompts={prompts}", "server_requests=8")
        assert found == local
        assert len(served.asked) == requests and 4 <= served.most_in_flight <= 8
    arrived = [answer["chat"] for answer in read_journal(journal(tmp_path))]
    assert arrived != sorted(arrived), "answers that arrive out of order are tested"
    finish = metrics(tmp_path)["finish"]
    assert finish["stop"] > 0 and finish["length"] > 0, "both ways to finish are tested"


def test_answers_of_another_model_differ(home: Path, local: bytes, tmp_path: Path):
    """Control: the server's weights give the answers, not those of target.path."""
    from safetensors.torch import load_file, save_file

    with_stops(home / "target", tmp_path / "other", every=EVERY)
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(1, 0)
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    with serve(tmp_path / "other") as served:
        assert ask(home, served, tmp_path / "run") != local


def test_a_target_without_weights_is_enough(home: Path, local: bytes, tmp_path: Path):
    with serve(home / "target") as served:
        (tmp_path / "target").mkdir()
        for file in (home / "target").iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / "target" / file.name).write_bytes(file.read_bytes())
        given = ("temperature=0", f"server={served.url}")
        config = configured(tmp_path / "target", home / "chats.jsonl", tmp_path / "run", *given)
        assert run(config).read_bytes() == local
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["metrics"]["server"] == served.url
    assert manifest["metrics"]["server_model"] == "the-target"
    assert str(tmp_path / "target" / "tokenizer.json") in manifest["inputs"]


def test_samples_repeat_and_every_setting_is_sent(home: Path, tmp_path: Path):
    given = ("temperature=0.9", "top_k=40", "min_p=0.01", "top_p=0.95", "samples=2")
    given = (*given, "data.max_samples=6")
    with serve(home / "target") as served:
        one, two = (ask(home, served, tmp_path / name, *given) for name in "ab")
        other = ask(home, served, tmp_path / "c", *given, "seed=1")
    assert one == two != other
    body = served.asked[0]
    assert {key: body[key] for key in ("temperature", "top_k", "min_p", "top_p", "max_tokens")} == {
        "temperature": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "top_p": 0.95,
        "max_tokens": 16,
    }
    assert body["repetition_penalty"] == 1.0 and body["model"] == "the-target"
    seeds = {(body["seed"], json.dumps(body["prompt"])) for body in served.asked[:12]}
    assert len({seed for seed, _ in seeds}) == len(seeds) == 12 and max(seeds)[0] < 2**31
    samples = json.loads(one)
    assert len(samples) == metrics(tmp_path / "a")["success"] > 8
    assert {record["sample"] for record in samples} == {0, 1}


def test_a_server_without_extensions_is_asked_without_them(home: Path, tmp_path: Path):
    with serve(home / "target", token_ids=False) as served:
        records = json.loads(ask(home, served, tmp_path, "server_extensions=false"))
    assert not {"top_k", "min_p", "return_token_ids"} & set(served.asked[0])
    ids = {record["id"] for record in records}
    assert [record["id"] for record in records] == [one["id"] for one in MANY if one["id"] in ids]
    found = metrics(tmp_path)
    assert len(records) == found["success"] > 6
    assert found["as_drawn_share"] is None and found["block_efficiency"] is None
    assert all(answer["tokens"] for answer in read_journal(journal(tmp_path)))


# ------------------------------------------------------------------------------------------- faults
@pytest.mark.parametrize(
    "fault", tiered(["drop", "truncate", "half", "500", "429"], ["drop", "truncate"])
)
def test_a_failed_request_is_sent_again(
    fault: str, home: Path, local: bytes, requests: int, tmp_path: Path
):
    with serve(home / "target", lambda number: fault if number % 3 == 0 else "") as served:
        assert ask(home, served, tmp_path, "server_requests=4", "server_retries=8") == local
        assert len(served.asked) > requests
    assert len(read_journal(journal(tmp_path))) == requests


@pytest.mark.parametrize(
    ("fault", "words"),
    tiered(
        [
            ("drop", r"failed 4 times in a row, at last: RemoteProtocolError, "),
            (
                "half",
                r"failed 4 times in a row, at last: RemoteProtocolError, .*incomplete|complete",
            ),
            (
                "truncate",
                r"4 times in a row, at last: an incomplete or malformed answer of .* bytes",
            ),
            ("ids", r"4 times in a row, at last: an incomplete or malformed answer of .* bytes"),
            ("500", r"4 times in a row, at last: HTTP 500: .*planted 500"),
        ],
        lambda fault, words: fault in ("truncate", "ids"),
    ),
)
def test_a_server_that_fails_for_good_ends_the_run_which_resumes(
    fault: str, words: str, home: Path, local: bytes, requests: int, tmp_path: Path
):
    with serve(home / "target", lambda number: fault if number >= 9 else "") as served:
        with pytest.raises(UserError, match=words) as error:
            ask(home, served, tmp_path, "server_requests=3")
        remedy = "Check that the server runs, and its own log. The answers so far are kept in"
        assert f". {remedy}" in str(error.value) and f".. {remedy}" not in str(error.value)
    kept = {answer["chat"] for answer in read_journal(journal(tmp_path))}
    assert kept and not (tmp_path / "chats.json").exists()
    with serve(home / "target") as served:  # at another address
        assert ask(home, served, tmp_path, "server_requests=5") == local
        assert len(served.asked) == requests - 9, "answered requests are not asked again"


def test_a_slow_server_is_given_up_after_the_timeout(home: Path, tmp_path: Path):
    slow = ("server_timeout_s=0.05", "server_retries=1")
    with (
        serve(home / "target", delay_s=0.3) as served,
        pytest.raises(UserError, match=r"2 times in a row, at last: no answer within 0.05 s"),
    ):
        ask(home, served, tmp_path, *slow)


@pytest.mark.parametrize(
    ("fault", "reason", "more"),
    tiered(
        [
            ("refuse", "refused by the server", "HTTP 400: .*the prompt is not welcome"),
            ("filtered", "refused by the server", "finish_reason content_filter"),
            ("cut", "refused by the server", "cut after 2 of [0-9]+ tokens"),
            ("empty", "empty answer", ""),
        ],
        lambda fault, reason, more: fault in ("refuse", "empty"),
    ),
)
def test_unusable_answers_are_counted_and_left_out(
    fault: str,
    reason: str,
    more: str,
    home: Path,
    local: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    with serve(home / "target", lambda number: fault if number in (7, 10) else "") as served:
        records = json.loads(ask(home, served, tmp_path, "server_requests=1"))
    found = metrics(tmp_path)
    assert count_ended(tmp_path, reason) == count_ended(home / "local", reason) + 2
    assert found["input"] == len(MANY) == found["success"] + sum(found["failed"].values())
    output = capsys.readouterr().out
    assert reason in output
    expected = json.loads(local)
    same = [record for record in expected if record in records]
    assert len(same) == len(expected) - 2, "other chats are unchanged"
    if more:
        words = [
            one["text"] for one in read_journal(journal(tmp_path)) if one["finish"] == "refused"
        ]
        assert len(words) == 2
        assert all(re.search(more, text) for text in words)
        assert "note: the server did not answer chat" in output


@pytest.mark.long
@pytest.mark.parametrize(("on_length", "kept"), [("end", True), ("drop", False), ("go_on", True)])
def test_cut_answers_follow_on_length(on_length: str, kept: bool, home: Path, tmp_path: Path):
    given = ("temperature=0", f"on_length={on_length}")
    regenerated(home / "target", home / "chats.jsonl", tmp_path / "local", *given)
    with serve(home / "target") as served:
        found = ask(home, served, tmp_path / "run", *given)
    assert found == (tmp_path / "local" / "chats.json").read_bytes()
    assert (metrics(tmp_path / "run")["finish"]["length"] > 0) == kept


# ------------------------------------------------------------------------------------------- resume
def test_a_kill_in_the_middle_changes_nothing(
    home: Path, local: bytes, requests: int, tmp_path: Path
):
    flying = 3
    with serve(home / "target", delay_s=0.05) as served:
        given = ("temperature=0", f"server={served.url}", f"server_requests={flying}")
        process = start(home, tmp_path, *given)
        wait_for_answers(process, journal(tmp_path), 6)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert 6 <= journal(tmp_path).read_bytes().count(b"\n") < requests
        assert not (tmp_path / "chats.json").exists()
        first = len(served.asked)
        assert ask(home, served, tmp_path, f"server_requests={flying}") == local
        again = set(served.prompts[:first]) & set(served.prompts[first:])
        assert len(again) == len(served.asked) - requests <= flying
        before = len(served.asked)
        (tmp_path / "chats.json").unlink()
        assert ask(home, served, tmp_path) == local
        assert len(served.asked) == before, "the journal answers everything"


@pytest.mark.long
def test_sigterm_ends_a_run_with_requests_in_flight(home: Path, tmp_path: Path):
    with serve(home / "target", delay_s=0.05) as served:
        process = start(home, tmp_path, f"server={served.url}", "server_requests=3")
        wait_for_answers(process, journal(tmp_path), 3)
        process.send_signal(signal.SIGTERM)
        _, words = process.communicate(timeout=60)
    assert process.returncode == 130 and "finished work is kept" in words, words
    assert "Traceback" not in words


def test_answers_of_two_models_are_not_mixed(home: Path, tmp_path: Path):
    with (
        serve(home / "target", lambda number: "500" if number >= 5 else "") as served,
        pytest.raises(UserError, match="HTTP 500"),
    ):
        ask(home, served, tmp_path, "server_retries=0")
    with (
        serve(home / "target", models=("another",)) as served,
        pytest.raises(UserError, match=r"come from a server's model 'the-target', but .*'another'"),
    ):
        ask(home, served, tmp_path, "server_retries=0")
    config = configured(home / "target", home / "chats.jsonl", tmp_path, "temperature=0")
    config.server_retries, config.server_retry_s = 0, 0.01
    with pytest.raises(UserError, match=r"'the-target', but this command asks the loaded target"):
        run(config)


# ---------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        (
            {"context": 128},
            [],
            r"a context of 128 tokens \(max_model_len\), expected data.max",
        ),
        ({"models": ()}, [], r"serves no model. Load one into the server"),
        ({"models": ("a", "b")}, [], r"serves a, b; choose one. Set server_model="),
        ({}, ["server_model=x"], r"serves the-target; server_model is 'x', which it does not list"),
        ({"bos": True}, [], r"read a prompt of \d+ tokens, expected the \d+ of .* adds no tokens"),
        (
            {"bos": True},
            ["server_prompts=messages"],
            r"Start it with the chat template of .*, or set server_prompts=tokens",
        ),
        (
            {"faults": lambda _: "refuse"},
            [],
            r"did not answer the first 8 requests.*server_extensions=f",
        ),
        ({"faults": lambda _: "404"}, [], r"HTTP 404: .*planted 404.*server_prompts=messages"),
        ({"faults": lambda _: "401"}, [], r"HTTP 401: .*Set OPENAI_API_KEY to a key"),
        ({}, ["server_prompts=both"], r"server_prompts is both, expected tokens or messages"),
        ({}, ["server_requests=0"], r"server_requests is 0, expected 1 or more"),
        ({}, ["drafters=[prompt_lookup]"], r"drafters is .*, expected \[\] with a server"),
        ({}, ["server_extensions=false", "top_k=4"], r"top_k is 4, expected 0 with server_exten"),
        ({}, ["parallel=ddp", "parallel.processes=2"], r"parallel.kind is ddp, expected single"),
        ({}, ["server=127.0.0.1:8000"], r"server is 127.0.0.1:8000, expected an address such as"),
        ({}, ["server='http://127.0.0.1:1/v1'"], r"127.0.0.1:1/v1/models failed: ConnectError"),
    ],
)
def test_invalid_servers_and_values_are_refused(
    options: dict[str, object], overrides: list[str], message: str, home: Path, tmp_path: Path
):
    with (
        serve(home / "target", **options) as served,  # type: ignore[arg-type]
        pytest.raises(UserError, match=f"(?s){message}"),
    ):
        ask(home, served, tmp_path, *overrides)


def test_an_address_without_its_path_is_refused(home: Path, tmp_path: Path):
    with (
        serve(home / "target") as served,
        pytest.raises(UserError, match="/models is a web page, expected JSON. .* with its /v1"),
    ):
        ask(home, served, tmp_path, f"server={served.url.removesuffix('/v1')}")


def test_a_server_with_another_tokenizer_is_refused(home: Path, tmp_path: Path, chat24m: Path):
    with (
        serve(chat24m) as served,
        pytest.raises(UserError, match=r"returned the text .* decodes to .*. Serve the model of"),
    ):
        ask(home, served, tmp_path)


def test_a_dry_run_measures_the_server(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with serve(home / "target") as served:
        ask_nothing = ("temperature=0", f"server={served.url}", "dry_run=true")
        run(configured(home / "target", home / "chats.jsonl", tmp_path / "run", *ask_nothing))
        assert len(served.asked) == len(MANY) // 2
    assert "tokens/s (measured on one batch)" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_the_key_is_sent_and_not_saved(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-a-test")
    with serve(home / "target") as served:
        ask(home, served, tmp_path, "data.max_samples=1")
    assert served.authorizations == {"Bearer key-of-a-test"}
    texts = [file.read_text() for file in tmp_path.rglob("*.*") if file.is_file()]
    assert texts and not any("key-of-a-test" in text for text in texts)
