"""Repetition penalty, allowed tokens, min-p and stop strings under laws 1, 2 and 5.

Each drafted position is processed with the text before it. Law 3 is in test_law_of_processors.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.loop import decode
from decoding.rounds.batch import Batch, Row
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.sampling.logits_processors import Processors
from decoding.schedules.by_name import VIRTUAL
from tests.support.tiers import tiered
from tests.support.tiny_targets import VOCABULARY, hf_model, native_of, random_prompts

from .rows import COSTS, ROWS, DrafterRow, Kit
from .test_laws import models, name, with_rule

# Rows of each kind of drafting and verification run under every change alone; all rows run under
# all changes together.
PROMPTS = 8
CHOSEN = ("chain", "ranked_tree", "multi_candidate", "lookahead", "ouroboros", "oracle")


def other_thirds(text: Sequence[int]) -> list[int]:
    """Return the tokens with another remainder by 3 than the last one, except the middle token."""
    taken = {token % 3 for token in text[-1:]}
    return [
        token
        for token in range(VOCABULARY)
        if token % 3 not in taken and token != text[len(text) // 2]
    ]


CHANGES = {
    "penalty": {"repetition_penalty": 1.4},
    "reward": {"repetition_penalty": 0.8},
    "allowed": {"allowed": other_thirds},
    "all": {"repetition_penalty": 1.4, "allowed": other_thirds, "min_p": 0.05},
}
CASES = [
    (row, change) for row in ROWS for change in CHANGES if change == "all" or row.name in CHOSEN
]
# The short suite has a chain under every change, and a tree and a pool under all of them.
QUICK = ("chain", "ranked_tree", "lookahead")


def parametrized(cases: list[tuple[DrafterRow, str]]) -> pytest.MarkDecorator:
    """Parametrize a test by rows and changes."""
    quick = tiered(cases, lambda row, change: row.name in QUICK[: 1 + 2 * (change == "all")])
    return pytest.mark.parametrize(("row", "change"), quick, ids=name)


by_case = parametrized(CASES)


def settings_of(change: str, rule: str) -> Settings:
    return with_rule(
        rule, max_new_tokens=40, num_draft_tokens=4, costs=COSTS, **CHANGES.get(change, {})
    )


def settings_for(row: DrafterRow, change: str, rule: str) -> Settings:
    return replace(settings_of(change, rule), num_draft_tokens=row.gamma or 4)


@lru_cache
def plain_of(change: str, rule: str) -> list[list[int]]:
    """Return the autoregressive text after each prompt."""
    return [
        g.tokens
        for g in decode(models()[0], None, random_prompts(PROMPTS), settings_of(change, rule))
    ]


def drafted_by(
    row: DrafterRow, settings: Settings, answers: list[list[int]]
) -> tuple[list[list[int]], int]:
    """Return the row's text after each prompt, and its number of accepted tokens."""
    drafted = decode(
        models()[0], row.make(Kit(*models(), answers)), random_prompts(PROMPTS), settings
    )
    return [g.tokens for g in drafted], sum(g.accepted for g in drafted)


@pytest.mark.parametrize("change", ["penalty", "reward", "all"])
def test_every_node_is_processed_by_its_text(change: str) -> None:
    """Check equality with the definitions, bit for bit, on trees, chains, tips and single tokens.

    Each text holds an id beyond the logits, which a padded embedding allows.
    """
    generator = torch.Generator().manual_seed(0)
    named = {key: value for key, value in CHANGES[change].items() if key != "min_p"}
    changes = Processors(**{"allowed": None, **named})
    V = VOCABULARY
    texts = [[*prompt, V + 3] for prompt in random_prompts(3)]
    tokens_BN = torch.randint(0, V, (3, 6), generator=generator)
    tokens_BN[1] = tokens_BN[1, 0]
    logits_BNV = torch.randn(3, 7, V, generator=generator)

    def defined(logits_V: torch.Tensor, text: list[int]) -> torch.Tensor:
        held = {min(token, V - 1) for token in text}
        penalty, row_V = changes.repetition_penalty, logits_V.clone()
        for token in held:
            row_V[token] = row_V[token] / penalty if row_V[token] > 0 else row_V[token] * penalty
        banned = set(range(V)) - set(other_thirds(text)) if changes.allowed is not None else set()
        return row_V.index_fill(0, torch.tensor(sorted(banned), dtype=torch.long), float("-inf"))

    for parents in ([-1, 0, 1, 2, 3, 4], [-1, -1, 0, 0, 1, 4]):
        parents_BN, chain = torch.tensor([parents]).expand(3, -1), parents == list(range(-1, 5))
        changed_BNV = changes(logits_BNV, texts, tokens_BN, None if chain else parents_BN)
        drafting = changes.drafting(texts)
        for node in range(7):
            ways, above = [list(text) for text in texts], node - 1
            path: list[int] = []
            while above >= 0:
                path, above = [above, *path], parents[above]
            for row, way in enumerate(ways):
                way += tokens_BN[row, path].tolist()
            wanted_BV = torch.stack(
                [defined(*pair) for pair in zip(logits_BNV[:, node], ways, strict=True)]
            )
            assert torch.equal(changed_BNV[:, node], wanted_BV)
            if chain:
                assert torch.equal(drafting(logits_BNV[:, node]), wanted_BV)
                drafting.add(tokens_BN[:, min(node, 5)])
    assert torch.equal(changes(logits_BNV[:, :1], texts), changed_BNV[:, :1])


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@by_case
def test_laws_1_and_2(row: DrafterRow, change: str, rule: str) -> None:
    plain = plain_of(change, rule)
    drafted, accepted = drafted_by(row, settings_for(row, change, rule), plain)
    assert drafted == plain
    assert accepted > 0 or row.name == "suffix_lookup", (
        "suffixes of this text hardly ever occur again"
    )
    assert plain_of("none", rule) != plain, "nothing was changed"
    if "allowed" in CHANGES[change]:
        for prompt, tokens in zip(random_prompts(PROMPTS), plain):
            assert all(t in other_thirds([*prompt, *tokens[:i]]) for i, t in enumerate(tokens))


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize(
    ("schedule", "change"), tiered(product(VIRTUAL, CHANGES), [("pearl_virtual", "all")])
)
def test_laws_1_and_2_under_overlapped_schedules(schedule: str, change: str, rule: str) -> None:
    settings = replace(settings_of(change, rule), schedule=schedule)
    drafter, accepted = ChainDrafter(model=models()[2]), 0
    for number, prompt in list(enumerate(random_prompts(PROMPTS)))[:4]:
        (done,) = decode(models()[0], drafter, [prompt], settings, request_ids=[number])
        assert done.tokens == plain_of(change, rule)[number]
        accepted += done.accepted
    assert accepted > 0


# Costs end these drafts of random heads before a token could differ.
FEW_DRAFTS = ("dspark_by_cost", "block_tree_by_cost")


@parametrized([case for case in CASES if case[0].name not in FEW_DRAFTS])
def test_law_1_rejects_changes_that_leave_the_drafted_tokens_out(
    row: DrafterRow, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, plain = Processors.__call__, plain_of(change, "greedy")
    monkeypatch.setattr(
        Processors,
        "__call__",
        lambda self, logits, sequences, *path: original(self, logits, sequences),
    )
    assert drafted_by(row, settings_of(change, "greedy"), plain)[0] != plain


def nothing_behind_the_end(text: Sequence[int]) -> list[int]:
    """Return the tokens that a grammar allows: none after token 5, which ends its texts."""
    return [] if text[-1] == 5 else other_thirds(text)


ENDING = {"allowed": nothing_behind_the_end, "stop_token_ids": (5,)}


@lru_cache
def ended_by_a_grammar(rule: str) -> list[Generation]:
    """Return the autoregressive texts of a grammar that may end."""
    prompts = [[*prompt, 4] for prompt in random_prompts(PROMPTS, seed=2)]
    return decode(models()[0], None, prompts, replace(settings_of("none", rule), **ENDING))


by_schedule = pytest.mark.parametrize(
    "schedule", tiered(["serial", *VIRTUAL], ["serial", "pearl_virtual"])
)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@by_schedule
def test_a_draft_may_continue_past_the_end_of_a_grammar(schedule: str, rule: str) -> None:
    """Check drafts past the stop token, where the grammar allows no token."""
    target, twin, _ = models()
    settings = replace(settings_of("none", rule), **ENDING, schedule=schedule)
    finished = set()
    for number, prompt in enumerate(random_prompts(PROMPTS, seed=2)):
        plain = ended_by_a_grammar(rule)[number]
        (done,) = decode(
            target,
            ChainDrafter(model=twin),
            [[*prompt, 4]],
            settings,
            request_ids=[number],
        )
        assert (done.tokens, done.finish) == (plain.tokens, plain.finish)
        finished.add(done.finish)
    assert finished == {"stop", "length"}


@pytest.mark.parametrize("rule", ["token", "coupled"])
def test_a_drafter_without_the_allowed_tokens_is_never_accepted(rule: str) -> None:
    model = hf_model("llama", layers=1)
    state, rows = dict(model.state_dict()), ("model.embed_tokens.weight", "lm_head.weight")
    few = {name: tensor[:40] if name in rows else tensor for name, tensor in state.items()}
    config = {**model.config.to_dict(), "vocab_size": 40}
    small = type(models()[0]).from_state(config, few, dtype=torch.float64)
    settings = replace(settings_of("none", rule), allowed=lambda text: range(40, VOCABULARY))
    (plain,) = decode(models()[0], None, [[4]], settings)
    (done,) = decode(models()[0], ChainDrafter(model=small), [[4]], settings)
    assert min(done.tokens) >= 40
    assert done.accepted == 0
    assert rule == "token" or done.tokens == plain.tokens


def test_the_penalty_equals_that_of_transformers() -> None:
    model = hf_model("llama")
    prompt = random_prompts(1)[0]
    ours = decode(
        native_of(model), None, [prompt], Settings(max_new_tokens=30, repetition_penalty=1.3)
    )[0].tokens
    theirs = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=30,
        do_sample=False,
        repetition_penalty=1.3,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert ours == theirs[0, len(prompt) :].tolist()


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(97 + i % 6) for i in ids)


@pytest.mark.parametrize("row", tiered(ROWS, lambda row: row.name in QUICK), ids=name)
def test_a_stop_string_ends_the_row_with_its_last_token(row: DrafterRow) -> None:
    free = Settings(max_new_tokens=60, num_draft_tokens=4, costs=COSTS)
    prompts = random_prompts(PROMPTS)
    answers = [g.tokens for g in decode(models()[0], None, prompts, free)]
    texts = [letters(tokens) for tokens in answers]
    stops = (texts[0][20:23], texts[1][7:9])
    drafted, _ = drafted_by(row, replace(free, stop_strings=stops, text_of=letters), answers)
    for text, tokens in zip(texts, drafted):
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        assert letters(tokens) == text[: min([60, *ends])]
    assert len(drafted[0]) < 60


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("schedule", tiered(VIRTUAL, ["pearl_virtual"]))
def test_a_stop_string_inside_an_assumed_span_ends_the_row(schedule: str, rule: str) -> None:
    """Check drafts of a copy of the target, whose chunks are all accepted, and of a weak model."""
    target, twin, draft_model = models()
    free = with_rule(rule, max_new_tokens=40, num_draft_tokens=4, costs=COSTS)
    for number, prompt in enumerate(random_prompts(4)):
        (plain,) = decode(target, None, [prompt], free, request_ids=[number])
        text = letters(plain.tokens)
        settings = replace(
            free, stop_strings=("zz", text[16:19]), text_of=letters, schedule=schedule
        )
        end = text.index(text[16:19]) + 3
        for model in (twin, draft_model):
            (done,) = decode(
                target, ChainDrafter(model=model), [prompt], settings, request_ids=[number]
            )
            assert (done.tokens, done.finish) == (plain.tokens[:end], "stop")
            assert done.accepted <= end, "tokens after the stop were counted"


@by_schedule
def test_stop_strings_that_are_looked_for_between_rounds_are_rejected(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a control that misses a stop string inside the accepted span."""

    def at_the_end(self: Batch, row: Row, new: list[int], otherwise: int | None) -> int | None:
        assert self.text_of is not None
        text = self.text_of([*row.generation.tokens, *new])
        return len(new) - 1 if any(stop in text for stop in row.stop_strings) else otherwise

    monkeypatch.setattr(Batch, "_stop_string", at_the_end)
    law = partial(test_a_stop_string_inside_an_assumed_span_ends_the_row, schedule, "greedy")
    with pytest.raises(AssertionError):
        law() if schedule != "serial" else test_a_stop_string_ends_the_row_with_its_last_token(
            ROWS[0]
        )


@pytest.mark.parametrize("found", [3, "ab", [1.5], [-1], [VOCABULARY], [2**80], [None], [[1]]])
def test_anything_but_token_ids_of_allowed_is_refused(found: Any) -> None:
    expected = f"expected None or a list of token ids, whole numbers from 0 to {VOCABULARY - 1}"
    settings = Settings(max_new_tokens=2, allowed=lambda text: found)
    with pytest.raises(UserError, match=rf"allowed\(\) returned .* after 1 tokens, {expected}"):
        decode(models()[0], None, [[4]], settings)


@pytest.mark.parametrize("found", [[5], (5,), {5}, range(5, 6), np.array([5]), torch.tensor([5])])
def test_any_collection_of_token_ids_is_accepted(found: Any) -> None:
    """Control: ids of any kind restrict the tokens."""
    settings = Settings(max_new_tokens=2, allowed=lambda text: found)
    assert decode(models()[0], None, [[4]], settings)[0].tokens == [5, 5]


@pytest.mark.parametrize("found", [None, 3, b"a", ["a"]])
def test_anything_but_a_string_of_text_of_is_refused(found: Any) -> None:
    settings = Settings(max_new_tokens=2, stop_strings=("x",), text_of=lambda ids: found)
    with pytest.raises(UserError, match=r"text_of\(\) returned .*, expected the text of the"):
        decode(models()[0], None, [[4]], settings)


def test_invalid_processor_settings_are_refused() -> None:
    target = models()[0]
    with pytest.raises(UserError, match="stop_strings needs text_of"):
        Settings(stop_strings=("x",))
    with pytest.raises(UserError, match="expected a tuple of nonempty strings"):
        Settings(stop_strings=("",), text_of=letters)
    with pytest.raises(
        UserError, match="repetition_penalty is 0, expected a number from 0.01 to 100"
    ):
        decode(target, None, [[4]], Settings(repetition_penalty=0))
    with pytest.raises(UserError, match="allowed.. allows no token after 1 tokens"):
        decode(target, None, [[4]], Settings(allowed=lambda text: []))
