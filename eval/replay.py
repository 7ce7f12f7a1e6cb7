"""`python -m eval.replay log=OUTPUTS`: acceptance of drafters on logged outputs, without a target.

Greedy verification accepts a draft as long as it equals the target's own text. So the rounds of
greedy speculative decoding follow from what the target wrote, and any drafter that drafts from text
alone can be ranked on a log: exactly those rounds, draft lengths and acceptance rates. Source of
the idea: the demo of "Decoding Speculative Decoding" (Yan et al. 2024, arXiv 2402.01528).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from decoding.devices import device_of
from decoding.engine import stop_tokens
from decoding.errors import UserError
from decoding.models.folder import has_config, is_gguf, read_config
from decoding.models.hub import name_of
from decoding.models.load import AUTO
from decoding.models.text.tokenizer import TOKENIZER_FILES, load_tokenizer
from decoding.stopping.policies import NAMES
from decoding.values import check_choice
from eval.config import ReplayConfig
from eval.logged.published import write_totals
from eval.logged.reading import read_log
from eval.logged.records import RECORDS
from eval.logged.replay import Replay, refuse_drafter, refuse_entry, refuse_mapping, replay
from eval.logged.rows import (
    ReplayedOutput,
    ReplayRow,
    context_notes,
    outputs_of,
    replay_table,
    rows_of,
)
from eval.logged.texts import LoggedTexts, Reader
from eval.logged.traces import emitted_tokens
from eval.measure.setup import EMBEDDED
from eval.report import text
from eval.report.terminal import print_tables
from jobs import drafters as drafter_list
from jobs.config import refuse_parallel
from jobs.files import write_text
from jobs.job import job_main
from jobs.paths import is_here, model_is_here, resolve, resolve_model
from jobs.run_files import read_journal_lines
from jobs.run_folder import RunFolder, hardware

ROWS, OUTPUTS, TOTALS = "replay.jsonl", "replays.jsonl", "totals"
NOTES = "notes"  # on what was read of the log, among the manifest's metrics
MOST_DRAFTED = 4096


def run(cfg: ReplayConfig) -> Path:
    """Replay and report; return the run folder with replay.jsonl and replays.jsonl.

    A dry run reads the log, if it is there, prints the plan and writes nothing. Raises UserError
    for invalid settings, for a log that cannot be read, is malformed, or is of other prompts or of
    another tokenizer, and for drafters that need more than the text.
    """
    check(cfg)
    if cfg.dry_run:
        _print_plan(cfg)
        return Path(cfg.output_dir)
    folder = RunFolder(cfg)
    rows_file, outputs_file = folder.path / ROWS, folder.path / OUTPUTS
    if folder.finished(rows_file, outputs_file):
        print(
            f"{folder.path} is finished; nothing is replayed again. Delete it, or set another "
            f"output_dir=, to replay again."
        )
        rows = read_rows(rows_file)
    else:
        rows = _replay(cfg, folder)
    notes = [*folder.manifest["metrics"].get(NOTES, []), *claims(rows[0])]
    print_tables([replay_table(rows)], context_notes(rows), notes, text.REPLAY_LEGEND, None)
    print(f"\nrows: {rows_file}\nrounds of every output: {outputs_file}")
    return folder.path


def check(cfg: ReplayConfig) -> None:
    """Raise UserError for settings that cannot be replayed, before anything is read."""
    for key, fits, expected in (
        ("log", bool(cfg.log), "a file or a run folder of eval.run: log=OUTPUTS.jsonl"),
        (
            "num_draft_tokens",
            bool(cfg.num_draft_tokens)
            and all(1 <= length <= MOST_DRAFTED for length in cfg.num_draft_tokens),
            f"one or more whole numbers from 1 to {MOST_DRAFTED}",
        ),
        ("max_outputs", cfg.max_outputs >= 0, "1 or more, or 0 for all"),
        ("bootstrap_resamples", cfg.bootstrap_resamples >= 1, "1 or more"),
    ):
        if not fits:
            raise UserError(f"{key} is {getattr(cfg, key)!r}, expected {expected}.")
    check_choice("benchmark.turns", cfg.benchmark.turns, ("first", "all"))
    if cfg.stopping is not None:
        check_choice("stopping", cfg.stopping, NAMES)
    refuse_parallel(cfg.target)
    for entry in cfg.drafters:
        refuse_entry(entry)
    drafter_list.check_entries(cfg.drafters)


def _replay(cfg: ReplayConfig, folder: RunFolder) -> list[ReplayRow]:
    """Replay all drafters and write all files, the manifest with its notes too; return the rows."""
    mappings, uses = describe_drafters(cfg)
    logged, vocab_size, stops = read_texts(cfg)
    drafters = drafter_list.build(mappings, uses, resolve_model(cfg.target.path, weights=False))
    for name, drafter in drafters.items():
        refuse_drafter(name, drafter, uses[name])
    inputs = _inputs(cfg, mappings)
    folder.write_manifest(inputs, {}, finished=False)
    shared = _shared(cfg)
    shared |= {"temperature": logged.temperature, "tokenized": logged.tokenized}
    rows: list[ReplayRow] = []
    outputs: list[ReplayedOutput] = []
    files = _names_of_files(drafters)
    for name, drafter in drafters.items():
        done = replay(
            drafter,
            uses[name],
            logged.texts,
            list(dict.fromkeys(cfg.num_draft_tokens)),
            stop_token_ids=stops,
            vocab_size=vocab_size,
            one_pass=cfg.one_pass,
        )
        rows += rows_of(
            name, drafter, uses[name], logged.texts, done, cfg.bootstrap_resamples, **shared
        )
        outputs += outputs_of(name, logged.texts, done)
        if cfg.write_totals:
            _write_totals(folder.path / TOTALS, files[name], done)
    write_text(folder.path / OUTPUTS, _lines(outputs))
    write_text(folder.path / ROWS, _lines(rows))
    metrics = {f"{row.drafter}, gamma {row.num_draft_tokens}": row.tau for row in rows}
    folder.write_manifest(inputs, {"tau": metrics, NOTES: describe(logged)}, finished=True)
    return rows


def describe_drafters(
    cfg: ReplayConfig,
) -> tuple[dict[str, dict[str, Any]], dict[str, drafter_list.DrafterUse]]:
    """Return the mappings of the drafters and their loop options, by name.

    Raises UserError for drafters that are known to need more than the text.
    """
    execution = "eager" if cfg.target.execution in ("", AUTO) else cfg.target.execution
    target = dataclasses.replace(
        cfg.target, device=device_of(cfg.target.device), execution=execution
    )
    mappings = drafter_list.describe(cfg.drafters, target, cfg.prompt_lookup_control)
    uses = drafter_list.uses(
        mappings, drafter_list.DrafterUse(cfg.stopping, cfg.stopping_threshold)
    )
    for name, mapping in mappings.items():
        refuse_mapping(name, mapping)
    return mappings, uses


def read_texts(cfg: ReplayConfig) -> tuple[LoggedTexts, int, tuple[int, ...]]:
    """Return the log's texts, the size of the target's vocabulary and its stop tokens."""
    folder = resolve_model(cfg.target.path, weights=False)
    is_model = has_config(folder)
    tokenizer = load_tokenizer(folder, cfg.target.trust_remote_code, of_model=is_model)
    vocab_size = int(read_config(folder)["vocab_size"]) if is_model else len(tokenizer)
    stops = stop_tokens(folder, tokenizer)
    log = read_log(cfg.log, cfg.requests)
    reader = Reader(log, cfg.benchmark, tokenizer, vocab_size, stops)
    return reader.read(cfg.max_outputs), vocab_size, stops


def describe(logged: LoggedTexts) -> list[str]:
    """Return warnings about the log, and notes on what was left out."""
    return [*logged.warnings, *(f"{note}." for note in logged.notes)]


def claims(row: ReplayRow) -> list[str]:
    """Return sentences on what the figures are."""
    if row.temperature:
        found = [
            f"The log was sampled at temperature {row.temperature:g}: the rounds are those of "
            f"greedy drafts on this sample. In a sampled run that writes it a lookup has the same "
            f"ones; a model's differ, as it drafts there with shared noise or by sampling."
        ]
    else:
        greedy = "" if row.temperature is not None else ", if it is greedy, which it does not state"
        found = [
            f"Exact for the tokens of the log{greedy}: the rounds are those of greedy speculative "
            f"decoding with the target that wrote them."
        ]
    if row.tokenized:
        found.append(
            f"{row.tokenized} of {row.outputs} outputs are text, tokenized here: the target may "
            f"have tokenized the same text differently, and its stop token is not replayed."
        )
    return found


def read_rows(path: Path) -> list[ReplayRow]:
    """Return the rows of replay.jsonl. Raises UserError for a damaged file."""
    found = read_journal_lines(path, lambda values: ReplayRow(**values))
    if found.wrong or not found.records:
        raise UserError(
            f"{path} does not hold rows of this version of eval.replay "
            f"({(found.wrong or ['no rows'])[0]}). Replay again, with another output_dir=."
        )
    return found.records


def _lines(items: Sequence[Any]) -> str:
    return "".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in items)


def _names_of_files(drafters: Iterable[str]) -> dict[str, str]:
    """Return drafter -> its name in the names of files; an equal later one gets a number."""
    found: dict[str, str] = {}
    for name in drafters:
        plain = "".join(letter if letter.isalnum() or letter in "-_+." else "_" for letter in name)
        names = itertools.chain([plain], (f"{plain}_{number}" for number in itertools.count(2)))
        found[name] = next(one for one in names if one not in found.values())
    return found


def _write_totals(folder: Path, name: str, done: Replay) -> None:
    folder.mkdir(exist_ok=True)
    for length, generations in done.generations.items():
        emitted = [emitted_tokens(one.trace) for one in generations]
        write_totals(folder / f"{name}-{length}.txt", emitted)


def _shared(cfg: ReplayConfig) -> dict[str, Any]:
    """Return the fields that all rows share, except those of the log's content."""
    device, machine = device_of(cfg.target.device), hardware()
    embedded = cfg.target.path.startswith(EMBEDDED)
    folder = resolve_model(cfg.target.path, weights=False)
    return {
        "log": Path(cfg.log).name,
        "target": cfg.target.path.replace(":", " ") if embedded else name_of(folder),
        "benchmark": cfg.benchmark.name or Path(cfg.benchmark.path or cfg.log).stem,
        "dtype": cfg.target.dtype,
        "threads": torch.get_num_threads(),
        "hardware": machine["gpus"][0] if device.startswith("cuda") else machine["cpu"],
        "seed": cfg.seed,
    }


def _inputs(cfg: ReplayConfig, mappings: dict[str, dict[str, Any]]) -> list[Path]:
    log, target = resolve(cfg.log), resolve_model(cfg.target.path, weights=False)
    files = [log / RECORDS if log.is_dir() else log]
    tokenizers = [target] if is_gguf(target) else [target / name for name in TOKENIZER_FILES]
    files += [file for file in tokenizers if file.is_file()]
    files += [resolve(one) for one in (cfg.benchmark.path, cfg.requests) if one]
    return files + [Path(one["folder"]) for one in mappings.values() if "folder" in one]


def _print_plan(cfg: ReplayConfig) -> None:
    """Print what would be replayed; files may be missing."""
    if is_here(cfg.log) and model_is_here(cfg.target.path, weights=False):
        if not _missing(cfg.drafters):
            describe_drafters(cfg)
        logged, _, _ = read_texts(cfg)
        outputs = text.count_label(len(logged.texts), "output")
        print(f"log: {outputs}, {logged.tokens:,} tokens ({logged.kind})")
        print("".join(f"{note}\n" for note in describe(logged)), end="")
    names = [
        one.get("name", one.get("use")) if isinstance(one, dict) else one for one in cfg.drafters
    ]
    names += [drafter_list.CONTROL] * cfg.prompt_lookup_control
    lengths = ", ".join(map(str, cfg.num_draft_tokens))
    there = "" if is_here(cfg.log) else " (not there yet)"
    for path in _missing(cfg.drafters):
        print(f"not there yet: {path}")
    print(
        f"would replay {', '.join(map(str, dict.fromkeys(names)))} at draft lengths {lengths} on "
        f"{cfg.log}{there}, and write {ROWS} and {OUTPUTS} into {cfg.output_dir}"
    )


def _missing(entries: Sequence[Any]) -> list[str]:
    """Return the folders of drafters that are not there: earlier stages may still write them."""
    named = [one.get(key) for one in entries if isinstance(one, dict) for key in ("use", "folder")]
    named += [one for one in entries if isinstance(one, str)]
    paths = [one for one in named if isinstance(one, str) and "/" in one and "*" not in one]
    return list(dict.fromkeys(path for path in paths if not model_is_here(path)))


if __name__ == "__main__":
    job_main("eval.replay", ReplayConfig, run, check)
