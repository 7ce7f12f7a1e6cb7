"""Write LOG.md and docs/experiments/index.md from the headers of docs/experiments/*.md.

python scripts/experiments_index.py
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.usage import show_usage

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "experiments"
FIELDS = ("Question", "Verdict", "Command", "Hardware", "Superseded by")
HEAD = """\
# Log of experiments

Newest first. Failures stay. `python scripts/experiments_index.py` writes this page from the files
in `docs/experiments/`. The figures that stand are collected in [benchmarks]({benchmarks}).

| date | experiment | verdict |
|---|---|---|
"""


@dataclass
class Experiment:
    """Header of one file in docs/experiments."""

    path: Path
    title: str
    fields: dict[str, str]

    @property
    def date(self) -> str:
        return self.path.name[:10]

    @property
    def is_superseded(self) -> bool:
        return self.fields["Superseded by"] != "nothing"


def read_experiment(path: Path) -> Experiment:
    """Read the header of one experiment.

    Raises ValueError if the file's name has no date, or its header lacks a title or a field.
    """
    if not re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.md", path.name):
        raise ValueError(f"{path}: expected a name like 2026-11-21-topic.md.")
    header = path.read_text("utf-8").split("\n\n", 2)
    if not header[0].startswith("# ") or len(header) < 3:
        raise ValueError(f"{path}: expected '# Title', header and text with blank lines between.")
    items = re.findall(r"^- \*\*(.+?):\*\* (.+?)(?=\n- |\Z)", header[1], re.DOTALL | re.MULTILINE)
    fields = {name: " ".join(value.split()) for name, value in items}
    if tuple(fields) != FIELDS:
        raise ValueError(
            f"{path}: the header has {', '.join(fields) or 'no fields'}; "
            f"expected {', '.join(FIELDS)}, in this order."
        )
    return Experiment(path, header[0].removeprefix("# ").strip(), fields)


def read_experiments() -> list[Experiment]:
    """Read all experiments, the newest first."""
    paths = sorted(FOLDER.glob("[0-9]*.md"))
    return sorted(map(read_experiment, paths), key=lambda e: e.date, reverse=True)


def index_text(experiments: list[Experiment], folder: str, benchmarks: str) -> str:
    """Return the index, with links relative to the file that it is written to."""
    rows = [
        f"| {e.date} | [{e.title}]({folder}{e.path.name}) |"
        f" {'*Superseded.* ' if e.is_superseded else ''}{e.fields['Verdict']} |\n"
        for e in experiments
    ]
    return HEAD.format(benchmarks=benchmarks) + "".join(rows)


def index_files() -> dict[Path, str]:
    """Return the two files of the index and the text that each should hold."""
    experiments = read_experiments()
    return {
        ROOT / "LOG.md": index_text(experiments, "docs/experiments/", "docs/benchmarks.md"),
        FOLDER / "index.md": index_text(experiments, "", "../benchmarks.md"),
    }


if __name__ == "__main__":
    show_usage(__doc__)
    for path, text in index_files().items():
        path.write_text(text, "utf-8")
