"""Part `drafting` of recurrent.py: the cost of a round outside the target and the head.

Operations are counted as they run on the chosen device, and with the tree verification of a GPU
(decoding/verification/device_tree.py), since operations launch kernels only on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from decoding.engine import Engine, load
from decoding.errors import UserError
from decoding.loop import prefill_batch
from decoding.rounds.settings import Settings
from decoding.verification import device_tree, token_tree
from jobs.paths import resolve_model
from recurrent_drafting.drafter import RecurrentDrafter
from scripts.bench.common import fitting_prompts, goal
from scripts.bench.operations import Operations, run_methods_within

TARGET_CALLS = ("forward",)
DRAFTER_CALLS = ("embed",)
HEAD_CALLS = ("start", "advance", "context", "features", "logits", "to_target_ids")
OPERATION_ROUNDS = 12
GOAL_SHARE, GOAL_OPERATIONS = 0.2, 150
GOAL_BEAMS = (8, 5)  # width and length that the goals are set for
# way to draft -> children of a beam, temperature
WAYS = {"greedy": ("top_k", 0.0), "picked": ("top_k", 1.0), "drawn": ("sampled", 1.0)}


class Clock:
    """Clock that adds up the seconds spent inside `running`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the clock inside the context."""
        began = perf_counter()
        yield
        self.seconds += perf_counter() - began


def measure_drafting(chosen: Any) -> dict[str, Any]:
    """Measure a round's time, the shares of its parts and its operations, for each of WAYS."""
    if not chosen.head:
        raise UserError("head is empty. Set it to the folder of a recurrent head.")
    found: dict[str, Any] = {}
    for name, (children, temperature) in WAYS.items():
        drafter = {
            "use": "recurrent",
            "folder": resolve_model(chosen.head),
            "beam_width": chosen.beam_width,
            "children": children,
            "by_cost": False,
            "dtype": chosen.head_dtype,
        }
        target, dtype = resolve_model(chosen.target), chosen.decode_dtype
        engine = load(target, drafter, device=chosen.device, dtype=dtype)
        settings = Settings(
            max_new_tokens=chosen.max_new_tokens,
            temperature=temperature,
            num_draft_tokens=chosen.beam_length,
            ignore_eos=True,
        )
        asked = fitting_prompts(engine, chosen.prompts, chosen.max_new_tokens)
        prompts = [ids for _, ids in asked][: chosen.max_prompts]
        operations = count_operations(engine, prompts[0], settings)
        with patch.object(token_tree, "token", device_tree.token):
            on_gpu = count_operations(engine, prompts[0], settings)
        found[name] = {
            **measure_shares(engine, prompts, settings, chosen.rounds),
            "operations_outside": operations,
            "operations_outside_as_on_a_gpu": on_gpu,
        }
    return found | {"goals": judge_goals(found, chosen.beam_width, chosen.beam_length)}


def judge_goals(found: dict[str, Any], width: int, length: int) -> dict[str, dict[str, Any]]:
    """Compare every goal with the figures; only the sizes of GOAL_BEAMS get a verdict."""
    share = f"at most {GOAL_SHARE:.0%} of a round outside the models"
    operations = f"at most {GOAL_OPERATIONS} operations outside them"
    limits = {
        share: ("share_outside", GOAL_SHARE),
        operations: ("operations_outside_as_on_a_gpu", GOAL_OPERATIONS),
    }
    judged = {}
    for name, (key, most) in limits.items():
        by_way = {way: one[key] for way, one in found.items()}
        judged[name] = goal(by_way, all(value <= most for value in by_way.values()))
        if (width, length) != GOAL_BEAMS:
            del judged[name]["met"]
    return judged


def models_of(engine: Engine) -> list[tuple[Any, tuple[str, ...]]]:
    """Return the models and the methods that compute their forwards, the target first."""
    assert isinstance(engine.drafter, RecurrentDrafter)
    head = engine.drafter.head
    return [(engine.target, TARGET_CALLS), (head, HEAD_CALLS), (engine.drafter, DRAFTER_CALLS)]


def count_operations(engine: Engine, prompt: list[int], settings: Settings) -> int:
    """Return the largest number of operations outside the models in any round after the first."""
    counter, models = Operations(), models_of(engine)
    for owner, names in models:
        counter.leave_out(owner, *names)
    batch = prefill_batch(engine.target, engine.drafter, [prompt], settings)
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
            delattr(owner, name)
    return most


def measure_shares(
    engine: Engine, prompts: list[list[int]], settings: Settings, repeats: int
) -> dict[str, float]:
    """Return a round's milliseconds, the shares of its parts, and tau.

    These are medians over `repeats` passes through all prompts, after one pass for warm-up.
    """
    target_clock, head_clock = Clock(), Clock()
    (target, target_calls), *rest = models_of(engine)
    run_methods_within(target_clock.running, target, *target_calls)
    for owner, names in rest:
        run_methods_within(head_clock.running, owner, *names)
    found = []
    for _ in range(repeats + 1):
        seconds = in_target = in_head = 0.0
        rounds = tokens = 0
        for prompt in prompts:
            batch = prefill_batch(engine.target, engine.drafter, [prompt], settings)
            (row,) = batch.rows
            target_clock.seconds = head_clock.seconds = 0.0  # without the prefill
            with torch.inference_mode():
                while batch.rows:
                    batch.round()
            batch.close()
            seconds += row.generation.decode_seconds
            in_target += target_clock.seconds
            in_head += head_clock.seconds
            rounds += row.generation.rounds
            tokens += len(row.generation.tokens)
        shares = (in_target / seconds, in_head / seconds)
        found.append((1e3 * seconds / rounds, *shares, tokens / rounds))
    round_ms, share_of_target, share_of_head, tau = map(median, zip(*found[1:]))
    return {
        "round_ms": round_ms,
        "share_of_target": share_of_target,
        "share_of_head": share_of_head,
        "share_outside": 1 - share_of_target - share_of_head,
        "tau": tau,
    }
