"""Servers in processes of their own: their address, what they print, and how they end."""

import signal
from pathlib import Path

import pytest

from decoding.errors import UserError
from scripts import server_process
from scripts.server_process import run_server

SERVER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("see https://example.org", *sys.argv[1:])
try:
    print("open http://127.0.0.1:8123/v1 in a browser; not http://127.0.0.1:9", flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    print(os.environ["ASKED"], "stopped")
"""


def test_a_server_has_an_address_and_ends_by_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "PATIENCE_S", 0.1)
    (tmp_path / "own_server.py").write_text(SERVER)
    given = {"PYTHONPATH": str(tmp_path), "ASKED": "was"}
    with run_server("own_server", "a=1", environment=given) as found:
        assert found.url == "http://127.0.0.1:8123"
        assert found.printed[0].split()[2:] == ["a=1", "port=0"]
        assert found.end(signal.SIGINT)[1].endswith("was stopped\n")
    with run_server("own_server", environment=given) as found:
        pass
    assert found.process.returncode == -signal.SIGKILL, "it ignored the first signal"


def test_a_server_that_does_not_start_is_an_error() -> None:
    words = "no_such ended before it listened: .*No module named"
    with pytest.raises(UserError, match=words), run_server("no_such"):
        raise AssertionError("it started")
