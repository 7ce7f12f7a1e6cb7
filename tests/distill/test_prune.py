"""Test `distill.prune` end to end on a random target: modes, cache, stages, resume and errors."""

import dataclasses
import json
import os
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import distill.prune.masks
import training.loop
from decoding.errors import UserError
from distill.config import PruneConfig
from distill.prune.job import intermediate_depths, run
from jobs.interrupts import Interrupted
from jobs.job import CONF
from tests.support.configurations import configuration
from tests.support.tiers import tiered

NARROW = (
    "student.hidden_size=16",
    "student.num_attention_heads=2",
    "student.num_key_value_heads=1",
)
BRIEF = (
    "mode=l0",
    "loop.max_steps=6",
    "loop.optimizer.warmup_steps=2",
    "loop.optimizer.lr=2e-6",
    "l0.mask_lr=0.02",
    "loop.tokens_per_step=256",
    "loop.micro_batch_tokens=128",
    "loop.checkpoint_every=2",
)


def arguments(target: Path, folder: Path, *overrides: str) -> list[str]:
    return [
        "target=embedded",
        *([] if any(text.startswith("data=") for text in overrides) else ["data=embedded"]),
        f"target.path={target}",
        "target.device=cpu",
        "student=shallow",
        "student.num_hidden_layers=2",
        "data.max_samples=60",
        "data.max_length=128",
        f"importance.cache_dir={folder.parent}/cache",
        "importance.sequences=16",
        "importance.greedy_sequences=2",
        "importance.probe_sequences=2",
        "importance.probe_steps=0",
        "between.max_steps=2",
        "between.tokens_per_step=256",
        "between.micro_batch_tokens=256",
        f"output_dir={folder}",
        *overrides,
    ]


def configured(target: Path, folder: Path, *overrides: str) -> PruneConfig:
    return configuration("distill.prune", *arguments(target, folder, *overrides))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student" / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("mode", [("mode=importance",), BRIEF, ("mode=random",)])
def test_every_mode_writes_a_student_of_the_shape(
    tiny_target: Path, tmp_path: Path, mode: tuple[str, ...]
):
    folder = tmp_path / "run"
    run(configured(tiny_target, folder, *NARROW, "student.intermediate_size=32", *mode))
    student = AutoModelForCausalLM.from_pretrained(folder / "student")
    config = student.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (2, 16, 32)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 8)
    assert AutoTokenizer.from_pretrained(folder / "student").get_vocab()
    card = json.loads((folder / "student" / "drafter_card.json").read_text())
    assert card["parameters"] == sum(parameter.numel() for parameter in student.parameters())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["finished"] is True
    assert 0 < manifest["metrics"]["acceptance"] < 1
    if mode[0] != "mode=random":
        assert (folder / "masks.safetensors").is_file()
        assert manifest["metrics"]["flops"] and manifest["metrics"]["seconds"]


def test_other_shapes_reuse_the_scores(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run(configured(tiny_target, tmp_path / "first"))
    assert "collected before" not in capsys.readouterr().out
    run(configured(tiny_target, tmp_path / "second", *NARROW, "student.num_hidden_layers=3"))
    assert "collected before" in capsys.readouterr().out
    spent = json.loads((tmp_path / "second" / "manifest.json").read_text())["metrics"]["flops"]
    assert "scores" not in spent and "layers by KL" not in spent


def test_the_probe_selects_the_best_distilled_candidate(tiny_target: Path, tmp_path: Path):
    """Check that the two candidates with the highest acceptance as cut are distilled.

    The one with the higher acceptance after distillation is selected.
    """
    run(
        configured(
            tiny_target,
            tmp_path / "run",
            "importance.probe_steps=2",
            "importance.probe_candidates=2",
        )
    )
    (notes,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["metrics"]["stages"]
    as_cut, found = notes["acceptance_as_cut"], notes["probe_acceptance"]
    assert notes["candidates"].keys() == as_cut.keys() and len(as_cut) > 2
    assert {*found} == {*sorted(as_cut, key=lambda name: as_cut[name])[-2:]}
    assert notes["layers"] == notes["candidates"][notes["proposed_by"]]
    assert notes["proposed_by"] == max(found, key=lambda name: found[name])


@pytest.mark.parametrize(
    ("working", "proposed_by"),
    tiered([((0, 2), "even_without_last"), ((0, 3), "even")], [((0, 2), "even_without_last")]),
)
def test_the_last_layer_is_kept_only_if_it_is_useful(
    working: tuple[int, int], proposed_by: str, tiny_target: Path, tmp_path: Path
):
    """Check that pruning keeps the two layers that work, whether or not one of them is the last.

    The target's other two layers add nothing, so the selected candidate equals the target.
    """
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    state = load_file(target / "model.safetensors")
    for name, tensor in state.items():
        idle = any(f"layers.{layer}." in name for layer in {*range(4)} - {*working})
        if idle and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    run(configured(target, tmp_path / "run"))
    (notes,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["metrics"]["stages"]
    found = notes["probe_acceptance"]
    assert (notes["layers"], notes["proposed_by"]) == ([*working], proposed_by)
    assert found[proposed_by] == pytest.approx(1, abs=1e-4), "it is the target"
    assert len(found) > 1
    assert all(acceptance < 0.99 for name, acceptance in found.items() if name != proposed_by)


@pytest.mark.long
def test_cached_target_states_serve_all_candidates(tiny_target: Path, tmp_path: Path):
    """Check that with a cache every candidate after the first is distilled with fewer FLOPs.

    The layers and the acceptance equal those without a cache. Acceptance may differ slightly,
    because the target's forward passes have other numbers of rows.
    """
    runs = []
    for memory in (0, 50):
        folder = tmp_path / f"cache_{memory}"
        run(configured(tiny_target, folder, "importance.probe_steps=2", f"cache_mb={memory}"))
        metrics = json.loads((folder / "manifest.json").read_text())["metrics"]
        probes = [value for name, value in metrics["flops"].items() if name.startswith("probe ")]
        runs.append(
            (probes, metrics["stages"][0]["probe_acceptance"], metrics["stages"][0]["layers"])
        )
    (fresh, found, layers), (kept, again, same_layers) = runs
    assert kept[0] == fresh[0] and all(
        later < first for later, first in zip(kept[1:], fresh[1:], strict=True)
    )
    assert len(kept) > 1 and again == pytest.approx(found, rel=1e-4) and same_layers == layers


@pytest.mark.parametrize(
    ("given", "signal_at"),
    tiered(
        [
            # in the second candidate
            (("importance.probe_steps=3", "student.num_hidden_layers=3"), 5),
            # between two cuts
            (("student.num_hidden_layers=1", "depths=[3]", "between.max_steps=4"), 2),
        ],
        lambda given, signal_at: signal_at == 2,
    ),
    ids=["probe", "between"],
)
def test_an_interrupted_distillation_resumes_exactly(
    given: tuple[str, ...],
    signal_at: int,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Check that a resumed job makes every training step once and gives the same student."""
    steps = {"straight": 0, "resumed": 0}
    step, at_work = training.loop.Training.step, "straight"

    def counted(*arguments: Any) -> dict[str, float]:
        steps[at_work] += 1
        if at_work == "resumed" and steps[at_work] == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    monkeypatch.setattr(training.loop.Training, "step", counted)
    run(configured(tiny_target, tmp_path / "straight", *given))
    at_work = "resumed"
    with pytest.raises(Interrupted):
        run(configured(tiny_target, tmp_path / "resumed", *given))
    assert steps["resumed"] == signal_at
    run(configured(tiny_target, tmp_path / "resumed", *given))
    assert steps["resumed"] == steps["straight"] > signal_at, "every step is made once"
    straight, resumed = (
        json.loads((tmp_path / name / "manifest.json").read_text())["metrics"]["stages"]
        for name in ("straight", "resumed")
    )
    for key in ("probe_acceptance", "layers", "acceptance_before_distillation"):
        assert [notes[key] for notes in resumed] == [notes[key] for notes in straight]
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "resumed"))


@pytest.mark.long
def test_layers_are_given_or_chosen_by_one_criterion(tiny_target: Path, tmp_path: Path):
    run(configured(tiny_target, tmp_path / "named", "student.layers=[1,2]"))
    run(configured(tiny_target, tmp_path / "even", "importance.choice=even"))
    layers = [
        json.loads((tmp_path / name / "manifest.json").read_text())["metrics"]["stages"][0][
            "layers"
        ]
        for name in ("named", "even")
    ]
    assert layers == [[1, 2], [0, 3]]


def test_severe_cuts_are_made_in_stages_with_distillation(tiny_target: Path, tmp_path: Path):
    folder = tmp_path / "run"
    run(
        configured(
            tiny_target,
            folder,
            "student.num_hidden_layers=1",
            "depths=[3,2]",
            "student.intermediate_size=32",
        )
    )
    stages = json.loads((folder / "manifest.json").read_text())["metrics"]["stages"]
    assert [len(notes["layers"]) for notes in stages] == [3, 2, 1]
    assert "acceptance" in stages[0] and "acceptance" not in stages[2], (
        "distill.train distils the last student"
    )
    first = AutoModelForCausalLM.from_pretrained(folder / "stages" / "1_3_layers").config
    assert (first.num_hidden_layers, first.intermediate_size) == (3, 32), (
        "widths are cut in the first stage"
    )


def test_a_tracker_gets_every_stage_under_the_experiments_name(
    tiny_target: Path, tmp_path: Path, wandb_runs: list[dict[str, Any]]
):
    """Check that the distillation between two cuts is a run of its own in the same group.

    The job's run records both stages at the end.
    """
    tracked = ("tracker=wandb", "tracker.name=llama_796m", "tracker.group=sweep")
    folder = tmp_path / "run"
    student = run(configured(tiny_target, folder, *NARROW, "depths=[3]", *tracked))
    assert [(one["name"], one["group"], one["job_type"]) for one in wandb_runs] == [
        ("llama_796m: distil 3 layers", "sweep", "distill.prune"),
        ("llama_796m", "sweep", "distill.prune"),
    ]
    between, complete = (one["logged"] for one in wandb_runs)
    assert "loss" in between and "loss" not in complete
    stages = json.loads((student / "drafter_card.json").read_text())["pruning"]["stages"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [(line["step"], line["layers"]) for line in lines] == [(1, 3), (2, 2)]
    for line, stage in zip(lines, stages, strict=True):
        assert line["acceptance_before_distillation"] == stage["acceptance_before_distillation"]
        best = stage["proposed_by"]
        assert line[f"acceptance_as_cut/{best}"] == stage["acceptance_as_cut"][best] > 0
        assert line["seconds/scores"] > 0 and line["flops/scores"] > 0
    columns = complete["candidates"].columns
    assert columns == ["stage", "candidate", "layers", "acceptance_as_cut", "probe_acceptance"]
    assert len(complete["candidates"].data) == sum(len(stage["candidates"]) for stage in stages)


@pytest.mark.long
def test_a_run_is_named_after_its_experiment_by_default(
    tiny_target: Path, tmp_path: Path, wandb_runs: list[dict[str, Any]]
):
    config = configured(tiny_target, tmp_path / "run", *NARROW, *BRIEF, "tracker=wandb")
    run(dataclasses.replace(config, experiment="mine"))
    assert [(one["name"], one["group"]) for one in wandb_runs] == [
        ("mine: masks of 2 layers", "mine"),
        ("mine", "mine"),
    ]


def test_saved_masks_give_the_same_student_and_fit_no_other_target(
    tiny_target: Path, tmp_path: Path
):
    run(configured(tiny_target, tmp_path / "first", *NARROW))
    masks = f"masks={tmp_path}/first/masks.safetensors"
    run(configured(tiny_target, tmp_path / "again", *NARROW, masks))
    assert same(weights(tmp_path / "first"), weights(tmp_path / "again"))
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.norm.weight.data[0] = 3.0
    model.save_pretrained(other)
    with pytest.raises(UserError, match=rf"was made for another target \({tiny_target}, hash "):
        run(configured(other, tmp_path / "refused", *NARROW, masks))
    # a refused run does not claim its folder
    run(configured(other, tmp_path / "refused", *NARROW))


def test_a_real_run_saves_no_published_configuration(tiny_target: Path, tmp_path: Path):
    """Check that the saved target.config is empty.

    Only a dry run without the target's folder uses it.
    """
    given = (*NARROW, "mode=random", "+target.config={model_type: llama, hidden_size: 4096}")
    run(configured(tiny_target, tmp_path / "run", *given))
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").target.config == {}


@pytest.mark.long
def test_interrupted_mask_training_resumes_exactly(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = (*BRIEF, *NARROW, "student.intermediate_size=32")
    run(configured(tiny_target, tmp_path / "straight", *given))
    sample = distill.prune.masks.Masks.sample

    def until_step_3(self: distill.prune.masks.Masks, step: int, *place: int):
        if step == 3:
            raise KeyboardInterrupt
        return sample(self, step, *place)

    monkeypatch.setattr(distill.prune.masks.Masks, "sample", until_step_3)
    with pytest.raises(KeyboardInterrupt):
        run(configured(tiny_target, tmp_path / "resumed", *given))
    monkeypatch.undo()
    run(configured(tiny_target, tmp_path / "resumed", *given))
    assert same(weights(tmp_path / "straight"), weights(tmp_path / "resumed"))
    run(configured(tiny_target, tmp_path / "seed", *given, "seed=1"))
    assert not same(weights(tmp_path / "straight"), weights(tmp_path / "seed")), (
        "control: the seed matters"
    )


@pytest.mark.long
def test_a_resumed_run_repeats_no_finished_stage(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = ("student.num_hidden_layers=1", "depths=[3]")
    run(configured(tiny_target, tmp_path / "straight", *given))
    run(configured(tiny_target, tmp_path / "resumed", *given))
    folder = tmp_path / "resumed"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"finished": False}))
    shutil.rmtree(folder / "student")
    before = (folder / "stages" / "1_3_layers" / "model.safetensors").stat().st_mtime_ns
    run(configured(tiny_target, folder, *given))
    assert (folder / "stages" / "1_3_layers" / "model.safetensors").stat().st_mtime_ns == before
    assert same(weights(tmp_path / "straight"), weights(folder))


def test_no_stage_removes_more_than_the_largest_cut():
    assert intermediate_depths(32, 3, 0.625) == [12, 5]
    assert intermediate_depths(32, 5, 0.625) == [12]
    assert intermediate_depths(32, 1, 0.625) == [12, 5, 2]
    assert intermediate_depths(32, 1, 1.0) == intermediate_depths(32, 12, 0.625) == []
    for share in (0.3, 0.5, 0.9):
        depths = [80, *intermediate_depths(80, 2, share), 2]
        assert all(
            before > after >= min(before - 1, before * (1 - share))
            for before, after in pairwise(depths)
        )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["student.num_hidden_layers=5"],
            "num_hidden_layers is 5, expected at most the target's 4",
        ),
        (["student.hidden_size=64"], "hidden_size is 64, expected at most the target's 32"),
        (
            ["student.hidden_size=-16"],
            "hidden_size is -16, expected 0 for the target's 32, or 1 to 1,048,576",
        ),
        (["mode=random", "student.head_dim=5"], "head_dim is 5, expected an even number"),
        (
            ["student.num_attention_heads=4", "student.num_key_value_heads=1"],
            "is 4, expected at most the target's 2",
        ),
        (
            ["student.num_attention_heads=3", "student.num_key_value_heads=2"],
            r"num_attention_heads is 3, expected a multiple of num_key_value_heads \(2\)",
        ),
        (
            ["student.hidden_size=18"],
            r"hidden_size is 18, expected a multiple of the 4 query heads.*Use 16, for example",
        ),
        (["mode=magic"], "mode is magic, expected one of importance, l0, random"),
        (["importance.choice=best"], "importance.choice is best, expected one of probe"),
        (["importance.probe_candidates=0"], "importance.probe_candidates is 0, expected 1 or more"),
        (["l0.beta=half", "mode=l0"], "l0.beta is half, expected one of code, paper"),
        (
            ["mode=l0", "loop.max_steps=200"],
            "warmup_steps is 320, expected less than loop.max_steps=200",
        ),
        (
            ["mode=l0", "student.intermediate_size=2"],
            "95.8% of the units.*95.0% at most.*Use a wider shape",
        ),
        (
            ["depths=[2]"],
            r"depths is \[2\], expected decreasing numbers of layers between the target's 4 and "
            r"the student's 2",
        ),
        (["data.max_samples=2", "data.max_length=512"], "too little calibration text"),
        (
            ["data.max_length=99999"],
            r"data\.max_length is 99999, .*context of .* is \d+ tokens.*Lower data\.max_length",
        ),
        (["data=text"], r"the train split is empty: set data\.chats=\[CHATS"),
        (
            ["data.max_samples=2", "data.max_length=512", "mode=l0", "loop.max_steps=400"],
            "too little calibration text",
        ),
        (["data.mixing=loss"], "data.mixing is loss, but data.domains is empty"),
        (["masks=/nowhere/masks.safetensors"], "/nowhere/masks.safetensors does not exist"),
        (
            ["masks=/nowhere", "depths=[3]"],
            "expected no file together with depths, because a file holds one cut",
        ),
        (
            ["cache_mb=5", "parallel=fsdp", "parallel.processes=2"],
            "cache_mb is 5, expected 0 .*with zero3 and fsdp",
        ),
        (["student.layers=[0,9]"], "from 0 to 3"),
    ],
)
def test_invalid_values_are_refused(
    tiny_target: Path, tmp_path: Path, overrides: list[str], words: str
):
    with pytest.raises(UserError, match=words):
        run(configured(tiny_target, tmp_path / "run", *overrides))


def test_unsupported_targets_are_refused(tiny_target: Path, tmp_path: Path):
    """Check that a target of another family or with a sliding window is refused."""
    for kind, more, words in (
        ("gpt2", "", "family 'gpt2', expected one of llama, mistral, qwen2, qwen3"),
        (
            "mistral",
            ", sliding_window: 4096",
            "the target: mistral has a sliding attention window of 4096 tokens",
        ),
    ):
        given = (
            "target.path=/nowhere",
            f"+target.config={{model_type: {kind}{more}}}",
            "dry_run=true",
        )
        with pytest.raises(UserError, match=words):
            run(configured(tiny_target, tmp_path / "run", *given))


def test_unaligned_widths_are_printed_as_warnings(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run(configured(tiny_target, tmp_path / "run", "mode=random", "student.intermediate_size=40"))
    output = capsys.readouterr().out
    assert (
        "warning: student.intermediate_size is 40, not a multiple of 64: 64 is often as fast"
        in output
    )


@pytest.mark.long
def test_domains_are_sampled_by_their_shares(tiny_target: Path, tmp_path: Path):
    """Check that a domain with share 0 changes no score, and that one with share 0.5 does."""
    texts = {
        "prose": CONF.parent / "LOG.md",
        "licence": CONF.parent / "assets" / "LICENSE-PYTHON.txt",
    }

    def scores(name: str, *shares: float) -> dict[str, torch.Tensor]:
        given = [
            "data=domains",
            "data.mixing=fixed",
            "importance.choice=even",
            f"importance.cache_dir={tmp_path}/{name}",
        ]
        for (label, path), share in zip(texts.items(), shares):
            given.append(
                f"+data.domains.{label}={{texts: [{path}], held_out_texts: [{path}], share: "
                f"{share}}}"
            )
        run(configured(tiny_target, tmp_path / f"{name}_run", *given))
        (found,) = (tmp_path / name).glob("*/scores.safetensors")
        return load_file(found)

    one = scores("one", 1.0)
    assert same(one, scores("both", 1.0, 0.0))
    assert not same(one, scores("half", 0.5, 0.5)), "control: shares matter"


@pytest.mark.long
def test_the_short_distillation_uses_its_dtype(tiny_target: Path, tmp_path: Path):
    """Check that between.dtype applies to training, and target.dtype to the stored weights."""
    given = ("student.num_hidden_layers=1", "depths=[3]", "importance.choice=even")
    run(configured(tiny_target, tmp_path / "wide", *given))
    run(configured(tiny_target, tmp_path / "narrow", *given, "between.dtype=bfloat16"))
    wide, narrow = (
        load_file(tmp_path / name / "stages" / "1_3_layers" / "model.safetensors")
        for name in ("wide", "narrow")
    )
    assert all(tensor.dtype == torch.float32 for tensor in narrow.values())
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in narrow.values())
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in wide.values()), (
        "control"
    )


def test_a_pruned_student_is_distilled_from_its_folder(tiny_target: Path, tmp_path: Path):
    import distill.train

    run(configured(tiny_target, tmp_path / "pruned", *NARROW))
    given = ["+experiment=smoke", f"target.path={tiny_target}", f"output_dir={tmp_path}/trained"]
    given += ["student.init=folder", f"student.path={tmp_path}/pruned/student"]
    distill.train.run(configuration("distill.train", *given))
    drafter = tmp_path / "trained" / "drafter"
    pruning = json.loads((drafter / "drafter_card.json").read_text())["pruning"]
    assert pruning["mode"] == "importance" and len(pruning["stages"][0]["layers"]) == 2, (
        "the card records the pruning"
    )
    config = AutoModelForCausalLM.from_pretrained(drafter).config
    assert (config.hidden_size, config.num_hidden_layers) == (16, 2)
