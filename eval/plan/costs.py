"""Measured costs of every candidate's round, kept in costs.jsonl of the plan's run folder.

Costs that the file holds are not measured again, so an interrupted plan continues, and a plan for
other speedups, acceptances or drafters measures what is new alone.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from decoding.costs.machine_limits import measure_limits
from decoding.costs.measure import measure_costs, widths_to_time
from decoding.costs.prediction import Costs
from decoding.costs.timing import STEP_ROOM
from decoding.devices import device_of, memory_bytes, release
from decoding.errors import UserError
from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.models.folder import INDEX, WEIGHTS
from decoding.models.load import DTYPES, load_target, native_execution
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from eval.plan.candidates import Candidate
from eval.plan.config import PlanConfig
from eval.plan.curves import CHAIN, TREE
from jobs.amounts import size
from jobs.files import write_bytes
from jobs.paths import resolve, resolve_model
from jobs.run_files import journal_bytes, read_journal_lines
from jobs.run_folder import hardware
from training.held_out.costs import MOST_WINDOWS, REPEATS, TOKENS, differences
from training.models.build import target_is_here
from training.models.shapes import cache_bytes_per_token, parameter_counts, sizes_of

FILE = "costs.jsonl"
MEMINFO = Path("/proc/meminfo")
READ_BYTES = 1 << 20  # that the measurement of the machine's limits reads, which is not used here
# A model's tensors are held twice while they are converted and packed.
COPIES = 2


@dataclass(frozen=True)
class MeasuredCosts:
    """The costs of a candidate's round: a line of costs.jsonl."""

    conditions: dict[str, Any]  # target, machine and settings under which they were measured
    drafter: dict[str, Any]  # see Candidate.facts
    costs: RoundCosts
    one_pass: bool  # whether t_draft_ms is the time of a complete draft
    nodes: dict[int, int]  # draft length -> verified tokens
    seconds: float

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> MeasuredCosts:
        """Return the costs in a line. Raises KeyError, TypeError or ValueError."""
        nodes = {int(gamma): count for gamma, count in values["nodes"].items()}
        return cls(**{**values, "costs": RoundCosts.read(values["costs"]), "nodes": nodes})

    @property
    def ratios(self) -> Costs:
        """The costs in units of t_target(1), as the speedup formula takes them."""
        found = Costs.of_chain(self.costs, self.one_pass)
        return dataclasses.replace(found, nodes=self.nodes, deepest=max(self.nodes))

    @property
    def tree_nodes(self) -> int:
        """Number of nodes of its deepest tree; 0 for a chain."""
        return max(self.nodes.values()) if self.drafter["draft_shape"] == TREE else 0


def has_weights(config: PlanConfig) -> bool:
    """Return whether the target's folder holds weights and not a configuration alone."""
    if not target_is_here(config.target):
        return False
    folder = resolve_model(config.target.path)
    return any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def conditions_of(config: PlanConfig, target: Any) -> dict[str, Any]:
    """Return what all measured costs depend on, as the file stores it."""
    machine = hardware()
    found = {
        "hardware": {"cpu": machine["cpu"], "gpus": machine["gpus"], "threads": machine["threads"]},
        "target": sizes_of(target),
        **{name: getattr(config.target, name) for name in ("dtype", "backend", "execution")},
        "device": torch.device(device_of(config.target.device)).type,
        **{name: getattr(config, name) for name in ("batch_size", "context", "temperature")},
    }
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------- the target
def capacity(config: PlanConfig) -> int:
    """Return the tokens of a row while its costs are measured: the context, and room for drafts."""
    widest = max(config.tree_nodes) + config.max_draft_tokens if TREE in config.shapes else 0
    longest = TOKENS + max(2 * config.max_draft_tokens, widest + 1)
    return config.context + max(STEP_ROOM + 2, longest)


def check_memory(config: PlanConfig, target: Any, found: Sequence[Candidate]) -> None:
    """Raise UserError if the target, a drafter and their caches exceed the free memory.

    target: the target's Hugging Face configuration. Nothing is checked where the free memory is
    unknown.
    """
    free, width = free_bytes(config), DTYPES[config.target.dtype].itemsize
    tokens = config.batch_size * capacity(config)
    weights = COPIES * width * parameter_counts(target)["all"]
    cache = tokens * cache_bytes_per_token(target, width)
    drafter = max(
        (COPIES * width * one.parameters + tokens * one.cache_bytes_a_token for one in found),
        default=0,
    )
    if free is None or weights + cache + drafter <= free:
        return
    raise UserError(
        f"measuring needs some {size(weights + cache + drafter)} (target {size(weights)}, keys and "
        f"values of {config.batch_size} rows of {capacity(config):,} tokens {size(cache)}, the "
        f"largest drafter {size(drafter)}), and {size(free)} are free. Lower batch_size or "
        f"context, or set target.dtype=bfloat16."
    )


def free_bytes(config: PlanConfig) -> int | None:
    """Return the free memory of the target's device in bytes; None if it is unknown."""
    on_gpu = memory_bytes(torch.device(device_of(config.target.device)))
    if on_gpu is not None:
        return on_gpu[0]
    if not MEMINFO.is_file():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def open_target(config: PlanConfig, target: Any) -> Target:
    """Load the target or, from a configuration alone, make it of random weights.

    target: its Hugging Face configuration.
    """
    asked, device = config.target, device_of(config.target.device)
    longest = asked.max_length or None
    if has_weights(config):
        return load_target(
            resolve_model(asked.path),
            backend=asked.backend,
            execution=asked.execution or "auto",
            dtype=asked.dtype,
            device=device,
            max_length=longest,
        )
    if asked.backend != "native":
        raise UserError(
            f"target.backend is {asked.backend}, expected native: {asked.path} has no weights, and "
            f"only native targets are made of random ones."
        )
    dtype, execution = DTYPES[asked.dtype], asked.execution
    weight_bytes = parameter_counts(target)["all"] * dtype.itemsize
    if execution in ("", "auto"):
        execution = native_execution(weight_bytes, dtype, torch.device(device))
    return NativeTarget.from_state(
        target.to_dict(),
        random_state(target, dtype, device),
        name=Path(asked.path).name,
        dtype=dtype,
        device=device,
        max_length=longest,
        execution=execution,
    )


def random_state(target: Any, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Return the state dict of a model with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(target, dtype=dtype, trust_remote_code=False)
    return dict(model.state_dict())


def matrix_tflops(config: PlanConfig) -> float:
    """Return the TFLOP/s of matrix products in the target's dtype on its device."""
    device = device_of(config.target.device)
    limits = measure_limits(
        READ_BYTES, DTYPES[config.target.dtype], device, config.cost_seconds / 40
    )
    return limits.operations_a_second / 1e12


# ------------------------------------------------------------------------------------ measurements
class CostFile:
    """The costs that a plan has measured, and those that it takes over from another plan."""

    def __init__(self, config: PlanConfig, target: Any, folder: Path) -> None:
        """Read costs.jsonl of the run folder, and the file that `costs` names.

        With `remeasure` unreliable costs count as unknown, and leave the run folder's file. Raises
        UserError for costs that were measured on another machine, for another target or under other
        settings.
        """
        self.config, self.path = config, folder / FILE
        self.conditions = conditions_of(config, target)
        self.known = self._read(self.path)
        write_bytes(self.path, _lines(self.known))  # without damaged lines
        if config.costs:
            self.known += self._read(resolve(config.costs))

    def _read(self, path: Path) -> list[MeasuredCosts]:
        found = read_journal_lines(path, MeasuredCosts.read)
        found.report(path, "its drafter is measured again")
        for one in found.records:
            if differing := list(differences(one.conditions, self.conditions)):
                raise UserError(
                    f"{path} was measured under other conditions: {'; '.join(differing)}. Set "
                    f"another output_dir=, and costs= to a file of this machine and target."
                )
        kept = [one for one in found.records if not one.costs.unreliable]
        return kept if self.config.remeasure else found.records

    def find(self, one: Candidate) -> MeasuredCosts | None:
        """Return the costs of a candidate, None if they are not measured yet."""
        facts = json.loads(json.dumps(one.facts))
        return next((known for known in self.known if known.drafter == facts), None)

    def measure(self, target: Target, found: Sequence[Candidate]) -> list[str]:
        """Measure the candidates that are not known; return a note on each that cannot draft so."""
        left_out: dict[str, list[str]] = {}
        missing = [one for one in found if self.find(one) is None]
        for number, one in enumerate(missing, start=1):
            began = time.monotonic()
            # a killed run leaves the folder, which the next one deletes by its suffix
            with TemporaryDirectory(suffix=".partial", dir=self.path.parent) as written:
                folder = Path(written) / "drafter"
                one.write(folder)
                try:
                    drafter = one.load(folder, target)
                    _check_draft(drafter, one)
                except UserError as error:
                    if one.draft_shape == CHAIN:
                        raise
                    left_out.setdefault(str(error), []).append(one.name)
                    continue
                measured = self._measure(target, drafter, one, began)
            del drafter
            release(target.device)
            self.known.append(measured)
            with self.path.open("ab") as file:
                file.write(_lines([measured]))
            found_c = f"c {measured.ratios.cost_ratio:.3f}"
            if measured.costs.unreliable:
                found_c = "unreliable costs"
            print(
                f"plan: {number} of {len(missing)}, {one.name}: {found_c}, "
                f"{measured.seconds:.0f} s",
                file=sys.stderr,
            )
        return [
            f"{', '.join(names)} {'are' if names[1:] else 'is'} left out: {why}"
            for why, names in left_out.items()
        ]

    def _measure(
        self, target: Target, drafter: Drafter, one: Candidate, began: float
    ) -> MeasuredCosts:
        config = self.config
        nodes = {gamma: drafter.width(gamma) for gamma in range(1, one.longest + 1)}
        # some heads draft fewer tokens than they are asked for, and small trees are not so deep
        nodes = {gamma: count for gamma, count in nodes.items() if count >= gamma}
        longest, prompt = max(nodes), random_prompt(config, target)
        widths = {*widths_to_time(drafter, longest), *(1 + count for count in nodes.values())}
        costs = measure_costs(
            target,
            drafter,
            prompt,
            Settings(TOKENS, config.temperature, num_draft_tokens=longest, seed=config.seed),
            widths=sorted(widths),
            context=config.context,
            batch_size=config.batch_size,
            windows=MOST_WINDOWS,
            repeats=REPEATS,
            tokens=TOKENS,
            seconds=config.cost_seconds,
        )
        return MeasuredCosts(
            self.conditions,
            json.loads(json.dumps(one.facts)),
            costs,
            drafter.capabilities.steps == "round",
            nodes,
            time.monotonic() - began,
        )


def _check_draft(drafter: Drafter, one: Candidate) -> None:
    """Raise UserError if a drafter does not draft in the shape and size of its candidate."""
    shape = drafter.capabilities.shape
    if shape != one.draft_shape:
        raise UserError(f"it drafts a {shape}.")
    widest = drafter.width(one.longest)
    if widest < one.tree_nodes:
        raise UserError(f"at depth {one.longest} its trees have at most {widest} nodes.")


def random_prompt(config: PlanConfig, target: Target) -> list[int]:
    """Return the ids of a random prompt that fills the context."""
    drawn = np.random.default_rng(config.seed).integers(0, target.vocab_size, config.context)
    return [int(token) for token in drawn]


def _lines(measured: Sequence[MeasuredCosts]) -> bytes:
    return journal_bytes([dataclasses.asdict(one) for one in measured])
