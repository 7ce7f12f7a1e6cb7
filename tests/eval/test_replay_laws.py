"""Law of a replay: its rounds are those of greedy speculative decoding with the logged target.

The target is real; its own greedy outputs are the log. Counts must be equal round by round. For
sampled outputs the law holds for lookups alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Drafter
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.stopping.policies import BY_COST, NAMES
from eval.logged.contexts import positions_past_context
from eval.logged.decoding import decode_logged
from eval.logged.one_pass import correct_tokens, drafts_of, follow, follows_in_one_pass
from eval.logged.replay import NEEDS, replay
from eval.logged.texts import LoggedText
from eval.logged.traces import ROUND
from jobs.drafter_use import DrafterUse
from tests.decoding.row_kinds import models as rows_of_models
from tests.decoding.rows import BY_NAME, Kit
from tests.decoding.test_laws import models
from tests.support.other_vocabularies import renamed_drafter
from tests.support.tiers import tiered
from tests.support.tiny_targets import native_of, random_prompts
from training.held_out.rounds import match_survival, walk

LIMIT, STOPS = 40, (3, 17)
SETTINGS = Settings(max_new_tokens=LIMIT, stop_token_ids=STOPS)


def chain() -> ChainDrafter:
    return ChainDrafter(model=models()[2])


# rows of the laws of decoding whose drafters read the text alone: their rounds are found without
# decoding, or in the loop
ONE_PASS = ("chain", "prompt_lookup", "suffix_lookup", "chain_with_lookup")
IN_THE_LOOP = (
    "parallel",
    "other_vocabulary",
    "other_vocabulary_strings",
    "multi_candidate",
    "static_tree",
    "ranked_tree",
    "ranked_tree_with_lookup",
    "graph",
)


def made(name: str) -> Drafter:
    """Return the drafter of a row."""
    return BY_NAME[name].make(Kit(*models(), answers=[]))


def texts_of(prompts: Sequence[list[int]], outputs: Sequence[Generation]) -> list[LoggedText]:
    """Return outputs as a log of them; the ones that a stop token ended had room for more."""
    return [
        LoggedText(
            str(number),
            "none",
            0,
            prompt,
            output.tokens,
            LIMIT if output.finish == "stop" else len(output.tokens),
        )
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


@lru_cache
def log() -> tuple[LoggedText, ...]:
    """Return the target's greedy outputs, some of which end with a stop token."""
    prompts = random_prompts(16)
    outputs = decode(models()[0], None, prompts, SETTINGS)
    assert {output.finish for output in outputs} == {"stop", "length"}
    return tuple(texts_of(prompts, outputs))


def counts(generations: Sequence[Generation]) -> list[tuple[object, ...]]:
    """Return everything that is counted in the rounds of each output."""
    return [
        (one.tokens, one.rounds, one.drafted, one.trace, one.tested_by_depth, one.accepted_by_depth)
        for one in generations
    ]


def speculative(drafter: Drafter, gamma: int, **changes: object) -> list[Generation]:
    """Return real greedy speculative decoding of the log's prompts."""
    settings = replace(SETTINGS, num_draft_tokens=gamma, **changes)  # type: ignore[arg-type]
    return decode(models()[0], drafter, [text.prompt for text in log()], settings)


def in_one_pass(
    drafter: Drafter, gamma: int, texts: Sequence[LoggedText] | None = None
) -> list[Generation]:
    texts = log() if texts is None else texts
    found = {
        index: follow(begin(), texts[index], gamma)
        for index, begin in drafts_of(drafter, texts, models()[0].vocab_size)
    }
    return [found[index] for index in range(len(texts))]


def in_the_loop(drafter: Drafter, gamma: int, **settings: object) -> list[Generation]:
    return decode_logged(
        drafter,
        log(),
        num_draft_tokens=gamma,
        stop_token_ids=STOPS,
        vocab_size=models()[0].vocab_size,
        **settings,
    )


@pytest.mark.parametrize("gamma", tiered([1, 3, 8], [3]))
@pytest.mark.parametrize("name", ONE_PASS)
def test_rounds_equal_those_of_speculative_decoding(name: str, gamma: int) -> None:
    real = counts(speculative(made(name), gamma))
    assert sum("1" in str(trace) for _, _, _, trace, _, _ in real) > 3
    assert counts(in_one_pass(made(name), gamma)) == real
    assert counts(in_the_loop(made(name), gamma)) == real
    assert follows_in_one_pass(made(name))


@pytest.mark.parametrize("name", tiered(IN_THE_LOOP, ["parallel", "other_vocabulary", "graph"]))
def test_rounds_of_other_drafters_equal_those_of_speculative_decoding(name: str) -> None:
    real = counts(speculative(made(name), 3))
    assert sum("1" in str(trace) for _, _, _, trace, _, _ in real) > 3
    assert counts(in_the_loop(made(name), 3)) == real
    assert not follows_in_one_pass(made(name))


def test_every_row_is_replayed_or_refused() -> None:
    """Check that no row of the laws which reads the text alone was forgotten above."""
    needy = {
        row.name
        for row in rows_of_models.ROWS
        if isinstance(drafter := made(row.name), tuple(NEEDS))
        or drafter.capabilities.needs_costs
        or drafter.capabilities.needs_hidden
    }
    assert needy == {"budget_tree", "lookahead", "ouroboros", "self_speculation"}
    everything = {row.name for row in rows_of_models.ROWS}
    assert everything - needy == {*ONE_PASS, *IN_THE_LOOP} - {"ranked_tree_with_lookup"}


def sampled(name: str, verify: str) -> tuple[list[Generation], list[Generation]]:
    """Return sampled speculative decoding, and the replay of its outputs."""
    real = speculative(made(name), 3, temperature=0.4, verify=verify, seed=5)
    prompts = [text.prompt for text in log()]
    return real, in_one_pass(made(name), 3, texts_of(prompts, real))


@pytest.mark.parametrize("verify", ["coupled", "token"])
@pytest.mark.parametrize("name", ["prompt_lookup", "suffix_lookup"])
def test_rounds_of_lookups_equal_those_of_the_sampled_run(name: str, verify: str) -> None:
    real, replayed = sampled(name, verify)
    assert [one.tokens for one in real] != [text.tokens for text in log()]
    assert sum(str(one.trace).count("1") for one in real) > 3, "some drafts are accepted"
    assert counts(replayed) == counts(real)


@pytest.mark.parametrize("verify", ["coupled", "token"])
def test_control_a_models_rounds_differ_from_those_of_the_sampled_run(verify: str) -> None:
    real, replayed = sampled("chain", verify)
    assert [one.tokens for one in replayed] == [one.tokens for one in real]
    assert [one.rounds for one in replayed] != [one.rounds for one in real]


@lru_cache
def of_fixed_length() -> list[tuple[object, ...]]:
    return counts(speculative(chain(), 6))


@pytest.mark.parametrize("rule", [name for name in NAMES if name not in ("fixed", *BY_COST)])
def test_rounds_of_stopping_rules_equal_those_of_speculative_decoding(rule: str) -> None:
    real = counts(speculative(chain(), 6, stopping=rule))
    assert counts(in_the_loop(chain(), 6, stopping=rule)) == real
    assert real != of_fixed_length(), "control: the rule ends drafts"


def test_control_the_log_of_another_target_has_other_rounds() -> None:
    other = native_of_another()
    prompts = [text.prompt for text in log()]
    outputs = decode(other, None, prompts, SETTINGS)
    texts = [
        replace(text, tokens=output.tokens, limit=LIMIT)
        for text, output in zip(log(), outputs, strict=True)
    ]
    real = counts(speculative(chain(), 3))
    assert counts(in_one_pass(chain(), 3, texts)) != real
    changed = [replace(text, tokens=[*text.tokens[1:], text.tokens[0]]) for text in log()]
    assert [one[1] for one in counts(in_one_pass(chain(), 3, changed))] != [one[1] for one in real]


def native_of_another() -> object:
    """Return a target with other weights."""
    from tests.support.tiny_targets import hf_model

    return native_of(hf_model("llama", layers=2, seed=1))


def test_the_target_as_its_own_drafter_is_never_wrong() -> None:
    """Check the closed form: gamma + 1 tokens a round, up to the ends of the outputs."""
    for text, one in zip(log(), in_one_pass(ChainDrafter(model=models()[1]), 4), strict=True):
        assert "0" not in one.trace
        assert one.rounds == -(-len(text.tokens) // 5)


def test_texts_past_the_drafters_context_are_drafted_up_to_there() -> None:
    """Check a drafter whose context is shorter than most texts."""
    model = models()[2]
    short = native_of_context(24)
    assert max(len(text.ids) for text in log()) > short.max_length + 4
    real = counts(speculative(ChainDrafter(model=short), 3))
    assert counts(in_one_pass(ChainDrafter(model=short), 3)) == real
    assert real != counts(speculative(ChainDrafter(model=model), 3))


@pytest.mark.parametrize("name", ["chain", "other_vocabulary"])
def test_positions_past_the_context_are_those_without_a_draft(name: str) -> None:
    """Check each round of one drafted token, and that drafts end where the count begins."""
    short = native_of_context(24)
    drafter = ChainDrafter(model=short) if name == "chain" else renamed_drafter(short, "tokens")
    starts = set()
    for text, one in zip(log(), in_the_loop(drafter, 1), strict=True):
        last = len(text.tokens) - 1  # nothing is drafted for it
        first_past = len(text.tokens) - positions_past_context(drafter, [text])
        for found in ROUND.finditer(one.trace):
            if found.start() < last:
                assert found[0].startswith(".") == (found.start() >= first_past)
                starts.add(found.start() - first_past)
    assert {-1, 0} <= starts
    assert positions_past_context(chain(), log()) == 0, "control"
    assert positions_past_context(made("prompt_lookup"), log()) is None


def native_of_context(context: int) -> object:
    """Return the draft model with a shorter context."""
    from tests.decoding.test_laws import DISTURBANCE
    from tests.support.tiny_targets import hf_model

    return native_of(hf_model("llama", layers=2), noise=DISTURBANCE, max_length=context)


def test_rounds_equal_those_that_training_walks() -> None:
    """Check the counts with which trainers score drafters on held-out answers."""
    found = dict(correct_tokens(models()[2], log(), models()[0].vocab_size))
    runs = []
    for index in range(len(log())):
        ahead = [0]
        for one in reversed(found[index]):
            ahead.append(ahead[-1] + 1 if one else 0)
        runs.append(np.array(ahead[:0:-1]))
    walked = walk(match_survival(runs, 3), [len(text.tokens) for text in log()], 3, LIMIT)
    replayed = in_one_pass(chain(), 3)
    assert walked.rounds_A.tolist() == [one.rounds for one in replayed]
    assert walked.accepted_AK.sum() == sum(one.accepted for one in replayed)
    assert walked.tested_AK.sum() == sum(one.tested for one in replayed)


def test_chains_of_llama_cpp_draft_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a model whose `lm_head` does not give its logits; the rounds stay the same."""
    found = []
    for backend in ("native", "llama_cpp"):
        monkeypatch.setattr(NativeTarget, "backend", backend)
        drafter = chain()
        assert follows_in_one_pass(drafter) == (backend == "native")
        done = replay(
            drafter,
            DrafterUse(),
            log(),
            [2, 3],
            stop_token_ids=STOPS,
            vocab_size=models()[0].vocab_size,
        )
        assert done.passes == (1 if backend == "native" else 2)
        found.append([counts(generations) for generations in done.generations.values()])
    assert found[0] == found[1]
