"""Both servers as jobs, in processes of their own: many connections, few files, signals."""

from collections.abc import Callable

import httpx2
import pytest

from scripts.server_process import run_server
from tests.support.idle_connections import is_open, open_idle, wait_until_closed
from tests.support.open_files import allow_open_files
from tests.support.server_jobs import fork_server

pytestmark = pytest.mark.long

FEW, MANY = 300, 10_000


def complete(url: str) -> bool:
    """Return whether the API answers a request."""
    model = httpx2.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": model, "prompt": "def f(", "max_tokens": 5}
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


def show(url: str) -> bool:
    """Return whether the page is there."""
    return "Shallow Draft" in httpx2.get(url, timeout=60).text


JOBS: dict[str, Callable[[str], bool]] = {"serving.api": complete, "serving.web": show}


@pytest.fixture(params=JOBS)
def module(request: pytest.FixtureRequest) -> str:
    if request.param == "serving.web":
        request.getfixturevalue("gradio")
    return str(request.param)


def test_ten_thousand_idle_connections(module: str) -> None:
    """Check that the server answers beside them, and closes them."""
    with (
        allow_open_files(MANY + 200),
        fork_server(module, "target.max_length=128", "idle_seconds=20") as job,
    ):
        with open_idle(job.url, MANY) as idle:
            assert JOBS[module](job.url)
            assert is_open(idle[0]) and is_open(idle[-1]), "control: all are open at once"
            for one in (idle[0], idle[-1]):
                one.setblocking(True)
            wait_until_closed(idle)
            assert JOBS[module](job.url)
        status, printed = job.end()
    assert status == 0 and "Traceback" not in printed


def test_more_connections_than_open_files_wait(module: str) -> None:
    with fork_server(module, "target.max_length=128", "idle_seconds=3", files=FEW) as job:
        assert JOBS[module](job.url)
        with open_idle(job.url, 2 * FEW) as idle:
            assert JOBS[module](job.url), "once idle ones are closed"
            wait_until_closed(idle)
        assert JOBS[module](job.url)
        status, printed = job.end()
    assert status == 0
    assert f"all {FEW} open files that the system allows are in use" in printed
    assert "Traceback" not in printed


def test_a_signal_ends_the_job(module: str) -> None:
    with run_server(module, "target.max_length=128") as job:
        assert JOBS[module](job.url)
        status, printed = job.end()
    assert status == 0 and printed.rstrip().endswith("stopped")
