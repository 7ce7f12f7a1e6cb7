"""The llama.cpp backend against `transformers` and its own laws, with the real library.

Laws 1, 2 and 4 are checked with the table of rows on a real model in a float32 file; law 3 on five
symbols. Every test skips, with the line that installs it, where llama-cpp-python is missing.

Shapes: B rows, N nodes, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import decoding
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.self_speculation import SelfSpeculation
from decoding.errors import UserError
from decoding.interfaces import Drafter, Target, ancestors
from decoding.loop import decode
from decoding.models.gguf.writer import write_gguf
from decoding.models.llama_cpp.library import load_library
from decoding.models.load import load_target
from decoding.models.prefill import prefill
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from eval.statistics.joint_law import p_value

from .law_3 import P_LIMIT, PROMPT, WARPERS, exact_joint
from .row_kinds.kit import draft_table
from .rows import BY_NAME, COSTS, PICKED, ROWS, DrafterRow, Kit
from .test_real_models import chats, check_law, first_layers
from .test_rows_on_real_models import RANDOM

pytest.importorskip("gguf")
from tests.support.gguf_files import byte_level, tiny_llama, write
from tests.support.many_requests import first_tokens

pytestmark = pytest.mark.engines
TOLERANCE = 2e-4  # share of the largest logit
DRAFTING = [row for row in ROWS if not row.name.startswith("oracle")]
# In the names of rows whose drafters run the target's layers or read their states; the fitted head
# of the eagle3 rows reads the last one alone, which llama.cpp gives.
REFUSED = (
    "p_eagle",
    "dflash",
    "dspark",
    "block",
    "specdiff",
    "self_speculation",
    "early_exit",
    "sdsat",
)
SETTINGS = Settings(max_new_tokens=64, stopping="fixed", costs=COSTS)
DRAWS, ROWS_AT_ONCE = 4000, 200
TOGETHER = 8  # rows whose trees have at most 256 leaves, llama.cpp's sequences


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        load_library()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def tiny(places: Path) -> tuple[Path, Any]:
    model = tiny_llama()
    return write(places / "tiny.gguf", model), model


@pytest.fixture(scope="module")
def target(tiny: tuple[Path, Any]) -> Target:
    return load_target(tiny[0])


@lru_cache
def file_of(folder: Path, places: Path, dtype: str = "float32") -> Path:
    """Return a folder's GGUF file, written once."""
    path = places / f"{folder.name}.{dtype}.gguf"
    if folder.name.startswith("stories"):  # its tokenizer has no counterpart in llama.cpp
        return without_tokenizer(LlamaForCausalLM.from_pretrained(folder), path)
    write_gguf(folder, path, dtype)
    return path


def without_tokenizer(model: Any, path: Path) -> Path:
    """Write a model's file with made-up tokens, for prompts of ids."""
    theta = model.config.rope_parameters["rope_theta"]
    words: dict[str, Any] = {
        **byte_level(),
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(model.config.vocab_size)],
        "tokenizer.ggml.token_type": [1] * model.config.vocab_size,
        "tokenizer.ggml.merges": ["t 1"],
    }
    return write(
        path, model, words, lambda metadata, _: metadata.update({"llama.rope.freq_base": theta})
    )


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 200, shape, generator=torch.Generator().manual_seed(seed))


def plain(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the logits (N, V) of a sequence without a cache."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=TOLERANCE * right.abs().max().item())


def test_logits_and_states_equal_transformers(target: Target, tiny: tuple[Path, Any]) -> None:
    tokens, parts = ids(1, 70), []
    target.open(1, 128)
    for start, stop in ((0, 60), (60, 65), (65, 66), (66, 67), (67, 70)):
        logits_BNV, hidden_BNC = target.forward(tokens[:, start:stop])
        close(target.lm_head(hidden_BNC), logits_BNV)
        target.commit(None, [stop - start])
        parts.append(logits_BNV)
    close(torch.cat(parts, 1)[0], plain(tiny[1], tokens[0].tolist()))
    embedded = tiny[1].get_input_embeddings()(tokens)
    torch.testing.assert_close(target.embed(tokens), embedded)
    assert (target.num_layers, target.hidden_size, target.max_length) == (2, 64, 128)
    assert target.num_parameters == tiny[1].num_parameters()


def test_ragged_rows_equal_single_rows(target: Target, tiny: tuple[Path, Any]) -> None:
    prompts, new = [[5], [7, 8, 9, 10, 11, 12], [], [3, 4]], ids(4, 3)
    target.open(4, 32)
    prefill(target, prompts)
    assert target.lengths_B == [1, 6, 0, 2]
    logits_BNV, _ = target.forward(new)
    target.commit(None, [3, 1, 2, 3])
    later_BNV, _ = target.forward(new)
    for b, prompt in enumerate(prompts):
        row = new[b].tolist()
        close(logits_BNV[b], plain(tiny[1], prompt + row)[-3:])
        close(later_BNV[b], plain(tiny[1], prompt + row[: [3, 1, 2, 3][b]] + row)[-3:])


def test_prefill_returns_the_states_of_transformers(target: Target, tiny: tuple[Path, Any]) -> None:
    prompts = [[5, 6, 7], [9], [4, 4, 8, 3]]
    target.open(3, 32)
    hidden_BNC = prefill(target, prompts, keep_hidden=True)
    assert hidden_BNC is not None
    for hidden_NC, prompt in zip(hidden_BNC, prompts, strict=True):
        found = tiny[1].model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        close(hidden_NC[: len(prompt)], found)


PARENTS = [[-1, 0, 0, 1, 1, 4], [-1, 0, 1, 0, 3, 3]]


def test_a_tree_equals_a_forward_for_each_path(target: Target, tiny: tuple[Path, Any]) -> None:
    prompts, parents_BN, tokens_BN = [[5, 6, 7], [9]], torch.tensor(PARENTS), ids(2, 6)
    target.open(2, 24)
    prefill(target, prompts)
    logits_BNV, hidden_BNC = target.forward(tokens_BN, parents_BN)
    for b, prompt in enumerate(prompts):
        for n in range(6):
            path = [m for m in range(6) if ancestors(parents_BN)[b, n, m]]
            close(logits_BNV[b, n], plain(tiny[1], prompt + tokens_BN[b, path].tolist())[-1])
    assert hidden_BNC.shape == (2, 6, 64)
    # a chain in place of the tree is another model
    chain_BNV, _ = target.forward(tokens_BN)
    assert (chain_BNV[:, 3:] - logits_BNV[:, 3:]).abs().max() > 0.01


def test_committed_paths_equal_chains(target: Target, tiny: tuple[Path, Any]) -> None:
    paths, kept = [[0, 1, 4, 5], [0, 3]], [[5, 6, 7], [9]]
    target.open(2, 64)
    prefill(target, kept)
    for seed in range(3):
        tokens_BN = ids(2, 6, seed=seed)
        logits_BNV, _ = target.forward(tokens_BN, torch.tensor(PARENTS))
        for b in range(2):
            close(logits_BNV[b, 0], plain(tiny[1], [*kept[b], int(tokens_BN[b, 0])])[-1])
        target.commit(paths, [4, 2])
        kept = [row + tokens_BN[b, paths[b]].tolist() for b, row in enumerate(kept)]
        assert target.lengths_B == [len(row) for row in kept]
    more_BN = ids(2, 2, seed=9)
    logits_BNV, _ = target.forward(more_BN)
    for b in range(2):
        close(logits_BNV[b], plain(tiny[1], kept[b] + more_BN[b].tolist())[-2:])


def test_roll_back_selection_and_copies(target: Target, tiny: tuple[Path, Any]) -> None:
    target.open(4, 32)
    prefill(target, [[5, 6, 7, 8], [9, 10], [4, 4, 3], [11]])
    target.keep(0, 1)
    target.forward(ids(4, 3))  # not committed
    target.truncate([2, 9, 3, 1])
    assert target.lengths_B == [2, 2, 3, 1]
    target.select([0, 2, 3])
    target.select([2, 0])
    new = ids(2, 2)
    logits_BNV, _ = target.forward(new)
    close(logits_BNV[0], plain(tiny[1], [11, *new[0].tolist()])[-2:])
    close(logits_BNV[1], plain(tiny[1], [5, 6, *new[1].tolist()])[-2:])
    target.open(2, 32)
    target.begin(1, 1, 3)
    assert target.lengths_B == [0, 3]
    logits_BNV, _ = target.forward(new)
    close(logits_BNV[1], plain(tiny[1], [5, 6, 7, *new[1].tolist()])[-2:])
    target.forget()


def test_a_forward_past_the_cache_is_refused(target: Target) -> None:
    target.open(1, 4)
    with pytest.raises(ValueError, match="5 slots are needed, but the cache was opened for 4"):
        target.forward(ids(1, 5))


def test_a_wide_tree_is_refused(target: Target) -> None:
    target.open(3, 128)
    parents_BN = torch.tensor([[-1, *[0] * 90]] * 3)
    with pytest.raises(UserError, match="3 rows have more than 256 leaves together"):
        target.forward(ids(3, 91), parents_BN)


def test_an_unknown_architecture_is_refused(places: Path) -> None:
    def rename(metadata: dict[str, Any], _: Any) -> None:
        for key in [key for key in metadata if key.startswith("llama.")]:
            metadata["other" + key.removeprefix("llama")] = metadata.pop(key)

    path = write(places / "other.gguf", tiny_llama(), change=rename, architecture="other")
    with pytest.raises(UserError, match="llama.cpp cannot load it.*unknown model architecture"):
        load_target(path)


def test_the_front_door_takes_files(tiny: tuple[Path, Any]) -> None:
    reply = decoding.generate(decoding.load(tiny[0]), "the sea", max_new_tokens=12)
    for drafter in (tiny[0], "prompt_lookup", {"use": "ranked_tree", "folder": tiny[0]}):
        engine = decoding.load(tiny[0], drafter)
        drafted = decoding.generate(engine, "the sea", max_new_tokens=12)
        assert drafted.tokens == reply.tokens


def test_drafters_of_layers_and_taps_are_refused(tiny: tuple[Path, Any]) -> None:
    engine = decoding.load(tiny[0], SelfSpeculation(mlp=[0]))
    with pytest.raises(UserError, match="runs some of the target's layers, which the llama_cpp"):
        decoding.generate(engine, "the sea")
    with pytest.raises(UserError, match="of which the llama_cpp backend has only layer 2"):
        engine.target.forward(ids(1, 2), None, (1,))


@lru_cache
def spoken(
    folder: Path, places: Path, sampled: bool
) -> tuple[Target, list[list[int]], Settings, list[Generation]]:
    """Return a target of a float32 file, prompts, settings and its autoregressive text."""
    target = load_target(file_of(folder, places))
    settings = SETTINGS
    if sampled:
        settings = Settings(**{**vars_of(SETTINGS), "temperature": 1.0, "verify": "coupled"})
    prompts = [[1, 10 + 6 * number] for number in range(32)]
    if folder.name.startswith("chat"):
        prompts = chats(decoding.load(folder).tokenizer, 8)
    return target, prompts, settings, decode(target, None, prompts, settings)


def vars_of(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def is_refused(row: DrafterRow) -> bool:
    return any(word in row.name for word in REFUSED)


def drafter_of(row: DrafterRow, folder: Path, places: Path, sampled: bool) -> Drafter:
    target, prompts, _, plain_text = spoken(folder, places, sampled)
    if is_refused(row):
        target = load_target(folder, backend="native", dtype="float32")
    texts = [[*prompt, *said.tokens] for prompt, said in zip(prompts, plain_text, strict=True)]
    draft = first_layers(folder, 3).model
    return row.make(Kit(target, load_target(file_of(folder, places)), draft, [], None, texts))


@pytest.mark.parametrize("row", DRAFTING, ids=lambda row: row.name)
def test_stories_keep_law_1(stories260k: Path, places: Path, row: DrafterRow) -> None:
    """Check every row; those that run layers or read taps are refused by name."""
    target, prompts, settings, plain_text = spoken(stories260k, places, False)
    error, drafted = "", list[Generation]()
    try:
        drafter = drafter_of(row, stories260k, places, False)
        for start in range(0, len(prompts), TOGETHER):
            part = slice(start, start + TOGETHER)
            drafted += check_law(target, drafter, prompts[part], settings, plain_text[part])[1]
    except UserError as found:
        error = str(found)
    if is_refused(row):
        assert "llama_cpp backend" in error
        return
    assert not error
    if row.name not in RANDOM and not row.name.startswith("recurrent"):
        assert sum(g.rounds for g in drafted) < sum(g.rounds for g in plain_text)


@pytest.mark.parametrize("name", ["chain", "static_tree", "prompt_lookup", "medusa"])
def test_stories_keep_law_2(stories260k: Path, places: Path, name: str) -> None:
    target, prompts, settings, _ = spoken(stories260k, places, True)
    drafter = drafter_of(BY_NAME[name], stories260k, places, True)
    for start in range(0, len(prompts), TOGETHER):
        part = prompts[start : start + TOGETHER]
        check_law(target, drafter, part, settings, decode(target, None, part, settings))


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_the_chat_model_keeps_the_law(chat24m: Path, places: Path, rule: str) -> None:
    target, prompts, settings, plain_text = spoken(chat24m, places, rule == "coupled")
    for drafter in (first_layers(chat24m, 2), ChainDrafter(file_of(chat24m, places))):
        _, drafted = check_law(target, drafter, prompts, settings, plain_text)
        assert sum(g.rounds for g in drafted) < sum(g.rounds for g in plain_text)


def five_symbols(places: Path) -> Path:
    """Return the file of a model of five symbols."""
    return without_tokenizer(tiny_llama(vocab_size=5), places / "five.gguf")


def law_3(places: Path, drafter: Drafter, rule: str, warper: str) -> float:
    """Return the p-value of the first three tokens' joint distribution."""
    target = load_target(five_symbols(places))
    fields = {"max_new_tokens": 5, "verify": rule, "costs": COSTS, **WARPERS[warper]}
    counts: Counter[Any] = Counter()
    for start in range(0, DRAWS, ROWS_AT_ONCE):
        requests = range(start, start + ROWS_AT_ONCE)
        done = first_tokens(target, drafter, PROMPT, Settings(**fields), requests, 3)  # type: ignore[arg-type]
        counts.update(map(tuple, done))
    return p_value(counts, exact_joint(target, WARPERS[warper]))


@pytest.mark.parametrize("warper", ["plain", "cold_top_k"])
@pytest.mark.parametrize(("name", "rule"), [("chain", "token"), ("chain", "block")])
def test_the_distribution_is_the_targets(places: Path, name: str, rule: str, warper: str) -> None:
    make = {row.name: row.table for row in [*ROWS, *PICKED]}[name]
    assert make is not None
    assert law_3(places, make(), rule, warper) > P_LIMIT


def test_another_distribution_is_noticed(places: Path) -> None:
    """Sample from the draft model alone, against the target's law."""
    target = load_target(five_symbols(places))
    settings = Settings(max_new_tokens=5, temperature=1.0, verify="token", costs=COSTS)
    counts = Counter(
        map(tuple, first_tokens(draft_table(), None, PROMPT, settings, range(1000), 3))
    )
    assert p_value(counts, exact_joint(target, WARPERS["plain"])) < P_LIMIT


def test_a_perfect_drafter_is_always_accepted(stories260k: Path, places: Path) -> None:
    """Law 4: gamma + 1 tokens a round, and the same text from an adversarial drafter."""
    target, prompts, _, _ = spoken(stories260k, places, False)
    settings = Settings(max_new_tokens=41, num_draft_tokens=4, stopping="fixed", ignore_eos=True)
    expected = decode(target, None, prompts[:8], settings)
    twin = ChainDrafter(file_of(stories260k, places))
    drafted = decode(target, twin, prompts[:8], settings)
    assert [g.tokens for g in drafted] == [g.tokens for g in expected]
    assert all(g.rounds <= 10 for g in drafted)  # 9 rounds of 5 tokens, and one near tie
    worst = decode(target, first_layers(stories260k, 1), prompts[:8], settings)
    assert [g.tokens for g in worst] == [g.tokens for g in expected]


def test_stops_single_tokens_and_batches(stories260k: Path, places: Path) -> None:
    """Law 5."""
    target, prompts, _, _ = spoken(stories260k, places, False)
    twin = ChainDrafter(file_of(stories260k, places))
    settings = Settings(max_new_tokens=30, num_draft_tokens=4, stopping="fixed", ignore_eos=True)
    asked = [[1], prompts[0], [1, 40, 50, 60, 70, 80], prompts[1]]
    together = decode(target, twin, asked, settings)
    alone = [decode(target, twin, [prompt], settings)[0] for prompt in asked]
    assert [g.tokens for g in together] == [g.tokens for g in alone]
    text = alone[0].tokens
    stop = text[12]
    (stopped,) = decode(
        target,
        twin,
        [[1]],
        Settings(max_new_tokens=30, num_draft_tokens=4, stopping="fixed", stop_token_ids=(stop,)),
    )
    assert stopped.tokens == text[: text.index(stop) + 1]
