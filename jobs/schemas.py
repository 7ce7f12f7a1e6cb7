"""Dotted name of the dataclass of each job's settings.

If the class depends on the command line, it is the name of a function from overrides to the class.
Names replace imports, because the jobs are in packages above this one.
"""

from collections.abc import Sequence
from typing import Any

from decoding.drafters.registry import imported
from decoding.errors import UserError
from jobs.config import JobConfig

SCHEMAS = {
    "distill.compact": "distill.config.CompactConfig",
    "distill.pretrain": "distill.config.PretrainConfig",
    "distill.prune": "distill.config.PruneConfig",
    "distill.quality": "distill.config.QualityConfig",
    "distill.regenerate": "distill.config.RegenerateConfig",
    "distill.skip_search": "distill.config.SkipSearchConfig",
    "distill.train": "distill.config.TrainConfig",
    "eval.analyze": "eval.config.AnalyzeConfig",
    "eval.compare": "eval.config.CompareConfig",
    "eval.doctor": "eval.doctor.config.DoctorConfig",
    "eval.plan": "eval.plan.config.PlanConfig",
    "eval.replay": "eval.config.ReplayConfig",
    "eval.run": "eval.config.EvalConfig",
    "heads.train": "heads.train.schema_for",
    "recurrent_drafting.generate": "serving.config.GenerateConfig",
    "recurrent_drafting.train": "recurrent_drafting.config.HeadTrainConfig",
    "serving.api": "serving.api.config.ApiConfig",
    "serving.web": "serving.web.config.WebConfig",
}


def schema_of(job: str, overrides: Sequence[str] = ()) -> type[JobConfig]:
    """Return the dataclass of a job's settings. Raises UserError for an unknown job.

    overrides: command line of the job, on which the class may depend.
    """
    if job not in SCHEMAS:
        raise UserError(f"'{job}' is not a job, expected one of {', '.join(SCHEMAS)}")
    found: Any = imported(SCHEMAS[job])
    return found if isinstance(found, type) else found(overrides)
