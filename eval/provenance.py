"""Facts on how the numbers of an evaluation were obtained, for the end of its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.config import EvalConfig
from eval.measure.records import Record
from eval.measure.rounds import FILE as ROUNDS
from eval.measure.session import drafter_names, prompts_by_part
from eval.measure.setup import Loaded
from eval.report.page import Provenance
from eval.report.text import traced_texts
from eval.statistics.schema import Row, main_rows
from eval.tasks.checking import FILE as ANSWERS
from eval.tasks.forms import PUBLISHED, SEVERAL_FILES
from jobs.run_folder import RunFolder

NOT_MEASURED = (
    "Any machine, dtype, batch size, temperature or prompt that is not named above.",
    "Quality of the target's answers: drafting does not change them.",
)
# file of a run folder -> what a line of it is; the page names those that a run has
RAW_DATA = {
    "results.jsonl": "rows",
    "records.jsonl": "all generations",
    ROUNDS: "every round",
    "parts.jsonl": "part times",
    ANSWERS: "each answer's check",
}


def provenance(
    cfg: EvalConfig,
    folder: RunFolder,
    loaded: Loaded,
    rows: Sequence[Row],
    records: Sequence[Record],
) -> Provenance:
    """Return the facts of a run. rows, records: of our own loop."""
    manifest = folder.manifest
    versions = manifest["versions"].items()
    text_of = loaded.bench.settings.text_of
    assert text_of is not None, "eval.measure.setup sets it"
    return Provenance(
        command=manifest["command"],
        date=manifest["started"].replace("T", " "),
        versions={name: version for name, version in versions if version != "absent"},
        prompt_counts=loaded.bench.benchmark.counts,
        prompt_file=loaded.prompt_file.name,
        prompt_notes=_prompt_notes(cfg),
        raw_data={file: what for file, what in RAW_DATA.items() if (folder.path / file).is_file()},
        revision=manifest["git_revision"],
        unmeasured=_unmeasured(cfg, loaded, rows),
        draft_lengths=describe_draft_lengths(
            cfg, loaded, len({record.prompt_id for record in records if record.part == "sweep"})
        ),
        repeats=cfg.repeats,
        texts=traced_texts(records, drafter_names(loaded), text_of, cfg.show_texts),
    )


def _prompt_notes(cfg: EvalConfig) -> list[str]:
    """Return the worked examples before a prompt, and the strings that end its answer."""
    benchmark, found = cfg.benchmark, list[str]()
    if benchmark.shots:
        found.append(f"{benchmark.num_shots} worked examples of {benchmark.shots} before each")
    if stops := [*cfg.stop_strings, *benchmark.stop_strings]:
        found.append(f"answers end at {', '.join(map(repr, stops))}")
    return found


def _unmeasured(cfg: EvalConfig, loaded: Loaded, rows: Sequence[Row]) -> list[str]:
    """Return sentences on the conditions and prompts that were not measured."""
    counts, found = loaded.bench.benchmark.counts, []
    if min(cfg.temperatures) > 0:
        found.append("Greedy decoding.")
    if max(cfg.temperatures) == 0:
        found.append("Temperatures above 0.")
    found += NOT_MEASURED
    if counts["too_long"]:
        found.append(f"{counts['too_long']} prompts: too long for the context.")
    if counts["over_limit"]:
        found.append(f"{counts['over_limit']} prompts: over the limit of max_prompts.")
    for first in main_rows(rows)[:1]:
        found += _unmeasured_by_bound(first)
        found += _unmeasured_as_published(cfg, first)
    for batch in cfg.batch_sizes:
        if left := sum(len(part) % batch for part in prompts_by_part(cfg, loaded)):
            found.append(f"{left} prompts at batch {batch}: they do not fill a batch.")
    return found


def _unmeasured_by_bound(first: Row) -> list[str]:
    """Return a sentence on the prompts that max_seconds left, if it left some."""
    left = first.prompts_asked - first.prompts
    if left <= 0:
        return []
    over = (
        f"was over, after {first.overrun_seconds:.0f} s, when the minimum of {first.prompts} was "
        f"measured"
        if first.overrun_seconds
        else "ended before they were measured"
    )
    return [
        f"{left} of {first.prompts_asked} prompts: max_seconds={first.max_seconds:g} {over}. "
        f"The prompts are measured in an order shuffled by the seed."
    ]


def _unmeasured_as_published(cfg: EvalConfig, first: Row) -> list[str]:
    """Return a sentence if fewer prompts were measured than the published benchmark has."""
    published = PUBLISHED.get(cfg.benchmark.format, 0)
    if first.prompts >= published:
        return []
    least = "or more " if cfg.benchmark.format in SEVERAL_FILES else ""
    return [
        f"{published - first.prompts:,} of the {published:,} {least}prompts that "
        f"{first.benchmark} has as published. max_prompts=0 with benchmark.sweep_path=FILE, or "
        f"with sweep=[] and num_draft_tokens=, measures all prompts of a file."
    ]


def describe_draft_lengths(cfg: EvalConfig, loaded: Loaded, measured: int | None = None) -> str:
    """Describe how draft lengths are set, and on which prompts.

    measured: number of sweep prompts that were measured; None: all.
    """
    lengths, count = cfg.num_draft_tokens, len(prompts_by_part(cfg, loaded)[0])
    set_by = [f"given: {', '.join(map(str, lengths))}"] if lengths or not count else []
    if count:
        file = Path(cfg.benchmark.sweep_path or loaded.prompt_file).name
        some = f"{measured} of " if measured is not None and measured < count else ""
        set_by.append(
            f"{'a' if lengths else 'chosen for each drafter in a'} sweep on {some}{count} prompts "
            f"from all over {file}, none of which is in the main part"
        )
    caps: dict[int, list[str]] = {}
    for name, facts in loaded.facts.items():
        if facts.length_cap is not None:
            caps.setdefault(facts.length_cap, []).append(name)
    set_by += [
        f"up to {cap} by the stopping rule of {', '.join(names)}" for cap, names in caps.items()
    ]
    return "; ".join(set_by)
