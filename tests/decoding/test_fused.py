"""The fused step: its bits do not depend on the rows beside a token, and how it is built.

Its equality with the eager step is in test_static.py. Shapes: B rows, N new tokens, V vocabulary.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.trees.multi_candidate import MultiCandidate
from decoding.errors import UserError
from decoding.interfaces import Drafter
from decoding.loop import decode
from decoding.models import load
from decoding.models.load import choose_execution, load_target
from decoding.models.native import fused, library
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from tests.support.tiny_targets import VOCABULARY, hf_model, native_of, random_prompts

ROOT = Path(__file__).resolve().parents[2]
# sizes that are no multiples of a vector, in products and in attention
ODD = {"hidden_size": 76, "intermediate_size": 90, "head_dim": 22, "vocab_size": VOCABULARY - 1}
EVEN = {"hidden_size": 96, "intermediate_size": 200, "head_dim": 64}
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def model(
    dtype: torch.dtype, execution: str = "fused", noise: float = 0.0, **sizes: int
) -> NativeTarget:
    made = hf_model("llama", **(sizes or EVEN))
    return native_of(made, noise=noise, dtype=dtype, execution=execution)


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY - 1, shape, generator=torch.Generator().manual_seed(seed))


def logits_of_last(target: NativeTarget, path: list[int], ways: str) -> list[Tensor]:
    """Return the last token's logits after one prompt, decoded in several ways.

    ways: `one` token at a time; all in a `chain`; as a path of a `tree`; in the last of eight rows.
    """
    prompt, found = ids(1, 12, seed=5), []  # of all rows few enough to be fused
    with torch.inference_mode():
        for way in ways.split():
            rows = 8 if way == "batch" else 1
            target.open(rows, 200)
            target.forward(prompt.expand(rows, -1))
            target.commit(None, [12] * rows)
            if way == "one":
                for token in path[:-1]:
                    target.forward(torch.tensor([[token]]))
                    target.commit(None, [1])
                logits = target.forward(torch.tensor([path[-1:]]))[0]
            elif way == "tree":  # every second node lies on the path
                tokens = [each for token in path for each in (token, 3)][:-1]
                parents = [max(2 * (n // 2) - 2, -1) if n > 1 else -1 for n in range(len(tokens))]
                logits = target.forward(torch.tensor([tokens]), torch.tensor([parents]))[0]
            else:
                tokens = ids(rows, len(path), seed=9)
                tokens[-1] = torch.tensor(path)
                logits = target.forward(tokens)[0]
            found.append(logits[-1, -1])
    return found


@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_bits_do_not_depend_on_what_is_decoded_beside_it(
    dtype: torch.dtype, sizes: dict[str, int]
) -> None:
    target = model(dtype, **sizes)
    one, *others = logits_of_last(target, [7, 11, 13, 17, 19, 23, 29], "one chain tree batch")
    assert all(torch.equal(one, other) for other in others)


def test_the_eager_steps_bits_do() -> None:  # the control: else the test above proves nothing
    target = model(torch.float32, "eager")
    one, *others = logits_of_last(target, [7, 11, 13, 17, 19, 23, 29], "one chain tree batch")
    assert not all(torch.equal(one, other) for other in others)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    target, before, found = model(torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found += logits_of_last(target, [7, 11, 13], "chain")
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)


def chain(draft: NativeTarget) -> Drafter:
    return ChainDrafter(model=draft)


def tree(draft: NativeTarget) -> Drafter:
    return MultiCandidate(model=draft, branching=(3, 2))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("make", "rows", "dtype"),
    [
        (chain, 8, torch.bfloat16),
        (tree, 8, torch.bfloat16),
        (chain, 8, torch.float32),
        (tree, 8, torch.float32),
        (chain, 48, torch.bfloat16),  # 192 tokens in a forward
    ],
)
def test_laws_1_and_2_hold_to_the_bit_in_any_dtype(
    make: Callable[[NativeTarget], Drafter], rows: int, dtype: torch.dtype, temperature: float
) -> None:
    target, drafter = model(dtype), make(model(dtype, noise=0.02))
    settings = Settings(
        max_new_tokens=64, temperature=temperature, verify="coupled", num_draft_tokens=3, seed=3
    )
    prompts = random_prompts(rows)
    drafted, plain = (
        [made.tokens for made in decode(target, each, prompts, settings)]
        for each in (drafter, None)
    )
    assert drafted == plain


@pytest.mark.parametrize("dtype", DTYPES)
def test_lm_head_equals_the_steps_logits(dtype: torch.dtype) -> None:
    target = model(dtype)
    with torch.inference_mode():
        target.open(2, 50)
        logits_BNV, hidden_BNC = target.forward(ids(2, 3))
        again = target.lm_head(hidden_BNC).to(logits_BNV.dtype)
    # hidden states are rounded to the model's dtype, and so are the head's outputs
    torch.testing.assert_close(
        again,
        logits_BNV,
        rtol=0.02 if dtype == torch.bfloat16 else 1e-5,
        atol=0.1 if dtype == torch.bfloat16 else 1e-5,
    )


def test_bfloat16_is_closer_to_float32_than_the_eager_step_is() -> None:
    errors = {}
    for execution in ("fused", "eager"):
        target, exact = model(torch.bfloat16, execution), model(torch.float32)
        with torch.inference_mode():
            found = []
            for each in (target, exact):
                each.open(1, 100)
                found.append(each.forward(ids(1, 60))[0].float())
        errors[execution] = (found[0] - found[1]).square().mean().item()
    assert errors["fused"] < errors["eager"]


def test_two_targets_in_eight_threads_compute_what_they_compute_alone() -> None:
    targets = [model(torch.float32, noise=0.1 * (number % 2)) for number in range(8)]
    wanted = [logits_of_last(target, [7, 11, 13], "chain")[0] for target in targets[:2]]
    found: list[tuple[int, Tensor]] = []

    def work(number: int) -> None:
        for _ in range(20):
            found.append((number % 2, logits_of_last(targets[number], [7, 11, 13], "chain")[0]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 160
    assert all(torch.equal(logits, wanted[index]) for index, logits in found)


FORKS = """
import os, sys, torch
from tests.decoding.test_fused import logits_of_last, model
torch.set_num_threads(3)
target = model(torch.float32)
(mine,) = logits_of_last(target, [7, 11, 13], "chain")
child = os.fork()
if child == 0:
    (copied,) = logits_of_last(target, [7, 11, 13], "chain")
    os._exit(0 if torch.equal(copied, mine) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.long
@pytest.mark.parametrize("limit", [{}, {"OMP_THREAD_LIMIT": "2"}], ids=["three", "two of three"])
def test_a_forked_process_and_one_short_of_threads_compute_the_same(limit: dict[str, str]) -> None:
    """Check the teams of both kinds: a forked process lacks the OpenMP threads of its parent."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **limit}
    done = subprocess.run([sys.executable, "-c", FORKS], env=environment, timeout=100)
    assert done.returncode == 0


def test_a_long_chain_in_slices_equals_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    target, found = model(torch.float32), []
    for width in (1024, 7):
        monkeypatch.setattr(fused, "SLICE", width)
        with torch.inference_mode():
            target.open(2, 100)
            target.commit(None, [0, 0])
            found.append(target.forward(ids(2, 20), None, (0, 2)))
            target.commit(None, [20, 3])
            found.append(target.forward(ids(2, 11)))
    for whole, sliced in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(whole, sliced, strict=True))


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([[VOCABULARY]], None), ([[-1]], None), ([[5, 5]], [[-1, 1]])],
)
def test_tokens_and_parents_out_of_range_are_refused(
    tokens: list[list[int]], parents: list[list[int]] | None
) -> None:
    target = model(torch.float32)
    target.open(1, 10)
    parents_BN = None if parents is None else torch.tensor(parents)
    with pytest.raises(IndexError, match=f"tokens from 0 to {VOCABULARY - 1}"):
        target.forward(torch.tensor(tokens), parents_BN)


# Building ---------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Return an empty cache folder, in a process that has not loaded the library yet."""
    monkeypatch.setenv("SHALLOW_DRAFT_CACHE", str(tmp_path / "cache"))
    library.load_library.cache_clear()
    yield tmp_path / "cache"
    library.load_library.cache_clear()


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the log of a compiler that copies a library built before, a line for each call."""
    library.load_library()
    shutil.copy(library.find_libraries()[0], tmp_path / "built.so")
    script, log = tmp_path / "compiler", tmp_path / "log"
    copy = f'while [ $# -gt 1 ]; do shift; done; cp {shlex.quote(str(tmp_path))}/built.so "$1"'
    script.write_text(f"#!/bin/sh\necho called >> {shlex.quote(str(log))}\n{copy}\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def calls(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_second_start_builds_nothing(copying: Path, fresh: Path) -> None:
    for _ in range(2):
        library.load_library.cache_clear()
        library.load_library()
    assert calls(copying) == 1
    assert [file.suffix for file in fresh.iterdir()] == [".so"]


@pytest.mark.parametrize("is_slow", [True, False], ids=["slow", "control"])
def test_a_note_says_that_a_slow_build_happens_once(
    is_slow: bool,
    copying: Path,
    fresh: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decoding.errors.NOTE_SECONDS", 0.0 if is_slow else 1e6)
    for has_note in (is_slow, False):  # the second start finds it in the cache
        library.load_library.cache_clear()
        library.load_library()
        printed = capsys.readouterr().err
        assert len(printed.splitlines()) == has_note
        assert printed.startswith("note: building the compiled step" if has_note else "")
        assert printed.count("once on this machine") == has_note


def test_another_processors_library_is_built_anew(
    copying: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.load_library()
    monkeypatch.setattr(library, "cpu_flags", lambda: ["another"])
    library.load_library.cache_clear()
    library.load_library()
    assert calls(copying) == 2 and len(list(fresh.iterdir())) == 2


@pytest.mark.parametrize("changed", [file.name for file in sorted(library.SOURCES.iterdir())])
def test_a_change_in_any_source_file_is_built_anew(
    copying: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str
) -> None:
    library.load_library()
    sources = tmp_path / "step"
    shutil.copytree(library.SOURCES, sources)
    monkeypatch.setattr(library, "SOURCES", sources)
    assert library.find_libraries()  # the control
    (sources / changed).write_text((sources / changed).read_text() + "// changed\n")
    assert not library.find_libraries()


LOADS = "from decoding.models.native.library import load_library; load_library().linear"


@pytest.mark.long
@pytest.mark.parametrize("share", [1, 0.5, 0], ids=["whole", "half", "empty"])
def test_a_torn_library_is_built_anew(copying: Path, fresh: Path, share: float) -> None:
    """Load it in another process, which would end with SIGBUS if it mapped half a library."""
    library.load_library()
    [path] = library.find_libraries()
    intact = path.read_bytes()
    os.truncate(path, int(share * len(intact)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LOADS], env=environment, timeout=100)
    assert done.returncode == 0 and path.read_bytes() == intact
    assert calls(copying) == (1 if share == 1 else 2)


def test_a_library_that_does_not_load_is_built_anew(copying: Path, fresh: Path) -> None:
    library.load_library()
    [path] = library.find_libraries()
    other = b"for another system"
    digest = hashlib.sha256(other).hexdigest()[:20]
    path.rename(fresh / "away")
    path.with_name(f"{path.stem.rpartition('-')[0]}-{digest}.so").write_bytes(other)
    library.load_library.cache_clear()
    library.load_library()
    assert calls(copying) == 2 and path.is_file()
    library.load_library.cache_clear()
    library.load_library()
    assert calls(copying) == 2


def test_a_library_that_a_compiler_built_before_is_used_without_one(
    copying: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.load_library()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX")
    library.load_library.cache_clear()
    assert fused.refuse(torch.float32, torch.device("cpu")) is None
    library.load_library()
    assert calls(copying) == 1
    monkeypatch.setattr(library, "cpu_flags", lambda: ["another"])  # the control
    assert "there is no C++ compiler" in str(fused.refuse(torch.float32, torch.device("cpu")))


def test_a_cache_that_cannot_be_written_is_replaced_and_named(
    copying: Path, fresh: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoding.errors.NOTE_SECONDS", 0.0)
    fresh.write_text("a file in the folder's place")
    library.load_library()
    assert calls(copying) == 1 and fresh.is_file()
    printed = capsys.readouterr().err
    assert f"cannot be kept in {fresh} " in printed and "once" not in printed


def test_no_compiler_is_an_error_that_says_what_to_install(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, chat24m: Path
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match="no C.. compiler .install g.. or clang.*eager"):
        load_target(chat24m, execution="fused")
    with pytest.warns(UserWarning, match="decoding operation by operation.*no C.. compiler"):
        assert load_target(chat24m).backend == "native"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "g++-none -m64",
            "CXX is 'g[+][+]-none -m64', and there is no program g[+][+]-none .*unset",
        ),
        ("g++ '-m64", "which is no command .No closing quotation"),
    ],
)
def test_a_compiler_in_cxx_that_cannot_be_run_is_named(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, chat24m: Path, given: str, words: str
) -> None:
    """Check that no other compiler takes its place in silence."""
    monkeypatch.setenv("CXX", given)
    with pytest.raises(UserError, match=f"'fused' does not work here: .*{words}"):
        load_target(chat24m, execution="fused")
    with pytest.warns(UserWarning, match=f"the fused step cannot run: .*{words}"):
        assert choose_execution(chat24m, backend="native", dtype="float32", device="cpu") == "eager"
    with pytest.raises(UserError, match=words):
        library.load_library()


def test_words_after_the_compiler_in_cxx_are_its_first_arguments(
    copying: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"env SHALLOW=1 {os.environ['CXX']}")
    library.load_library()
    assert calls(copying) == 1


def test_a_compiler_that_fails_is_shown_with_its_words(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chat24m: Path
) -> None:
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\necho 'error: unknown standard' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(UserError, match="unknown standard\nName another compiler in CXX"):
        load_target(chat24m, execution="fused")
    with pytest.warns(UserWarning, match="unknown standard"):
        assert choose_execution(chat24m, backend="native", dtype="float32", device="cpu") == "eager"


def test_auto_fuses_large_models_on_a_cpu_and_their_drafters(
    chat24m: Path, stories260k: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"backend": "native", "device": "cpu"}
    assert choose_execution(chat24m, dtype="bfloat16", **place) == "fused"
    assert choose_execution(chat24m, dtype="float16", **place) == "eager"
    assert choose_execution(stories260k, dtype="float32", **place) == "eager"
    assert choose_execution(chat24m, dtype="float32", backend="hf", device="cpu") == "eager"
    monkeypatch.setattr(load, "WORTH_FUSING", 0)
    assert choose_execution(stories260k, dtype="float32", **place) == "fused"


def test_other_dtypes_devices_and_packed_weights_are_refused() -> None:
    with pytest.raises(UserError, match="'fused' does not work here: it is for float32, .*float16"):
        model(torch.float16)
    assert "it is for CPUs" in str(fused.refuse(torch.float32, torch.device("cuda")))
    with pytest.raises(ValueError, match="plain weights"):
        native_of(hf_model(), dtype=torch.float32, packed=True, execution="fused")
