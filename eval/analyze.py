"""`python -m eval.analyze path=RUN`: the averages that the published demo prints, and more.

"Average tokens matched" is the number of tokens that a round emits. It includes one token of the
target's own, the bonus, so a drafter that is never right has an average of 1. The job prints the
two published lines for a run folder of eval.replay or eval.run or a published output file, and then
what they hide: accepted drafts, acceptance rates and the target's share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from decoding.errors import UserError
from eval.config import AnalyzeConfig
from eval.logged.entries import read_text
from eval.logged.published import TOTALS_EXPECTED, read_totals
from eval.logged.records import RECORDS, records_of
from eval.logged.rows import ReplayedOutput
from eval.logged.traces import PromptRounds, published_average, rounds_of_totals, rounds_of_trace
from eval.measure.records import AUTOREGRESSIVE
from eval.replay import OUTPUTS
from eval.report.text import number, rates
from eval.statistics import metrics
from jobs.job import job_main
from jobs.paths import resolve
from jobs.run_files import read_journal_lines

SHOWN = 12  # prompts whose averages are printed
CLOSE = 0.005  # averages that differ by less print the same


@dataclass
class Analyzed:
    """The outputs of one drafter at one draft length."""

    name: str
    num_draft_tokens: int  # 0: not known
    outputs: list[PromptRounds] = field(default_factory=list)
    tested: list[list[int]] = field(default_factory=list)  # by depth; empty: not known
    accepted: list[list[int]] = field(default_factory=list)


def run(cfg: AnalyzeConfig) -> Path:
    """Print the averages and return the path. Raises UserError for a file that holds no rounds."""
    check(cfg)
    if cfg.dry_run:
        print(f"would analyze {cfg.path}")
        return Path(cfg.path)
    path = resolve(cfg.path)
    for one in read(path, cfg.num_draft_tokens):
        print("\n".join(lines(one)), end="\n\n")
    return path


def check(cfg: AnalyzeConfig) -> None:
    """Raise UserError without a path, and for an invalid draft length."""
    if not cfg.path:
        raise UserError(
            "path is empty, expected a run folder of eval.replay or eval.run, or an output file in "
            "the published format: path=RUN."
        )
    if cfg.num_draft_tokens < 0:
        raise UserError(
            f"num_draft_tokens is {cfg.num_draft_tokens}, expected 1 or more, or 0 if not known."
        )


def read(path: Path, num_draft_tokens: int = 0) -> list[Analyzed]:
    """Return the outputs of every drafter and draft length in a run folder or output file.

    Raises UserError, with the line, for damaged and malformed files.
    """
    folder = path if path.is_dir() else path.parent
    if path.name == OUTPUTS or (path.is_dir() and (path / OUTPUTS).is_file()):
        return _of_replay(folder / OUTPUTS)
    if path.name == RECORDS or (path.is_dir() and (path / RECORDS).is_file()):
        return _of_run(folder)
    if path.is_dir():
        raise UserError(
            f"{path} holds neither {OUTPUTS} nor {RECORDS}, expected a finished run of "
            f"eval.replay, a run of eval.run, or an output file in the published format."
        )
    content = read_text(path, TOTALS_EXPECTED)
    outputs = rounds_of_totals(path, read_totals(path, content), num_draft_tokens)
    return [Analyzed(path.name, num_draft_tokens, outputs)]


def _of_replay(path: Path) -> list[Analyzed]:
    found = read_journal_lines(path, lambda values: ReplayedOutput(**values))
    if found.wrong or not found.records:
        raise UserError(
            f"{path}, {(found.wrong or ['no lines'])[0]}. Replay again, with another output_dir=."
        )
    return _grouped(
        (one.drafter, one.num_draft_tokens, one.trace, one.tested_by_depth, one.accepted_by_depth)
        for one in found.records
    )


def _of_run(folder: Path) -> list[Analyzed]:
    records = [one for one in records_of(folder) if not one.drafter.startswith(AUTOREGRESSIVE)]
    main = [one for one in records if one.part == "main"] or records
    serial = [one for one in main if one.trace and not one.lanes_seconds]
    if not serial:
        raise UserError(
            f"{folder} holds no rounds of a drafter in turn with its target, expected some."
        )
    return _grouped(
        (
            f"{one.drafter}, {one.condition.label}",
            one.num_draft_tokens,
            one.trace,
            one.tested_by_depth,
            one.accepted_by_depth,
        )
        for one in serial
    )


def _grouped(
    outputs: Iterable[tuple[str, int, str, list[int], list[int]]],
) -> list[Analyzed]:
    groups: dict[tuple[str, int], Analyzed] = {}
    for name, gamma, trace, tested, accepted in outputs:
        group = groups.setdefault((name, gamma), Analyzed(name, gamma))
        group.outputs.append(rounds_of_trace(trace))
        group.tested.append(tested)
        group.accepted.append(accepted)
    return list(groups.values())


def lines(one: Analyzed) -> list[str]:
    """Return the published two lines and what they hide."""
    rounds = sum(len(output.emitted) for output in one.outputs)
    tokens = sum(sum(output.emitted) for output in one.outputs)
    accepted = sum(output.accepted for output in one.outputs)
    means = [f"{output.mean:.2f}" for output in one.outputs[:SHOWN]]
    more = f", ... ({len(one.outputs)} outputs)" if len(one.outputs) > SHOWN else ""
    tau = tokens / rounds
    known = f", num_draft_tokens {one.num_draft_tokens}" if one.num_draft_tokens else ""
    bonus = "Only the last round of an output may lack it"
    if not one.tested:
        bonus = "Assumed: the file does not tell which token of a round it is"
    found = [
        f"{one.name}{known}",
        f"Average tokens matched per prompt: {', '.join(means)}{more}",
        f"Average tokens matched per dataset: {tau:.4f}",
        f"  of these, accepted drafts: {accepted / rounds:.4f} a round; the target's own token, "
        f"the bonus: {(tokens - accepted) / rounds:.4f}. {bonus} ({rounds:,} rounds, {tokens:,} "
        f"tokens)",
        f"  share of the text that was drafted: {accepted / tokens:.1%}",
    ]
    found += _acceptance(one)
    published = published_average(one.outputs)
    if abs(published - tau) >= CLOSE:
        found.append(
            f"  the published script prints {published:.4f} for the dataset: it leaves out the "
            f"first round, counts the last one twice and may take two prompts for one"
        )
    return found


def _acceptance(one: Analyzed) -> list[str]:
    """Return a line on the acceptance rate, if the draft length is known."""
    tested_D, accepted_D = metrics.add_by_depth(one.tested), metrics.add_by_depth(one.accepted)
    assumed = ""
    if not one.tested and one.num_draft_tokens:
        gamma = one.num_draft_tokens
        assumed = f" (if every round drafted {gamma} tokens, which lookups do not)"
        depths = [emitted - 1 for output in one.outputs for emitted in output.emitted]
        accepted_D = [sum(depth >= k for depth in depths) for k in range(1, gamma + 1)]
        tested_D = [len(depths), *accepted_D[:-1]]
    if not tested_D:
        return ["  acceptance rate: not known without the draft length (num_draft_tokens=N)"]
    by_depth = rates(metrics.alpha_by_depth(tested_D, accepted_D))
    return [
        f"  acceptance rate alpha: {number(metrics.alpha(tested_D, accepted_D), 4)}; by depth "
        f"{by_depth}{assumed}"
    ]


if __name__ == "__main__":
    job_main("eval.analyze", AnalyzeConfig, run, check)
