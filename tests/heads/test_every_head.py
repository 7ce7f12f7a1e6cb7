"""The recipes of the table of all drafters: what their stages train, and what rows they measure."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from transformers import AutoConfig

from decoding.errors import UserError
from eval.measure.setup import check
from heads.registry import KINDS, kind_of
from jobs.composing import compose_job
from jobs.config import typed
from jobs.drafters import describe
from jobs.schemas import schema_of
from jobs.stages import compose_stage
from training.features.states import layers_read
from training.heads.build import shape_of
from training.heads.loss_config import reads_final

PRESET_OF = {"redrafter": "recurrent"}


def members(recipe: str, folder: Path) -> dict[str, list[Any]]:
    """Return the configurations of a recipe's stages, by stage; a sweep has several."""
    schema = schema_of("heads.train")
    given = [f"+experiment={recipe}", f"output_dir={folder}"]
    composed: DictConfig = compose_job("heads.train", schema, given)
    config = typed(composed, schema)
    stages = {one: compose_stage(one, config, composed) for one in config.stages}
    return {one: list(stage.members) for one, stage in stages.items()}


def write_drafter(folder: Path, name: str) -> None:
    """Write what the list of drafters reads of a trained one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa"}))
    (folder / "drafter_card.json").write_text(json.dumps({"name": name}))


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "seconds", "draft_vocabulary", "dtype"),
    [("every_head", 720, 8192, "bfloat16"), ("every_head_chat24m", 300, 2048, "float32")],
)
def test_every_preset_learns_for_equal_seconds_and_has_a_row(
    recipe: str, seconds: int, draft_vocabulary: int, dtype: str, tmp_path: Path
) -> None:
    found = members(recipe, tmp_path)
    trained = [one for stage, ones in found.items() if ".train" in stage for one in ones]
    assert {one.loop.max_seconds for one in trained} == {seconds}
    heads = [one for one in trained if one.job == "heads.train"]
    assert not any(one.data.held_out_chats for one in heads)  # only text that the target wrote
    drafted = {one.head.draft_vocab_size for one in found["heads.train:heads"]}
    drafted |= {one.student.draft_vocab_size for one in found["distill.train:pruned"]}
    assert drafted == {draft_vocabulary}
    presets = [PRESET_OF.get(one.head.name, one.head.name) for one in heads]
    assert sorted(presets) == sorted(KINDS)
    names = {
        one.output_dir: one.head.name if one.job == "heads.train" else one.student.name
        for one in trained
    }
    for folder, drafter in names.items():
        write_drafter(Path(folder) / "drafter", drafter)
    (member,) = found["eval.run"]
    evaluation: Any = typed(member, schema_of("eval.run"))
    rows = describe(evaluation.drafters, evaluation.target, evaluation.prompt_lookup_control)
    shapes = {"pruned tree", "jetspec tree", "eagle3 chain", "medusa chain"}
    assert {*rows} == {*names.values(), *shapes, "prompt_lookup"}
    assert len(rows) == len(names) + 5
    assert (evaluation.batch_sizes, evaluation.sweep) == ([1, 8], [1, 2, 4, 7])
    assert evaluation.temperatures == [0.0, 1.0]
    assert max(one.loss.predict_n_tokens for one in heads) == max(evaluation.sweep)
    assert {one.target.dtype for one in (*heads, evaluation)} == {dtype}
    check(evaluation)
    evaluation.sweep_prompts = 4
    with pytest.raises(UserError, match="sweep_prompts is 4, expected 8 or more"):
        check(evaluation)


@pytest.mark.parametrize(("recipe", "layers"), [("every_head", 30), ("every_head_chat24m", 12)])
def test_all_heads_of_a_recipe_read_the_layers_of_one_store(
    recipe: str, layers: int, chat24m: Path, tmp_path: Path
) -> None:
    """Check each recipe with the depth of its target; the mask token is chat24m's in both."""
    target = AutoConfig.from_pretrained(chat24m)
    target.num_hidden_layers = layers
    read, shared = set[int](), set[int]()
    for stage, ones in members(recipe, tmp_path).items():
        for one in ones:
            if "heads.train" in stage and one.states.cache == "disk":
                one.target.path = str(chat24m)
                kind = kind_of(PRESET_OF.get(one.head.name, one.head.name))
                taps = kind.taps(shape_of(kind, one, target))
                read |= {*layers_read(taps, layers, reads_final(one.loss))}
                shared |= {*one.states.layers}
    assert read == shared
