"""Test mixtures: published updates, sampled shares, complete epochs and refused settings.

For mixtures inside the loop see test_mixture_in_training.py.
"""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from decoding.errors import UserError
from decoding.models.text.tokenizer import load_tokenizer
from distill.config import TrainConfig
from jobs.job import check_arguments
from jobs.paths import resolve_model
from tests.support.configurations import configuration
from training.bounds import Progress
from training.config import DataConfig, DomainConfig
from training.data.from_config import data_files, training_texts
from training.data.mixture import (
    MixedData,
    acceptance_gaps,
    check_mixture,
    loss_gaps,
    raise_to_floor,
    update_shares,
)
from training.data.packing import Sample

NAMES = ("code", "prose", "maths")


def samples(seed: int, count: int, low: int, high: int) -> list[Sample]:
    """Return `count` documents of random ids from `low` to `high` - 1, which show their domain."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = random.integers(low, high, int(random.integers(12, 30))).astype(np.int32)
        mask = np.ones(len(ids), dtype=bool)
        mask[0] = False
        found.append(Sample(ids, mask))
    return found


DOMAINS = {
    "code": samples(1, 40, 0, 20),
    "prose": samples(2, 15, 20, 40),
    "maths": samples(3, 9, 40, 60),
}
HELD_OUT = {
    "code": samples(4, 6, 0, 20),
    "prose": samples(5, 6, 20, 40),
    "maths": samples(6, 6, 40, 60),
}


def config(**changes: object) -> DataConfig:
    """Return settings of three domains with texts and references; NAME=dict changes a domain."""
    domains = {
        name: DomainConfig(texts=["x.txt"], held_out_texts=["y.txt"], share=share, reference=3.0)
        for name, share in zip(NAMES, (0.5, 0.3, 0.2), strict=True)
    }
    for name in NAMES:
        vars(domains[name]).update(changes.pop(name, {}))
    return DataConfig(domains=domains, max_length=64, **changes)


def mixed(rows_per_step: int = 4, seed: int = 7, **changes: object) -> MixedData:
    return MixedData(DOMAINS, config(**changes), rows_per_step, seed)


def domain_of(data: MixedData, row: list[int]) -> str:
    """Return the domain of a row's tokens. Raises ValueError if they are of several domains."""
    tokens = np.concatenate([data.samples[index].ids for index in row])
    (found,) = {NAMES[int(token) // 20] for token in tokens}
    return found


def test_the_update_follows_the_paper():
    """Check that an update is w exp(eta delta), normalised, and then (1 - c) w + c / k."""
    shares = {"a": 0.6, "b": 0.3, "c": 0.1}
    losses, references = {"a": 2.0, "b": 2.5, "c": 1.0}, {"a": 2.1, "b": 2.0, "c": 0.2}
    gaps = loss_gaps(losses, references, clip=True)
    assert gaps == pytest.approx({"a": 0.0, "b": 0.5, "c": 0.8})
    after = update_shares(shares, gaps, 1.0, 1e-4, 0.0)
    grown = [0.6, 0.3 * math.exp(0.5), 0.1 * math.exp(0.8)]
    assert list(after.values()) == pytest.approx(
        [(1 - 1e-4) * w / sum(grown) + 1e-4 / 3 for w in grown], rel=1e-12
    )
    assert sum(after.values()) == pytest.approx(1)
    unclipped = update_shares(shares, loss_gaps(losses, references, clip=False), 1.0, 1e-4, 0.0)
    assert unclipped["a"] < after["a"], (
        "the published code takes share from a domain that is below its reference"
    )
    assert update_shares(shares, dict.fromkeys(shares, 0.7), 1.0, 0.0, 0.0) == pytest.approx(
        shares
    ), "equal gaps move nothing"
    assert update_shares(shares, {"a": 0.0, "b": 5000.0, "c": 0.0}, 1.0, 0.0, 0.0)["b"] == 1.0, (
        "no overflow"
    )


def test_acceptance_gaps_are_measured_to_the_reference_or_the_best_domain():
    alpha = {"a": 0.8, "b": 0.5, "c": 0.7}
    assert acceptance_gaps(alpha, dict.fromkeys(alpha, 0.0)) == pytest.approx(
        {"a": 0.0, "b": 0.3, "c": 0.1}
    )
    assert acceptance_gaps(alpha, {"a": 0.9, "b": 0.4, "c": 0.0}) == pytest.approx(
        {"a": 0.1, "b": 0.0, "c": 0.1}
    )


@pytest.mark.parametrize("floor", [0.0, 0.05, 0.2, 1 / 3])
def test_shares_keep_the_floor_and_their_sum(floor: float):
    for shares in (
        {"a": 0.98, "b": 0.02, "c": 0.0},
        {"a": 0.4, "b": 0.35, "c": 0.25},
        {"a": 1.0, "b": 0.0, "c": 0.0},
    ):
        after = raise_to_floor(shares, floor)
        assert sum(after.values()) == pytest.approx(1)
        assert min(after.values()) >= floor * (1 - 1e-9)
    untouched = {"a": 0.4, "b": 0.35, "c": 0.25}
    if floor <= 0.25:
        assert raise_to_floor(untouched, floor) == pytest.approx(untouched), (
            "a floor that nobody is under moves nothing"
        )


def test_every_domain_has_complete_epochs():
    data = mixed()
    served = [row for step in range(60) for row in data.step_rows(step)]
    counts = Counter(domain_of(data, row) for row in served)
    assert counts == data.used
    assert sum(data.used.values()) == 60 * 4
    for name in NAMES:
        rows = len(data.domains[name].rows)
        times = Counter(tuple(row) for row in served if domain_of(data, row) == name)
        assert set(times.values()) <= {counts[name] // rows, counts[name] // rows + 1}, (
            "an epoch sees every row once"
        )
        assert len(times) == rows
    assert data.supervised == sum(
        int(sample.mask.sum()) for of in DOMAINS.values() for sample in of
    )
    assert sorted(index for row in data.rows for index in row) == list(range(len(data.samples)))


def test_rows_are_sampled_in_proportion_to_the_shares():
    data = mixed(rows_per_step=8)
    for step in range(500):
        data.step_rows(step)
    for name, share in zip(NAMES, (0.5, 0.3, 0.2), strict=True):
        spread = math.sqrt(share * (1 - share) / 4000)
        assert abs(data.used[name] / 4000 - share) < 4 * spread


def test_a_step_is_a_function_of_seed_step_and_shares_so_far():
    data, again, other = (
        mixed(mixing="acceptance"),
        mixed(mixing="acceptance"),
        mixed(mixing="acceptance", seed=8),
    )
    figures = {"acceptance/code": 0.9, "acceptance/prose": 0.4, "acceptance/maths": 0.6}
    before = [data.step_rows(step) for step in range(3)]
    assert [other.step_rows(step) for step in range(3)] != before
    data.adapt(figures)
    state = json.loads(json.dumps(data.state()))  # as a checkpoint keeps it
    after = [data.step_rows(step) for step in range(3, 9)]
    again.load(state)
    assert [again.step_rows(step) for step in range(3, 9)] == after
    # the control: other shares, other rows
    state["shares"] = {"code": 0.1, "prose": 0.1, "maths": 0.8}
    again.load(state)
    assert [again.step_rows(step) for step in range(3, 9)] != after
    with pytest.raises(ValueError, match="step 3 was requested, but the next one is 9"):
        again.step_rows(3)


def test_acceptance_gaps_are_averaged_and_raise_the_share_of_the_worst_domain():
    data = mixed(mixing="acceptance", uniform_share=0.0, floor_share=0.0)
    logged = data.adapt({"acceptance/code": 0.9, "acceptance/prose": 0.4, "acceptance/maths": 0.6})
    assert data.gaps == pytest.approx({"code": 0.0, "prose": 0.5, "maths": 0.3}), (
        "the first gap is taken as it is"
    )
    grown = {"code": 0.5, "prose": 0.3 * math.exp(0.5), "maths": 0.2 * math.exp(0.3)}
    assert data.shares == pytest.approx(
        {name: share / sum(grown.values()) for name, share in grown.items()}
    )
    assert logged == {f"share/{name}": data.shares[name] for name in NAMES} | {
        f"rows/{name}": 0.0 for name in NAMES
    }
    data.adapt({"acceptance/code": 0.9, "acceptance/prose": 0.9, "acceptance/maths": 0.6})
    assert data.gaps == pytest.approx(
        {"code": 0.0, "prose": 0.9 * 0.5, "maths": 0.9 * 0.3 + 0.1 * 0.3}
    )
    kept = dict(data.shares)
    data.adapt({"acceptance/code": math.nan, "acceptance/prose": 0.9, "acceptance/maths": 0.6})
    assert data.shares == kept


def test_fixed_shares_are_not_updated():
    data = mixed()
    assert data.adapt({"loss/code": 9.0, "loss/prose": 1.0, "loss/maths": 1.0})["share/code"] == 0.5
    assert data.shares == {"code": 0.5, "prose": 0.3, "maths": 0.2}


def test_a_domain_too_small_for_one_step_is_refused():
    with pytest.raises(
        UserError,
        match=r"domain '\w+' has \d+ of its \d+ rows left and step 1 needs \d+ .*Add text to this",
    ):
        mixed(rows_per_step=60, when_exhausted="stop")


def test_an_empty_state_is_the_start():
    data = mixed()
    data.step_rows(0)
    data.load(Progress().data)
    assert data.state() == mixed().state()


# ------------------------------------------------------------------------------------ configuration
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixing": "random"}, "data.mixing 'random' is unknown, expected one of fixed, loss,"),
        ({"when_exhausted": "crash"}, "data.when_exhausted 'crash' is unknown, expected one of"),
        ({name: {"share": 0.0} for name in NAMES}, "expected 0 or more each and a sum above 0"),
        ({"code": {"share": -0.1}}, "expected 0 or more each"),
        ({"code": {"share": math.nan}}, "expected 0 or more each"),
        ({"prose": {"texts": []}}, "data.domains.prose is empty. Set its chats or texts"),
        (
            {"mixing": "loss", "maths": {"reference": 0.0}},
            "data.domains.maths.reference is 0, expected a number above 0",
        ),
        (
            {"mixing": "loss", "maths": {"held_out_texts": []}},
            "data.domains.maths has no held-out text",
        ),
        (
            {"code": {"reference_acceptance": 1.5}},
            "data.domains.code.reference_acceptance is 1.5, expected a rate",
        ),
        (
            {"floor_share": 0.34},
            "data.floor_share is 0.34, expected from 0 to 0.3333, the equal share of 3 domains",
        ),
        ({"mixing_rate": 0.0}, "data.mixing_rate is 0.0, expected more than 0"),
        ({"mixing_smoothing": 1.0}, "data.mixing_smoothing is 1.0, expected from 0 to below 1"),
        ({"uniform_share": 2.0}, "data.uniform_share is 2.0"),
        ({"texts": ["more.txt"]}, "data.domains cannot be combined with data.chats, texts"),
    ],
)
def test_invalid_mixtures_are_refused(changes: dict[str, object], words: str):
    check_mixture(config(), ("loss", "acceptance"))
    with pytest.raises(UserError, match=words):
        check_mixture(config(**changes), ("loss", "acceptance"))


def test_mixings_without_figures_or_domains_are_refused():
    with pytest.raises(
        UserError,
        match="data.mixing is acceptance, whose figures .* Expected fixed or loss",
    ):
        check_mixture(config(mixing="acceptance"), ("loss",))
    with pytest.raises(UserError, match="data.mixing is loss, but data.domains is empty"):
        check_mixture(DataConfig(mixing="loss"), ("loss",))
    check_mixture(DataConfig(), ("loss",))


@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl", "chats.json", "chats.jsonl"])
def test_a_domains_file_of_another_encoding_is_named(name: str, tmp_path: Path):
    """Check that a file in Latin-1 is refused by name with a remedy, and read in UTF-8."""
    turns = [{"from": "human", "value": "Grüße?"}, {"from": "gpt", "value": "Schöne Grüße"}]
    record = {"conversations": turns} if name.startswith("chats") else {"text": "Schöne Grüße"}
    text = "Schöne Grüße" if name.endswith("txt") else json.dumps(record, ensure_ascii=False)
    file = tmp_path / name
    german = DomainConfig(**{file.stem: [str(file)]})
    data = DataConfig(domains={"german": german}, cache="none")
    tokenizer = load_tokenizer(resolve_model("embedded:target"))
    content = f"[{text}]" if file.suffix == ".json" else text
    file.write_text(content, encoding="utf-8")
    assert len(training_texts(tokenizer, data, show=False)["german"]) == 1
    file.write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="not UTF-8.* Convert a file of another encoding") as error:
        training_texts(tokenizer, data, show=False)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl", "chats.json", "chats.jsonl"])
def test_wide_characters_are_named_as_another_encoding(name: str, encoding: str, tmp_path: Path):
    """Check that UTF-16 and UTF-32 are neither trained on as NUL bytes nor called bad JSON."""
    turns = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hello!"}]
    record = {"conversations": turns} if name.startswith("chats") else {"text": "Hello!"}
    text = "Hello!" if name.endswith("txt") else json.dumps(record)
    file = tmp_path / name
    file.write_text(f"[{text}]" if file.suffix == ".json" else text, encoding=encoding)
    data = DataConfig(domains={"english": DomainConfig(**{file.stem: [str(file)]})}, cache="none")
    tokenizer = load_tokenizer(resolve_model("embedded:target"))
    with pytest.raises(UserError, match="UTF-8.* Convert a file of another encoding") as error:
        training_texts(tokenizer, data, show=False)
    assert str(file) in str(error.value)


def test_a_domain_without_supervised_tokens_is_refused():
    nothing = [Sample(np.arange(5, dtype=np.int32), np.zeros(5, dtype=bool))]
    with pytest.raises(UserError, match="data.domains.prose: zero supervised tokens"):
        MixedData({**DOMAINS, "prose": nothing}, config(), 4, 0)


def composed(*overrides: str) -> TrainConfig:
    check_arguments(list(overrides), "distill.train", TrainConfig)
    return configuration("distill.train", *overrides)


def test_the_published_mixtures_are_shipped():
    """Check that references and initial shares are those of princeton-nlp/LLM-Shearing."""
    large, two, small = (
        composed(f"data={name}", "data.root=/texts").data
        for name in ("redpajama", "redpajama_2b7", "redpajama_370m")
    )
    names = ["cc", "github", "book", "stackexchange", "wiki", "arxiv", "c4-rp"]
    losses = {
        "large": [1.9643, 0.7459, 2.1393, 1.6117, 1.7590, 1.4449, 2.1251],
        "two": [1.8712, 0.6883, 2.0325, 1.5353, 1.6297, 1.3560, 2.0328],
        "small": [2.1401, 0.8694, 2.3625, 1.7791, 2.047, 1.6637, 2.3139],
    }
    for data, expected in (
        (large, losses["large"]),
        (two, losses["two"]),
        (small, losses["small"]),
    ):
        assert [data.domains[name].reference for name in names] == expected
        assert [data.domains[name].share for name in names] == [
            0.67,
            0.045,
            0.045,
            0.02,
            0.045,
            0.025,
            0.15,
        ]
        assert (data.mixing, data.mixing_rate, data.uniform_share, data.floor_share) == (
            "loss",
            1.0,
            1e-4,
            0.0,
        )
        check_mixture(data, ("loss",))
    with pytest.raises(UserError, match=r"train/cc does not exist \(working folder: "):
        data_files(composed("data=redpajama").data)


def test_domain_keys_can_be_overridden_and_unknown_ones_are_refused():
    data = composed(
        "data=redpajama",
        "data.root=.",
        "data.domains.cc.share=0.5",
        "+data.domains.new={texts: [a.txt], share: 2}",
    ).data
    assert data.domains["cc"].share == 0.5
    assert data.domains["new"].texts == ["a.txt"]
    with pytest.raises(
        UserError,
        match="unknown configuration key 'data.domains.new.weight'; .* 'data.domains.new.",
    ):
        composed("+data.domains.new={texts: [a.txt], weight: 2}")
    with pytest.raises(
        UserError,
        match="unknown configuration key 'data.domains.cc.shar'; .* 'data.domains.cc.share'",
    ):
        composed("data=redpajama", "data.domains.cc.shar=1")
    with pytest.raises(UserError, match="data.domains.new.share"):
        composed("+data.domains.new={share: many}")
