"""Re-targeting: the stages of its experiment, and a head through all of them."""

import json
import shutil
from pathlib import Path

import pytest

from decoding.errors import UserError
from distill.config import TrainConfig
from jobs.composing import compose_job
from jobs.stages import check_required_settings
from tests.support import planted
from tests.support.experiments import compose_stages
from tests.support.forks import succeed


@pytest.mark.parametrize(
    ("job", "start"),
    [("distill.train", "student"), ("recurrent_drafting.train", "head"), ("heads.train", "head")],
)
def test_retargeting_continues_the_old_drafter_with_every_trainer(job: str, start: str) -> None:
    given = ("from_drafter=/old", "adapter_rank=64", "target.path=/new")
    _, stages = compose_stages("retarget", *given, job=job)
    assert list(stages) == ["distill.regenerate", job, "eval.run", "eval.compare"]
    trainer = stages[job]
    assert getattr(trainer, start).path == trainer.from_drafter == "/old"
    assert trainer.adapter_rank == 64
    assert trainer.data.chats == ["/run/distill.regenerate/chats.json"]
    old, new = stages["eval.run"].drafters
    assert (old["use"], new["use"]) == ("/old", f"/run/{job}/drafter")
    assert old["any_target"] and "any_target" not in new
    assert {stages[name].target.path for name in (job, "distill.regenerate", "eval.run")} == {
        "/new"
    }


def test_retargeting_without_an_old_drafter_is_refused() -> None:
    with pytest.raises(
        UserError, match="from_drafter is empty, but experiment 'retarget' needs it"
    ):
        check_required_settings(
            compose_job("distill.train", TrainConfig, ["+experiment=retarget", "output_dir=/run"])
        )


@pytest.mark.long
def test_a_head_is_retargeted_from_the_command_line(tmp_path: Path) -> None:
    """Check every stage: the old head is measured on the new target, and so is the new one."""
    model = planted.noisy(planted.MODELS / "target", 0.05)
    model.config.max_position_embeddings = 512  # the recipe's answers have up to 192 tokens
    tuned = planted.write_model(tmp_path / "tuned", model)
    old = Path(shutil.copytree(planted.MODELS / "eagle3", tmp_path / "old"))
    shape = json.loads((old / "config.json").read_text()) | {"max_position_embeddings": 512}
    (old / "config.json").write_text(json.dumps(shape))
    prompts = planted.write_prompts(tmp_path / "prompts.jsonl", planted.shuffled())
    succeed(
        "heads.train",
        "head=eagle3",
        "+experiment=retarget",
        f"target.path={tuned}",
        "target.device=cpu",
        f"from_drafter={old}",
        f"data.chats=[{planted.write_chats(tmp_path / 'chats.json')}]",
        "data.max_length=256",
        f"held_out.prompts={prompts}",
        "held_out.max_new_tokens=16",
        "held_out.costs=none",
        f"benchmark_prompts={prompts}",
        "adapter_rank=4",
        "loop.max_seconds=0",
        "loop.max_steps=3",
        "loop.tokens_per_step=512",
        "loop.micro_batch_tokens=512",
        f"output_dir={tmp_path / 'run'}",
    )
    rows = [json.loads(line) for line in (tmp_path / "run/eval.run/results.jsonl").open()]
    assert {"old", "retargeted"} <= {row["drafter"] for row in rows}
    assert (tmp_path / "run" / "eval.compare" / "comparison.html").is_file()
