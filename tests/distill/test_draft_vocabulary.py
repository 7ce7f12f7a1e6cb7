"""Students with a draft vocabulary: training, resume, figures, a copy with all tokens, errors."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from decoding.costs.roofline import forward_budget
from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.draft_vocabulary import D2T, restrict_head, token_ids
from decoding.models.gguf.writer import write_gguf
from decoding.models.load import load_target
from decoding.models.native.weights import NativeConfig
from decoding.rounds.settings import Settings
from distill.acceptance import HeldOutAcceptance
from distill.config import PretrainConfig
from distill.pretrain import check as check_pretraining
from distill.prune.job import run as prune
from distill.student import build_student, restrict_vocabulary
from distill.train import run
from scripts.full_vocabulary import export
from serving.engines.conversion import export_openvino
from tests.distill.test_train import configured
from tests.support.pruned_folders import configured as pruning
from training import checkpoint
from training.config import StudentConfig
from training.data.packing import Sample, collate
from training.models.build import load_causal_lm
from training.models.shapes import bytes_a_step, forward_flops, parameter_counts
from training.objectives import Distillation, LanguageModelling, hidden_states

V, SIZE = 2048, 300
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def finished(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of a student that drafts from 300 of 2,048 tokens."""
    folder = tmp_path_factory.mktemp("finished")
    run(configured(tiny_target, folder, f"student.draft_vocab_size={SIZE}"))
    return folder


def ids_of(folder: Path) -> list[int]:
    d2t = load_file(folder / WEIGHTS)[D2T]
    return (d2t + torch.arange(len(d2t))).tolist()


def sample(tokens: list[int], answer: int) -> Sample:
    """Return a sample that supervises its last `answer` tokens."""
    mask = np.arange(len(tokens)) >= len(tokens) - answer
    return Sample(np.array(tokens, dtype=np.int32), mask)


@pytest.fixture
def student(tiny_target: Path):
    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    return build_student(StudentConfig(num_hidden_layers=1), target, torch.float32)


def test_the_folder_has_its_ids_in_weights_config_and_card(finished: Path, tiny_target: Path):
    drafter = finished / "drafter"
    state, card = (
        load_file(drafter / WEIGHTS),
        json.loads((drafter / "drafter_card.json").read_text()),
    )
    config = json.loads((drafter / "config.json").read_text())
    assert (config["draft_vocab_size"], config["tie_word_embeddings"]) == (SIZE, False)
    assert state["lm_head.weight"].shape == (SIZE, 32)
    assert state["model.embed_tokens.weight"].shape == (V, 32), "every token can be read"
    assert card["draft_vocabulary"] == {"size": SIZE, "ids": ids_of(drafter)}
    assert card["parameters"] == sum(t.numel() for name, t in state.items() if name != D2T)
    special = AutoTokenizer.from_pretrained(tiny_target).all_special_ids
    assert special and set(special) <= set(ids_of(drafter))
    figures = card["acceptance"]
    assert 0 < figures["acceptance"] <= figures["coverage"] < 1
    assert 0 < figures["drafted_tokens"] < 1
    readme = (drafter / "README.md").read_text()
    assert "full_vocabulary.py" in readme and "vllm serve" not in readme


def test_special_tokens_come_first_and_then_the_most_frequent_answers(
    student, capsys: pytest.CaptureFixture[str]
):
    before = student.lm_head.weight.detach().clone()
    samples = [sample([50, 9, 9, 9, 60, 60, 4], 4), sample([7, 7, 7, 60], 1)]
    restrict_vocabulary(student, StudentConfig(draft_vocab_size=4), samples, {1, 2}, show=True)
    # answers: 9 60 60 4 60, so 60 is the most frequent; 4 and 9 tie
    assert token_ids(student).tolist() == [1, 2, 4, 60]
    assert "4 of 2,048 tokens, 80.00%" in capsys.readouterr().out
    assert torch.equal(student.lm_head.weight, before[[1, 2, 4, 60]])
    assert not student.config.tie_word_embeddings


def test_training_logits_equal_drafting_logits(finished: Path):
    """Compare the packed forward of training with the cached forwards of drafting."""
    drafter = finished / "drafter"
    model, ids = load_causal_lm(drafter, torch.float32), torch.tensor(ids_of(drafter))
    tokens = torch.randint(3, V, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = collate([sample(tokens, 39)], [[0]], 64, torch.device("cpu"))
    with torch.no_grad():
        trained_ND = batch.at_supervised(hidden_states(model, batch)) @ model.lm_head.weight.T
    for backend in ("native", "hf"):
        loaded = load_target(drafter, backend=backend)
        loaded.open(1, 64)
        drafted = []
        with torch.inference_mode():
            for token in tokens[:-1]:
                drafted.append(loaded.forward(torch.tensor([[token]]))[0][0, 0])
                loaded.commit(None, [1])
        drafted_NV = torch.stack(drafted)
        torch.testing.assert_close(drafted_NV[:, ids], trained_ND, rtol=0, atol=1e-5)
        others = torch.ones(V, dtype=torch.bool).index_fill(0, ids, False)
        assert bool(drafted_NV[:, others].isneginf().all())


@pytest.mark.parametrize("loss", ["forward_kl", "cross_entropy"])
def test_the_objective_learns_only_drafted_tokens(student, tiny_target: Path, loss: str):
    teacher = load_causal_lm(tiny_target, torch.float32)
    restrict_head(student, torch.arange(0, V, 2))
    batch = collate([sample([5, 8, 11, 12, 40], 4)], [[0]], 8, torch.device("cpu"))
    learns = LanguageModelling(student)
    total, metric = (Distillation(student, teacher) if loss == "forward_kl" else learns)(batch)
    total.backward()
    assert student.lm_head.weight.grad.shape == (V // 2, 32)
    assert 0 <= float(metric) <= 4 and torch.isfinite(total)
    assert float(student.model.embed_tokens.weight.grad.abs().sum()) > 0


def test_held_out_acceptance_equals_an_eager_twin(student, tiny_target: Path):
    teacher, ids = load_causal_lm(tiny_target, torch.float32), torch.arange(0, V, 3)
    restrict_head(student, ids)
    tokens = torch.randint(3, V, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    figures = HeldOutAcceptance(student, teacher, [sample(tokens, 29)], 32, 0.8)()
    batch = collate([sample(tokens, 29)], [[0]], 32, torch.device("cpu"))
    with torch.no_grad():
        p, q = (
            model.lm_head(batch.at_supervised(hidden_states(model, batch))).div(0.8).softmax(-1)
            for model in (teacher, student)
        )
    eager = {
        "acceptance": torch.minimum(p, q).sum(-1).mean(),
        "greedy_acceptance": (p.argmax(-1) == q.argmax(-1)).float().mean(),
        "coverage": p[:, ids].sum(-1).mean(),
    }
    for name, value in eager.items():
        assert figures[name] == pytest.approx(float(value), abs=1e-5)
    drafted = sum(token % 3 == 0 for token in tokens[1:]) / 29
    assert figures["drafted_tokens"] == pytest.approx(drafted)


@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one(
    finished: Path, tiny_target: Path, tmp_path: Path
):
    """Continue from the checkpoint of step 2, as after a kill."""
    size = f"student.draft_vocab_size={SIZE}"
    run(configured(tiny_target, tmp_path, size, "loop.keep=5"))
    shutil.rmtree(tmp_path / "drafter")
    kept = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert len(kept) > 1
    for folder in kept[1:]:
        shutil.rmtree(folder)
    assert checkpoint.latest(tmp_path / "checkpoints", report=print).state["step"] == 2
    run(configured(tiny_target, tmp_path, size, "loop.keep=5"))
    ours, straight = (load_file(f / "drafter" / WEIGHTS) for f in (tmp_path, finished))
    assert ours.keys() == straight.keys()
    assert all(torch.equal(ours[name], straight[name]) for name in straight)


def test_a_student_folder_with_a_draft_vocabulary_keeps_it(
    finished: Path, tiny_target: Path, tmp_path: Path
):
    path = f"student.path={finished / 'drafter'}"
    run(configured(tiny_target, tmp_path, "student.init=folder", path, "loop.max_steps=1"))
    assert ids_of(tmp_path / "drafter") == ids_of(finished / "drafter")
    other = configured(
        tiny_target, tmp_path / "other", "student.init=folder", path, "student.draft_vocab_size=200"
    )
    with pytest.raises(UserError, match="draft_vocab_size is 200, but .* drafts from 300 tokens"):
        run(other)


@pytest.mark.parametrize("size", [-1, V + 1])
def test_an_impossible_size_is_refused(tiny_target: Path, tmp_path: Path, size: int):
    with pytest.raises(UserError, match=f"student.draft_vocab_size is {size}, expected 0 .* 2048"):
        run(configured(tiny_target, tmp_path, f"student.draft_vocab_size={size}"))


def test_a_drafter_with_a_draft_vocabulary_is_no_target(finished: Path, tmp_path: Path):
    with pytest.raises(UserError, match="is a drafter of 300 tokens, expected a model with an lm"):
        run(configured(finished / "drafter", tmp_path))


def test_pretraining_has_no_draft_vocabulary():
    shape = StudentConfig(
        hidden_size=32, num_attention_heads=4, intermediate_size=48, draft_vocab_size=10
    )
    with pytest.raises(UserError, match="model.draft_vocab_size is 10, expected 0"):
        check_pretraining(PretrainConfig(model=shape))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_attention_heads": 3}, "hidden_size is 32, expected a multiple of .* .3."),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, expected a multiple of .* .3."),
        ({"head_dim": 7}, "head_dim is 7, expected even heads"),
        ({"hidden_size": 36}, "hidden_size is 36, expected even heads, found 9 channels"),
    ],
)
def test_heads_that_no_model_has_are_refused(changed: dict[str, int], message: str):
    shape = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    check_pretraining(PretrainConfig(model=StudentConfig(**shape)))  # type: ignore[arg-type]
    config = PretrainConfig(model=StudentConfig(**{**shape, **changed}))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        check_pretraining(config)


def test_a_dry_run_counts_the_rows_and_writes_all_tokens(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run(configured(tiny_target, tmp_path, f"student.draft_vocab_size={SIZE}", "dry_run=true"))
    assert "the untrained student has all tokens" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "drafter").lm_head.weight.shape == (
        V,
        32,
    )


def test_pruning_notes_that_it_keeps_all_tokens(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = ("dry_run=true", f"student.draft_vocab_size={SIZE}")
    prune(pruning(tiny_target, tmp_path, *given))
    assert "the pruned one keeps all tokens" in capsys.readouterr().out


def test_costs_count_the_rows_of_the_draft_vocabulary(student):
    complete = student.config.to_dict()
    before = [count(student.config) for count in (bytes_a_step, forward_flops)]
    restrict_head(student, torch.arange(SIZE))
    after = [count(student.config) for count in (bytes_a_step, forward_flops)]
    saved = (V - SIZE) * 32
    assert [b - a for b, a in zip(before, after)] == [2 * saved, 2 * saved]
    assert parameter_counts(student.config)["all"] == student.num_parameters()
    whole, part = (
        forward_budget(NativeConfig.from_dict(one), torch.float32, 1, 0)
        for one in (complete, student.config.to_dict())
    )
    assert whole.weight_bytes - part.weight_bytes == 4 * saved
    assert whole.operations - part.operations == 2 * saved


@pytest.mark.long
def test_the_copy_with_all_tokens_drafts_the_same(embedded_target: Path, tmp_path: Path):
    drafter, copy = tmp_path / "drafter", tmp_path / "copy"
    run(configured(embedded_target, tmp_path, f"student.draft_vocab_size={SIZE}"))
    found = export(drafter, copy)
    assert found.same_argmax == 1 and found.largest_mass < 1e-6
    model, H = AutoModelForCausalLM.from_pretrained(copy), 192
    assert type(model).__name__ == "LlamaForCausalLM" and model.lm_head.weight.shape == (V, H)
    rows = load_file(drafter / WEIGHTS)["lm_head.weight"]
    assert torch.equal(load_file(copy / WEIGHTS)["lm_head.weight"][ids_of(drafter)], rows)
    target, prompts = load_target(embedded_target), [[1, 5, 9], [1, 700, 33, 8], [1, 4]]
    for settings in (Settings(max_new_tokens=24), Settings(max_new_tokens=24, temperature=1.0)):
        ours, theirs = (
            decode(target, ChainDrafter(folder), prompts, settings) for folder in (drafter, copy)
        )
        assert [g.tokens for g in ours] == [g.tokens for g in theirs]
        assert [g.accepted_by_depth for g in ours] == [g.accepted_by_depth for g in theirs]
        assert sum(g.accepted for g in ours) > 0
    card = json.loads((copy / "drafter_card.json").read_text())
    assert card["copy_of"]["drafted"] == SIZE and card["draft_vocabulary"] is None
    readme = (copy / "README.md").read_text()
    assert "full_vocabulary.py" not in readme and "vllm serve" in readme
    with pytest.raises(UserError, match="exists already"):
        export(drafter, copy)
    with pytest.raises(UserError, match="has no draft vocabulary"):
        export(copy, tmp_path / "another")
    with pytest.raises(UserError, match="does not exist, expected a model folder"):
        export(tmp_path / "nowhere", tmp_path / "another")


def test_a_folder_for_readers_of_all_tokens_is_refused(finished: Path, tmp_path: Path):
    """Check that the error has the line that makes a copy for llama.cpp and OpenVINO."""
    pytest.importorskip("gguf")
    drafter, words = finished / "drafter", rf"drafts {SIZE} tokens .*full_vocabulary.py .* COPY"
    with pytest.raises(UserError, match=words):
        write_gguf(drafter, tmp_path / "drafter.gguf", "float32")
    with pytest.raises(UserError, match=words):
        export_openvino(drafter, tmp_path / "openvino", Path(sys.executable))


def test_a_copy_that_drafts_other_tokens_reports_it(finished: Path, tmp_path: Path):
    """Check on random weights, whose states have no direction in common."""
    found = export(finished / "drafter", tmp_path / "copy")
    assert found.same_argmax < 1
    readme = (tmp_path / "copy" / "README.md").read_text()
    assert f"In {1 - found.same_argmax:.3%} of the states it drafts another token" in readme
