"""Batches of conversation turns: the text equals fresh decoding, and each row keeps its cache."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import pytest

from decoding.errors import UserError
from decoding.interfaces import Target
from decoding.loop import decode
from decoding.rounds.batch import Batch
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.sessions.conversations import ConversationBatches
from tests.support.tiers import tiered
from tests.support.tiny_targets import hf_model, random_prompts

from .rows import ROWS, DrafterRow
from .test_session import kit_of, settings_of

BATCHED = ("chain", "parallel", "self_speculation", "recurrent", "prompt_lookup")


@dataclass
class Said:
    """An answer in one of several conversations, and its prompt."""

    prompt: list[int]
    answer: Generation
    request: int
    new: int  # tokens after the previous answer


def conversations(target: Target, settings: Settings, turns: ConversationBatches) -> list[Said]:
    """Decode three turns of five conversations, and return all answers.

    One conversation ends after each turn.
    """
    texts = {name: list(prompt) for name, prompt in enumerate(random_prompts(5, seed=7))}
    spoken = iter(random_prompts(15, seed=8))
    found = []
    for turn in range(3):
        # in a different order each time
        names = [name for name in texts if name >= turn][:: 1 if turn % 2 else -1]
        more = [next(spoken) for _ in names]
        prompts = [[*texts[name], *new] for name, new in zip(names, more, strict=True)]
        ids = [10 * name + turn for name in names]
        answers = turns.decode(
            names, prompts, [name == turn for name in names], settings, request_ids=ids
        )
        for name, prompt, answer in zip(names, prompts, answers, strict=True):
            texts[name] = [*prompt, *answer.tokens]
        found += [Said(*one) for one in zip(prompts, answers, ids, map(len, more), strict=True)]
    return found


@pytest.mark.parametrize("rule", tiered(["greedy", "coupled"], ["coupled"]))
@pytest.mark.parametrize(
    "row",
    [None, *(row for row in ROWS if row.name in BATCHED)],
    ids=lambda row: row.name if row else "none",
)
def test_conversations_in_batches_equal_fresh_decodes(row: DrafterRow | None, rule: str) -> None:
    settings, kit, other = (
        replace(settings_of(rule), stop_token_ids=(3, 5, 9, 20)),
        kit_of(),
        kit_of(),
    )
    drafter = row.make(kit) if row else None
    found = conversations(kit.target, settings, ConversationBatches(kit.target, drafter))
    for one in found:
        drafter = row.make(other) if row else None
        (fresh,) = decode(other.target, drafter, [one.prompt], settings, request_ids=[one.request])
        assert (one.answer.tokens, one.answer.rounds, one.answer.trace) == (
            fresh.tokens,
            fresh.rounds,
            fresh.trace,
        )
    assert {one.answer.finish for one in found} == {"stop", "length"}, "rows end at different times"
    for number, one in enumerate(found):
        if number < 5:
            assert one.answer.prefilled == len(one.prompt) - 1
        else:  # the answer's last token is in no cache, and perhaps the one before it
            assert one.new - 1 <= one.answer.prefilled <= one.new


def test_a_drafter_of_all_hidden_states_reads_complete_prompts() -> None:
    """Check that a drafter that needs all hidden states makes every turn prefill its full prompt.

    The text stays the same.
    """
    kit, settings = kit_of(), settings_of("greedy")
    drafter = next(row for row in ROWS if row.name == "recurrent").make(kit)
    some = conversations(kit.target, settings, ConversationBatches(kit.target, drafter))
    drafter.capabilities = replace(drafter.capabilities, last_hidden=False)
    whole = conversations(kit.target, settings, ConversationBatches(kit.target, drafter))
    assert [one.answer.tokens for one in whole] == [one.answer.tokens for one in some]
    assert all(one.answer.prefilled == len(one.prompt) - 1 for one in whole)
    assert sum(one.answer.prefilled for one in some) < sum(one.answer.prefilled for one in whole)


def test_overlapped_schedules_are_refused() -> None:
    kit = kit_of()
    with pytest.raises(UserError, match="schedule is 'pearl_virtual', .* Set schedule=serial"):
        ConversationBatches(kit.target, None).decode(
            ["one"], [[5, 6]], [True], replace(settings_of("greedy"), schedule="pearl_virtual")
        )


def test_conversations_on_the_hf_backend_and_batches_without_a_stored_cache() -> None:
    from decoding.models.hf import HFTarget

    class Forgetful(ConversationBatches):
        def decode(self, *arguments: object, **named: object) -> list[Generation]:
            self.forget()
            return super().decode(*arguments, **named)  # type: ignore[arg-type]

    settings = settings_of("greedy")
    targets = [HFTarget(hf_model("llama"), "hf") for _ in range(2)]
    found = conversations(targets[0], settings, ConversationBatches(targets[0], None))
    for one in found:
        assert one.answer.tokens == decode(targets[1], None, [one.prompt], settings)[0].tokens
    assert all(one.answer.prefilled <= one.new for one in found[5:])
    anew = conversations(targets[0], settings, Forgetful(targets[0], None))
    assert [one.answer.tokens for one in anew] == [one.answer.tokens for one in found]
    assert all(one.answer.prefilled == len(one.prompt) - 1 for one in anew)


def test_control_conversations_that_take_each_others_caches_are_found_out() -> None:
    class Mixed(ConversationBatches):
        def _open(self, batch: Batch, names: Sequence[Hashable]) -> None:
            # each text with the next conversation's keys and values
            places = [place for place, _ in self._stored.values()]
            shortest = min((len(text) for _, text in self._stored.values()), default=0)
            texts = [text[:shortest] for _, text in self._stored.values()]
            self._stored = dict(
                zip(self._stored, zip([*places[1:], *places[:1]], texts, strict=True), strict=True)
            )
            super()._open(batch, names)

    settings, kit, other = settings_of("greedy"), kit_of(), kit_of()
    found = conversations(kit.target, settings, Mixed(kit.target, None))
    same = [
        one.answer.tokens == decode(other.target, None, [one.prompt], settings)[0].tokens
        for one in found
    ]
    assert all(same[:5]) and not all(same[5:])
