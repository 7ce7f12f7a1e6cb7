"""Test `distill.prune` end to end on a random target: modes, cached scores, layers and stages."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoding.errors import UserError
from distill.prune.job import run
from jobs.job import CONF
from tests.support.configurations import configuration
from tests.support.pruned_folders import BRIEF, NARROW, configured, same, weights
from tests.support.tiers import tiered


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
