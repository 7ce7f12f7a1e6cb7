"""Part `drafting` of recurrent.py: the cost of a round outside the target and the head.

Operations are counted as they run here, and with the verification of trees that a GPU takes
(decoding/verification/device_tree.py), since only there they launch kernels.
"""

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from decoding.engine import Engine, load
from decoding.errors import UserError
from decoding.loop import prefill_batch
from decoding.rounds.settings import Settings
from decoding.verification import device_tree, token_tree
from jobs.paths import resolve
from recurrent_drafting.drafter import RecurrentDrafter
from scripts.bench.common import fitting_prompts, goal
from scripts.bench.operations import Operations
from scripts.bench.recurrent_generation import head_dtype

TARGET_CALLS = ("forward",)
DRAFTER_CALLS = ("embed",)
HEAD_CALLS = ("start", "advance", "context", "features", "logits", "to_target_ids")
OPERATION_ROUNDS = 12
GOAL_SHARE, GOAL_OPERATIONS = 0.2, 150
GOAL_BEAMS = (8, 5)  # width and length that the goals are set for
# way to draft -> children of a beam, temperature
WAYS = {"greedy": ("top_k", 0.0), "picked": ("top_k", 1.0), "drawn": ("sampled", 1.0)}


class CallClock:
    """Total time inside some methods of objects, which it replaces."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time_calls(self, owner: Any, *names: str) -> None:
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


def measure_drafting(chosen: Any) -> dict[str, Any]:
    """Measure the milliseconds, the parts' shares and the operations of a round for each way."""
    if not chosen.head:
        raise UserError("head is empty: part=drafting needs the folder of a recurrent head")
    found: dict[str, Any] = {}
    for name, (children, temperature) in WAYS.items():
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
        asked = fitting_prompts(engine, chosen.prompts, chosen.max_new_tokens)
        prompts = [ids for _, ids in asked][: chosen.max_prompts]
        operations = count_operations(engine, drafter, prompts[0], settings)
        with patch.object(token_tree, "token", device_tree.token):
            on_gpu = count_operations(engine, drafter, prompts[0], settings)
        found[name] = {
            **measure_shares(engine, drafter, prompts, settings, chosen.rounds),
            "operations_outside": operations,
            "operations_outside_as_on_a_gpu": on_gpu,
        }
    return found | {"goals": goals(found, chosen.beam_width, chosen.beam_length)}


def goals(found: dict[str, Any], width: int, length: int) -> dict[str, dict[str, Any]]:
    """Compare every goal with the figures; beams of another size get no verdict."""
    limits = {
        f"at most {GOAL_SHARE:.0%} of a round outside the models": ("share_outside", GOAL_SHARE),
        f"at most {GOAL_OPERATIONS} operations outside them": (
            "operations_outside_as_on_a_gpu",
            GOAL_OPERATIONS,
        ),
    }
    judged = {}
    for name, (key, most) in limits.items():
        by_way = {way: one[key] for way, one in found.items()}
        judged[name] = goal(by_way, all(value <= most for value in by_way.values()))
        if (width, length) != GOAL_BEAMS:
            del judged[name]["met"]
    return judged


def count_operations(
    engine: Engine, drafter: RecurrentDrafter, prompt: list[int], settings: Settings
) -> int:
    """Return the largest number of operations of a round, the first one left out."""
    models = (
        (engine.target, TARGET_CALLS),
        (drafter.head, HEAD_CALLS),
        (drafter, DRAFTER_CALLS),
    )
    counter = Operations()
    for owner, names in models:
        counter.inside(owner, *names)
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
    for owner, names in models:
        for name in names:
            delattr(owner, name)  # restores the method of the class
    return most


def measure_shares(
    engine: Engine,
    drafter: RecurrentDrafter,
    prompts: list[list[int]],
    settings: Settings,
    rounds: int,
) -> dict[str, float]:
    """Return medians over passes through all prompts, the first of which is a warm-up."""
    target_clock, head_clock = CallClock(), CallClock()
    target_clock.time_calls(engine.target, *TARGET_CALLS)
    head_clock.time_calls(drafter.head, *HEAD_CALLS)
    head_clock.time_calls(drafter, *DRAFTER_CALLS)
    found = []
    for _ in range(rounds + 1):
        seconds = in_target = in_head = 0.0
        count = tokens = 0
        for prompt in prompts:
            batch = prefill_batch(engine.target, drafter, [prompt], settings)
            (row,) = batch.rows
            before = target_clock.seconds, head_clock.seconds
            with torch.inference_mode():
                while batch.rows:
                    batch.round()
            batch.close()
            seconds += row.generation.decode_seconds
            in_target += target_clock.seconds - before[0]
            in_head += head_clock.seconds - before[1]
            count += row.generation.rounds
            tokens += len(row.generation.tokens)
        shares = (in_target / seconds, in_head / seconds)
        found.append((1e3 * seconds / count, *shares, tokens / count))
    round_ms, target, head, tau = (statistics.median(column) for column in zip(*found[1:]))
    return {
        "round_ms": round_ms,
        "share_of_target": target,
        "share_of_head": head,
        "share_outside": 1 - target - head,
        "tau": tau,
    }
