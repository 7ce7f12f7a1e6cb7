"""Print the configuration of every stage of every experiment, one value per line.

    python -m scripts.stage_values [KEY=VALUE ...]

Compare the output before and after a change. Settings apply to the experiments that have the key.
"""

import sys
from collections.abc import Iterator
from typing import Any

import yaml

from jobs.composing import CONF, compose_job
from jobs.config import plain, typed, valid_keys
from jobs.schemas import schema_of
from jobs.stages import compose_stage
from scripts.usage import show_usage

# required settings of experiments
ASKED = ["draft_model=DRAFT_MODEL", "benchmark_folder=BENCHMARK_FOLDER", "output_dir=OUTPUT_DIR"]


def main(given: list[str]) -> None:
    """Compose and print every stage. given: settings as KEY=VALUE."""
    for file in sorted((CONF / "experiment").glob("*.yaml")):
        job = str(yaml.safe_load(file.read_text()).get("job", "distill.train"))
        schema = schema_of(job)
        keys = valid_keys(schema)
        fits = [text for text in [*ASKED, *given] if text.lstrip("+").split("=")[0] in keys]
        composed = compose_job(job, schema, [f"+experiment={file.stem}", *fits])
        config = typed(composed, schema)
        for name in config.stages:
            stage = compose_stage(name, config, composed)
            for member in stage.members:
                for key, value in _values(plain(typed(member, stage.schema))):
                    print(f"{file.stem} {member.output_dir} {key}={value!r}")


def _values(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values in the order of the keys."""
    for key, value in sorted(node.items()):
        if isinstance(value, dict) and value:
            yield from _values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


if __name__ == "__main__":
    show_usage(__doc__)
    main(sys.argv[1:])
