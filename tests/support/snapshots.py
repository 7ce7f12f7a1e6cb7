"""Readers of what must survive a change of the code's structure.

tests/test_compatibility.py and tests/test_inventory.py use them. Most use command lines, files and
the front door, so that moving a class does not affect them.
"""

import json
import runpy
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
CONF = ROOT / "conf"
TOLERANCE = 1e-9
# The fields of a line of records.jsonl that are compared; none is a time.
DRAFTED = (
    "part",
    "temperature",
    "drafter",
    "num_draft_tokens",
    "prompt_id",
    "tokens",
    "finish",
    "rounds",
    "tested_by_depth",
    "accepted_by_depth",
    "drafted",
    "draft_steps",
    "verified",
    "trace",
)
# The fields of a row of results.jsonl that are compared; none is a time.
COUNTED = (
    "drafter",
    "temperature",
    "num_draft_tokens",
    "prompts",
    "tokens",
    "rounds",
    "verify",
    "lossless",
    "alpha",
    "alpha_by_depth",
    "tested_by_depth",
    "accepted_by_depth",
    "tau",
    "distinct_4",
)

# Fields of a generation or of a row that depend on the draft lengths of its rounds.
LENGTHS = {
    "rounds",
    "tested_by_depth",
    "accepted_by_depth",
    "drafted",
    "draft_steps",
    "verified",
    "trace",
    "alpha",
    "alpha_by_depth",
    "tau",
}


def run_command(job: str, *arguments: str) -> int:
    """Run `python -m job arguments` in this process, and return its exit status."""
    before = sys.argv
    sys.argv = [job, *arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is already imported
            runpy.run_module(job, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return 0


def differences(
    expected: Any, found: Any, tolerance: float = TOLERANCE, path: str = ""
) -> list[str]:
    """Return a line for every place where two JSON values differ.

    tolerance: allowed difference between floats, relative to the expected value if that is above 1.
    path: name of the values in the lines.
    """
    where = path or "the value"
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        keys = [*expected, *(key for key in found if key not in expected)]
        lacking = [
            f"{path}.{key}: one side lacks it"
            for key in keys
            if key not in expected or key not in found
        ]
        shared = [key for key in keys if key in expected and key in found]
        inner = [
            differences(expected[key], found[key], tolerance, f"{path}.{key}") for key in shared
        ]
        return [*lacking, *(place for one in inner for place in one)]
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return [f"{where}: {len(expected)} entries, found {len(found)}"]
        pairs = enumerate(zip(expected, found, strict=True))
        return [
            place for i, (a, b) in pairs for place in differences(a, b, tolerance, f"{path}[{i}]")
        ]
    if isinstance(expected, float) and isinstance(found, int | float):
        near = abs(expected - found) <= tolerance * max(1.0, abs(expected))
        return [] if near else [f"{where}: {expected}, found {found}"]
    return [] if expected == found else [f"{where}: {expected!r:.80}, found {found!r:.80}"]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file with one object per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def drafted(run: Path) -> list[dict[str, Any]]:
    """Return the compared fields of every generation of an evaluation, in a fixed order.

    run: the run folder.
    """
    records = [
        {key: record[key] for key in DRAFTED} for record in json_lines(run / "records.jsonl")
    ]
    order = ("part", "temperature", "drafter", "num_draft_tokens", "prompt_id")
    return sorted(records, key=lambda record: [str(record[key]) for key in order])


def without_lengths(
    records: Iterable[Mapping[str, Any]], planned: Iterable[str]
) -> list[dict[str, Any]]:
    """Return the records, without the fields of LENGTHS for the drafters named in `planned`.

    A planner chooses draft lengths from estimates that may improve; the tokens may not change.
    """
    names = set(planned)
    return [
        {key: value for key, value in record.items() if key not in LENGTHS}
        if record["drafter"] in names
        else dict(record)
        for record in records
    ]


def counted(run: Path) -> list[dict[str, Any]]:
    """Return the compared fields of every row of an evaluation's results.jsonl."""
    return [{key: row[key] for key in COUNTED} for row in json_lines(run / "results.jsonl")]


def answered(
    engine: Any, prompts: Sequence[str], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the tokens, text and counts of the replies to prompts, each sent as a user's message.

    settings: keyword arguments of `generate`.
    """
    from decoding import generate

    replies = [
        generate(engine, [{"role": "user", "content": prompt}], **settings) for prompt in prompts
    ]
    counts = ("finish", "rounds", "drafted", "tested_by_depth", "accepted_by_depth", "trace")
    return [
        {
            "tokens": reply.tokens,
            "text": reply.text,
            **{name: vars(reply.stats)[name] for name in counts},
        }
        for reply in replies
    ]


def decisions(costs: Any) -> dict[str, Any]:
    """Return the milliseconds that costs predict for forwards, draft steps and rounds."""
    return {
        "plain_ms": costs.plain_ms,
        "target_ms": [costs.target_ms(n) for n in range(1, 25)],
        "step_ms": [costs.step_ms(beams) for beams in (1, 1.5, 2, 3, 4, 9)],
        "steps_ms": [costs.steps_ms(steps) for steps in range(1, 5)],
        "steps_ms_of_2_beams": [costs.steps_ms(steps, 2) for steps in range(1, 5)],
        "round_ms": [
            costs.round_ms(steps, nodes) for steps, nodes in ((0, 0), (1, 1), (2, 3), (4, 9))
        ],
        "rows": costs.rows,
        "beams": costs.frontier,
    }


def law_rows() -> dict[str, list[str]]:
    """Return a mapping from row of the law table to its rules and its special forms for laws."""
    from tests.decoding.rows import PICKED, ROWS

    forms = {"law 3": "table", "law 4, perfect": "perfect", "law 4, adversarial": "adversarial"}
    return {
        row.name: [
            *row.rules,
            *(law for law, form in forms.items() if getattr(row, form) is not None),
        ]
        for row in [*ROWS, *PICKED]
    }


def by_function(names: Iterable[str]) -> dict[str, list[str]]:
    """Return a mapping from test function to the ids of its parameters, duplicates included.

    names: names of tests, such as `test_x[id]`; a test without parameters has the id "".
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        function, _, parameters = name.partition("[")
        found.setdefault(function, []).append(parameters.removesuffix("]"))
    return found


def collect_all() -> list[str]:
    """Return the names of the tests of all tiers, except those that read this module.

    Pytest collects them in a new process.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    command += [
        "-o",
        "addopts=--import-mode=importlib",
        "--ignore=tests/test_compatibility.py",
        "--ignore=tests/test_inventory.py",
        "tests",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def lost(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the entries that occur less often in a name's list now than before: `name[entry]`."""
    gone = []
    for name, entries in before.items():
        missing = Counter(entries) - Counter(now.get(name, ()))
        gone += [f"{name}[{entry}]" if entry else name for entry in missing.elements()]
    return gone


# Required overrides of a job or a group.
GIVEN = {
    "distill.compact": ["model=FOLDER"],
    "distill.quality": ["model=FOLDER"],
    "eval.compare": ["runs=[RUN]"],
    "eval.doctor": ["drafter=FOLDER"],
}
GIVEN_OF = {"benchmark": ["benchmark.path=PROMPTS.jsonl"]}


def composed(job: str, override: str) -> Any:
    """Compose a job with an override of the inventory, and with those that the job requires.

    Raises the job's error if it rejects them.
    """
    from tests.test_readme import composed as of_arguments

    given = GIVEN_OF.get(override.partition("=")[0], [])
    return of_arguments(job, [*GIVEN.get(job, []), *([override] if override else []), *given])


def readme_commands() -> list[str]:
    """Return the commands of the README."""
    from tests.test_readme import commands

    return commands()


def named_drafters() -> dict[str, dict[str, Any]]:
    """Return each drafter of the registry by name: its class path and its keys in conf/drafter."""
    from decoding.drafters.registry import DRAFTERS

    return {
        name: {
            "class": entry.kind,
            "keys": sorted(yaml.safe_load((CONF / "drafter" / f"{name}.yaml").read_text())),
        }
        for name, entry in DRAFTERS.items()
    }


def row_fields(run: Path) -> dict[str, list[str]]:
    """Return the fields of the rows of results.jsonl, and those of the objects in each field.

    The fields of the rows are under the key "", those of objects under their field's name.
    """
    rows = json_lines(run / "results.jsonl")
    found = {"": {key for row in rows for key in row}}
    for row in rows:
        for key, value in row.items():
            inner = value if isinstance(value, list) else [value]
            if key not in ("t_target_ms", "V"):  # their keys are numbers
                for one in (one for one in inner if isinstance(one, dict)):
                    found.setdefault(key, set()).update(one)
    return {key: sorted(names) for key, names in found.items()}
