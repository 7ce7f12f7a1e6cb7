"""+experiment=redrafter_quickstart: the head's row joins the table of the quickstart's drafter."""

import os
from typing import Any

from jobs.composing import compose_job
from jobs.config import plain, typed
from jobs.drafters import check_entries
from jobs.schemas import schema_of
from jobs.stages import compose_stage


def stage_inputs(job: str, experiment: str, *given: str) -> dict[str, dict[str, Any]]:
    """Return the configuration of each stage of an experiment, by the stage's name."""
    schema = schema_of(job)
    composed = compose_job(job, schema, [f"+experiment={experiment}", *given])
    config = typed(composed, schema)
    stages = [compose_stage(name, config, composed) for name in config.stages]
    return {stage.name: plain(typed(stage.members[0], stage.schema)) for stage in stages}


def test_its_first_stage_is_the_quickstarts():
    """Check that the first stage has the quickstart's configuration and folder.

    So the drafter of ./scripts/quickstart.sh is reused.
    """
    stages = stage_inputs("recurrent_drafting.train", "redrafter_quickstart")
    assert [*stages] == ["distill.train", "recurrent_drafting.train", "eval.run"]
    asked = stages["distill.train"]
    quickstart = stage_inputs("distill.train", "quickstart")["distill.train"]
    assert os.path.normpath(asked["output_dir"]) == quickstart["output_dir"]
    assert asked | {"output_dir": quickstart["output_dir"]} == quickstart


def test_its_last_stage_measures_the_head_beside_the_quickstarts_drafter():
    given = "output_dir=runs/here"
    drafters = stage_inputs("recurrent_drafting.train", "redrafter_quickstart", given)["eval.run"][
        "drafters"
    ]
    check_entries(drafters)
    assert drafters[0] == "runs/here/../quickstart/distill.train/drafter"
    assert [one["name"] for one in drafters[1:]] == ["drafter+lookup", "redrafter"]
    assert drafters[2]["folder"] == "runs/here/recurrent_drafting.train/drafter"
