"""Upload of a drafter folder: the card, refusals, the dry run, and the requests of a push."""

import base64
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from decoding.errors import UserError
from decoding.models.folder import CARD, hash_input, read_json
from distill.drafter_folder import format_readme
from scripts import push_to_hub
from scripts.options import read_options
from scripts.push_to_hub import Options, run
from tests.support import simulated_runs
from tests.support.simulated_comparisons import SHALLOW

TRAINED = Path(__file__).parents[1] / "fixtures" / "distill.train" / "finished" / "drafter"
TARGET = "owner/target-of-this-test"
TOKEN = "hf_" + "a1B2" * 9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a drafter folder as a job writes it, with a README of today."""
    path = Path(shutil.copytree(TRAINED, tmp_path / "drafter"))
    card = read_json(path / CARD) | {"drafter_hash": hash_input(path)}
    card |= {"num_draft_tokens": 3, "target": "/nowhere/a target"}
    (path / CARD).write_text(json.dumps(card))
    (path / "README.md").write_text(format_readme(card))
    return path


def options(folder: Path, **changed: Any) -> Options:
    return Options(folder=str(folder), repo="owner/name", **{"target": TARGET, **changed})


def listed(printed: str) -> set[str]:
    """Return the files that a dry run lists."""
    lines = [line.split() for line in printed.splitlines() if line.startswith("   ")]
    return {line[1] for line in lines if len(line) == 2}


def test_a_dry_run_lists_the_files_and_changes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "notes.txt.orig").write_text("mine")
    card = read_json(folder / CARD) | {"drafter_hash": hash_input(folder)}
    (folder / CARD).write_text(json.dumps(card))
    (folder / "LICENSE").write_text("Apache License")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "nothing was uploaded" in run(options(folder, out=str(tmp_path / "out")))
    printed = capsys.readouterr().out
    assert listed(printed) == {*before} - {"notes.txt.orig"}
    assert "left out: notes.txt.orig" in printed
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == listed(printed)
    assert (
        load_file(out / "model.safetensors").keys()
        == load_file(folder / "model.safetensors").keys()
    )
    with pytest.raises(UserError, match="exists already"):
        run(options(folder, out=str(out)))


def test_the_card_names_the_target_as_the_hub_does(folder: Path, tmp_path: Path) -> None:
    run(options(folder, out=str(tmp_path / "out"), license="apache-2.0"))
    text = (tmp_path / "out" / "README.md").read_text()
    made = ModelCard(text)
    assert made.data.base_model == TARGET and made.data.license == "apache-2.0"
    assert made.data.library_name == "transformers" and "drafter" in (made.data.tags or [])
    assert "a target" not in text and "On another machine" not in text
    assert f"vllm serve '{TARGET}' " in text and f'from_pretrained("{TARGET}")' in text
    assert "The target verifies all of them" in text, "the word is no name"
    readme = "Of `embedded:target`.\n\n```bash\nserve /elsewhere/assets/target x/target\n```\n"
    assert push_to_hub.rename_target(readme, "embedded:target", "a/b") == (
        "Of `a/b`.\n\n```bash\nserve a/b x/target\n```\n"
    )
    assert read_json(tmp_path / "out" / CARD)["target"] == TARGET
    with pytest.raises(UserError, match=r"'/nowhere/a target', which nobody.*target=OWNER/NAME"):
        run(options(folder, target=""))


def spoil(name: str, content: bytes | str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def with_optimizer(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    save_file(state | {"exp_avg.0": torch.zeros(2)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil("optimizer.pt", b"x"), r"optimizer.pt \(a training state"),
        (spoil("checkpoint-5/scheduler.safetensors", b"x"), "checkpoint-5/scheduler"),
        (spoil("pytorch_model.bin", b"x"), "pytorch_model.bin"),
        (with_optimizer, "tensors of an optimizer, such as 'exp_avg.0'"),
        (spoil(".env", "A=1"), r".env \(a file of secrets"),
        (spoil("inner/id_ed25519", "x"), "inner/id_ed25519"),
        (spoil("config.json", f'{{\n"note": "{TOKEN}"}}'), "config.json, line 2, holds what looks"),
        (spoil("README.md", "---\ntags: [a]\n---\napi_key = 'abcdefgh1234'"), "README.md, line"),
        (spoil("chat_template.jinja", "-----BEGIN PRIVATE KEY-----"), "chat_template.jinja, line"),
        (spoil("README.md", f"See {TRAINED}/config.json"), "a path of this machine"),
        (spoil("README.md", "---\n[\n---\n"), "is not YAML"),
        (spoil("README.md", "---\n- a\n---\n"), "front matter is a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_must_not_be_published_is_refused(
    folder: Path, change: Callable[[Path], None], message: str
) -> None:
    run(options(folder))  # control: nothing is wrong yet
    change(folder)
    card = read_json(folder / CARD) | {"drafter_hash": hash_input(folder)}
    (folder / CARD).write_text(json.dumps(card))
    with pytest.raises(UserError, match=message) as caught:
        run(options(folder, push=True))
    assert TOKEN not in str(caught.value)


def test_a_card_must_describe_the_weights(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in state.items()}, folder / "model.safetensors")
    with pytest.raises(UserError, match="other weights, configuration or tokenizer"):
        run(options(folder))
    card = read_json(folder / CARD)
    (folder / CARD).write_text(json.dumps(card | {"drafter_hash": None}))
    with pytest.raises(UserError, match="is untrained"):
        run(options(folder))
    (folder / CARD).write_text("{}")
    with pytest.raises(UserError, match="names no target"):
        run(options(folder))
    with pytest.raises(UserError, match="has no drafter_card.json"):
        run(options(tmp_path))


@pytest.mark.parametrize("name", ["name", "a/b/c", "owner/na me", "-/-"])
def test_a_repository_needs_an_owner(folder: Path, name: str) -> None:
    with pytest.raises(UserError, match="repo="):
        run(Options(folder=str(folder), repo=name, target=TARGET))


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(UserError, match="license"):
        read_options(Options, ["folder=x", "repo=a/b", "licence=mit"])
    with pytest.raises(UserError, match="no value for folder, repo"):
        read_options(Options, [])


def measured(folder: Path, home: Path) -> Path:
    """Write a SIMULATED run of eval.run that measured the folder's weights."""
    path = simulated_runs.write(home / "run", SHALLOW, tokens_seen=1000)
    origins = read_json(path / "drafters.json")
    name = next(iter(origins))
    manifest = read_json(path / "manifest.json")
    manifest["inputs"][origins[name]["folder"]] = hash_input(folder)
    manifest["command"] = "python -m eval.run drafters=[/home/someone/mine] target.path=/a/b/target"
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_measured_figures_and_plots_are_on_the_card(folder: Path, tmp_path: Path) -> None:
    path = measured(folder, tmp_path)
    run(options(folder, runs=[str(path)], out=str(tmp_path / "out")))
    text = (tmp_path / "out" / "README.md").read_text()
    assert "## Measured" in text and "| drafter | setting | speedup [95 %] |" in text
    assert "python -m eval.run drafters=[mine] target.path=target" in text
    shown = [line.rsplit("(", 1)[1][:-1] for line in text.splitlines() if line.startswith("![")]
    assert shown and len(set(shown)) == len(shown)
    for name in shown:
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    made = ModelCard(text)
    found = {(one.metric_type, one.dataset_name) for one in made.data.eval_results or []}
    assert {kind for kind, _ in found} == {"speedup", "acceptance_rate", "block_efficiency"}
    assert "Other processes used this machine" not in text, "control: an idle machine"
    rows = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
    busy = [json.dumps(row | {"cpu_share": 0.2}) + "\n" for row in rows]
    (path / "results.jsonl").write_text("".join(busy))
    run(options(folder, runs=[str(path)], out=str(tmp_path / "busy")))
    warned = (tmp_path / "busy" / "README.md").read_text()
    assert "**Other processes used this machine: decoding had its processors" in warned
    other = simulated_runs.write(tmp_path / "other", SHALLOW)
    with pytest.raises(UserError, match="did not measure the weights in .*; it measured"):
        run(options(folder, runs=[str(other)]))
    with pytest.raises(UserError, match="matches no folder"):
        run(options(folder, runs=[str(tmp_path / "none")]))


class Hub(BaseHTTPRequestHandler):
    """A small part of the Hub's interface, which takes every file in the commit itself."""

    commits: list[dict[str, bytes]]
    requests: list[str]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.requests.append(self.path)
        answer: Any = {}
        if self.path.endswith("/repos/create"):
            answer = {"url": f"http://{self.headers['Host']}/owner/name"}
        elif "/preupload/" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            files = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            answer = {"files": files}
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.commits.append({one["path"]: base64.b64decode(one["content"]) for one in files})
            address = f"http://{self.headers['Host']}/owner/name/commit/{'1' * 40}"
            answer = {"commitUrl": address, "commitOid": "1" * 40}
        self.send(answer)

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send({"id": "owner/name", "sha": "0" * 40, "siblings": [], "tags": []})

    def send(self, answer: Any) -> None:
        content = json.dumps(answer if self.status == 200 else {"error": "no"}).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """Serve a Hub on the loopback, to which the script's uploads go."""
    kind = type("ThisHub", (Hub,), {"commits": [], "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    here = push_to_hub.HfApi
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(push_to_hub, "HfApi", lambda: here(endpoint=address, token=TOKEN))
    yield kind
    server.shutdown()
    server.server_close()


def test_a_push_uploads_what_the_dry_run_lists(
    folder: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    run(options(folder))
    names = listed(capsys.readouterr().out)
    assert not hub.requests, "a dry run asks nobody"
    assert f"/owner/name/commit/{'1' * 40}" in run(options(folder, push=True))
    [files] = hub.commits
    assert files.keys() == names
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert files["README.md"].decode().count(TARGET) > 3


def test_a_refusal_of_the_hub_is_one_sentence(folder: Path, hub: type[Hub]) -> None:
    hub.status = 401
    with pytest.raises(UserError, match="owner/name was not uploaded .*hf auth login") as caught:
        run(options(folder, push=True))
    assert hub.requests[0] == "/api/repos/create" and not hub.commits
    assert TOKEN not in str(caught.value)
