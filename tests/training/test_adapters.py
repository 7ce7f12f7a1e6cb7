"""Low-rank adapters: exact start, merging, rank of the change, exact resume, the trainers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import distill.train
import heads.train
import recurrent_drafting.train
from decoding.drafters.build import check_folder
from decoding.errors import UserError
from decoding.models.folder import CARD, WEIGHTS, read_json
from heads.eagle.drafter import EagleDrafter
from jobs.config import ParallelConfig
from jobs.interrupts import Interrupted
from recurrent_drafting.head import HeadConfig, RecurrentHead
from recurrent_drafting.kind import KIND
from tests.support import planted, tiny_folders, tiny_heads
from tests.support.configurations import configuration
from tests.support.interrupted_data import stop_after_step
from training import checkpoint
from training.adapters import attach, merge, merged_state
from training.config import LoopConfig, StudentConfig
from training.data.packing import PackedData, Sample, collate
from training.heads.checkpoint import save_head
from training.loop import fit
from training.models.build import build_llama
from training.objectives import LanguageModelling, hidden_states
from training.optimizer_config import OptimizerConfig
from training.parallel.strategy import Parallel

RANK, TARGET = 3, planted.MODELS / "target"
SHAPE = StudentConfig(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
)
SMALL = (
    "loop.max_steps=2",
    "loop.tokens_per_step=512",
    "loop.micro_batch_tokens=512",
    "loop.checkpoint_every=1",
    "loop.keep=2",
    "loop.optimizer.lr=1e-2",
    "loop.optimizer.warmup_steps=0",
    "data.max_length=96",
    "held_out.max_prompts=2",
    "held_out.max_new_tokens=4",
    "target.device=cpu",
)


def made(dtype: torch.dtype = torch.float32, **base: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "max_position_embeddings": 64, "initializer_range": 0.1}
    return build_llama(SHAPE, dtype, **sizes, **base)


def made_data() -> PackedData:
    random = np.random.default_rng(0)
    samples = []
    for _ in range(40):
        ids = random.integers(0, 61, int(random.integers(8, 40))).astype(np.int32)
        samples.append(Sample(ids, np.arange(len(ids)) > 2))
    return PackedData(samples, 64, rows_per_step=4, seed=7)


def logits(model: Any) -> torch.Tensor:
    sample = Sample(np.arange(20, dtype=np.int32), np.arange(20) > 0)
    batch = collate([sample], [[0]], 20)
    with torch.no_grad():
        return model.lm_head(hidden_states(model, batch))  # type: ignore[no-any-return]


def trained(
    folder: Path, rank: int = RANK, stop_after: int = 0, dtype: torch.dtype = torch.float32
) -> Any:
    """Return a model after training with adapters, which are still attached."""
    model = made(dtype)
    attach(model, rank)
    data = stop_after_step(made_data(), stop_after)
    settings = LoopConfig(
        max_steps=6,
        tokens_per_step=256,
        micro_batch_tokens=128,
        eval_every=0,
        checkpoint_every=2,
        optimizer=OptimizerConfig(lr=2e-2, warmup_steps=1),
    )
    fit(
        "t",
        LanguageModelling(model),
        model,
        data,
        settings,
        Parallel(ParallelConfig(), "cpu"),
        folder,
        None,
        lambda: {"score": 0.0},
    )
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_starts_as_the_old_drafter_exactly(dtype: torch.dtype) -> None:
    old, model = made(dtype), made(dtype)
    count = attach(model, RANK)
    assert 0 < count < sum(one.numel() for one in old.parameters()) / 2
    assert torch.equal(logits(old), logits(model))
    # the control: an adapter that does not start at zero
    model.lm_head.parametrizations.weight[0].up_Or.data.fill_(0.5)
    assert not torch.equal(logits(old), logits(model))


@pytest.mark.parametrize("form", ["recurrent", "projected", "shortlist"])
def test_a_head_with_adapters_starts_with_the_old_heads_loss(form: str) -> None:
    model, batch = tiny_heads.target(), tiny_heads.packed(tiny_heads.samples())
    plain, adapted = (tiny_heads.objective(tiny_heads.head(form), model) for _ in range(2))
    assert attach(adapted.head, RANK)
    before, after = plain(batch), adapted(batch)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    after[0].backward()
    gradients = {name for name, one in adapted.head.named_parameters() if one.grad is not None}
    assert gradients and all("parametrizations.weight.0" in name for name in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_adapter_equals_the_unmerged_one(tmp_path: Path, dtype: torch.dtype) -> None:
    model = trained(tmp_path, dtype=dtype)
    with_adapters, state = logits(model), merged_state(model)
    merge(model)
    assert torch.equal(with_adapters, logits(model))
    # the control: the weights that were adapted
    assert not torch.equal(with_adapters, logits(made(dtype)))
    own = model.state_dict()
    assert state.keys() == own.keys() == made().state_dict().keys()
    assert all(torch.equal(state[name], own[name]) for name in own)
    assert type(model.lm_head) is torch.nn.Linear


def ranks_of_change(model: Any) -> dict[str, int]:
    """Return the rank of the change of each weight that changed."""
    old = made().state_dict()
    changes = {name: (one - old[name]).double() for name, one in model.state_dict().items()}
    return {
        name: int(torch.linalg.matrix_rank(change, rtol=1e-5)) if change.dim() == 2 else -1
        for name, change in changes.items()
        if change.any()
    }


def test_an_adapter_changes_linear_layers_by_its_rank_alone(tmp_path: Path) -> None:
    model = trained(tmp_path / "adapted")
    merge(model)
    found = ranks_of_change(model)
    layers = {name for name, one in made().named_modules() if isinstance(one, torch.nn.Linear)}
    assert found == {f"{name}.weight": RANK for name in layers}
    # the control: all weights are trained
    whole = ranks_of_change(trained(tmp_path / "whole", rank=0))
    assert max(whole.values()) > RANK and "model.norm.weight" in whole


def test_a_resumed_adapter_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    trained(tmp_path / "straight")
    with pytest.raises(Interrupted):
        trained(tmp_path / "stopped", stop_after=3)
    trained(tmp_path / "stopped")
    one, other = (
        checkpoint.load(tmp_path / name / "checkpoints" / "step_000006")
        for name in ("straight", "stopped")
    )
    for mine, theirs in ((one.model, other.model), (one.optimizer, other.optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert all("parametrizations" in name for name in one.optimizer)  # no state of whole weights
    # the control: an earlier step
    before = checkpoint.load(tmp_path / "straight" / "checkpoints" / "step_000006").model
    earlier = made()
    attach(earlier, RANK)
    assert any(not torch.equal(before[name], one) for name, one in earlier.state_dict().items())


def test_a_tied_output_layer_keeps_the_embedding() -> None:
    model = made(tie_word_embeddings=True)
    attach(model, RANK)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.lm_head.weight.requires_grad
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "ParametrizedLinear"


def test_too_large_a_rank_names_the_largest() -> None:
    with pytest.raises(UserError, match="adapter_rank is 32, expected less than 32"):
        attach(made(), 32)
    with pytest.raises(UserError, match="has no linear layer"):
        attach(torch.nn.Embedding(4, 4), 1)


# ------------------------------------------------------------------------------------ the trainers


def given(home: Path, *more: str) -> list[str]:
    chats = planted.write_chats(home / "chats.json")
    prompts = planted.write_prompts(home / "prompts.jsonl", planted.shuffled())
    return [f"data.chats=[{chats}]", f"held_out.prompts={prompts}", *SMALL, *more]


def distilled(home: Path, name: str, *more: str, target: Path = TARGET) -> Path:
    folder = home / name
    paths = (f"target.path={target}", f"output_dir={folder}")
    distill.train.run(configuration("distill.train", *given(home), *paths, *more))
    return folder / "drafter"


def recurrent(home: Path, name: str, *more: str, target: Path = TARGET) -> Path:
    folder = home / name
    paths = (f"target.path={target}", f"output_dir={folder}")
    config = configuration("recurrent_drafting.train", *given(home), "beam_width=2", *paths, *more)
    recurrent_drafting.train.run(config)
    return folder / "drafter"


def old_head(folder: Path) -> Path:
    """Write a recurrent head for the target, with its card."""
    torch.manual_seed(5)
    shape = HeadConfig(len(tiny_folders.tokenizer()), 32, 64, 1)
    save_head(KIND.layout, shape, RecurrentHead(shape), folder)
    planted.write_tokenizer(folder)
    planted.write_card(folder, TARGET)
    return folder


def tuned_target(home: Path) -> Path:
    model = planted.fit(planted.noisy(TARGET, 0.0), planted.samples_of(planted.TEMPLATE, step=4), 2)
    return planted.write_model(home / "tuned", model)


def changed(old: Path, new: Path) -> dict[str, int]:
    """Return the rank of the change of each tensor of two drafter folders."""
    one, other = load_file(old / WEIGHTS), load_file(new / WEIGHTS)
    assert one.keys() == other.keys()
    changes = {name: (other[name].double() - one[name].double()) for name in one}
    return {
        name: int(torch.linalg.matrix_rank(change, rtol=1e-3)) if change.dim() == 2 else -1
        for name, change in changes.items()
        if change.any()
    }


def test_a_drafter_is_retargeted_by_an_adapter_and_exported_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    old = planted.write_drafter(tmp_path / "old", TARGET, planted.noisy(TARGET, 0.05))
    tuned = tuned_target(tmp_path)
    start = ("student.init=folder", f"student.path={old}", f"adapter_rank={RANK}")
    new = distilled(tmp_path, "run", *start, target=tuned)
    found = changed(old, new)
    assert found and set(found.values()) == {RANK}
    assert not any("norm" in name or "embed" in name for name in found)
    card = read_json(new / CARD)
    assert card["continued_from"]["drafter_hash"] == read_json(old / CARD)["drafter_hash"]
    assert card["continued_from"]["adapter_rank"] == RANK
    assert card["target_hash"] != card["continued_from"]["target_hash"]
    # a checkpoint's folder is an ordinary drafter too
    again = f"checkpoint={tmp_path / 'run' / 'checkpoints' / 'step_000002'}"
    config = configuration("distill.train", f"target.path={tuned}", again)
    exported = load_file(distill.train.run(config) / WEIGHTS)
    assert exported.keys() == load_file(new / WEIGHTS).keys()


def test_a_head_continues_on_another_target_whole_and_by_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = old_head(tmp_path / "old")
    tuned = tuned_target(tmp_path)
    whole = changed(old, recurrent(tmp_path, "whole", f"head.path={old}", target=tuned))
    assert "other weights than those of" in " ".join(capsys.readouterr().out.split())
    assert max(whole.values()) > RANK
    start = (f"head.path={old}", f"adapter_rank={RANK}")
    adapted = changed(old, recurrent(tmp_path, "adapted", *start, target=tuned))
    assert adapted and set(adapted.values()) == {RANK}


def test_a_continued_drafter_must_fit_the_target(tmp_path: Path) -> None:
    other = tiny_folders.save(tmp_path / "other", layers=2)
    written = json.loads((other / "tokenizer.json").read_text())
    words = written["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(UserError, match="their tokenizers differ in 2 of"):
        distilled(tmp_path, "a", "student.init=folder", f"student.path={other}")
    old = old_head(tmp_path / "old")
    head = Path(shutil.copytree(old, tmp_path / "narrow"))
    text = (head / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 16')
    (head / "config.json").write_text(text)
    with pytest.raises(UserError, match="hidden_size"):
        recurrent(tmp_path, "b", f"head.path={head}")
    with pytest.raises(UserError, match="No such|does not exist|neither"):
        distilled(tmp_path, "c", "student.init=folder", f"student.path={tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("adapter_rank=2",), "adapter_rank is 2, expected 0 without student.path"),
        (("adapter_rank=-1",), "adapter_rank is -1, expected"),
        (
            ("adapter_rank=2", "student.init=folder", "student.path=x", "parallel.kind=fsdp"),
            "adapter_rank is 2, expected 0 with parallel.kind=fsdp",
        ),
        (
            ("adapter_rank=2", "student.init=folder", "student.path=x", "loop.compile=true"),
            "adapter_rank is 2, expected 0 with loop.compile=true",
        ),
        (("from_drafter=x",), r"from_drafter is x, expected empty without \+experiment=retarget"),
    ],
)
def test_impossible_adapters_are_refused(
    tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        distilled(tmp_path, "run", *more)


def test_a_head_of_other_weights_drafts_only_if_asked(tmp_path: Path) -> None:
    head, kind = planted.MODELS / "eagle3", EagleDrafter
    tuned = tuned_target(tmp_path)
    planted.write_card(folder := Path(shutil.copytree(head, tmp_path / "head")), TARGET)
    check_folder(TARGET, folder, kind)
    with pytest.raises(UserError, match=r"train.* on this one \(\+experiment=retarget\)"):
        check_folder(tuned, folder, kind)
    check_folder(tuned, folder, kind, any_target=True)
    other = tiny_folders.save(tmp_path / "other", layers=2)
    text = (other / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 48')
    (other / "config.json").write_text(text)
    with pytest.raises(UserError, match="hidden_size is 48 in the target and 32 in the head"):
        check_folder(other, folder, kind, any_target=True)


def test_a_kind_of_head_refuses_adapters_without_a_head(tmp_path: Path) -> None:
    config = configuration(
        "heads.train", "head=eagle3", f"target.path={TARGET}", "adapter_rank=2", "target.device=cpu"
    )
    with pytest.raises(UserError, match="expected 0 without head.path"):
        heads.train.run(config)
