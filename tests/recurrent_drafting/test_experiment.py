"""+experiment=redrafter_quickstart: the head's row stands in one table with the quickstart's
drafter.
"""

import os

from hydra import compose, initialize_config_dir

from distill.config import TrainConfig
from eval.config import EvalConfig
from jobs.config import plain, typed
from jobs.drafters import check_entries
from jobs.job import CONF, register
from recurrent_drafting.config import HeadTrainConfig


def composed(job: str, schema: type, *overrides: str) -> dict[str, object]:
    register(job, schema)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return plain(typed(compose(job.replace(".", "_"), list(overrides)), schema))


def test_its_first_stage_is_the_quickstarts_own():
    """So that what ./scripts/quickstart.sh has trained is passed over, and no other configuration
    is found in its folder.
    """
    own = composed("recurrent_drafting.train", HeadTrainConfig, "+experiment=redrafter_quickstart")
    assert own["stages"] == ["distill.train", "recurrent_drafting.train", "eval.run"]
    given = own["stage_overrides"]["distill.train"]  # type: ignore[index]
    asked = composed(
        "distill.train", TrainConfig, *(text.replace("{output_dir}", "runs/here") for text in given)
    )
    quickstart = composed("distill.train", TrainConfig, "+experiment=quickstart")
    assert os.path.normpath(asked["output_dir"]) == os.path.join(
        quickstart["output_dir"], "distill.train"
    )  # type: ignore[call-overload]
    left = {"output_dir": "", "stages": [], "stage_overrides": {}}
    assert asked | left == quickstart | left
    assert (asked["stages"], asked["stage_overrides"]) == ([], {})


def test_its_last_stage_measures_the_head_beside_the_quickstarts_drafter():
    own = composed("recurrent_drafting.train", HeadTrainConfig, "+experiment=redrafter_quickstart")
    given = own["stage_overrides"]["eval.run"]  # type: ignore[index]
    asked = composed(
        "eval.run", EvalConfig, *(text.replace("{output_dir}", "runs/here") for text in given)
    )
    drafters = asked["drafters"]
    check_entries(drafters)  # type: ignore[arg-type]
    assert drafters[0] == "runs/here/../quickstart/distill.train/drafter"  # type: ignore[index]
    assert [one["name"] for one in drafters[1:]] == ["drafter+lookup", "redrafter"]  # type: ignore[index]
    assert drafters[2]["folder"] == "runs/here/recurrent_drafting.train/drafter"  # type: ignore[index]
