"""Test experiments of several stages at toy size, run from the command line."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from distill.config import TrainConfig
from jobs.composing import CONF
from jobs.job import register
from tests.support.experiments import compose_stages
from tests.support.forks import succeed
from tests.support.tiers import tiered
from training.config import LoopConfig


def run_job(*arguments: str, job: str = "distill.train") -> str:
    """Run `python -m JOB` with these arguments, assert that it succeeds, and return its output."""
    return succeed(job, *arguments)


@pytest.mark.parametrize(
    ("given", "mode", "largest_cut"),
    tiered(
        [
            ([], "importance", 0.625),
            (["prune_mode=l0"], "l0", 0.625),
            (["prune_mode=l0", "prune_largest_cut=0.95"], "l0", 0.95),
        ],
        lambda given, mode, largest_cut: largest_cut == 0.95,
    ),
)
def test_one_override_selects_the_mode_of_pruning(given: list[str], mode: str, largest_cut: float):
    pruning = compose_stages("llama_796m", *given)[1]["distill.prune"]
    assert (pruning.mode, pruning.largest_cut) == (mode, largest_cut)


@pytest.mark.parametrize("experiment", tiered(["llama_796m", "depth_sweep"], ["llama_796m"]))
def test_every_stage_uses_the_chosen_target(experiment: str):
    """Check that every stage has the chosen target's path, device and published configuration.

    A dry run without the target's folder needs that configuration.
    """
    config, stages = compose_stages(experiment, "target=llama3_1_70b", "target.device=cpu")
    assert config.target.config["num_hidden_layers"] == 80
    for name, stage in stages.items():
        if name != "eval.compare":  # reads only results
            assert stage.target.config == config.target.config, name
            assert (stage.target.path, stage.target.device) == (config.target.path, "cpu"), name


@pytest.mark.parametrize(
    ("job", "experiment", "single"),
    tiered(
        [
            ("distill.train", "llama_796m", "distill.prune"),
            ("distill.train", "depth_sweep", "distill.prune"),
            ("eval.run", "every_way", "distill.skip_search"),
        ],
        lambda job, experiment, single: experiment == "every_way",
    ),
)
def test_a_parallel_target_is_given_only_to_stages_that_accept_one(
    job: str, experiment: str, single: str
):
    """Check that pruning and the skip search, which require one process, get an unsplit target."""
    given = ["draft_model=/draft"] if job == "eval.run" else []
    shared = ["target.parallel=layers", "target.processes=2"]
    for name, stage in compose_stages(experiment, *given, *shared, job=job)[1].items():
        if name != "eval.compare":
            expected = ("none", 0) if name == single else ("layers", 2)
            assert (stage.target.parallel, stage.target.processes) == expected, name


@pytest.mark.parametrize("mode", tiered(["importance", "random", "l0"], ["l0"]))
def test_one_override_makes_a_ladder_random_or_by_masks(mode: str):
    ladder, stages = compose_stages("depth_sweep", f"prune_mode={mode}")
    pruning = stages["distill.prune"]
    assert (pruning.mode, pruning.student.num_hidden_layers) == (mode, 7)
    assert pruning.output_dir == "/run/pruned/student.num_hidden_layers=7"
    distilled = stages["distill.train:distilled"].student
    assert distilled.path == f"{pruning.output_dir}/student" and distilled.name == "depth_7"
    masks, loop = pruning.loop, ladder.loop
    assert masks.max_steps * masks.tokens_per_step == loop.max_steps * loop.tokens_per_step
    assert masks.dtype == loop.dtype and masks.optimizer.warmup_steps < masks.max_steps


def test_a_recipe_passes_shape_and_domains_to_pruning():
    """Check that pruning gets the overridden shape and the same domains, with fixed shares."""
    config, stages = compose_stages(
        "llama_796m",
        "data=redpajama",
        "data.root=/texts",
        "student.num_hidden_layers=3",
        "student.intermediate_size=9472",
    )
    pruning = stages["distill.prune"]
    assert pruning.student == config.student
    assert pruning.data == replace(config.data, mixing="fixed") and len(pruning.data.domains) == 7
    assert (pruning.data.root, config.data.mixing) == ("/texts", "loss")


@pytest.mark.parametrize("experiment", tiered(["llama_796m", "depth_sweep"], ["llama_796m"]))
def test_template_and_memory_settings_reach_every_training_stage(experiment: str):
    """Check that both training stages get the experiment's data, micro-batch size and dtype."""
    overrides = [
        "data.template=vicuna",
        "data.train_on=all",
        "data.max_samples=70",
        "data.max_bad=0.2",
    ]
    config, stages = compose_stages(
        experiment, *overrides, "loop.micro_batch_tokens=2048", "loop.dtype=float16"
    )
    trains = {name: stage for name, stage in stages.items() if not name.startswith("eval.")}
    assert len(trains) == 2
    for stage in trains.values():
        assert stage.data == config.data
        loops = [value for value in vars(stage).values() if isinstance(value, LoopConfig)]
        assert {(loop.micro_batch_tokens, loop.dtype) for loop in loops} == {(2048, "float16")}


RECIPES = {
    **dict.fromkeys(
        ("llama_1b3", "llama_796m", "llama_543m", "llama_290m", "vicuna_796m", "depth_sweep"),
        "distill.train",
    ),
    **dict.fromkeys(("redrafter_vicuna_7b", "redrafter_chat24m"), "recurrent_drafting.train"),
    **dict.fromkeys(("smollm2_135m", "smollm2_135m_quick", "smollm2_135m_depths"), "distill.train"),
    **dict.fromkeys(("redrafter_smollm2", "redrafter_smollm2_quick"), "recurrent_drafting.train"),
}


@pytest.mark.parametrize(
    ("experiment", "job"),
    tiered(
        RECIPES.items(),
        lambda experiment, job: experiment in ("llama_796m", "redrafter_smollm2_quick"),
    ),
)
def test_a_recipe_ends_in_a_comparison_of_its_drafters(experiment: str, job: str):
    """Check that a recipe ends with eval.run and with eval.compare on its results.

    All stages share a tracker group, and the benchmark has the chat template of the data.
    """
    given = ["tracker=wandb_offline", "data.template=vicuna"]
    config, stages = compose_stages(experiment, *given, job=job)
    assert config.stages[-2:] == ["eval.run", "eval.compare"]
    assert stages["eval.compare"].runs == ["/run/eval.run"] == [stages["eval.run"].output_dir]
    benchmark = stages["eval.run"].benchmark
    assert (benchmark.render, benchmark.chat_template) == ("auto", "vicuna")
    trackers = [stage.tracker for stage in stages.values() if hasattr(stage, "tracker")]
    assert {(one.wandb, one.group) for one in trackers} == {("offline", experiment)}
    assert {one.name for one in trackers} <= {experiment, "depth_7", "depth_8"}
    assert len(trackers) == len(stages.keys() - {"distill.regenerate"})


@pytest.mark.parametrize(
    ("experiment", "trained"),
    tiered(
        [
            ("smollm2_135m", "distill.train"),
            ("smollm2_135m_quick", "distill.train"),
            ("smollm2_135m_depths", "distill.train:distilled"),
            ("redrafter_smollm2", "recurrent_drafting.train"),
            ("redrafter_smollm2_quick", "recurrent_drafting.train"),
        ],
        lambda experiment, trained: experiment == "redrafter_smollm2_quick",
    ),
)
def test_recipes_of_smollm2_train_on_the_answers_that_they_share(experiment: str, trained: str):
    """Check that every recipe reads the answers it makes, and that all ask for the same ones.

    So a folder of answers that one recipe has finished is used by the others.
    """
    stages = compose_stages(experiment, job=RECIPES[experiment])[1]
    asked = stages["distill.regenerate"]
    for name in {trained, "distill.prune"} & stages.keys():
        data = stages[name].data
        assert (data.chats, data.max_samples) == ([f"{asked.output_dir}/chats.json"], 0), name
        assert data.held_out_chats == asked.data.held_out_chats
    first = "smollm2_135m_quick" if experiment.endswith("_quick") else "smollm2_135m"
    theirs = asked if experiment == first else compose_stages(first)[1]["distill.regenerate"]
    assert asked == theirs
    assert asked.target.path == "models/smollm2_135m"


def test_the_script_of_answers_shows_a_recipe_that_trains_on_them():
    """Check that the recipe reads the folder that the script writes, and does not answer again."""
    script = (CONF.parent / "scripts" / "data" / "on_policy.sh").read_text()
    (folder,) = re.findall(r"on_policy\.sh models/smollm2_135m (\S+)", script)
    ((recipe, given),) = re.findall(r"distill\.train \+experiment=(\S+) (.*)", script)
    stages = compose_stages(recipe, *given.split())[1]
    assert "distill.regenerate" not in stages
    for name in ("distill.prune", "distill.train"):
        assert stages[name].data.chats == [f"{folder}/chats.json"], name


def test_a_chat_model_is_pruned_and_distilled_on_its_own_answers():
    """Check that the recipe differs from that of a base model in the text and its cache alone."""
    stages, found = (compose_stages(name)[1] for name in ("vicuna_796m", "llama_796m"))
    answers = [f"{stages['distill.regenerate'].output_dir}/chats.json"]
    for name in ("distill.prune", "distill.train"):
        ours, theirs = stages[name], found[name]
        assert (ours.data.chats, ours.data.max_samples) == (answers, 0), name
        same = {"data": theirs.data, "target": theirs.target, "tracker": theirs.tracker}
        if name == "distill.train":  # the target reads text that recurs once
            assert (ours.teacher.cache, theirs.teacher.cache) == ("sampled", "none")
            same["teacher"] = theirs.teacher
        loop = replace(ours.loop, max_epochs=theirs.loop.max_epochs)
        assert replace(ours, **same, loop=loop, experiment=theirs.experiment) == theirs, name


@pytest.mark.long
def test_a_complete_recipe_runs_on_a_base_model(
    base_target: Path, shared_data: Path, tmp_path: Path
):
    """Check that a base model can be pruned, distilled, evaluated and compared in one command.

    The tiny target's tokenizer, LLaMA's, has no chat template, so prompts are plain text.
    """
    folder, texts = tmp_path / "run", shared_data / "text"
    register("distill.train", TrainConfig)
    sizes = [
        "student.num_hidden_layers=2",
        "student.hidden_size=16",
        "student.num_attention_heads=2",
        "student.num_key_value_heads=2",
        "student.head_dim=8",
        "student.intermediate_size=32",
        "data.max_length=128",
        "held_out.max_prompts=4",
        "held_out.max_new_tokens=8",
        "loop.max_steps=2",
        "loop.tokens_per_step=512",
        "loop.micro_batch_tokens=512",
    ]
    small = {
        "distill.prune": [
            "importance.sequences=16",
            "importance.greedy_sequences=2",
            "importance.probe_sequences=2",
            "importance.probe_steps=1",
            "importance.probe_candidates=2",
            f"importance.cache_dir={tmp_path}/importance",
            "between.max_steps=1",
            "between.tokens_per_step=256",
        ],
        "eval.run": [
            "max_prompts=6",
            "sweep_prompts=2",
            "sweep=[1,2]",
            "max_new_tokens=8",
            "timing_repeats=1",
        ],
    }
    with initialize_config_dir(str(CONF), version_base="1.3"):
        documented = [
            "+experiment=llama_796m",
            f"target.path={base_target}",
            f"data.texts=[{texts / 'tinystories_1000.jsonl'}]",
            f"data.held_out_texts=[{texts / 'wikipedia_en_30.jsonl'}]",
            f"held_out.prompts={shared_data / 'eval' / 'hellaswag_contexts.jsonl'}",
            f"benchmark_prompts={shared_data / 'eval' / 'raw' / 'HumanEval.jsonl'}",
        ]
        given = [
            *documented,
            *sizes,
            "target.device=cpu",
            "data.max_samples=40",
            f"output_dir={folder}",
        ]
        composed = compose("distill_train", given)
    for stage, overrides in small.items():
        composed.stage_overrides[stage] += overrides
    (tmp_path / "toy.yaml").write_text(OmegaConf.to_yaml(composed))
    output = run_job("--config-file", str(tmp_path / "toy.yaml"))
    assert "so prompts are given as plain text" in output
    assert (folder / "distill.prune" / "stages" / "1_3_layers").is_dir(), (
        "one stage removes at most five eighths"
    )
    card = json.loads((folder / "distill.train" / "drafter" / "drafter_card.json").read_text())
    assert (card["shape"]["num_hidden_layers"], card["shape"]["hidden_size"]) == (2, 16)
    assert card["pruning"]["stages"][-1]["layers"] and card["acceptance"]["acceptance"] > 0
    rows = [
        json.loads(line)
        for line in (folder / "eval.compare" / "comparison.jsonl").read_text().splitlines()
    ]
    assert {(row["drafter"], row["temperature"]) for row in rows} == {
        (name, temperature) for name in ("drafter", "prompt_lookup") for temperature in (0.0, 1.0)
    }
    assert {row["benchmark"] for row in rows} == {"HumanEval"}
    assert (folder / "eval.compare" / "comparison.html").is_file()


@pytest.mark.long
def test_a_stage_with_an_experiment_is_composed_from_it(tmp_path: Path):
    """Check that a stage with its own experiment gets the settings of that experiment.

    Both stages are of one job: the first plans 3 epochs, and the second, which has its own
    experiment and continues from the first's folder, plans 2.
    """
    output = run_job(
        "+experiment=quickstart_target",
        "dry_run=true",
        f"output_dir={tmp_path}",
        job="distill.pretrain",
    )
    assert output.count("model: 6.6 M parameters") == 2
    assert "plan: 3 epochs" in output and "plan: 2 epochs" in output


@pytest.mark.exhaustive
def test_a_ladder_of_depths_ends_in_one_comparison(tiny_target: Path, tmp_path: Path):
    folder, prompts = tmp_path / "run", tmp_path / "prompts.jsonl"
    texts = [f"Write a function of {count} arguments." for count in range(1, 13)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    run_job(
        "+experiment=depth_sweep",
        f"benchmark_prompts={prompts}",
        f"target.path={tiny_target}",
        "target.device=cpu",
        'ladder="1,3"',
        "data.chats=[embedded:chats]",
        "data.held_out_chats=[embedded:held_out_chats]",
        "data.max_length=128",
        "loop.max_steps=2",
        "loop.tokens_per_step=512",
        "loop.micro_batch_tokens=512",
        f"output_dir={folder}",
    )
    depths = {}
    for layers in (1, 3):
        card = json.loads(
            (
                folder / f"distilled/student.num_hidden_layers={layers}/drafter/drafter_card.json"
            ).read_text()
        )
        depths[card["name"]] = card["shape"]["num_hidden_layers"]
    assert depths == {"depth_1": 1, "depth_3": 3}
    rows = [
        json.loads(line)
        for line in (folder / "eval.compare" / "comparison.jsonl").read_text().splitlines()
    ]
    assert {row["name"] for row in rows} >= {"depth_1", "depth_3"}
    assert (folder / "eval.compare" / "comparison.html").is_file()


def hours_in(text: str) -> list[float]:
    """Return the hours of every estimate in `text` that names its pace ("N hours at ...")."""
    return [
        float(found.replace(",", ""))
        for found in re.findall(r"([\d.,]+) hours(?: \([\d.,]+ s\))? at ", text)
    ]


@pytest.mark.parametrize(
    ("experiment", "millions", "pruning", "words"),
    [
        pytest.param(
            "llama_1b3",
            "1333.7 M",
            [],
            "importance: scores",
            marks=pytest.mark.exhaustive,
        ),
        ("llama_796m", "796.3 M", [], "stage 2 of 2: 12 -> 5 layers"),
        pytest.param(
            "llama_543m",
            "543.3 M",
            ["prune_mode=l0", "prune_largest_cut=0.95"],
            "l0: weights and masks trained on 419,430,400",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "llama_290m",
            "290.3 M",
            ["prune_mode=random"],
            "random weights",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@pytest.mark.long
def test_a_dry_run_of_a_recipe_needs_neither_weights_nor_data(
    tmp_path: Path, experiment: str, millions: str, pruning: list[str], words: str
):
    output = run_job(
        f"+experiment={experiment}", *pruning, "dry_run=true", f"output_dir={tmp_path}/run"
    )
    assert output.count(f"student: {millions}") == 2, "hours of the cut and of the distillation"
    assert words in output
    assert "target: 6738.4 M parameters" in output
    assert "hours at" in output and "does not exist" in output
    assert "embedded:prompts are requests for Python functions" in output
    assert "memory of rank 0 while the target answers the held-out prompts" in output
    assert (
        "[4/4] eval.compare" in output and "would write comparison.jsonl, comparison.html" in output
    )
    *parts, total = hours_in(output)
    assert "all stages together" in output.splitlines()[-1]
    assert len(parts) >= 1 and total == pytest.approx(sum(parts), abs=0.01 * len(parts))
    config = json.loads(
        (tmp_path / "run" / "distill.train" / "drafter" / "config.json").read_text()
    )
    assert config["head_dim"] == 128
