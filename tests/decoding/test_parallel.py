"""A target split over ranks: its logits equal one process's, and each rank reads only its part.

Each rank is a thread that uses the product's sockets. Real processes are tested in
test_parallel_processes.py.

Shapes: B rows, N nodes, V vocabulary, C hidden size.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from decoding import devices as cuda
from decoding.errors import UserError
from decoding.interfaces import Target
from decoding.models.distributed.links import Collectives, Link, Sockets, socket_mesh
from decoding.models.distributed.parallel import ParallelTarget, device_for_drafter, processes_of
from decoding.models.distributed.rank_process import PipelineStage, SummedLinear, join, load_part
from decoding.models.distributed.shards import (
    RankSetup,
    Shard,
    check_divisible,
    layer_span,
    read_shard,
)
from decoding.models.load import load_target
from decoding.models.native.linear import can_pack
from decoding.models.native.model import NativeTarget
from decoding.models.prefill import prefill
from tests.support.tiny_targets import hf_model, native_of

from .test_targets import ids

FAMILIES = {
    "grouped_heads": {"shape": "llama"},
    "all_heads_tied": {"shape": "llama_mha"},
    "output_bias": {"shape": "llama_bias", "num_key_value_heads": 2},
    "qwen2": {"shape": "qwen2"},
    "qwen3": {"shape": "qwen3"},
}
LAYERS = 3
Script = list[Tensor]


def exercise(target: Target) -> Script:
    """Call every method of a target, and return all tensors that the calls return."""
    seen: Script = []
    with torch.inference_mode():
        target.open(4, 40)
        seen.append(prefill(target, [[5, 6, 7], [9], [], [4, 4, 3, 8, 11]], keep_hidden=True))  # type: ignore[arg-type]
        seen += target.forward(ids(4, 3))  # a chain after rows of different lengths
        for taps in ((1,), (2, 0, 1)):  # of every rank's layers, not in their order
            seen.append(target.features(ids(4, 3), None, taps))
        seen += target.forward(ids(4, 3), None, (2,))
        target.commit(None, [3, 0, 1, 2])
        seen += target.forward(
            ids(4, 6, seed=1), torch.tensor([[-1, 0, 0, 1, 1, 4], [-1, 0, 1, 0, 3, 3]] * 2)
        )
        target.commit([[0, 1, 4, 5], [0, 3], [0, 2], [0, 1]], [4, 2, 2, 1])
        seen += target.forward(ids(4, 1, seed=2))
        target.truncate([6, 9, 1, 5])
        target.select([0, 2, 3])
        target.select([2, 0])
        seen += target.forward(ids(2, 2, seed=3))
        target.keep(1, 7)
        target.open(3, 60)
        target.begin(2, 7, 4)
        target.forget()
        seen += target.forward(ids(3, 2, seed=5))
        target.open(1, 200)
        seen += target.forward(ids(1, 150, seed=4))  # more than a chunk of a socket
        seen.append(target.lm_head(seen[-1][:, -1]))
        seen.append(target.embed(ids(2, 2)))
    return seen


def close(found: Script, expected: Script) -> None:
    assert len(found) == len(expected)
    for left, right in zip(found, expected):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-10)


def differ(found: Script, expected: Script) -> bool:
    return any((left - right).abs().max() > 1e-3 for left, right in zip(found, expected))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the model folder of a family once and returns its path."""
    home = tmp_path_factory.mktemp("families")

    def folder(family: str) -> Path:
        if not (home / family).exists():
            hf_model(layers=LAYERS, **FAMILIES[family]).save_pretrained(home / family)  # type: ignore[arg-type]
        return home / family

    return folder


class Threads:
    """Ranks of a target as threads; each method runs on all ranks and returns rank 0's result."""

    def __init__(self, folder: Path, kind: str, size: int, gloo: bool = False) -> None:
        mesh = socket_mesh(size)
        self.ranks: list[NativeTarget] = [None] * size  # type: ignore[list-item]
        self.is_tp = kind == "tp"

        def make(rank: int) -> None:
            setup = RankSetup(
                str(folder), Shard(kind, rank, size), torch.float64, "cpu", None, 1, ""
            )
            link: Link = (
                Collectives("gloo", rank, size, str(folder / "meeting"))
                if gloo
                else Sockets(rank, mesh[rank])
            )
            self.ranks[rank] = join(load_part(setup)[0], setup, "threads", link)

        self._all(make)
        self.device, self.max_length = self.ranks[0].device, self.ranks[0].max_length

    def _all(self, work: Callable[[int], object]) -> object:
        answers: dict[int, object] = {}

        def run(rank: int) -> None:
            with torch.inference_mode():
                answers[rank] = work(rank)

        others = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
        return answers[0]

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        hidden_BNC = self.features(tokens_BN, parents_BN)
        logits_BNV = self.lm_head(hidden_BNC)
        return logits_BNV, self.features(tokens_BN, parents_BN, taps) if taps else hidden_BNC

    def features(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Tensor:
        def work(rank: int) -> Tensor:
            target = self.ranks[rank]
            if rank and isinstance(target, PipelineStage):
                room = torch.empty(*tokens_BN.shape, target.hidden_size, dtype=torch.float64)
                return target.through_layers(room, parents_BN, taps, {})
            return target.features(tokens_BN, parents_BN, taps)

        return self._all(work)  # type: ignore[return-value]

    def lm_head(self, hidden: Tensor) -> Tensor:
        if not self.is_tp:
            return self.ranks[0].lm_head(hidden)
        return self._all(lambda rank: self.ranks[rank].lm_head(hidden))  # type: ignore[return-value]

    def embed(self, ids: Tensor) -> Tensor:
        return self.ranks[0].embed(ids)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def every(*arguments: object) -> None:
            for rank in self.ranks:
                getattr(rank, name)(*arguments)

        return every


@pytest.mark.parametrize(("kind", "size"), [("tp", 2), ("layers", 2), ("layers", 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_logits_of_one_process(
    family: str, kind: str, size: int, folders: Callable[[str], Path]
) -> None:
    whole = native_of(hf_model(layers=LAYERS, **FAMILIES[family]))  # type: ignore[arg-type]
    close(exercise(Threads(folders(family), kind, size)), exercise(whole))


def test_four_ranks_of_one_head(folders: Callable[[str], Path]) -> None:
    whole = native_of(hf_model("llama_mha", layers=LAYERS))
    close(exercise(Threads(folders("all_heads_tied"), "tp", 4)), exercise(whole))


@pytest.mark.parametrize("kind", ["tp", "layers"])
def test_sockets_and_gloo_give_equal_logits(kind: str, folders: Callable[[str], Path]) -> None:
    """Check that `Sockets` give the results of `Collectives`, the link that GPUs use."""
    folder = folders("grouped_heads")
    close(exercise(Threads(folder, kind, 2)), exercise(Threads(folder, kind, 2, gloo=True)))
    (folder / "meeting").unlink(missing_ok=True)


@pytest.mark.parametrize("family", ["grouped_heads", "output_bias"])
def test_controls_that_must_fail(
    family: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the comparison detects a missing sum and a bias added by every rank."""
    expected = exercise(native_of(hf_model(layers=LAYERS, **FAMILIES[family])))  # type: ignore[arg-type]
    if family == "grouped_heads":
        monkeypatch.setattr(SummedLinear, "__call__", lambda self, x_NI: self.inner(x_NI))
    else:
        import decoding.models.distributed.shards

        monkeypatch.setattr(
            decoding.models.distributed.shards,
            "_ONCE",
            decoding.models.distributed.shards.re.compile("nothing"),
        )
    assert differ(exercise(Threads(folders(family), "tp", 2)), expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the target of the law tests, and return its folder."""
    path = tmp_path_factory.mktemp("target")
    hf_model("llama", layers=2).save_pretrained(path)
    return path


# ------------------------------------------------------------------------ reading and errors
def test_a_rank_reads_only_its_part(folders: Callable[[str], Path]) -> None:
    folder = folders("grouped_heads")
    whole = native_of(hf_model(layers=LAYERS))
    config = whole.config
    for kind in ("tp", "layers"):
        parts = [read_shard(folder, config, Shard(kind, rank, 2)) for rank in range(2)]
        assert all(count == whole.num_parameters for _, count in parts)
        sizes = [sum(tensor.numel() for tensor in state.values()) for state, _ in parts]
        norms = (2 * LAYERS + 1) * config.hidden_size
        embedding = config.vocab_size * config.hidden_size
        assert sum(sizes) == whole.num_parameters + (norms + embedding if kind == "tp" else 0)
        assert max(sizes) < 0.75 * whole.num_parameters
        assert all(tensor.is_contiguous() for state, _ in parts for tensor in state.values())


def test_layers_are_divided_by_parameters() -> None:
    config = replace(native_of(hf_model(layers=1)).config, num_layers=12)

    def spans(vocab_size: int, size: int) -> list[int]:
        counted = replace(config, vocab_size=vocab_size)
        return [len(layer_span(counted, Shard("layers", rank, size))) for rank in range(size)]

    assert spans(1, 2) == [6, 6]
    assert spans(1, 5) == [2, 2, 3, 2, 3]
    assert spans(100_000, 4)[0] == 1  # embedding and head have more parameters than the layers
    assert sum(spans(100_000, 4)) == 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel": "rows"}, "parallel 'rows' is unknown, expected one of none, tp, layers"),
        ({"processes": 2}, "processes is 2 with parallel=none"),
        ({"parallel": "tp", "processes": 2, "backend": "hf"}, "native backend, found hf"),
        ({"parallel": "tp", "processes": 1}, "needs at least 2 processes, found processes=1"),
        ({"parallel": "layers"}, "needs at least 2 processes, found 0 GPUs for device=cpu"),
        (
            {"parallel": "tp", "processes": 4},
            "2 key/value heads cannot be split .* Use 2 processes, or parallel=layers",
        ),
        (
            {"parallel": "tp", "processes": 3},
            "4 attention heads cannot be split evenly over 3 processes",
        ),
        (
            {"parallel": "layers", "processes": 3},
            "has 2 layers, expected at least one for each of 3",
        ),
    ],
)
def test_inconsistent_parallel_settings_are_refused(
    settings: dict[str, object], message: str, folder: Path
) -> None:
    with pytest.raises(UserError, match=message):
        load_target(folder, **settings)  # type: ignore[arg-type]


def test_one_key_value_head_allows_layers_only() -> None:
    config = native_of(hf_model("llama_bias")).config
    with pytest.raises(UserError, match="1 key/value heads .* Use parallel=layers"):
        check_divisible(config, "tp", 2, "folder")


def test_gpus_are_counted_from_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "count_gpus", lambda: 4)
    assert processes_of("tp", 0, "native", "cuda") == 4
    assert processes_of("tp", 0, "native", "cuda:1") == 3
    assert processes_of("layers", 2, "native", "cuda:2") == 2
    with pytest.raises(
        UserError, match="processes=3 needs 3 GPUs starting at cuda:2, found 2. Use processes=2"
    ):
        processes_of("tp", 3, "native", "cuda:2")


def test_a_drafter_gets_a_free_gpu_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "count_gpus", lambda: 3)
    split = ParallelTarget.__new__(ParallelTarget)
    for devices, expected in (
        (["cuda:0", "cuda:1"], "cuda:2"),
        (["cuda:1", "cuda:2"], "cuda:0"),
        (["cuda:2"], "cuda:0"),
        (["cuda:0", "cuda:1", "cuda:2"], "cuda:0"),  # none is free
        (["cpu", "cpu"], "cpu"),
    ):
        split.devices = devices
        assert device_for_drafter(split) == expected
    assert device_for_drafter(SimpleNamespace(device=torch.device("cuda"))) == "cuda:1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_products_and_16_bit_dtypes(dtype: torch.dtype, folder: Path) -> None:
    if not can_pack(torch.device("cpu"), dtype):
        pytest.skip(f"this processor has no packed {dtype} products")
    results = []
    for size in (1, 2):
        mesh = socket_mesh(size)
        ranks = [
            RankSetup(str(folder), Shard("tp", rank, size), dtype, "cpu", None, 1, "")
            for rank in range(size)
        ]
        results.append(_logits(ranks, mesh))
    torch.testing.assert_close(
        results[1], results[0], rtol=0, atol=1e-3 if dtype == torch.float32 else 0.5
    )


def _logits(setups: list[RankSetup], mesh: list) -> Tensor:
    answers: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        with torch.inference_mode():
            target = join(
                load_part(setups[rank])[0], setups[rank], "rank", Sockets(rank, mesh[rank])
            )
            target.open(1, 8)
            answers[rank] = target.forward(ids(1, 4))[0]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(setups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers[0].float()
