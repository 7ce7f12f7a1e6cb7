"""Checks of the configuration, and the models and prompts that it names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from decoding.devices import count_gpus, device_of
from decoding.drafters.other_vocabulary import TOKENS, OtherVocabulary
from decoding.drafters.registry import imported
from decoding.engine import stop_tokens
from decoding.errors import UserError, without_stop
from decoding.interfaces import Drafter, Target, precision
from decoding.models.distributed.parallel import device_for_drafter, processes_of
from decoding.models.draft_vocabulary import draft_vocab_size
from decoding.models.folder import CARD, read_json
from decoding.models.load import AUTO
from decoding.models.native.model import EXECUTIONS as NATIVE_EXECUTIONS
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.settings import Settings
from decoding.sampling.logits_processors import Allowed
from decoding.sampling.rule_names import SAMPLING, check_verify
from decoding.schedules.by_name import WALL
from decoding.values import RULES, check_settings, check_value
from eval.config import EvalConfig
from eval.measure.benchmarks import Benchmark, load_benchmark, render_turns
from eval.measure.lengths import length_cap_of, longest_draft, possible_lengths, rule_of
from eval.measure.measurement import Bench
from eval.measure.records import Arm, Condition
from eval.statistics.budgets import Shapes, shapes_of
from eval.statistics.schema import DrafterFacts, RunFacts
from heads.block.drafter import BlockDrafter
from jobs import drafters as drafter_list
from jobs.paths import resolve, resolve_model
from jobs.run_folder import hardware
from jobs.targets import load_job_target

WARM_UP_TOKENS = 24
MOST_PROMPTS = 4096  # in a batch
EMBEDDED = "embedded:"  # prefix of a path that names a file shipped with the project
EXECUTIONS = (AUTO, *NATIVE_EXECUTIONS)
# Fields that the decoding settings and the rows share.
SHARED = ("max_new_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def conditions(cfg: EvalConfig) -> list[Condition]:
    """Return all combinations of batch size and temperature."""
    return [
        Condition(temperature, batch)
        for batch in cfg.batch_sizes
        for temperature in cfg.temperatures
    ]


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def check(cfg: EvalConfig) -> None:
    """Raise UserError for settings that cannot be measured, before any model is loaded."""
    check_settings(cfg, (*SHARED[1:], "stop_strings", "stopping_threshold"))
    check_value("benchmark.stop_strings", cfg.benchmark.stop_strings, RULES["stop_strings"])
    check_verify(cfg.verify, SAMPLING)
    temperature, length = RULES["temperature"], RULES["max_new_tokens"]
    hot = bool(cfg.temperatures) and all(map(temperature.fits, cfg.temperatures))
    numbers = "numbers from 1"
    for key, fits, expected in (
        ("temperatures", hot, f"one or more of these: {temperature.expected}"),
        (
            "batch_sizes",
            bool(cfg.batch_sizes) and all(1 <= size <= MOST_PROMPTS for size in cfg.batch_sizes),
            f"one or more whole {numbers} to {MOST_PROMPTS}",
        ),
        ("num_draft_tokens", min(cfg.num_draft_tokens, default=1) >= 1, f"whole {numbers} up"),
        ("sweep", min(cfg.sweep, default=1) >= 1, f"whole {numbers} up, or [] for no sweep"),
        ("max_draft_tokens", cfg.max_draft_tokens >= 1, "a whole number from 1 up"),
        *(
            (key, vars(cfg)[key] >= 1, "1 or more")
            for key in ("samples", "repeats", "timing_repeats", "bootstrap_resamples")
        ),
        *(
            (key, vars(cfg)[key] >= 0, f"1 or more, or 0 for {meaning}")
            for key, meaning in (
                ("max_prompts", "all"),
                ("sweep_prompts", "no sweep"),
                ("show_texts", "none"),
            )
        ),
        ("engine_timeout", 0 < cfg.engine_timeout < math.inf, "more than 0 s"),
        ("max_seconds", 0 <= cfg.max_seconds < math.inf, "seconds, or 0 for all prompts"),
        (
            "max_new_tokens",
            cfg.max_new_tokens >= 2 and length.fits(cfg.max_new_tokens),
            "2 or more: one token leaves nothing to draft",
        ),
        ("target.execution", cfg.target.execution in ("", *EXECUTIONS), _one_of(EXECUTIONS)),
    ):
        if not fits:
            raise UserError(f"{key} is {attrgetter(key)(cfg)}, expected {expected}.")
    drafter_list.check_entries(cfg.drafters)
    processes_of(
        cfg.target.parallel, cfg.target.processes, cfg.target.backend, device_of(cfg.target.device)
    )
    if cfg.allowed:
        _allowed(cfg.allowed)
    if not cfg.num_draft_tokens and not (cfg.sweep and cfg.sweep_prompts):
        raise UserError(
            "num_draft_tokens is empty, and there is no sweep to choose it. "
            "Set num_draft_tokens=[4], or sweep=[1,2,4] with sweep_prompts=8."
        )
    if cfg.sweep and 0 < cfg.sweep_prompts < (rows := max(cfg.batch_sizes)):
        raise UserError(
            f"sweep_prompts is {cfg.sweep_prompts}, expected {rows} or more, as batch_sizes has "
            f"{rows}. Or set the draft length instead (sweep=[] num_draft_tokens=[4])."
        )


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Models, prompts and facts that a run needs."""

    bench: Bench
    run: RunFacts
    facts: dict[str, DrafterFacts]
    prompt_file: Path
    inputs: list[Path]  # for the manifest
    shapes: Shapes  # bytes and operations of the models' forwards
    # drafter -> its folder and the dtype of its model; absent: it has no folder
    folders: dict[str, tuple[Path, str]]


def load(cfg: EvalConfig) -> Loaded:
    """Load target, drafters, tokenizer and prompts.

    Raises UserError for parts that are missing or damaged, or that do not fit together.
    """
    folder, device = resolve_model(cfg.target.path), device_of(cfg.target.device)
    chosen = drafter_list.with_execution(cfg.target, folder)
    # engines are compared without a drafter too
    no_drafter = not isinstance(cfg.engine, str) and len(cfg.engine) > 1
    mappings = drafter_list.describe(
        cfg.drafters, chosen, cfg.prompt_lookup_control, may_be_empty=no_drafter
    )
    uses = drafter_list.uses(
        mappings, drafter_list.DrafterUse(cfg.stopping, cfg.stopping_threshold, cfg.schedule)
    )
    target = load_job_target(
        chosen, folder, cfg.threads, Path(cfg.output_dir), batch_size=max(cfg.batch_sizes)
    )
    _check_lengths(cfg, target)
    worker_devices = {device: _worker_device(target, uses.values())}
    drafters = drafter_list.build(mappings, uses, folder, worker_devices)
    uses = {
        name: use.with_default_stopping(drafters[name].capabilities, target)
        for name, use in uses.items()
    }
    for drafter in drafters.values():
        drafter.prepare(target, None)  # an unfit drafter fails now, not after an hour
    tokenizer = load_tokenizer(folder, cfg.target.trust_remote_code)
    benchmark, prompt_files = _load_prompts(cfg, tokenizer, target.max_length)
    folders = {
        name: (Path(mapping["folder"]), mapping.get("dtype") or cfg.target.dtype)
        for name, mapping in mappings.items()
        if "folder" in mapping
    }
    facts = {
        name: _facts_of(cfg, name, drafter, uses[name], target, folders.get(name))
        for name, drafter in drafters.items()
    }
    inputs = [folder, *prompt_files, *(drafter_folder for drafter_folder, _ in folders.values())]
    settings = settings_of(cfg, stop_tokens(folder, tokenizer), tokenizer)
    bench = Bench(
        target, drafters, tokenizer, benchmark, settings, cfg.verify, uses, cfg.samples, cfg.repeats
    )
    shapes = shapes_of(folder, target, mappings, drafters)
    run = run_facts(cfg, target, benchmark, device)
    return Loaded(bench, run, facts, prompt_files[0], inputs, shapes, folders)


def _check_lengths(cfg: EvalConfig, target: Target) -> None:
    """Raise UserError for drafts longer than the target's context, before they are timed."""
    for key, length in (
        ("num_draft_tokens", max(cfg.num_draft_tokens, default=0)),
        ("sweep", max(cfg.sweep, default=0)),
        ("max_draft_tokens", cfg.max_draft_tokens),
    ):
        if length > target.max_length:
            raise UserError(
                f"{key} goes up to {length}, expected at most {target.max_length}, the context of "
                f"'{target.name}' in tokens."
            )


def _load_prompts(
    cfg: EvalConfig, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[Benchmark, list[Path]]:
    """Return the benchmark and its files: the prompts, then those of the sweep and the examples.

    max_length: the target's context in tokens. A sweep that does not run has no file.
    """
    asked = cfg.benchmark
    swept = asked.sweep_path if cfg.sweep and cfg.sweep_prompts else ""
    prompts, sweep, shots = (
        str(resolve(path)) if path else "" for path in (asked.path, swept, asked.shots)
    )
    benchmark = load_benchmark(
        dataclasses.replace(asked, path=prompts, sweep_path=sweep, shots=shots),
        tokenizer,
        max_length=max_length,
        max_new_tokens=cfg.max_new_tokens,
        limit=cfg.max_prompts,
    )
    return benchmark, [Path(file) for file in (prompts, sweep, shots) if file]


def _worker_device(target: Target, uses: Iterable[drafter_list.DrafterUse]) -> str:
    """Return the device for drafters in workers; print a note if it is the target's card."""
    device = device_for_drafter(target)
    on_card = target.device.type == "cuda" and torch.device(device) == target.device
    if on_card and any(use.schedule in WALL for use in uses):
        print(f"note: no other card is free, so drafters in workers share {device} with the target")
    return device


def settings_of(cfg: EvalConfig, stop_token_ids: tuple[int, ...], tokenizer: Any) -> Settings:
    """Return the decoding settings that all conditions share."""
    return Settings(
        allowed=_allowed(cfg.allowed)(tokenizer) if cfg.allowed else None,
        stop_strings=(*cfg.stop_strings, *cfg.benchmark.stop_strings),
        text_of=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        stop_token_ids=stop_token_ids if cfg.stop_at_eos else (),
        **{name: vars(cfg)[name] for name in SHARED},
    )


def _allowed(name: str) -> Callable[[Any], Allowed]:
    """Import the function that `allowed` names. Raises UserError if that fails."""
    try:
        found = imported(name)
        if not callable(found):
            raise ImportError(f"it is a {type(found).__name__}")
        return found  # type: ignore[no-any-return]
    except ImportError as error:
        raise UserError(
            f"allowed={name} cannot be imported: {without_stop(error)}. Expected the "
            f"package.module.function that takes the tokenizer and returns a function from the ids "
            f"of a text to the ids that may follow."
        ) from error


def run_facts(cfg: EvalConfig, target: Target, benchmark: Benchmark, device: str) -> RunFacts:
    """Return the facts that all rows of the run share."""
    machine = hardware()
    embedded = cfg.target.path.startswith(EMBEDDED)
    return RunFacts(
        target=cfg.target.path.replace(":", " ") if embedded else target.name,
        target_layers=target.num_layers,
        target_parameters=target.num_parameters,
        benchmark=benchmark.name,
        examples_hash=benchmark.examples_hash,
        backend=target.backend,
        dtype=precision(target),
        device=device,
        threads=torch.get_num_threads(),
        hardware=machine["gpus"][0] if device.startswith("cuda") else machine["cpu"],
        shards=cfg.shards,
        shards_per_device=shards_per_device(cfg.shards, device),
        **{name: vars(cfg)[name] for name in ("verify", "allowed", "bootstrap_resamples", *SHARED)},
    )


def shards_per_device(shards: int, device: str) -> int:
    """Return how many of the processes that share the prompts run on one processor or GPU."""
    cards = max(1, count_gpus()) if device.startswith("cuda") else 1
    return math.ceil(shards / cards)


def _facts_of(
    cfg: EvalConfig,
    name: str,
    drafter: Drafter,
    use: drafter_list.DrafterUse,
    target: Target,
    stored: tuple[Path, str] | None,
) -> DrafterFacts:
    """Return the facts that rows state about a drafter.

    stored: folder and dtype of the drafter's model; None: it has none. Raises UserError if the
    drafter's entry sets a max_draft_tokens that would have no effect.
    """
    length_cap = length_cap_of(name, use, drafter.capabilities, target, cfg.max_draft_tokens)
    facts = DrafterFacts(
        name=name,
        layers=drafter.num_layers,
        parameters=drafter.num_parameters,
        one_pass=drafter.capabilities.steps == "round",
        stopping=use.stopping or "fixed",
        schedule=use.schedule,
        length_rule=rule_of(use.schedule, bool(cfg.num_draft_tokens), length_cap),
        verify=use.verify,
        dtype=stored[1] if stored else "",
        length_cap=length_cap,
        draft_vocab_size=_draft_vocab_size(drafter, stored[0]) if stored else 0,
        calibrated_at=_calibrated_at(drafter, stored[0]) if stored else None,
        draft_shape=drafter.capabilities.shape,
    )
    if facts.draft_shape == "chain":
        return facts
    nodes = {gamma: drafter.width(gamma) for gamma in possible_lengths(facts, cfg)}
    return dataclasses.replace(facts, tree_nodes=nodes)


def _draft_vocab_size(drafter: Drafter, folder: Path) -> int:
    """Return the number of tokens that a drafter can propose; 0: all of the target's."""
    if isinstance(drafter, OtherVocabulary):
        return len(drafter.vocabularies.target_ids_N) if drafter.rule == TOKENS else 0
    return draft_vocab_size(folder)


def _calibrated_at(drafter: Drafter, folder: Path) -> float | None:
    """Return the temperature at which the confidences were calibrated that end a drafter's drafts.

    None if nothing ends them, they are not calibrated, or the card does not give a temperature.
    """
    if not isinstance(drafter, BlockDrafter) or not drafter.ends_by_confidence:
        return None
    file = folder / CARD
    figures = read_json(file).get("acceptance", {}) if file.is_file() else {}
    found = figures.get("temperature") if drafter.config.temperatures else None
    return None if found is None else float(found)


def widths(cfg: EvalConfig, loaded: Loaded) -> list[int]:
    """Return the numbers of new tokens at which the target is timed.

    These are 1, and the size of every possible proposal with the token before it. For wide trees,
    and for chains longer than the sweep's, only some widths are timed; V is interpolated between
    them.
    """
    drafters, facts = loaded.bench.drafters, loaded.facts
    deepest = max([*cfg.num_draft_tokens, *cfg.sweep])
    chain = range(1, deepest + 2)
    capped = max((one.length_cap or 0 for one in facts.values()), default=0)
    widest = 1 + max(one.width(longest_draft(facts[name], cfg)) for name, one in drafters.items())
    further = {*range(deepest + 5, capped + 1, 4), *range(16, widest, 16), capped + 1, widest}
    return [*chain, *sorted(n for n in further if n > deepest + 1)]


def median_prompt(bench: Bench) -> list[int]:
    """Return the token ids of the prompt of median length, for timing and warming up."""
    render, template = bench.benchmark.render, bench.benchmark.chat_template
    prompts = [
        render_turns(prompt.turns[:1], [], bench.tokenizer, render, template)
        for prompt in bench.benchmark.prompts
    ]
    return sorted(prompts, key=len)[len(prompts) // 2]


def warm_up(loaded: Loaded, cfg: EvalConfig) -> None:
    """Run every arm once, so that no measured generation is the first of its shape."""
    ids = median_prompt(loaded.bench)
    tokens = min(WARM_UP_TOKENS, cfg.max_new_tokens)
    brief = dataclasses.replace(loaded.bench.settings, max_new_tokens=tokens)
    short = dataclasses.replace(loaded.bench, settings=brief)
    arms = [
        Arm(name, gamma)
        for name, facts in loaded.facts.items()
        for gamma in possible_lengths(facts, cfg)
    ]
    for condition in conditions(cfg):
        for arm in [*loaded.bench.baselines(condition), *arms]:
            short.decode(condition, arm, [ids] * condition.batch_size)
