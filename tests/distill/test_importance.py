"""Test importance scores, their cuts, and the choice of layers."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jobs.files
from decoding.values import is_number
from distill.prune.context import PruneContext
from distill.prune.cut import cut_model, keep_layers
from distill.prune.importance import (
    ImportanceScores,
    collect_scores,
    cut_by_scores,
    rank_batches,
    read_order,
    read_scores,
    write_order,
    write_scores,
)
from distill.prune.layer_choice import (
    CRITERIA,
    count_layer_sets,
    find_removal_order,
    propose_layer_sets,
)
from distill.shapes import student_config
from tests.support.model_families import FAMILIES, family
from training.config import StudentConfig
from training.data.packing import Sample, collate
from training.objectives import hidden_states

from .test_cut import SHAPE, logits


def one_rank(rank: int = 0, world_size: int = 1) -> Any:
    """Return a fake rank whose `sum` returns its argument, so that the caller adds up the ranks."""
    return SimpleNamespace(
        rank=rank, world_size=world_size, is_main=False, device="cpu", sum=lambda values: values
    )


ALONE = one_rank()


def batches(seed: int = 0, rows: int = 6):
    """Return `rows` batches, each one row of two packed random documents and padding."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in torch.randint(4, 9, (2 * rows,), generator=generator).tolist():
        ids = torch.randint(3, 60, (length,), generator=generator).numpy().astype("int32")
        samples.append(Sample(ids, torch.ones(length).bool().numpy()))
    return [collate(samples, [[2 * row, 2 * row + 1]], 20) for row in range(rows)]


def test_scores_equal_their_formulas():
    """Compare the scores of one layer with their formulas, computed from its modules' inputs."""
    target = family("llama")
    scores = collect_scores(target, batches(), ALONE).finished()
    units, heads, groups, square = torch.zeros(40), torch.zeros(6), torch.zeros(3), torch.zeros(24)
    inputs: dict[str, torch.Tensor] = {}
    layer = target.model.layers[1]
    layer.mlp.down_proj.register_forward_hook(
        lambda _, given, out: inputs.__setitem__("units", given[0])
    )
    layer.self_attn.o_proj.register_forward_hook(
        lambda _, given, out: inputs.__setitem__("heads", given[0])
    )
    layer.input_layernorm.register_forward_hook(
        lambda _, given, out: inputs.__setitem__("norm", given[0])
    )
    with torch.no_grad():
        for batch in batches():
            hidden_states(target, batch)
            real = batch.documents_RT[0] > 0
            by_head = inputs["heads"][0, real].view(-1, 6, 6)
            units += inputs["units"][0, real].abs().mean(0) ** 2
            heads += by_head.norm(dim=2).mean(0) ** 2
            groups += by_head.view(-1, 3, 12).norm(dim=2).mean(0) ** 2
            square += (inputs["norm"][0, real] ** 2).mean(0) / 6
    torch.testing.assert_close(scores.units_LF[1].float(), units.sqrt())
    torch.testing.assert_close(scores.heads_LQ[1].float(), heads.sqrt())
    torch.testing.assert_close(scores.groups_LH[1].float(), groups.sqrt())
    torch.testing.assert_close(scores.square_NC[2].float(), square)


def test_scores_of_ranks_add_up():
    """Check that the scores of 2, 3 or 7 ranks add up to the scores of one process.

    All ranks make equally many forward passes: a rank with fewer rows adds one of weight 0.
    """
    target, rows = family("llama"), batches(rows=5)
    alone = vars(collect_scores(target, rows, ALONE).finished())
    for ranks in (2, 3, 7):
        parts = [vars(collect_scores(target, rows, one_rank(rank, ranks))) for rank in range(ranks)]
        summed = ImportanceScores(**{name: sum(part[name] for part in parts) for name in alone})
        for name, tensor in vars(summed.finished()).items():
            torch.testing.assert_close(tensor, alone[name])
    shares = [rank_batches(rows, one_rank(rank, 3)) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 2, 2], (
        "every rank runs equally many forward passes"
    )
    assert [sum(weight for _, weight in share) for share in shares] == [2, 2, 1]


@pytest.mark.parametrize("name", FAMILIES)
def test_useless_units_are_cut_first(name: str):
    """Check that units and heads whose weights are zero are cut first, so the logits stay equal."""
    target = family(name)
    config = target.config
    group_size = config.num_attention_heads // config.num_key_value_heads
    kept_groups = config.num_key_value_heads // 3 * 2
    with torch.no_grad():
        for number, layer in enumerate(target.model.layers):
            # half of the units write nothing
            layer.mlp.down_proj.weight[:, number % 2 :: 2] = 0
            layer.mlp.up_proj.weight[number % 2 :: 2] = 0  # and compute nothing
            dead = torch.tensor(
                [g for g in range(config.num_key_value_heads) if (g + number) % 3 == 0]
            )
            for group in dead.tolist():
                layer.self_attn.v_proj.weight[group * 6 : group * 6 + 6] = 0
                if layer.self_attn.v_proj.bias is not None:
                    layer.self_attn.v_proj.bias[group * 6 : group * 6 + 6] = 0
    shape = student_config(
        StudentConfig(
            num_hidden_layers=4,
            num_attention_heads=kept_groups * group_size,
            num_key_value_heads=kept_groups,
            intermediate_size=20,
        ),
        config,
    )
    scores = collect_scores(target, batches(), ALONE).finished()
    student = cut_model(target, cut_by_scores(scores, range(4), shape, config), shape).eval()
    torch.testing.assert_close(logits(student), logits(target), rtol=1e-4, atol=1e-4)


def test_every_group_keeps_equally_many_query_heads():
    target = family("llama")
    scores = collect_scores(target, batches(), ALONE).finished()
    cut = cut_by_scores(scores, [0, 3], student_config(SHAPE, target.config), target.config)
    assert cut.queries_LKG.shape == (2, 2, 1)
    for layer, source in enumerate(cut.layers):
        for place, group in enumerate(cut.groups_LK[layer].tolist()):
            heads = scores.heads_LQ[source].view(3, 2)[group]
            assert int(cut.queries_LKG[layer, place, 0]) == int(heads.argmax())


def test_a_cut_norm_keeps_the_scale_of_its_output():
    """Check that the output of a cut, rescaled norm keeps its scale within 10 %.

    Control: without rescaling, the scale differs by more.
    """
    target = family("llama")
    with torch.no_grad():  # a few large channels, as in real models
        target.model.embed_tokens.weight[:, :4] *= 8
    scores = collect_scores(target, batches(), ALONE).finished()
    shape = student_config(dataclasses.replace(SHAPE, num_hidden_layers=4), target.config)
    off = []
    for rescale in (True, False):
        cut = cut_by_scores(scores, range(4), shape, target.config, rescale)
        student = cut_model(target, cut, shape)
        with torch.no_grad():
            x = target.model.embed_tokens.weight[3:60]
            complete = target.model.layers[0].input_layernorm(x)[:, cut.hidden_K]
            found = student.model.layers[0].input_layernorm(x[:, cut.hidden_K])
        off.append(float((found.norm() / complete.norm()).log().abs()))
    assert off[0] < 0.1 < off[1]


@torch.no_grad()
def silence(layer: Any) -> None:
    """Make a layer return its input."""
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


def test_useless_layers_are_removed_first():
    target = family("llama", num_hidden_layers=6)
    for idle in (2, 4):
        silence(target.model.layers[idle])
    order = find_removal_order(target, batches(rows=2), ALONE)
    assert set(order[:2]) == {2, 4}
    assert len(set(order)) == 5


def test_an_interrupted_removal_resumes():
    target, rows = family("llama", num_hidden_layers=6), batches(rows=2)
    kept: list[list[int]] = []
    order = find_removal_order(target, rows, ALONE, save=lambda removed: kept.append([*removed]))
    assert kept == [order[:count] for count in range(1, 6)]
    assert find_removal_order(target, rows, ALONE, removed=order[:2]) == order


def test_the_removed_layer_has_the_smallest_kl():
    """Compare the first removed layer with a search over models that lack one layer each."""
    target, rows = family("llama"), batches(rows=2)
    kl = []
    for removed in range(4):
        left = [layer for layer in range(4) if layer != removed]
        shape = student_config(StudentConfig(num_hidden_layers=3), target.config)
        student = cut_model(target, keep_layers(target.config, left), shape).eval()
        total = 0.0
        with torch.no_grad():
            for batch in rows:
                p, q = (
                    torch.log_softmax(
                        model.lm_head(batch.at_supervised(hidden_states(model, batch))).double(), -1
                    )
                    for model in (target, student)
                )
                total += float((p.exp() * (p - q)).sum())
        kl.append(total)
    assert find_removal_order(target, rows, ALONE)[0] == kl.index(min(kl))


def test_candidates_follow_their_criteria():
    influence = torch.tensor([0.9, 0.1, 0.5, 0.2, 0.8, 0.3])
    found = propose_layer_sets(3, 6, torch.tensor([0.9, 0.1, 0.5, 0.6, 0.2, 0.3]), [1, 3, 0, 2, 4])
    assert found == {
        "even": [0, 2, 5],
        "even_without_last": [0, 2, 4],
        "influence": [0, 2, 3],
        "greedy": [2, 4, 5],
        "contiguous": [0, 1, 5],
        "early_exit": [0, 1, 2],
    }
    found = propose_layer_sets(3, 6, influence, [1, 3, 5, 2, 4])
    assert "influence" not in found and "greedy" not in found, (
        "both propose the set of even_without_last"
    )
    every = propose_layer_sets(3, 6, influence, [1, 3, 5, 2, 4], distinct=False)
    assert every["influence"] == every["greedy"] == every["even_without_last"] == [0, 2, 4]
    assert propose_layer_sets(1, 6, influence, [1, 3, 5, 2, 0]) == {
        "even": [0],
        "greedy": [4],
        "contiguous": [5],
    }


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 12, 32])
def test_candidates_are_distinct_sorted_and_of_the_right_size(layers: int):
    """Check the sets of layers of every size: sorted, distinct and of that size.

    There are at most as many sets as `count_layer_sets` returns. Unless all layers are kept, at
    least one set lacks the last layer.
    """
    generator = torch.Generator().manual_seed(layers)
    for count in range(1, layers + 1):
        influence = torch.rand(layers, generator=generator)
        removal = torch.randperm(layers, generator=generator).tolist()[: layers - 1]
        every = propose_layer_sets(count, layers, influence, removal, distinct=False)
        assert tuple(every) == CRITERIA
        for chosen in every.values():
            assert (
                chosen == sorted(set(chosen))
                and len(chosen) == count
                and {*chosen} <= {*range(layers)}
            )
        found = propose_layer_sets(count, layers, influence, removal)
        assert sorted(found.values()) == sorted(
            map(list, {tuple(chosen) for chosen in every.values()})
        )
        assert len(found) <= count_layer_sets(count, layers) <= len(CRITERIA)
        assert (count == layers) == all(layers - 1 in chosen for chosen in found.values())
    assert count_layer_sets(layers, layers) == 1


@pytest.mark.parametrize("idle", [0, 3])
def test_criteria_may_drop_the_first_or_the_last_layer(idle: int):
    """Check that influence and greedy removal drop a layer that does nothing, at any position."""
    target, rows = family("llama"), batches(rows=2)
    silence(target.model.layers[idle])
    scores = collect_scores(target, rows, ALONE).finished()
    removal = find_removal_order(target, rows, ALONE)
    every = propose_layer_sets(3, 4, scores.influence_L, removal, distinct=False)
    left = [layer for layer in range(4) if layer != idle]
    assert every["influence"] == every["greedy"] == left
    assert every["even"] != left, "control: this criterion ignores the weights"


def test_scores_and_orders_are_cached_and_damaged_ones_ignored(tmp_path: Path):
    target = family("llama")
    scores = collect_scores(target, batches(), ALONE).finished()
    path = tmp_path / "deep" / "scores.safetensors"
    assert read_scores(path) is None
    write_scores(path, scores, {"target": "here"})
    found = read_scores(path)
    assert found is not None
    assert all(torch.equal(tensor, vars(found)[name]) for name, tensor in vars(scores).items())
    path.write_bytes(path.read_bytes()[:-40])
    assert read_scores(path) is None
    order = tmp_path / "deep" / "removal.json"
    assert read_order(order, 4) == []
    for removed in ([3], [3, 1, 2]):
        write_order(order, removed, 4)
        assert read_order(order, 4) == removed
    assert read_order(order, 5) == [], "an order of another number of layers"
    for damaged in ('{"layers": 4, "rem', "[3, 1, 2]", '{"layers": 4, "removed": [3, 3]}'):
        order.write_text(damaged)
        assert read_order(order, 4) == []


def test_two_runs_may_write_the_same_scores_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scores, path = (
        collect_scores(family("llama"), batches(), ALONE).finished(),
        tmp_path / "scores.safetensors",
    )
    replace = os.replace

    def write_another_first(*paths: Any) -> None:
        monkeypatch.setattr(jobs.files.os, "replace", replace)
        write_scores(path, scores, {})
        replace(*paths)

    monkeypatch.setattr(jobs.files.os, "replace", write_another_first)
    write_scores(path, scores, {})
    assert read_scores(path) is not None
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "no temporary file is left"


def test_damaged_values_of_a_probe_are_computed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank: Any = SimpleNamespace(is_main=True, broadcast=lambda value: value)
    config: Any = SimpleNamespace(cache_mb=0)
    context = PruneContext(config, None, {}, [], rank)
    file = tmp_path / "probe" / "acceptance.json"
    assert context.cached(file, lambda: 0.5, is_number) == 0.5
    assert context.cached(file, lambda: 0.6, is_number) == 0.5
    assert capsys.readouterr().out == ""
    for damaged in ("", "0.", "[0.5]", "{}", "null", "NaN", "[" * 10**5, "\x00"):
        file.write_text(damaged)
        assert context.cached(file, lambda: 0.7, is_number) == 0.7
        assert f"{file} is damaged" in capsys.readouterr().out
        assert json.loads(file.read_text()) == 0.7
