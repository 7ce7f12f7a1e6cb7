"""Part `drafting` of scripts/bench/recurrent.py: what a round with a recurrent head costs outside
the two models.

The share of a round that is neither the target's forward nor the head's, and operations outside
both that would launch a kernel: counted as they are here, and with the verification of trees that a
GPU takes (decoding/verification/device_tree.py), as kernels are launched there alone.
"""

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from decoding.engine import Engine, encode, load
from decoding.errors import UserError
from decoding.loop import prefill_batch
from decoding.rounds.settings import Settings
from decoding.verification import device_tree, token_tree
from jobs.paths import resolve
from recurrent_drafting.drafter import RecurrentDrafter
from scripts.bench.operations import Operations
from scripts.bench.recurrent_generation import head_dtype
from training.data.readers import read_prompts

TARGET_CALLS = ("forward",)
DRAFTER_CALLS = ("embed",)  # what the head reads of a token
HEAD_CALLS = ("start", "advance", "context", "features", "logits", "to_target_ids")
OPERATION_ROUNDS = 12
GOAL_SHARE, GOAL_OPERATIONS = 0.2, 150
GOAL_BEAMS = (8, 5)  # that these are set for


class Clock:
    """Seconds inside some methods of an object, by replacing them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def inside(self, owner: Any, *names: str) -> None:
        """Time these methods from now on."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            began = perf_counter()
            result = method(*arguments, **named)
            self.seconds += perf_counter() - began
            return result

        return wrapped


def drafting(chosen: Any) -> dict[str, Any]:
    """For each way of drafting: milliseconds of a round, the parts' shares, and operations outside
    both models.
    """
    if not chosen.head:
        raise UserError("head is empty: part=drafting needs the folder of a recurrent head")
    found = {}
    for name, children, temperature in (
        ("greedy", "top_k", 0.0),
        ("picked", "top_k", 1.0),
        ("drawn", "sampled", 1.0),
    ):
        engine = load(resolve(chosen.target), device=chosen.device, dtype=chosen.decode_dtype)
        drafter = RecurrentDrafter(
            resolve(chosen.head),
            beam_width=chosen.beam_width,
            children=children,
            dtype=head_dtype(chosen),
            device=chosen.device,
        )
        settings = Settings(
            max_new_tokens=chosen.max_new_tokens,
            temperature=temperature,
            num_draft_tokens=chosen.beam_length,
            ignore_eos=True,
        )
        prompts = _prompts(chosen, engine, engine.target.max_length - chosen.max_new_tokens)
        operations = _operations(engine, drafter, prompts[0], settings)
        with patch.object(token_tree, "token", device_tree.token):
            of_a_gpu = _operations(engine, drafter, prompts[0], settings)
        found[name] = {
            **_shares(engine, drafter, prompts, settings, chosen.rounds),
            "operations_outside": operations,
            "operations_outside_as_on_a_gpu": of_a_gpu,
        }
    return found | {"goals": goals(found, chosen.beam_width, chosen.beam_length)}


def goals(found: dict[str, Any], width: int, length: int) -> dict[str, dict[str, Any]]:
    """Each goal with what was found by way of drafting; of other beams than those that it was set
    for, without a verdict.
    """
    shares = {way: one["share_outside"] for way, one in found.items()}
    operations = {way: one["operations_outside_as_on_a_gpu"] for way, one in found.items()}
    told = {
        f"at most {GOAL_SHARE:.0%} of a round outside the models": (shares, GOAL_SHARE),
        f"at most {GOAL_OPERATIONS} operations outside them": (operations, GOAL_OPERATIONS),
    }
    if (width, length) != GOAL_BEAMS:
        return {name: {"found": of_ways} for name, (of_ways, _) in told.items()}
    return {
        name: {"found": of_ways, "met": all(value <= most for value in of_ways.values())}
        for name, (of_ways, most) in told.items()
    }


def _prompts(chosen: Any, engine: Engine, room: int) -> list[list[int]]:
    asked = (
        [{"role": "user", "content": prompt.turns[0]}]
        for prompt in read_prompts(resolve(chosen.prompts))
    )
    fitting = [ids for ids in (encode(engine, messages) for messages in asked) if len(ids) < room]
    return fitting[: chosen.max_prompts]


def _operations(
    engine: Engine, drafter: RecurrentDrafter, prompt: list[int], settings: Settings
) -> int:
    """The most of any round."""
    counter = Operations()
    counter.inside(engine.target, *TARGET_CALLS)
    counter.inside(drafter.head, *HEAD_CALLS)
    counter.inside(drafter, *DRAFTER_CALLS)
    batch = prefill_batch(engine.target, drafter, [prompt], settings)
    most = 0
    with torch.inference_mode():
        for number in range(OPERATION_ROUNDS):
            if not batch.rows:
                break
            counter.counts.clear()
            with counter:
                batch.round()
            most = max(most, counter.total if number else 0)
    batch.close()
    for owner, names in (
        (engine.target, TARGET_CALLS),
        (drafter.head, HEAD_CALLS),
        (drafter, DRAFTER_CALLS),
    ):
        for name in names:
            delattr(owner, name)  # the class's own method shows again
    return most


def _shares(
    engine: Engine,
    drafter: RecurrentDrafter,
    prompts: list[list[int]],
    settings: Settings,
    rounds: int,
) -> dict[str, float]:
    """Medians over rounds of all prompts, the first a warm-up."""
    of_target, of_head = Clock(), Clock()
    of_target.inside(engine.target, *TARGET_CALLS)
    of_head.inside(drafter.head, *HEAD_CALLS)
    of_head.inside(drafter, *DRAFTER_CALLS)
    target_shares, head_shares, round_ms, taus = [], [], [], []
    for number in range(rounds + 1):
        made = [_one(engine, drafter, prompt, settings, of_target, of_head) for prompt in prompts]
        seconds = sum(one[0] for one in made)
        if number:
            target_shares.append(sum(one[1] for one in made) / seconds)
            head_shares.append(sum(one[2] for one in made) / seconds)
            round_ms.append(1e3 * seconds / sum(one[3] for one in made))
            taus.append(sum(one[4] for one in made) / sum(one[3] for one in made))
    target, head = statistics.median(target_shares), statistics.median(head_shares)
    return {
        "round_ms": statistics.median(round_ms),
        "share_of_target": target,
        "share_of_head": head,
        "share_outside": 1 - target - head,
        "tau": statistics.median(taus),
    }


def _one(
    engine: Engine,
    drafter: RecurrentDrafter,
    prompt: list[int],
    settings: Settings,
    of_target: Clock,
    of_head: Clock,
) -> tuple[float, float, float, int, int]:
    """(seconds of all rounds, of them the target's and the head's, rounds, tokens) of one prompt,
    its prefill left out.
    """
    batch = prefill_batch(engine.target, drafter, [prompt], settings)
    (row,) = batch.rows
    before = of_target.seconds, of_head.seconds
    with torch.inference_mode():
        while batch.rows:
            batch.round()
    batch.close()
    done = row.generation
    return (
        done.decode_seconds,
        of_target.seconds - before[0],
        of_head.seconds - before[1],
        done.rounds,
        len(done.tokens),
    )
