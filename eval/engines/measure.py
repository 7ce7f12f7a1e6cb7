"""Measurement of engines: each prompt is decoded by all of them in turn, and by ours.

An engine's processes all stay open and wait for their turn, so the arms of a prompt are neighbours
in time, and a slower machine slows them all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from decoding.errors import UserError
from decoding.rounds.ties import choice_scores, first_difference, top_two_gap
from eval.config import EvalConfig
from eval.engines.ours import OurEngine
from eval.engines.plan import GREEDY, EngineArm, EnginePlan, Trial, given_targets
from eval.engines.records import EngineRecord, record_from
from eval.measure.measurement import Task, render_turn, rotate
from eval.measure.records import Condition, append_lines, write_records
from eval.measure.session import tasks_of
from eval.measure.setup import Loaded, conditions
from jobs.files import write_text
from jobs.paths import resolve_model
from jobs.progress import ProgressBar
from jobs.run_files import read_journal_lines, read_object
from serving.engines.conversion import prepare
from serving.engines.interface import BatchResult, EngineConfig, Method, Sampling
from serving.engines.process import EngineProcess
from serving.engines.registry import ENGINES, OURS, python_of
from training.data.readers import Prompt

FILE = "engine_records.jsonl"
FACTS = "engines.json"  # versions of the engines, and what they do not run
WARM_UPS = 8  # prompts at most that an arm decodes before it is measured
STEADY = 1.5  # an arm is warm when a prompt is not faster than the one before by this factor
# Pause before each arm. An engine's threads go on spinning for up to 0.2 s after its answer, beside
# the arm that comes next, which is the same one in every rotation.
PAUSE_SECONDS = 0.3
# Tokens of a short text, and of its answer, that an arm then decodes untimed. While an engine waits
# for the others, the caches and a virtual machine's host drop its memory, which made SmolLM2's
# first token take 350 instead of 130 ms after five idle seconds.
WAKING_PROMPT, WAKING_ANSWER = 8, 4
_REMEDY = "Delete it and engine_records.jsonl: the engines are measured again"


class EngineSession:
    """The engines of a run, its records and the measurement of missing ones."""

    def __init__(self, cfg: EvalConfig, loaded: Loaded, plan: EnginePlan, folder: Path) -> None:
        self.cfg, self.loaded, self.plan = cfg, loaded, plan
        self.file, self.logs = folder / FILE, folder / "engines"
        found = read_journal_lines(self.file, record_from)
        found.report(self.file, "its unit is measured again")
        self.records: list[EngineRecord] = found.records
        write_records(self.file, self.records)  # without torn and damaged lines
        self._facts_file = folder / FACTS
        self.versions: dict[str, str] = {}
        if self._facts_file.is_file():
            self.versions = read_object(self._facts_file, _REMEDY, lambda facts: facts["versions"])
        self._ours = OurEngine(loaded.bench)
        self._started: dict[EngineArm, EngineProcess] = {}

    def measure(self) -> None:
        """Start the engines and measure the units that the run folder lacks."""
        missing = [task for task in self._tasks() if not self._is_complete(task)]
        if not missing:
            return
        with ExitStack() as stack:
            for arm in self.plan.arms:
                if arm.engine != OURS:
                    self._start(arm, stack)
            facts = {"versions": self.versions, "not_run": self.plan.not_run}
            write_text(self._facts_file, json.dumps(facts))
            self._warm_up()
            total = sum(self._decodings(task) for task in missing)
            with ProgressBar("engines", total) as bar:
                done = 0
                for task in missing:
                    self._measure_unit(task)
                    done += self._decodings(task)
                    bar.update(done, task.condition.label)

    def _tasks(self) -> list[Task]:
        """Return the units of the main part under every condition."""
        found = []
        for condition in conditions(self.cfg):
            found += tasks_of(self.cfg, self.loaded, condition)["main"]
        return found

    def _decodings(self, task: Task) -> int:
        repeats = self.cfg.repeats * self.loaded.bench.samples_at(task.condition)
        return repeats * task.turns * len(self.plan.trials(self.cfg, task.condition))

    def _records_of(self, task: Task) -> list[EngineRecord]:
        place = (task.condition, task.unit)
        return [record for record in self.records if (record.condition, record.unit) == place]

    def _is_complete(self, task: Task) -> bool:
        have = [record.trial for record in self._records_of(task)]
        counts = [have.count(trial) for trial in self.plan.trials(self.cfg, task.condition)]
        return min(counts) > 0 and len(set(counts)) == 1

    def _start(self, arm: EngineArm, stack: ExitStack) -> None:
        """Start the process of an arm. Raises UserError with the engine's words if it fails."""
        print(f"engines: starting {arm.engine}, {arm.method} {arm.drafter}", file=sys.stderr)
        name = "-".join(filter(None, (arm.engine, arm.method, arm.drafter.replace("/", "_"))))
        log = self.logs / f"{name}-{arm.num_draft_tokens}.log"
        try:
            python = python_of(arm.engine, self.cfg.engine_python)
            config, variables = prepare(arm.engine, self._config(arm), self.logs / "models", python)
            process = EngineProcess(
                ENGINES[arm.engine].worker,
                config,
                log,
                python,
                environment=variables,
                timeout=self.cfg.engine_timeout,
            )
        except UserError as error:
            raise UserError(f"{_key_of(arm)}: {error}") from error
        self._started[arm] = stack.enter_context(process)
        given = given_targets(self.cfg).get(arm.engine)
        self.versions[arm.engine] = process.version + (f", {given.name}" if given else "")

    def _config(self, arm: EngineArm) -> EngineConfig:
        cfg, target = self.cfg, self.loaded.bench.target
        path = given_targets(cfg).get(arm.engine) or resolve_model(cfg.target.path)
        drafter = str(self.plan.folders[arm.drafter].resolve()) if arm.loads_drafter else ""
        return EngineConfig(
            target=str(path.resolve()),
            dtype=cfg.target.dtype,
            device=self.loaded.run.device,
            threads=torch.get_num_threads(),
            max_length=min(target.max_length, self._longest() + arm.num_draft_tokens + 1),
            batch_size=max(cfg.batch_sizes),
            eager=cfg.target.execution == "eager",
            method=Method(arm.method, drafter, arm.num_draft_tokens),
        )

    def _longest(self) -> int:
        """Return the tokens of the longest prompt and its answer, or of all turns together."""
        bench = self.loaded.bench
        prompts = bench.benchmark.prompts
        if max(len(prompt.turns) for prompt in prompts) > 1:
            return bench.target.max_length
        longest = max(
            len(ids)
            for prompt in prompts
            for ids in render_turn(bench, [prompt], 0, {prompt.id: []})[1]
        )
        return longest + self.cfg.max_new_tokens

    def _warm_up(self) -> None:
        """Decode prompts with every arm until it is no longer much faster than before.

        Engines compile parts of themselves when they first need them, for seconds each.
        """
        bench = self.loaded.bench
        prompts = bench.benchmark.prompts[:WARM_UPS]
        for condition in conditions(self.cfg):
            rows = list(range(condition.batch_size))
            for trial in self.plan.trials(self.cfg, condition):
                sampling, fastest = self._sampling(condition, trial, 0), math.inf
                for prompt in prompts:
                    [ids] = render_turn(bench, [prompt], 0, {prompt.id: []})[1]
                    result = self._decode(trial, [ids] * condition.batch_size, sampling, rows)
                    pace = result.seconds / sum(len(answer.tokens) for answer in result.answers)
                    if STEADY * pace > fastest:
                        break
                    fastest = pace

    def _decode(
        self, trial: Trial, prompts_ids: Sequence[list[int]], sampling: Sampling, rows: list[int]
    ) -> BatchResult:
        if trial.arm.engine == OURS:
            return self._ours.decode(trial, prompts_ids, sampling, rows)
        try:
            return self._started[trial.arm].decode(prompts_ids, sampling)
        except UserError as error:
            raise UserError(f"{_key_of(trial.arm)}: {error}") from error

    def _measure_unit(self, task: Task) -> None:
        """Decode a unit, turn by turn, and write its records in one step."""
        bench, new = self.loaded.bench, list[EngineRecord]()
        for sample in range(bench.samples_at(task.condition)):
            answers: dict[str, list[str]] = {prompt.id: [] for prompt in task.prompts}
            for turn in range(task.turns):
                present, prompts_ids = render_turn(bench, task.prompts, turn, answers)
                if not present:
                    break
                results = self._decode_turn(task, sample, turn, prompts_ids)
                new += self._records(task, sample, turn, present, prompts_ids, results)
                own = next(iter(results.values()))
                for prompt, answer in zip(present, own.answers, strict=True):
                    text = bench.tokenizer.decode(answer.tokens, skip_special_tokens=True)
                    answers[prompt.id].append(text)
        if have := self._records_of(task):
            self.records = [record for record in self.records if record not in have]
            write_records(self.file, self.records)
        self.records += new
        append_lines(self.file, new)

    def _decode_turn(
        self, task: Task, sample: int, turn: int, prompts_ids: Sequence[list[int]]
    ) -> dict[Trial, BatchResult]:
        """Return the median of the repeats of each trial, our own autoregressive one first.

        The trials take turns in every repetition.
        """
        trials = self.plan.trials(self.cfg, task.condition)
        rows = [_request(task, sample, turn, row) for row in range(len(prompts_ids))]
        results: dict[Trial, list[BatchResult]] = {trial: [] for trial in trials}
        # The ends of the prompts, as an engine could reuse their beginnings.
        short = [ids[-WAKING_PROMPT:] for ids in prompts_ids]
        for again in range(self.cfg.repeats):
            for trial in rotate(trials, task.unit + turn + sample + again):
                time.sleep(PAUSE_SECONDS)
                sampling = self._sampling(task.condition, trial, rows[0])
                waking = dataclasses.replace(
                    sampling, max_new_tokens=min(WAKING_ANSWER, sampling.max_new_tokens)
                )
                self._decode(trial, short, waking, rows)
                result = self._decode(trial, prompts_ids, sampling, rows)
                results[trial].append(result)
        return {trial: median_result(repeats) for trial, repeats in results.items()}

    def _sampling(self, condition: Condition, trial: Trial, seed: int) -> Sampling:
        cfg = self.cfg
        return Sampling(
            max_new_tokens=cfg.max_new_tokens,
            temperature=condition.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
            seed=(cfg.seed * 1_000_003 + seed) % 2**31,
            stop_token_ids=self.loaded.bench.settings.stop_token_ids,
            ignore_eos=trial.ignore_eos,
        )

    def _records(
        self,
        task: Task,
        sample: int,
        turn: int,
        prompts: Sequence[Prompt],
        prompts_ids: Sequence[list[int]],
        results: dict[Trial, BatchResult],
    ) -> list[EngineRecord]:
        own = next(iter(results))
        found = []
        for trial, result in results.items():
            differences: list[tuple[int | None, float | None]] = [(None, None)] * len(prompts)
            if trial.rule == GREEDY and trial.ignore_eos == own.ignore_eos:
                differences = [
                    self._difference(ids, answer.tokens, base.tokens)
                    for ids, answer, base in zip(
                        prompts_ids, result.answers, results[own].answers, strict=True
                    )
                ]
            found.append(
                EngineRecord(
                    **vars(trial.arm),
                    rule=trial.rule,
                    ignore_eos=trial.ignore_eos,
                    temperature=task.condition.temperature,
                    batch_size=task.condition.batch_size,
                    unit=task.unit,
                    turn=turn,
                    sample=sample,
                    prompt_ids=[prompt.id for prompt in prompts],
                    outputs=[answer.tokens for answer in result.answers],
                    seconds=result.seconds,
                    first_token_seconds=[answer.first_token_seconds for answer in result.answers],
                    rounds=result.rounds,
                    drafted=result.drafted,
                    accepted=result.accepted,
                    tested_by_depth=result.tested_by_depth,
                    accepted_by_depth=result.accepted_by_depth,
                    differs_at=[at for at, _ in differences],
                    gaps=[gap for _, gap in differences],
                )
            )
        return found

    def _difference(
        self, ids: list[int], tokens: list[int], base: list[int]
    ) -> tuple[int | None, float | None]:
        """Return the index of the first token that differs from our target's, and the gap there."""
        at = first_difference(tokens, base)
        if at is None:
            return None, None
        bench = self.loaded.bench
        return at, top_two_gap(choice_scores(bench.target, [*ids, *base[:at]], bench.settings, 0))


def median_result(repeats: Sequence[BatchResult]) -> BatchResult:
    """Return the result with the median time, the faster of two medians."""
    return sorted(repeats, key=lambda result: result.seconds)[(len(repeats) - 1) // 2]


def _request(task: Task, sample: int, turn: int, row: int) -> int:
    """Return a number unique to each generation of a run: its noise key in our own loop."""
    return ((sample * 1_000_000 + task.unit) * 1_000 + turn) * 1_000 + row


def _key_of(arm: EngineArm) -> str:
    """Return the key of eval.run that an arm comes from, for an error."""
    if arm.loads_drafter:
        return f"engine={arm.engine}, drafters: {arm.drafter} (remove it, or the engine)"
    return f"engine={arm.engine}"


def read_not_run(folder: Path) -> list[str]:
    """Return the sentences of a run folder on what its engines do not run."""
    return read_object(folder / FACTS, _REMEDY, lambda facts: list(facts["not_run"]))
