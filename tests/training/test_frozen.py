"""A sharded target is read row by row, equals the complete one, and is never held complete."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding.errors import UserError
from jobs.config import ParallelConfig
from scripts.bench.peak_memory import peak_bytes
from tests.support.forks import run_ranks
from tests.support.training_rank import local_bytes
from training.config import StudentConfig
from training.data.packing import Sample, collate
from training.models.build import build_llama, load_causal_lm
from training.models.frozen import load_frozen
from training.objectives import freeze, hidden_states
from training.parallel.fsdp import run_part
from training.parallel.strategy import Parallel

VOCABULARY = 67  # not a multiple of the number of ranks


def write_target(folder: Path, tied: bool) -> None:
    """Write a model in bfloat16, in files of at most 100 kB.

    It is loaded in float32, so every value that is read takes new memory.
    """
    torch.manual_seed(0)
    shape = StudentConfig(
        hidden_size=64, num_hidden_layers=6, num_attention_heads=4, intermediate_size=250
    )
    base = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.1}
    build_llama(shape, torch.bfloat16, **base, tie_word_embeddings=tied).save_pretrained(
        folder, max_shard_size="100KB"
    )


def states(model: Any) -> torch.Tensor:
    ids = torch.arange(40).numpy().astype("int32") % VOCABULARY
    batch = collate([Sample(ids, ids >= 0)], [[0]], 40)
    hidden = hidden_states(model, batch)
    return hidden @ model.lm_head.weight.T


def gradient(model: Any, chunks: int) -> torch.Tensor:
    """Return the gradient of inputs that pass products of two frozen layers, in chunks."""
    x = torch.linspace(-1, 1, 4 * 64).view(4, 64).requires_grad_()

    def add(layer: Any, *parts: torch.Tensor) -> list[torch.Tensor]:
        return [part + layer.mlp.down_proj(layer.mlp.gate_proj(part).sin()) for part in parts]

    parts = [*x.chunk(chunks)]
    for layer in model.model.layers[:2]:
        parts = run_part(layer, add, *parts)
    torch.cat(parts).square().sum().backward()
    assert x.grad is not None
    return x.grad


def as_rank(folder: str, out: str, kind: str) -> None:
    """Load the target as one rank, and write its memory, peak memory and outputs to `out`.

    The control loads the complete target and shards it afterwards.
    """
    torch.set_num_threads(1)
    parallel = Parallel(ParallelConfig(kind=kind), "cpu")
    seen: dict[str, Any] = {}
    models: dict[str, Any] = {}

    def by_rows() -> None:
        models["rows"] = load_frozen(Path(folder), torch.float32, parallel)

    def whole() -> None:
        models["whole"] = parallel.place_frozen(freeze(load_causal_lm(Path(folder), torch.float32)))

    for name, load in (("rows", by_rows), ("whole", whole)):
        seen[name] = {
            "peak": peak_bytes(load),
            "held": sum(map(local_bytes, models[name].parameters())),
        }
    with torch.no_grad():
        found = {name: states(model) for name, model in models.items()}
    found["gradient"] = gradient(models["rows"], chunks=1 + parallel.rank)
    seen["after"] = sum(map(local_bytes, models["rows"].parameters()))
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):  # control
        models["rows"].model.layers[0].mlp.gate_proj(torch.ones(1, 64))
    save_file(found, f"{out}/rank{parallel.rank}.safetensors")
    Path(out, f"rank{parallel.rank}.json").write_text(json.dumps(seen))
    parallel.close()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "tied"), [("fsdp", False), ("zero3", True)])
def test_no_rank_holds_a_complete_target(
    kind: str,
    tied: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
):
    if kind == "zero3":
        request.getfixturevalue("deepspeed")
    write_target(tmp_path, tied)
    assert len([*tmp_path.glob("*.safetensors")]) > 1, "several files"
    # transformers reads in threads, which torch's profiler does not see.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    run_ranks("tests.training.test_frozen", str(tmp_path), str(tmp_path), kind)
    model = load_causal_lm(tmp_path, torch.float32)
    mapped = max(file.stat().st_size for file in tmp_path.glob("model-*.safetensors"))
    all_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    head = 4 * model.lm_head.weight.numel()
    with torch.no_grad():
        expected = states(model)
    passed = gradient(freeze(model), chunks=4)
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        found = load_file(tmp_path / f"rank{rank}.safetensors")
        torch.testing.assert_close(found["rows"], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found["rows"], found["whole"])
        torch.testing.assert_close(found["gradient"], passed)
        share = (all_bytes - (0 if tied else head)) / 2 + head
        assert seen["rows"]["held"] == pytest.approx(share, rel=0.02)
        assert seen["after"] == seen["rows"]["held"], "no weight stays gathered"
        assert seen["rows"]["peak"] < 1.05 * (share + mapped), (
            "its shard and the file that it reads"
        )
        assert seen["whole"]["peak"] > all_bytes, "the control: loaded complete, then sharded"


def test_a_file_that_does_not_fit_its_configuration_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that a tensor of the wrong shape is refused with its name and both shapes.

    The model is loaded without shards, because two ranks would report the same error twice.
    """
    write_target(tmp_path, False)
    path = next(
        path for path in tmp_path.glob("*.safetensors") if "model.norm.weight" in load_file(path)
    )
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": torch.ones(32)}, path, {"format": "pt"})
    parallel = Parallel(ParallelConfig(), "cpu")
    monkeypatch.setattr(Parallel, "shards_weights", True)
    monkeypatch.setattr(Parallel, "place_frozen", lambda self, model: model.to_empty(device="cpu"))
    with pytest.raises(
        UserError, match=r"tensor 'model.norm.weight' has shape \[32\], expected \[64\] according"
    ):
        load_frozen(tmp_path, torch.float32, parallel)


def test_a_target_with_other_tensor_names_is_loaded_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_target(tmp_path, False)
    monkeypatch.setattr(Parallel, "shards_weights", True)
    monkeypatch.setattr(Parallel, "place_frozen", lambda self, model: model)
    monkeypatch.setattr("training.models.frozen._tensor_names", lambda file: [])
    model = load_frozen(tmp_path, torch.float32, Parallel(ParallelConfig(), "cpu"))
    assert "every rank reads the full target before sharding it" in capsys.readouterr().out
    assert not next(model.parameters()).is_meta and not next(model.parameters()).requires_grad


if __name__ == "__main__":
    as_rank(*sys.argv[1:])
