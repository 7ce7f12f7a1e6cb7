"""Jobs that decode take a GGUF file as the target; the others refuse it and name the conversion."""

from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from decoding.models.hub import find_folder
from decoding.models.llama_cpp.library import load_library
from eval.doctor.subject import Subject
from eval.engines.plan import check_engines
from eval.statistics.schema import read_all_rows
from tests.support.configurations import configuration
from tests.support.small_jobs import JOBS, configured

pytest.importorskip("gguf")
from decoding.models.gguf.writer import write_gguf

TRAINING = (
    *("distill.train", "distill.prune", "distill.skip_search", "distill.quality"),
    *("distill.compact", "recurrent_drafting.train"),
)
DECODING = ("eval.run", "eval.replay", "distill.regenerate")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, embedded_target: Path) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "target.gguf"
    write_gguf(embedded_target, path)
    return path


def run(job: str, file: Path, folder: Path, *overrides: str) -> Any:
    return JOBS[job].run(configured(job, file, folder, *overrides))


@pytest.mark.parametrize("job", TRAINING)
def test_jobs_that_read_weights_name_the_conversion(job: str, file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a file, expected a model folder\..*from_gguf\.py"):
        run(job, file, tmp_path)


def test_the_doctor_names_the_conversion(file: Path, embedded_target: Path) -> None:
    for target, drafter in ((file, embedded_target), (embedded_target, file)):
        given = (f"target.path={target}", f"+drafter.use={drafter}")
        with pytest.raises(UserError, match=r"is a file, expected a model.*from_gguf\.py"):
            Subject(configuration("eval.doctor", *given))


@pytest.mark.parametrize("engine", ["hf", "vllm", "openvino"])
def test_engines_without_gguf_are_refused(engine: str, file: Path, tmp_path: Path) -> None:
    cfg = configured("eval.run", file, tmp_path, f"engine=[ours,{engine}]", "max_seconds=0")
    with pytest.raises(UserError, match=f"engine has {engine}, which reads no GGUF file"):
        check_engines(cfg)
    check_engines(
        configured("eval.run", file, tmp_path, "engine=[ours,llama_cpp]", "max_seconds=0")
    )


def test_a_missing_file_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(UserError, match="models/absent.gguf does not exist"):
        find_folder("models/absent.gguf")


@pytest.fixture
def library() -> None:
    try:
        load_library()
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.engines
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("job", DECODING)
def test_jobs_that_decode_take_the_file(job: str, file: Path, tmp_path: Path) -> None:
    done = run(job, file, tmp_path / "run")
    assert Path(done).exists()
    if job == "eval.run":
        rows, _ = read_all_rows(tmp_path / "run" / "results.jsonl")
        assert {(row.target, row.backend, row.dtype) for row in rows} == {
            ("target", "llama_cpp", "float32")
        }
        assert {row.drafter for row in rows} == {"target.gguf", "prompt_lookup"}
        assert {row.lossless for row in rows} <= {"equal", "ties"}


@pytest.mark.engines
@pytest.mark.usefixtures("library")
def test_answers_are_those_of_the_folder(file: Path, embedded_target: Path, tmp_path: Path) -> None:
    """In float32 the file's answers are the folder's."""
    answers = [
        (Path(run("distill.regenerate", model, tmp_path / name, "temperature=0"))).read_text()
        for name, model in (("file", file), ("folder", embedded_target))
    ]
    assert answers[0] == answers[1]
