"""The job of the web page: its settings, its models and its address."""

import importlib.util
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from jobs.config import TargetConfig
from serving.listening import address_of, is_open_to_others, listen
from serving.web.config import WebConfig
from serving.web.job import check, run
from serving.web.models import load


def config_of(target: Path, **fields: Any) -> WebConfig:
    """Return the settings of a page on a free port."""
    fields.setdefault("drafters", ["prompt_lookup"])
    fields.setdefault("port", 0)
    place = TargetConfig(path=str(target), device="cpu")
    return WebConfig(job="serving.web", output_dir="unused", target=place, **fields)


@pytest.fixture
def _with_gradio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the job find gradio, which none of these tests reaches."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: name == "gradio" or found(name, *of)
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"port": 65536}, "port is 65536, expected a whole number from 0 to 65535"),
        ({"verify": "block"}, "verify 'block' is unknown, expected one of coupled, token"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_prompt_characters": 0}, "max_prompt_characters is 0"),
        ({"drafters": [{"use": "prompt_lookup", "schedule": "pearl_virtual"}]}, "visitors choose"),
        ({"drafters": [{"use": "prompt_lookup", "verify": "token"}]}, "only eval.run supports"),
        ({"drafters": ["promt_lookup"]}, "the nearest is 'prompt_lookup'"),
        ({"host": "203.0.113.7"}, "cannot listen on 203.0.113.7:0"),
    ],
)
@pytest.mark.usefixtures("_with_gradio")
def test_bad_settings_are_refused(fields: dict[str, Any], words: str, tiny_target: Path):
    with pytest.raises(UserError, match=words):
        run(config_of(tiny_target, **fields))


@pytest.mark.usefixtures("_with_gradio")
def test_a_port_in_use_is_refused(tiny_target: Path):
    with listen("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on 127.0.0.1:{port}: .* Set port="):
            run(config_of(tiny_target, port=port))
    with listen("127.0.0.1", port):
        pass  # control: the port is free now


def test_missing_packages_are_named(tiny_target: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(UserError, match=r"needs gradio. Run pip install -e '\.\[web\]'"):
        check(config_of(tiny_target))
    check(config_of(tiny_target, dry_run=True))


@pytest.mark.usefixtures("_with_gradio")
def test_a_drafter_of_another_target_is_refused(tiny_target: Path, base_target: Path):
    words = f"{base_target} cannot draft for {tiny_target}: their tokenizers differ"
    with pytest.raises(UserError, match=words):
        run(config_of(tiny_target, drafters=[str(base_target)]))


def test_a_dry_run_names_what_it_would_show(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(tiny_target, tmp_path / "drafter")
    cfg = config_of(tiny_target, drafters=[str(tmp_path / "drafter")], dry_run=True, port=7860)
    run(cfg)
    printed = capsys.readouterr().out
    assert f"would show {tiny_target}" in printed and "127.0.0.1:7860" in printed


def test_only_loopback_addresses_are_closed_to_other_machines():
    with listen("127.0.0.1", 0) as near, listen("0.0.0.0", 0) as far:
        assert not is_open_to_others(near) and is_open_to_others(far)
        assert address_of(near).startswith("127.0.0.1:")
    if socket.has_ipv6:
        try:
            six = listen("::1", 0)
        except UserError:
            pytest.skip("this machine has no IPv6 loopback")
        with six:
            assert not is_open_to_others(six) and address_of(six).startswith("[::1]:")


def test_a_prompt_is_continued_where_there_is_no_chat_template(
    base_target: Path, tiny_target: Path
):
    plain, chat = (load(config_of(folder)) for folder in (base_target, tiny_target))
    assert plain.template == "" and chat.template == "auto"
    assert plain.plain.tokenizer.decode(plain.encode("Once"), skip_special_tokens=True) == "Once"
    assert len(chat.encode("Once")) > len(plain.encode("Once"))
