"""Compositions of experiments and of their stages."""

import functools
from typing import Any

from jobs.composing import compose_job
from jobs.config import typed
from jobs.schemas import schema_of
from jobs.stages import compose_stage


@functools.cache  # tests only read the result
def compose_stages(
    experiment: str, *given: str, job: str = "distill.train"
) -> tuple[Any, dict[str, Any]]:
    """Return an experiment's configuration, and the configuration of each of its stages by name.

    Of a stage that is a sweep, the last member is returned.
    """
    composed = compose_job(
        job, schema_of(job), [f"+experiment={experiment}", "output_dir=/run", *given]
    )
    config: Any = typed(composed, schema_of(job))
    stages = {name: compose_stage(name, config, composed) for name in config.stages}
    return config, {name: typed(stage.members[-1], stage.schema) for name, stage in stages.items()}
