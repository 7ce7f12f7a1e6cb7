"""Test that an answer equals decoding its request alone, whatever the drafter and the batch."""

from pathlib import Path

import pytest
from torch import Tensor

from decoding import generate, load
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from decoding.sampling import noise
from distill.regenerate.dialogues import Answer
from distill.regenerate.generate import AnswerGenerator
from distill.regenerate.resume import read_journal
from tests.support.regeneration import CHATS, regenerated, with_stops, write_chats
from tests.support.tiers import tiered
from training.data.chat import render_prompt

GREEDY, SAMPLED = ("temperature=0",), ("temperature=0.9", "top_k=40", "top_p=0.95")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    folder = tmp_path_factory.mktemp("regenerate")
    with_stops(tiny_target, folder / "target", every=20)
    write_chats(folder / "chats.jsonl")
    return folder


def run(home: Path, name: str, *overrides: str) -> bytes:
    regenerated(home / "target", home / "chats.jsonl", home / name, *overrides)
    return (home / name / "chats.json").read_bytes()


@pytest.fixture(scope="module")
def greedy(home: Path) -> bytes:
    return run(home, "greedy", *GREEDY)


@pytest.fixture(scope="module")
def sampled(home: Path) -> bytes:
    return run(home, "sampled", *SAMPLED)


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_an_answer_equals_decoding_its_request_alone(
    how: str, home: Path, request: pytest.FixtureRequest
):
    request.getfixturevalue(how)
    records = regenerated(
        home / "target", home / "chats.jsonl", home / how, *(GREEDY if how == "greedy" else SAMPLED)
    )
    engine = load(home / "target", dtype="float64", max_length=256)
    warpers = {} if how == "greedy" else {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
    settings = Settings(16, verify="coupled", stop_token_ids=engine.stop_token_ids, **warpers)
    finishes, number = set(), {chat["id"]: index for index, chat in enumerate(CHATS)}
    for record in records:
        history: list[dict[str, str]] = []
        turn = 0
        for message in record["conversations"]:
            if message["from"] == "gpt":
                ids, key = (
                    render_prompt(engine.tokenizer, history),
                    noise.key(number[record["id"]], 0, turn),
                )
                (alone,) = decode(engine.target, None, [ids], settings, request_ids=[key])
                stopped = alone.finish == "stop"
                text = engine.tokenizer.decode(
                    alone.tokens[: -1 if stopped else None], skip_special_tokens=True
                )
                assert (message["tokens"], message["finish"]) == (len(alone.tokens), alone.finish)
                assert message["value"] == (text if stopped else text.rstrip("\ufffd"))
                if how == "greedy":
                    assert generate(engine, history, max_new_tokens=16).tokens == alone.tokens
                finishes.add(alone.finish)
                turn += 1
            role = {"human": "user", "gpt": "assistant", "system": "system"}[message["from"]]
            history.append({"role": role, "content": message["value"]})
    assert finishes == {"stop", "length"}, "both ways to finish are tested"


WAYS = [
    ["batch_size=1"],
    ["batch_size=32"],
    ["drafters=[prompt_lookup]"],
    ["drafters=[TARGET]", "num_draft_tokens=3"],
    ["drafters=[{use: chain_with_lookup, folder: TARGET, min_match: 2}]"],
    ["drafters=[{use: multi_candidate, folder: TARGET, branching: [2, 1]}]", "batch_size=2"],
]


@pytest.mark.parametrize("how", tiered(["greedy", "sampled"], ["sampled"]))
@pytest.mark.parametrize("overrides", tiered(WAYS, [WAYS[0], WAYS[3], WAYS[5]]))
def test_neither_batch_nor_drafter_changes_an_answer(
    how: str, overrides: list[str], home: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    given = [text.replace("TARGET", str(home / "target")) for text in overrides]
    regenerated(
        home / "target",
        home / "chats.jsonl",
        tmp_path,
        *(GREEDY if how == "greedy" else SAMPLED),
        *given,
    )
    assert (tmp_path / "chats.json").read_bytes() == request.getfixturevalue(how)


def answers_of(folder: Path) -> list[Answer]:
    return [Answer(**record) for record in read_journal(folder / "answers" / "rank_0.jsonl")]


def read_by_target(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every prefill forward pass appends its number of positions."""
    read: list[int] = []
    features = NativeTarget.features

    def counted(
        self: NativeTarget,
        tokens_BN: Tensor,
        parents_BN: Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> Tensor:
        read.append(tokens_BN.numel())
        return features(self, tokens_BN, parents_BN, taps)

    of_rows = NativeTarget.features_of_rows

    def counted_rows(
        self: NativeTarget, tokens_of: dict[int, list[int]], taps: tuple[int, ...] = ()
    ) -> list[Tensor]:
        read.append(sum(map(len, tokens_of.values())))
        return of_rows(self, tokens_of, taps)

    monkeypatch.setattr(NativeTarget, "features_of_rows", counted_rows)

    def forward(
        self: NativeTarget,
        tokens_BN: Tensor,
        parents_BN: Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        hidden_BNC = features(self, tokens_BN, parents_BN)
        return self.weights.head(hidden_BNC), hidden_BNC

    monkeypatch.setattr(NativeTarget, "features", counted)
    monkeypatch.setattr(NativeTarget, "forward", forward)
    return read


@pytest.mark.parametrize("warped", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_turn_reads_only_new_tokens(
    warped: tuple[str, ...], tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that a turn reads only tokens that the turn before did not, for equal answers.

    Control: without caches, all tokens of a prompt are read.
    """
    long = [
        [turn for n in range(4) for turn in (("human", f"part {n} of {name}"), ("gpt", "ok"))]
        for name in "ab"
    ]
    chats = [
        {"id": str(number), "conversations": turns}
        for number, turns in enumerate([*long, long[0][:2]])
    ]
    write_chats(tmp_path / "chats.jsonl", chats)
    read = read_by_target(monkeypatch)
    regenerated(tiny_target, tmp_path / "chats.jsonl", tmp_path / "kept", *warped)
    with_caches = sum(read)
    read.clear()
    monkeypatch.setattr(
        AnswerGenerator,
        "__call__",
        lambda self, requests, _, call=AnswerGenerator.__call__: call(self, requests, False),
    )
    regenerated(tiny_target, tmp_path / "chats.jsonl", tmp_path / "anew", *warped)
    assert (tmp_path / "kept" / "chats.json").read_bytes() == (
        tmp_path / "anew" / "chats.json"
    ).read_bytes()
    kept, anew = (
        {answer.key: answer for answer in answers_of(tmp_path / name)} for name in ("kept", "anew")
    )
    assert len(kept) == 9 and all(
        answer.read_tokens == answer.prompt_tokens - 1 for answer in anew.values()
    )
    for (chat, sample, turn), answer in kept.items():
        before = anew[chat, sample, turn - 1].prompt_tokens if turn else 1
        assert answer.read_tokens <= answer.prompt_tokens - before, (
            "no turn reads an earlier prompt again"
        )
    assert (
        sum(answer.read_tokens for answer in kept.values())
        < sum(answer.read_tokens for answer in anew.values()) / 2
    )
    assert with_caches < sum(read) / 2


def test_another_seed_changes_sampled_answers_but_not_greedy_ones(
    home: Path, greedy: bytes, sampled: bytes
):
    assert run(home, "other_seed", *SAMPLED, "seed=1") != sampled
    assert run(home, "other_seed_greedy", *GREEDY, "seed=1") == greedy


def test_samples_differ_and_the_first_equals_a_single_sample(home: Path, sampled: bytes):
    records = regenerated(
        home / "target", home / "chats.jsonl", home / "samples", *SAMPLED, "samples=2"
    )
    first, second = (
        {one["id"]: one["conversations"] for one in records if one["sample"] == s} for s in (0, 1)
    )
    alone = regenerated(home / "target", home / "chats.jsonl", home / "sampled", *SAMPLED)
    assert first == {record["id"]: record["conversations"] for record in alone}
    assert len(second) > 2
    assert all(conversation != first.get(name) for name, conversation in second.items())
