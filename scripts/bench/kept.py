"""What a long benchmark has measured already: a run that is cut loses the part it was at, and the
same settings go on behind it.

A part is one student, or one evaluation; which parts a call runs is no setting, so that pieces of a
comparison may be run one by one.
"""

import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from scipy.stats import t as student_t

from distill.regenerate.resume import Journal, read_journal
from jobs.config import plain
from jobs.files import write_text
from jobs.run_folder import git_revision

# where results lie and how much is remembered changes none of them
_NO_SETTINGS = ("work", "name", "cache_mb")


class Kept:
    """Figures of finished parts in `folder`/parts.jsonl; the folder is one of the settings' own
    under `work`.
    """

    def __init__(self, work: str, chosen: Any, parts: Collection[str]) -> None:
        """parts: names of the options that say which parts are run."""
        settings = {
            key: value for key, value in plain(chosen).items() if key not in (*parts, *_NO_SETTINGS)
        }
        text = json.dumps(settings, sort_keys=True)
        self.folder = Path(work) / hashlib.sha256(text.encode()).hexdigest()[:12]
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / "settings.json", json.dumps(settings, indent=1))
        self._path = self.folder / "parts.jsonl"
        known = len(self.all())
        if known:
            print(
                f"{known} parts were measured before: {self._path} (delete it to measure anew)",
                file=sys.stderr,
            )
        others = [revision for revision in self.revisions() if revision != git_revision()]
        if others:
            print(f"note: some of them on other code: {', '.join(others)}", file=sys.stderr)

    def all(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(part, figures) of every finished part, those of earlier calls too."""
        records = read_journal(self._path) if self._path.is_file() else []
        return [(record["part"], record["figures"]) for record in records]

    def revisions(self) -> list[str]:
        """The code that the finished parts were measured on."""
        records = read_journal(self._path) if self._path.is_file() else []
        return sorted({str(record["git_revision"]) for record in records})

    def figures(
        self,
        part: Mapping[str, Any],
        measure: Callable[..., dict[str, Any]],
        *given: Any,
        **named: Any,
    ) -> dict[str, Any]:
        """The figures of a part: as they were kept, else of `measure(*given, **named)`, kept."""
        for known, figures in self.all():
            if known == part:
                return figures
        began = time.monotonic()
        found = measure(*given, **named)
        with Journal(self._path) as journal:
            journal.append([{"part": dict(part), "figures": found, "git_revision": git_revision()}])
        name = ", ".join(f"{key} {value}" for key, value in part.items())
        print(f"  {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return json.loads(json.dumps(found))  # as the journal gives them back


def paired(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float | int | None]:
    """Mean difference over the seeds that both have, with Student's 95 % interval of the paired
    differences; of one seed none is given.
    """
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return {"difference": None, "low": None, "high": None, "seeds": 0}
    mean, seeds = statistics.mean(differences), len(differences)
    if seeds < 2:
        return {"difference": mean, "low": None, "high": None, "seeds": seeds}
    reach = (
        float(student_t.ppf(0.975, seeds - 1)) * statistics.stdev(differences) / math.sqrt(seeds)
    )
    return {"difference": mean, "low": mean - reach, "high": mean + reach, "seeds": seeds}
