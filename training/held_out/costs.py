"""Costs of a round for held-out predictions: measured once, and frozen into the run folder.

A resumed run reads the frozen costs, so it selects the same checkpoints. All ranks use those of
rank 0.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decoding.costs.measure import measure_costs
from decoding.costs.prediction import Costs
from decoding.errors import UserError
from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.rounds.settings import Settings
from jobs.files import write_text
from jobs.paths import resolve
from jobs.run_files import read_object
from jobs.run_folder import hardware
from training.config import HeldOutConfig
from training.data.packing import Sample
from training.held_out.answers import (
    HeldOutFields,
    answer_prompts,
    fitting_prompts,
    load_answering_target,
)

FILE = "held_out_costs.json"
NONE, MEASURED = "none", "measured"
MOST_WINDOWS, REPEATS, TOKENS = 7, 3, 16


@dataclass(frozen=True)
class Timing:
    """The drafter that is timed, and what its costs depend on."""

    # returns the drafter of a chain, with weights of any value, on the target's device
    make_drafter: Callable[[Target], Drafter]
    # sizes of target and drafter, for the file
    target: dict[str, Any]
    drafter: dict[str, Any]
    # longest draft
    draft_tokens: int


def cost_files(held_out: HeldOutConfig) -> list[Path]:
    """Return the file named by held_out.costs, if any. Raises UserError if it is missing."""
    return [] if held_out.costs in (NONE, MEASURED) else [resolve(held_out.costs)]


def cost_rules(held_out: HeldOutConfig) -> dict[str, tuple[bool, str]]:
    """Return the rules for the options of measuring."""
    return {
        "held_out.costs": (bool(held_out.costs), f"{NONE}, {MEASURED} or a file"),
        "held_out.cost_seconds": (0 < held_out.cost_seconds <= 3600, "more than 0, at most 3600"),
    }


def answers_and_costs(
    target_folder: Path, tokenizer: Any, config: HeldOutFields, run_folder: Path, timing: Timing
) -> tuple[list[Sample], Costs | None]:
    """Return the target's answers to the held-out prompts, and the costs of a round.

    Both come from one loaded target. The costs are None if held_out.costs is `none`. Raises
    UserError if no prompt fits, and for costs of another machine or other sizes.
    """
    prompts = fitting_prompts(tokenizer, config)
    target = load_answering_target(target_folder, config)
    answers = answer_prompts(target, prompts, target_folder, tokenizer, config)
    if config.held_out.costs == NONE:
        return answers, None
    drafter = timing.make_drafter(target)
    facts = {
        "hardware": hardware(),
        "device": target.device.type,
        "dtype": config.target.dtype,
        "backend": target.backend,
        "target": timing.target,
        "drafter": timing.drafter,
        "draft_tokens": timing.draft_tokens,
    }
    costs = freeze_costs(
        config.held_out,
        run_folder / FILE,
        json.loads(json.dumps(facts)),  # as the file stores them
        lambda: _measure(target, drafter, prompts, config, timing.draft_tokens),
    )
    return answers, Costs.of_chain(costs, one_pass=drafter.capabilities.steps == "round")


def freeze_costs(
    held_out: HeldOutConfig, frozen: Path, facts: dict[str, Any], measure: Callable[[], RoundCosts]
) -> RoundCosts:
    """Return the costs in the file `frozen`, which the first call writes.

    The first call measures them, or reads the file that held_out.costs names. facts: what the costs
    depend on. Raises UserError for a damaged file, and if the named one was measured on another
    machine, or with other settings or sizes.
    """
    if frozen.is_file():
        return read_object(frozen, "Delete it to measure the costs again", _read_file)[1]
    if held_out.costs == MEASURED:
        costs = measure()
    else:
        path = resolve(held_out.costs)
        found, costs = read_object(path, f"Set held_out.costs={MEASURED}", _read_file)
        differing = list(differences(found, facts))
        if differing:
            raise UserError(
                f"held_out.costs={held_out.costs} was measured under other conditions: "
                f"{'; '.join(differing)}. Set held_out.costs={MEASURED}, or name a file of this "
                f"machine and these models"
            )
    write_text(frozen, json.dumps({"measured_for": facts, "costs": asdict(costs)}, indent=1))
    return costs


def _read_file(values: dict[str, Any]) -> tuple[dict[str, Any], RoundCosts]:
    """Return what the costs depend on, and the costs. Raises KeyError, TypeError or ValueError."""
    return values["measured_for"], RoundCosts.read(values["costs"])


def differences(
    there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Describe the values that differ, by their dotted names."""
    for key in sorted({*there, *here}):
        old, new = there.get(key), here.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} is {old!r} there and {new!r} here"


def _measure(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: HeldOutFields,
    draft_tokens: int,
) -> RoundCosts:
    """Measure the costs of a round of one row, at a prompt of median length."""
    held_out = config.held_out
    prompt = sorted(prompts, key=len)[len(prompts) // 2]
    settings = Settings(
        held_out.max_new_tokens,
        held_out.temperature,
        num_draft_tokens=draft_tokens,
        seed=config.seed,
    )
    began = time.monotonic()
    costs = measure_costs(
        target,
        drafter,
        prompt,
        settings,
        widths=range(1, draft_tokens + 2),
        context=len(prompt) + held_out.max_new_tokens // 2,
        windows=MOST_WINDOWS,
        repeats=REPEATS,
        tokens=TOKENS,
        seconds=held_out.cost_seconds,
    )
    print(
        f"costs of a round on this machine: cost ratio "
        f"{costs.t_draft_ms / costs.target_ms(1):.3f}, t_target(1) {costs.target_ms(1):.2f} ms, "
        f"V({draft_tokens + 1}) {costs.target_ms(draft_tokens + 1) / costs.target_ms(1):.2f}, "
        f"measured in {time.monotonic() - began:.1f} s; checkpoints are selected by the predicted "
        f"speedup"
    )
    if costs.unreliable:
        print(f"the predicted speedup is unreliable: {costs.unreliable}")
    return costs
