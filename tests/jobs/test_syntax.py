"""Command lines that Hydra cannot read: the error states the position and the correct form."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from decoding.errors import UserError
from eval.config import EvalConfig
from jobs.job import CONF, register
from jobs.syntax import EXPECTED, check_syntax, composition_error
from tests.support.forks import run_forked


@pytest.mark.parametrize(
    ("argument", "found"),
    [
        ("smoke", "'smoke' is not a setting: it has no '='"),
        ("sweep=[1,2", "'sweep=[1,2' cannot be read: it is incomplete"),
        ("drafters=[{use: a, name: b]", "cannot be read: ']' "),
        ("sweep=1,2]", "cannot be read: ']' "),
        (
            "benchmark.name='MT",
            "cannot be read: no value can begin with",
        ),
        ("seed=range(1,x)", "cannot be read: "),
    ],
)
def test_the_error_for_a_malformed_override_gives_its_position(argument: str, found: str):
    with pytest.raises(UserError) as error:
        check_syntax(["-m", "seed=1,2", argument])
    assert found in str(error.value)
    assert str(error.value).endswith(EXPECTED) and "\n" not in str(error.value)
    for word in ("hydra.cc", "HYDRA_FULL_ERROR", "Error parsing override"):
        assert word not in str(error.value)


def test_valid_overrides_and_flags_are_accepted():
    check_syntax(
        [
            "--config-dir",
            "/somewhere",
            "-m",
            "sweep=[1,2]",
            "seed=1,2",
            "~target",
            "drafters=[{use: runs/a b, folder: null}]",
            "benchmark.template='Q: {turn}'",
            "name=",
        ]
    )


@pytest.mark.parametrize(
    ("override", "found"),
    [
        (
            "target=nowhere",
            "target=nowhere: there is no conf/target/nowhere.yaml. Set target= .*embedded",
        ),
        ("+target=embedded", "the configuration does not compose: .*target"),
        (
            "engine_python={nothing: x}",
            "unknown configuration key 'engine_python.nothing', expected one of hf, vllm",
        ),
        ("seed=1,2", "the configuration does not compose: .*seed"),
    ],
)
def test_the_error_of_a_failed_composition_is_one_line(override: str, found: str):
    register("eval.run", EvalConfig)
    with (
        initialize_config_dir(str(CONF), version_base="1.3"),
        pytest.raises(HydraException) as raised,
    ):
        compose("eval_run", [override])
    found_error = composition_error(raised.value)
    assert "\n" not in str(found_error)
    with pytest.raises(UserError, match=found):
        raise found_error


NOWHERE = "error: target=nowhere: there is no conf/target/nowhere.yaml"


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["sweep=[1,2"], "error: 'sweep=[1,2' cannot be read"),
        pytest.param(["target=nowhere"], NOWHERE, marks=pytest.mark.long),
        pytest.param(["target=nowhere", "--help"], NOWHERE, marks=pytest.mark.long),
        pytest.param(["-m", "target=embedded,nowhere"], NOWHERE, marks=pytest.mark.long),
    ],
)
def test_a_job_prints_only_that_line(arguments: list[str], found: str, tmp_path: Path):
    done = run_forked("eval.run", *arguments, f"output_dir={tmp_path / 'out'}")
    assert done.returncode == 2
    assert done.stderr.startswith(found)
    assert "HYDRA_FULL_ERROR" not in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
