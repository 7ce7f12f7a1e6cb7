"""Roofline of a row's mean round: bytes and operations needed, and shares of the machine's limits.

The shares show the possible gain. If bytes are the limit, more tokens per forward cost nothing. If
neither is near its limit, the time goes into the calls of operations, as in small models. Only work
that no implementation can avoid is counted (decoding/costs/roofline.py): for a drafter one token
per row and step, although the steps of a tree run over more.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decoding.costs.machine_limits import Limits, measure_limits
from decoding.costs.roofline import BudgetedDrafter, ForwardBudget, forward_budget
from decoding.drafters.registry import head_of
from decoding.drafters.self_speculation import SelfSpeculation
from decoding.drafters.with_lookup import LookupFirst
from decoding.errors import UserError
from decoding.interfaces import Drafter, Target
from decoding.models.distributed.parallel import ParallelTarget
from decoding.models.folder import is_gguf, read_config
from decoding.models.load import DTYPES
from decoding.models.native.weights import NativeConfig
from decoding.schedules.by_name import VIRTUAL
from decoding.values import is_number
from eval.statistics.paired_samples import PairedSample
from eval.statistics.schema import DrafterFacts, RoundBudget
from jobs.drafter_use import ALONE
from jobs.files import write_text
from jobs.run_files import read_object

# Measuring a limit takes two seconds, which only runs of minutes justify. A step that reads fewer
# bytes than LEAST_BYTES fits into a core's cache.
LEAST_TOKENS, LEAST_BYTES = 5_000, 4_000_000
NO_LIMITS = (
    "a run of at most 5,000 tokens and a target under 4 MB are trials; a target in several "
    "processes, or of a family that is not native, has no single limit"
)

# (tokens a row, committed tokens a row, rows) -> budget of a forward.
Forward = Callable[[float, int, float], ForwardBudget]
# (draft steps, draft length, committed tokens a row, rows) -> budget of a round's draft
Draft = Callable[[float, int, int, float], ForwardBudget]
NOTHING = ForwardBudget(0, 0, 0)


@dataclass(frozen=True)
class Shapes:
    """Bytes and operations of the forwards of a run's models."""

    target: Forward | None = None  # None: its family is not known
    # drafter -> the budget of its drafts; None: the family of its model is not known
    drafts: Mapping[str, Draft | None] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32  # of the target
    device: str = "cpu"
    in_one_process: bool = True  # of the target
    limits: Limits | None = None  # None: not measured


UNKNOWN = Shapes()


def shapes_of(
    folder: Path,
    target: Target,
    mappings: Mapping[str, Mapping[str, Any]],
    drafters: Mapping[str, Drafter],
) -> Shapes:
    """Return the budgets of the forwards of a target and its drafters.

    folder: the target's model folder. mappings: the drafters' entries, with their folders and
    dtypes.
    """
    dtype = DTYPES[target.dtype]
    config = _config(folder)
    drafts = {
        name: _draft(mappings[name], drafter, target, config) for name, drafter in drafters.items()
    }
    single = not isinstance(target, ParallelTarget)
    return Shapes(_forward(config, dtype), drafts, dtype, str(target.device), single)


def _config(folder: str | Path) -> NativeConfig | None:
    """Return a model's shape; None for a GGUF file, and a family that native does not support."""
    if is_gguf(folder):  # its weights have other sizes than the dtype's
        return None
    try:
        return NativeConfig.from_dict(read_config(folder))
    except UserError:
        return None


def _forward(
    config: NativeConfig | None, dtype: torch.dtype, skipped: tuple[int, int] = (0, 0)
) -> Forward | None:
    if config is None:
        return None
    return lambda tokens, context, rows: forward_budget(
        config, dtype, tokens, context, rows, skipped
    )


def _draft(
    mapping: Mapping[str, Any], drafter: Drafter, target: Target, shape: NativeConfig | None
) -> Draft | None:
    """Return the function that computes the budget of a draft; None for an unknown family.

    A draft runs a head, a folder's model, the target without some sub-layers, or no model.
    """
    if isinstance(drafter, LookupFirst):
        drafter = drafter.drafter  # a lookup reads nothing
    if isinstance(drafter, BudgetedDrafter):
        return partial(drafter.draft_budget, target)
    dtype = DTYPES[target.dtype]
    if isinstance(drafter, SelfSpeculation):
        skipped = (len(drafter.skips.attention), len(drafter.skips.mlp))
        return _steps(_forward(shape, dtype, skipped))
    if "folder" not in mapping:
        return None if drafter.num_parameters else lambda *_: NOTHING
    if head_of(mapping["folder"]):
        return None  # it runs in another process
    own = DTYPES[mapping["dtype"]] if "dtype" in mapping else dtype
    return _steps(_forward(_config(mapping["folder"]), own))


def _steps(forward: Forward | None) -> Draft | None:
    """Return the budget of drafts of which each step is a forward over one token a row."""
    if forward is None:
        return None
    return lambda steps, gamma, context, rows: forward(1, context, rows).times(steps)


def _limits_of(values: dict[str, Any]) -> Limits:
    """Return the limits that `with_limits` wrote; raise ValueError for other values."""
    names = [field.name for field in dataclasses.fields(Limits)]
    if sorted(values) != sorted(names) or not all(
        is_number(value) and value > 0 for value in values.values()
    ):
        raise ValueError(f"expected the numbers {' and '.join(names)}, found {values!r:.80}")
    return Limits(**values)


def with_limits(shapes: Shapes, tokens: int, path: Path) -> Shapes:
    """Add the machine's limits, read from the file `path` or measured now and written there.

    Short runs, small targets, and targets of an unknown family or in several processes get none.
    tokens: maximum number of tokens that the run decodes. Raises UserError for a damaged file.
    """
    if shapes.target is None or not shapes.in_one_process or tokens <= LEAST_TOKENS:
        return shapes
    step = shapes.target(1, 0, 1)
    if step.weight_bytes < LEAST_BYTES:
        return shapes
    if path.is_file():
        limits = read_object(path, "Delete it: the limits are measured again", _limits_of)
    else:
        limits = measure_limits(step.weight_bytes, shapes.dtype, shapes.device)
        write_text(path, json.dumps(dataclasses.asdict(limits), indent=1))
    return dataclasses.replace(shapes, limits=limits)


def row_budgets(
    shapes: Shapes, facts: DrafterFacts, sample: PairedSample, gamma: int, context: int
) -> dict[str, Any]:
    """Return a row's budgets of a mean round and of a baseline step, and the limits.

    sample: the sum of the row's units. gamma: their draft length. context: committed tokens.
    """
    limits = shapes.limits
    base_rows = sample.base_tokens / sample.base_batch_rounds  # mean of those that still run
    step = shapes.target(1, context, base_rows) if shapes.target else None
    mean = round_budget(shapes, facts, sample, gamma, context)
    # A virtual clock counts two lanes as simultaneous; no machine reached their joint rate.
    reached = None if facts.schedule in VIRTUAL else limits
    return {
        "budget": _reached(mean, sample.round_ms, reached) if mean else None,
        "baseline_budget": _reached(step, sample.base_round_ms, limits) if step else None,
        "reading_gigabytes_per_second": limits.bytes_a_second / 1e9 if limits else None,
        "product_gigaflop_per_second": limits.operations_a_second / 1e9 if limits else None,
    }


def round_budget(
    shapes: Shapes, facts: DrafterFacts, sample: PairedSample, gamma: int, context: int
) -> ForwardBudget | None:
    """Return the budget of the mean round: draft steps, and the target's forward over the proposal.

    None if the shape of either model is unknown.
    """
    rounds = sample.batch_rounds
    rows = sample.rounds / rounds  # mean of those that still run
    draft = shapes.drafts.get(facts.name)
    if draft is None or shapes.target is None:
        return None
    if facts.schedule == ALONE:
        return draft(1, gamma, context, rows)
    verified = shapes.target(1 + sample.verified / rounds, context, rows)
    return verified + draft(sample.draft_steps / rounds, gamma, context, rows)


def _reached(budget: ForwardBudget, milliseconds: float, limits: Limits | None) -> RoundBudget:
    seconds = milliseconds / 1000
    shares: tuple[float | None, float | None] = (None, None)
    if limits is not None:
        moved, computed = budget.bytes_read / seconds, budget.operations / seconds
        shares = (moved / limits.bytes_a_second, computed / limits.operations_a_second)
    return RoundBudget(budget.bytes_read / 1e6, budget.operations / 1e6, *shares)
