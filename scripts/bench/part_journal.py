"""Journal of the finished parts of a long benchmark, and differences paired over seeds.

A part is one student or one evaluation. A call with the same settings continues after the finished
parts. Options that only choose which parts run do not count as settings, so the parts may run in
separate calls.
"""

import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from scipy.stats import t as student_t

from distill.regenerate.resume import Journal, read_journal
from jobs.config import plain
from jobs.files import write_text
from jobs.run_folder import git_revision

# options that change no figure
_NO_SETTINGS = ("work", "name", "cache_mb")


class PartJournal:
    """Journal of finished parts and their figures, WORK/<hash of the settings>/parts.jsonl."""

    def __init__(self, work: str, chosen: Any, parts: Collection[str]) -> None:
        """Open the journal. parts: names of the options that only choose which parts run."""
        left_out = (*parts, *_NO_SETTINGS)
        settings = {key: value for key, value in plain(chosen).items() if key not in left_out}
        text = json.dumps(settings, sort_keys=True)
        self.folder = Path(work) / hashlib.sha256(text.encode()).hexdigest()[:12]
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "settings.json", json.dumps(settings, indent=1))
        self._path = self.folder / "parts.jsonl"
        if known := len(self.all()):
            hint = f"{self._path} (delete it to measure again)"
            print(f"{known} parts are already measured: {hint}", file=sys.stderr)
        others = [revision for revision in self.revisions() if revision != git_revision()]
        if others:
            print(f"note: some with other code: {', '.join(others)}", file=sys.stderr)

    def _records(self) -> list[dict[str, Any]]:
        return read_journal(self._path) if self._path.is_file() else []

    def all(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (part, figures) of every finished part, in the order of measurement."""
        return [(record["part"], record["figures"]) for record in self._records()]

    def revisions(self) -> list[str]:
        """Return the git revisions of the code that measured the finished parts."""
        return sorted({str(record["git_revision"]) for record in self._records()})

    def figures(
        self,
        part: Mapping[str, Any],
        measure: Callable[..., dict[str, Any]],
        *given: Any,
        **named: Any,
    ) -> dict[str, Any]:
        """Return the figures of a part from the journal, or measure them and add them to it."""
        for known, figures in self.all():
            if known == part:
                return figures
        began = time.monotonic()
        found = measure(*given, **named)
        with Journal(self._path) as journal:
            journal.append([{"part": dict(part), "figures": found, "git_revision": git_revision()}])
        name = ", ".join(f"{key} {value}" for key, value in part.items())
        print(f"  {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return json.loads(json.dumps(found))  # in the form that the journal returns


Difference = dict[str, float | int | None]


def paired(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Difference:
    """Return the mean difference over the common seeds, with Student's 95 % interval.

    low and high are None for fewer than two common seeds, and the difference for none.
    """
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    mean = statistics.mean(differences) if differences else None
    low = high = None
    if mean is not None and (seeds := len(differences)) > 1:
        error = statistics.stdev(differences) / math.sqrt(seeds)
        reach = float(student_t.ppf(0.975, seeds - 1)) * error
        low, high = mean - reach, mean + reach
    return {"difference": mean, "low": low, "high": high, "seeds": len(differences)}


Runs = Mapping[str, Mapping[str, Any]]  # seed -> figures


def paired_figures(ours: Runs, theirs: Runs, keys: Iterable[str]) -> dict[str, Difference]:
    """Return the paired difference of every figure named in `keys`."""

    def by_seed(runs: Runs, key: str) -> dict[str, float]:
        return {seed: one[key] for seed, one in runs.items()}

    return {key: paired(by_seed(ours, key), by_seed(theirs, key)) for key in keys}
