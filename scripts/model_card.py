"""Fill a drafter folder's README, its model card, with the figures and plots of evaluations.

    python scripts/model_card.py folder=FOLDER "runs=[RUN, ...]" [KEY=VALUE ...]

The table, plots and commands of finished runs of eval.run that measured these weights go into the
section "Measured" and the folder `figures`, those of earlier calls are replaced, and the front
matter gets the figures in the Hub's form. The weights stay as they are.
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from omegaconf import MISSING

from eval.report.model_card import FIGURES, README, make_card
from eval.report.text import count_label
from eval.statistics.comparison.evaluations import find_runs
from jobs.files import disk_error, write_text
from scripts.options import run_with_options

PLOT = re.compile(r"\d+\.png")


@dataclass
class Options:
    """Options of the card."""

    folder: str = MISSING  # drafter folder that a training job or scripts/export_head.py wrote
    # finished run folders of eval.run, or globs, whose figures and plots the card shows
    runs: list[str] = field(default_factory=list)
    target: str = ""  # name of the target on the Hub; empty: the one in the README, if any
    # the Hub's identifier of a licence, such as apache-2.0; empty: the one in the README
    license: str = ""


def run(options: Options) -> str:
    """Write the card and its plots into the folder; return what was done in one line.

    Raises UserError for a folder without a README, for runs of other weights, and if a file cannot
    be written.
    """
    folder = Path(options.folder).expanduser()
    runs = find_runs(options.runs) if options.runs else []
    made = make_card(folder, runs, options.target, options.license)
    try:
        if made.figures:
            (folder / FIGURES).mkdir(exist_ok=True)
            for old in (folder / FIGURES).iterdir():
                if PLOT.fullmatch(old.name):
                    old.unlink()
            for name, image in made.figures.items():
                (folder / name).write_bytes(image)
    except OSError as error:
        raise disk_error(folder / FIGURES, error) from error
    write_text(folder / README, made.text)
    found = count_label(len(runs), "evaluation"), count_label(len(made.figures), "plot")
    return f"{folder / README}: {', '.join(found)}"


if __name__ == "__main__":
    run_with_options(run, Options, __doc__)
