"""A conversation in one row: each turn equals a fresh decode and reads only the new tokens.

Batches of conversations are tested in test_conversations.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.interfaces import Target
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.batch import Batch
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.rounds.ties import first_difference
from decoding.sessions.conversations import Session, shared_prefix_length
from tests.support.tiers import tiered
from tests.support.tiny_targets import hf_model, native_of, random_prompts

from . import test_laws
from .rows import COSTS, DrafterRow, Kit

PAIRS = tiered(
    [pair for pair in test_laws.PAIRS if not pair[0].name.startswith("oracle")], test_laws.is_quick
)


def settings_of(rule: str) -> Settings:
    sampled = {} if rule == "greedy" else {"temperature": 1.0, "verify": rule}
    return Settings(
        num_draft_tokens=3, max_new_tokens=20, costs=COSTS, stopping="fixed", seed=3, **sampled
    )  # type: ignore[arg-type]


def drained(batch: Batch) -> Generation:
    """Run a started turn to its end, and return its generation."""
    generation = batch.rows[0].generation
    with torch.inference_mode():
        while batch.rows:
            batch.round()
    return generation


def kit_of(seed: int = 0) -> Kit:
    model = hf_model("llama", layers=2, seed=seed)
    return Kit(native_of(model), native_of(model), native_of(model, noise=0.03), [])


@pytest.mark.parametrize(("row", "rule"), PAIRS, ids=test_laws.name)
def test_every_turn_equals_a_fresh_decode_of_the_text(row: DrafterRow, rule: str) -> None:
    settings, kit, other = (
        replace(settings_of(rule), num_draft_tokens=row.gamma or 3),
        kit_of(),
        kit_of(),
    )
    session = Session(kit.target, row.make(kit), settings)
    text: list[int] = random_prompts(1, seed=4)[0]
    for turn, said in enumerate(random_prompts(4, seed=5)):
        before = len(text)
        text = [*text, *said]
        found = drained(session.start(text, request_id=turn))
        (fresh,) = decode(other.target, row.make(other), [text], settings, request_ids=[turn])
        assert found.tokens == fresh.tokens
        assert (found.rounds, found.trace) == (fresh.rounds, fresh.trace), (
            "the drafter's state differs from that of a fresh decode"
        )
        if turn:  # the answer's last token is in no cache, and perhaps the one before it
            assert len(said) - 1 <= found.prefilled <= len(said) < before
        text += found.tokens


def test_the_drafter_reads_only_new_tokens() -> None:
    class Counting(NativeTarget):
        read = 0

        def _states(self, tokens_BN: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            self.read += tokens_BN.shape[1]
            return super()._states(tokens_BN, *rest)

    kit = kit_of()
    model = kit.draft_model
    assert isinstance(model, NativeTarget)
    drafter = ChainDrafter(model=Counting(model.weights, "counting", execution="eager"))
    session = Session(kit.target, drafter, settings_of("greedy"))
    first = drained(session.start([5] * 40))
    model = drafter.model
    assert isinstance(model, Counting)
    read = model.read
    assert read >= 39
    second = drained(session.start([*[5] * 40, *first.tokens, 7, 8, 9]))
    assert model.read - read < 39 + second.rounds * 4 - 20, (
        "the first 40 tokens were not read again"
    )


def test_an_edited_history_is_rolled_back_to_the_shared_prefix() -> None:
    settings, kit, other = settings_of("greedy"), kit_of(), kit_of()
    session = Session(kit.target, ChainDrafter(model=kit.draft_model), settings)
    prompt = list(range(3, 15))
    drained(session.start(prompt))
    edited = [*prompt[:6], 40, *prompt[7:], 9]
    found = drained(session.start(edited))
    assert found.tokens == decode(other.target, None, [edited], settings)[0].tokens
    assert found.prefilled == len(edited) - 1 - 6
    again = drained(session.start(edited))  # no new token
    assert again.tokens == found.tokens and again.prefilled == 0
    shorter = drained(session.start(edited[:3]))
    assert shorter.tokens == decode(other.target, None, [edited[:3]], settings)[0].tokens


def test_control_a_cache_that_keeps_too_much_is_found_out() -> None:
    class Careless(Session):
        def _reuse_cache(self, prompt: Sequence[int], drafter: object) -> int:
            right = super()._reuse_cache(prompt, drafter)  # type: ignore[arg-type]
            return (
                min(self.target.lengths_B[0], len(prompt) - 1)
                if self.target.lengths_B[0]
                else right
            )

    settings, kit, other = settings_of("greedy"), kit_of(), kit_of()
    session = Careless(kit.target, None, settings)
    prompt = list(range(3, 15))
    drained(session.start(prompt))
    edited = [40, 41, 42, *prompt[3:], 9]
    assert (
        drained(session.start(edited)).tokens
        != decode(other.target, None, [edited], settings)[0].tokens
    )


@pytest.mark.parametrize("rule", ["greedy", "coupled", "token"])
def test_plain_and_abandoned_turns_do_not_change_the_text(rule: str) -> None:
    settings, kit, other = settings_of(rule), kit_of(), kit_of()
    session = Session(kit.target, ChainDrafter(model=kit.draft_model), settings)
    text = [5, 6, 7, 8]
    answer = drained(session.start(text)).tokens
    plain = drained(session.start([*text, *answer[:-6]], drafted=False, max_new_tokens=6))
    assert plain.prefilled == 0 and len(plain.tokens) == 6 and plain.drafted == 0
    assert (plain.tokens == answer[-6:]) == (rule != "token"), "`token` samples anew without drafts"
    text += [*answer, 9, 10]
    left = session.start(text, request_id=1)
    with torch.inference_mode():
        left.round()
    text += [*left.rows[0].generation.tokens, 11]  # and the rest is never decoded
    found = drained(session.start(text, request_id=2))
    (fresh,) = decode(
        other.target, ChainDrafter(model=other.draft_model), [text], settings, request_ids=[2]
    )
    assert found.tokens == fresh.tokens and found.trace == fresh.trace
    assert found.prefilled <= 2


class LastState(ChainDrafter):
    """Chain drafter that keeps the hidden state before the tip and checks that it receives one."""

    capabilities = replace(ChainDrafter.capabilities, needs_hidden=True)
    state: torch.Tensor

    def open(
        self,
        prompts_B: Sequence[Sequence[int]],
        prefill_hidden_BNC: torch.Tensor | None,
        capacity: int,
    ) -> None:
        super().open(prompts_B, prefill_hidden_BNC, capacity)
        assert (
            prefill_hidden_BNC is not None and prefill_hidden_BNC.shape[1] == len(prompts_B[0]) - 1
        )
        self.state = prefill_hidden_BNC[0, -1]

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: torch.Tensor | None) -> None:
        super().resume(prompt, kept, None)
        assert hidden_NC is not None
        self.state = hidden_NC[-1]


@pytest.mark.parametrize("plain_first", [False, True])
def test_a_drafter_receives_the_hidden_state_before_the_tip(plain_first: bool) -> None:
    settings, kit, other = settings_of("greedy"), kit_of(), kit_of()
    drafter = LastState(model=kit.draft_model)
    session = Session(kit.target, drafter, settings)
    text = [5, 6, 7, 8]
    if plain_first:
        drained(session.start(text, drafted=False, max_new_tokens=2))
    for said in ([9, 10], [11], []):  # without a new token the last state is recomputed
        text = [*text, *said]
        found = drained(session.start(text))
        other.target.open(1, 200)
        expected = other.target.features(torch.tensor([text[:-1]]))[0, -1]
        torch.testing.assert_close(drafter.state, expected, rtol=1e-9, atol=1e-9)
        text += found.tokens[:-1] if said else []


def test_a_session_continues_after_a_refused_turn() -> None:
    settings, kit = settings_of("greedy"), kit_of()
    session = Session(kit.target, None, settings)
    answer = drained(session.start([5, 6, 7])).tokens
    with pytest.raises(UserError, match="prompt 0 is empty"):
        session.start([])
    with pytest.raises(UserError, match="holds at most 256"):
        session.start([5] * 256)
    more = drained(session.start([5, 6, 7, *answer, 8]))
    assert more.prefilled <= 1
    with pytest.raises(UserError, match="serial"):
        Session(kit.target, None, replace(settings, schedule="pearl_virtual"))


def test_an_answer_may_end_at_the_end_of_the_context() -> None:
    kit, other = kit_of(), kit_of()
    settings = replace(settings_of("greedy"), max_new_tokens=64)
    session = Session(kit.target, ChainDrafter(model=kit.draft_model), settings)
    start = drained(session.start([5] * 200)).tokens[:40]
    text = [*[5] * 200, *start]
    found = drained(session.start(text))
    assert len(text) + len(found.tokens) == kit.target.max_length
    assert found.tokens == decode(other.target, None, [text], settings)[0].tokens


def test_a_session_on_the_hf_backend() -> None:
    from decoding.models.hf import HFTarget

    settings = settings_of("greedy")
    session = Session(
        HFTarget(hf_model("llama"), "hf"), ChainDrafter(model=kit_of().draft_model), settings
    )
    other: Target = HFTarget(hf_model("llama"), "hf")
    text = [5, 6, 7]
    for said in ([8, 9], [10, 11, 12]):
        text = [*text, *said]
        found = drained(session.start(text))
        assert found.tokens == decode(other, None, [text], settings)[0].tokens
        text += found.tokens
    assert found.prefilled <= 3


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_the_shared_prefix_excludes_the_last_token() -> None:
    assert shared_prefix_length([1, 2, 3], [1, 2, 3]) == 2
    assert shared_prefix_length([1, 2, 3], [1, 2, 3, 4]) == 3
    assert shared_prefix_length([1, 9, 3], [1, 2, 3, 4]) == 1
    assert shared_prefix_length([], [1]) == 0
