"""The laws on real trained models in float32, and the front door: load, generate, stream.

In float32 a forward over five tokens rounds differently from five forwards over one. A divergence
is allowed only where the target's two best tokens are closer than 1e-4, noise included, and on
fewer than 1 in 10,000 tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from decoding import UserError, generate, load
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.prompt_lookup import PromptLookup
from decoding.interfaces import Drafter, Target
from decoding.loop import decode
from decoding.models.folder import load_state, read_config
from decoding.models.load import load_target
from decoding.models.native.model import NativeTarget
from decoding.models.prefill import prefill
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.sampling import noise
from tests.support.tiers import tiered

GAP_LIMIT = 1e-4
SHARE_LIMIT = 1e-4
TOPICS = ["the sea", "a fox", "bread", "winter", "music", "a train", "the moon", "paint"]
TOPICS += ["an old clock", "rain", "a garden", "maps", "salt", "a bridge", "bees", "tea"]
OPENINGS = ["Tell me about {}.", "Write a story with {}.", "What is {}?", "Explain {} to a child."]


def chats(engine_tokenizer: object, count: int) -> list[list[int]]:
    """Return chat prompts that combine openings and topics in turn."""
    texts = [OPENINGS[i % 4].format(TOPICS[i // 4 % len(TOPICS)]) for i in range(count)]
    rendered = [
        engine_tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text in texts
    ]
    return [engine_tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]  # type: ignore[operator]


def first_layers(folder: Path, count: int) -> ChainDrafter:
    """Return a weak drafter with the model's first `count` layers, its norm and its head."""
    config = {**read_config(folder), "num_hidden_layers": count}
    return ChainDrafter(
        model=NativeTarget.from_state(config, load_state(folder), name=f"first-{count}")
    )


def gap(target: Target, sequence: Sequence[int], settings: Settings, request: int) -> float:
    """Return the gap between the next token's two best scores, noise included if sampled."""
    with torch.inference_mode():
        target.open(1, len(sequence) + 1)
        prefill(target, [list(sequence[:-1])])
        logits_V = target.forward(torch.tensor([[sequence[-1]]]))[0][0, -1].double()
    if settings.temperature:
        logits_V = settings.warper.probs(logits_V[None])[0].log()
        key = noise.key(settings.seed, request, len(sequence))
        logits_V -= noise.exponentials(
            torch.tensor(noise.signed(key)), noise.scaled_ids(torch.arange(len(logits_V)))
        ).log()
    best = logits_V.topk(2).values
    return (best[0] - best[1]).item()


def check_law(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    settings: Settings,
    plain: list[Generation] | None = None,
) -> tuple[list[Generation], list[Generation]]:
    """Check that drafted text diverges only at near ties, and on few tokens.

    plain: the autoregressive generations, if they are known. Returns them and the drafted ones.
    """
    plain = plain or decode(target, None, prompts, settings)
    drafted = decode(target, drafter, prompts, settings)
    diverged = 0
    for request, (prompt, left, right) in enumerate(zip(prompts, plain, drafted)):
        if left.tokens == right.tokens:
            continue
        at = next(i for i, (a, b) in enumerate(zip(left.tokens, right.tokens)) if a != b)
        assert gap(target, prompt + left.tokens[:at], settings, request) < GAP_LIMIT
        diverged += 1
    assert diverged <= SHARE_LIMIT * sum(len(g.tokens) for g in plain)
    return plain, drafted


@pytest.mark.long
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_the_stories_model_keeps_the_law(stories260k: Path, rule: str) -> None:
    target = load_target(stories260k)
    prompts = [[1, 10 + 7 * i] for i in range(64)]
    settings = Settings(
        max_new_tokens=128, temperature=0.0 if rule == "greedy" else 1.0, verify="coupled"
    )
    plain, drafted = check_law(target, first_layers(stories260k, 3), prompts, settings)
    assert sum(g.rounds for g in drafted) < 0.95 * sum(g.rounds for g in plain)
    check_law(target, PromptLookup(), prompts, settings)


@pytest.mark.parametrize("backend", tiered(["native", "hf"], ["native"]))
def test_the_chat_model_keeps_the_law(chat24m: Path, backend: str) -> None:
    target = load_target(chat24m, backend=backend)
    prompts = chats(load(chat24m).tokenizer, 6)
    plain, _ = check_law(target, first_layers(chat24m, 2), prompts, Settings(max_new_tokens=40))
    assert len({tuple(g.tokens) for g in plain}) > 3


def test_generate_and_stream(stories260k: Path) -> None:
    plain = generate(load(stories260k), "Once upon a time", max_new_tokens=40)
    for drafter in ("prompt_lookup", stories260k):
        engine = load(stories260k, drafter)
        reply = generate(engine, "Once upon a time", max_new_tokens=40, stopping="fixed")
        assert reply.text == plain.text
        assert (
            "".join(
                generate(
                    engine, "Once upon a time", stream=True, max_new_tokens=40, stopping="fixed"
                )
            )
            == reply.text
        )
    assert reply.stats.block_efficiency == 5, "a model that drafts for itself is always right"
    assert 2 in engine.stop_token_ids
    assert not engine.costs, "fixed drafts need no costs"
    weighed = generate(engine, "Once upon a time", max_new_tokens=40)
    assert weighed.text == plain.text
    assert weighed.stats.draft_steps < reply.stats.draft_steps, (
        "a drafter as slow as its target hardly pays"
    )


def test_chats_need_a_template(stories260k: Path) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        generate(load(stories260k), [{"role": "user", "content": "hi"}])


def test_chats_are_rendered(chat24m: Path) -> None:
    engine = load(chat24m, "prompt_lookup")
    reply = generate(
        engine,
        [{"role": "user", "content": "Write a short poem about the sea."}],
        max_new_tokens=12,
    )
    assert reply.text
    assert len(reply.tokens) <= 12


def test_a_drafter_of_another_tokenizer_is_refused(stories260k: Path, chat24m: Path) -> None:
    with pytest.raises(UserError, match="their tokenizers differ"):
        load(chat24m, stories260k)
