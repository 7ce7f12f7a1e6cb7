"""Tests of the README and the docs: commands compose and run, files and links exist."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

import distill.compact
import distill.pretrain
import distill.prune.job
import distill.quality
import distill.regenerate.job
import distill.skip_search
import distill.train
import eval.analyze
import eval.compare
import eval.doctor.job
import eval.plan.job
import eval.replay
import eval.run
import heads.train
import recurrent_drafting.generate
import recurrent_drafting.train
import serving.api.job
import serving.web.job
from decoding.errors import UserError
from heads.train import find_kind_name
from heads.train import schema_of as head_schema
from jobs import schemas
from jobs.aliases import current_arguments
from jobs.config import JobConfig, typed
from jobs.job import CONF, check_arguments, register
from jobs.schemas import schema_of
from jobs.syntax import expand_drafter
from recurrent_drafting.cmd.flags import to_overrides
from tests.support.forks import succeed
from tests.support.tiers import tiered
from training.data import corpus
from training.data.readers import read_chats, read_prompts

ROOT = CONF.parent
README = (ROOT / "README.md").read_text()
# The README has the first commands of a newcomer, docs/cli.md all of them.
COMMANDS = README + (ROOT / "docs" / "cli.md").read_text()
GUIDES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*/*.md"))]
# words in the commands of the guides that are not arguments
ELLIPSES = ("...", "$@", "[overrides]")
# words that stand for values in the commands of the guides -> one of these values
VALUES = {"HEAD": "medusa", "NAME": "medusa", "LOSS": "forward_kl", "KIND": "sampled"}
VALUES |= {"SEED": "0", "SHARE": "0.5", "N": "2"}
SCHEMAS = {job: schema_of(job) for job in schemas.SCHEMAS}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "distill.compact": distill.compact.run,
    "distill.pretrain": distill.pretrain.run,
    "distill.prune": distill.prune.job.run,
    "distill.quality": distill.quality.run,
    "distill.regenerate": distill.regenerate.job.run,
    "distill.skip_search": distill.skip_search.run,
    "distill.train": distill.train.run,
    "eval.analyze": eval.analyze.run,
    "eval.compare": eval.compare.run,
    "eval.doctor": eval.doctor.job.run,
    "eval.plan": eval.plan.job.run,
    "eval.replay": eval.replay.run,
    "eval.run": eval.run.run,
    "heads.train": heads.train.run,
    "recurrent_drafting.generate": recurrent_drafting.generate.run,
    "recurrent_drafting.train": recurrent_drafting.train.run,
    "serving.api": serving.api.job.run,
    "serving.web": serving.web.job.run,
}
TOY_LOOP = (
    "loop.max_steps=2 loop.tokens_per_step=512 loop.micro_batch_tokens=512 "
    "loop.eval_every=0 data.max_samples=20"
)
# beginnings of commands and scripts that take a minute even so; other tests run their parts
SLOW = (
    "eval.run +experiment=every_way",
    "eval.run +experiment=pearl_comparison",
    "distill.train ... -m",
    "scripts/bench/distillation",
)
# job -> arguments that make it small; stages are left out, as .ci/run runs the quickstart's
TOY = {
    "distill.compact": "",
    "distill.pretrain": f"{TOY_LOOP} stages=[]",
    "distill.prune": "importance.sequences=16 importance.greedy_sequences=1 "
    "importance.probe_sequences=2 importance.probe_steps=1 "
    "between.tokens_per_step=512 between.micro_batch_tokens=512",
    "distill.quality": "functions=1 max_new_tokens=4",
    "distill.regenerate": "data.max_samples=3 max_new_tokens=8",
    "distill.skip_search": "held_out.max_prompts=2 held_out.max_new_tokens=4 max_skips=2",
    "distill.train": f"{TOY_LOOP} stages=[] held_out.max_prompts=2 held_out.max_new_tokens=4 "
    "held_out.costs=none",
    "eval.analyze": "dry_run=true",
    "eval.compare": "dry_run=true",
    "eval.doctor": "max_prompts=4 max_new_tokens=8",
    "eval.plan": "depths=[1] heads=[medusa] max_draft_tokens=2 context=16 cost_seconds=1 runs=[]",
    "eval.replay": "num_draft_tokens=[2] bootstrap_resamples=50 stages=[]",
    "eval.run": "max_prompts=3 sweep=[2] sweep_prompts=1 max_new_tokens=6 bootstrap_resamples=50 "
    "timing_repeats=1 samples=1",
    "heads.train": f"{TOY_LOOP} stages=[] held_out.costs=none held_out.max_prompts=2 "
    "held_out.max_new_tokens=4",
    "recurrent_drafting.generate": "dry_run=true",
    "recurrent_drafting.train": f"{TOY_LOOP} stages=[] held_out.costs=none held_out.max_prompts=2 "
    f"held_out.max_new_tokens=4",
    "serving.api": "dry_run=true",
    "serving.web": "dry_run=true",
}


def commands() -> list[str]:
    """Return the commands that run: those of COMMANDS, assets/README.md and the quickstart."""
    quickstart = (
        (ROOT / "scripts" / "quickstart.sh").read_text().replace("$folder", "runs/quickstart")
    )
    return commands_in([COMMANDS, (ROOT / "assets" / "README.md").read_text(), quickstart])


def commands_in(texts: list[str]) -> list[str]:
    """Return the jobs' commands in the texts."""
    found = [
        match
        for text in texts
        for match in re.findall(r"python -m ([\w.]+(?: [^`\n|]*)?)", joined(text))
    ]
    return sorted({command.strip() for command in found if command.split()[0] in SCHEMAS})


def joined(text: str) -> str:
    """Return a text with each command on one line, as a backslash or a code span joins lines."""
    pieces = text.replace("\\\n", " ").split("```")
    pieces[::2] = [
        re.sub(r"`[^`]+`", lambda code: re.sub(r"\n\s*", " ", code[0]), piece)
        for piece in pieces[::2]
    ]
    return "```".join(pieces)


def guide_commands() -> list[str]:
    """Return the commands of the guides and experiments that are not among `commands`.

    Words like CHATS that a page explains are left out, and VALUES are put in.
    """
    found: set[str] = set()
    for page in GUIDES:
        text = page.read_text()
        for command in commands_in([text]):
            words = re.findall(r"(?<= )[A-Z][A-Z0-9]+(?= |$)", command)
            explained = [
                word
                for word in words
                if re.search(rf"`{word}`\s+(?:is|stands\s+for|as\s+in)", text)
            ]
            for word in explained:
                command = re.sub(rf" {word}(?= |$)", "", command)
            for word, value in VALUES.items():
                command = re.sub(rf"(?<= )([\w.]+)={word}(?= |$)", rf"\1={value}", command)
            found.add(command)
    return sorted(found - {*commands()})


def test_the_readme_names_every_job():
    named = {command.split()[0] for command in commands()}
    assert named == set(SCHEMAS)
    assert {yaml.safe_load(path.read_text())["job"] for path in CONF.glob("*_*.yaml")} == set(
        SCHEMAS
    )


def parts(command: str) -> tuple[str, list[str]]:
    """Return a command's job and arguments, without ELLIPSES."""
    job, *arguments = (word for word in shlex.split(command, comments=True) if word not in ELLIPSES)
    return job, arguments


def composed(job: str, arguments: list[str]) -> JobConfig:
    """Return the configuration of a command; for a sweep, that of its first member."""
    # These jobs take the folder of a drafter, and the first one published flags.
    if job == "recurrent_drafting.generate":
        arguments = to_overrides(arguments)
    if job in ("eval.doctor", "serving.api"):
        arguments = [expand_drafter(word) for word in arguments]
    # The schema depends on the kind of head.
    schema = head_schema(find_kind_name(arguments)) if job == "heads.train" else SCHEMAS[job]
    arguments = current_arguments(job, arguments)
    check_arguments(arguments, job, schema)
    register(job, schema)
    single = [re.sub(r"=(\d+)(,\d+)+$", r"=\1", word) for word in arguments if word != "-m"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return typed(compose(job.replace(".", "_"), single), schema)


@pytest.mark.parametrize("command", tiered([*commands(), *guide_commands()], commands_in([README])))
def test_every_command_composes(command: str):
    job, arguments = parts(command)
    assert composed(job, arguments).job == job


def shell_words(lines: list[str], folder: Path) -> list[list[str]]:
    """Return the words into which a shell splits each line, in a folder without files."""
    script = "".join(f"printf '%s\\0' {line}; printf '\\0'\n" for line in lines)
    made = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return [line.split("\0") for line in made.stdout.split("\0\0")[:-1]]


def test_a_shell_reads_every_command_as_it_is_meant(tmp_path: Path):
    """Check the quotes of commands: a shell expands braces that are outside of them."""
    typed_in = [one.partition(" #")[0] for one in [*commands(), *guide_commands()]]
    typed_in = [one for one in typed_in if "$" not in one]
    assert len(typed_in) > 100
    assert shell_words(typed_in, tmp_path) == [shlex.split(one) for one in typed_in]
    assert shell_words(["a={b,c}"], tmp_path) != [["a={b,c}"]], "a control"


def write_pearl_prompts(folder: Path) -> Path:
    """Write the prompt files of PEARL's suite and sweeps, with eight short prompts each."""
    for name in ("humaneval", "gsm8k_test", "mgsm", "mt_bench", "mbpp_test", "alpaca_eval"):
        lines = [
            {"id": f"{name}/{i}", "category": name, "turns": [f"def {name}_{i}(x):", "And?"]}
            for i in range(8)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "mgsm_pearl_subset.json").write_text(json.dumps([f"mgsm/{i}" for i in (3, 1, 0, 2)]))
    return folder


def write_answers(path: Path) -> Path:
    """Write logged answers to the embedded prompts."""
    prompts = read_prompts(ROOT / "assets" / "prompts.jsonl")
    lines = [json.dumps({"id": one.id, "turns": ["return None"]}) for one in prompts]
    path.write_text("\n".join(lines))
    return path


def write_chats_folder(folder: Path) -> Path:
    """Write a folder that `datasets` loads, with a column `messages` of a few chats."""
    chats = [
        [{"role": "user", "content": f"Tell {i}"}, {"role": "assistant", "content": f"Told {i}"}]
        for i in range(12)
    ]
    folder.mkdir()
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def write_solved(path: Path, first: int) -> Path:
    """Write nine solved problems in GSM8K's form, numbered from `first`."""
    lines = [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(first, first + 9)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def seldom(name: str) -> Any:
    """Return a parameter that runs with --exhaustive alone if it takes a minute."""
    return pytest.param(name, marks=pytest.mark.exhaustive) if name.startswith(SLOW) else name


@pytest.mark.long
@pytest.mark.parametrize("command", map(seldom, commands()))
def test_every_command_runs_at_toy_size(
    command: str,
    tiny_target: Path,
    padded_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    documents = corpus.documents
    monkeypatch.setattr(
        corpus, "documents", lambda split: [text[:4000] for text in documents(split)[:40]]
    )
    job, arguments = parts(command)
    real = {
        "PADDED": padded_target,
        "MODEL": tiny_target,
        "FOLDER": tiny_target,
        "chats.json": ROOT / "assets/chats.json",
        "CHATS_FOLDER": write_chats_folder(tmp_path / "chats"),
    }
    real |= {
        "prompts.jsonl": ROOT / "assets/prompts.jsonl",
        "text.txt": ROOT / "LOG.md",
        "more.txt": ROOT / "README.md",
    }
    # A fresh clone has none of these yet.
    real |= dict.fromkeys(("runs/quickstart/distill.train/drafter", "STUDENT"), tiny_target)
    real |= {"runs/mine/drafter": tiny_target}
    real |= {
        "runs/answers/chats.json": ROOT / "assets/chats.json",
        "other_prompts.jsonl": ROOT / "assets/prompts.jsonl",
    }
    real |= {"answers.jsonl": write_answers(tmp_path / "answers.jsonl")}
    real |= {"LARGE": tiny_target, "SMALL": tiny_target, "PROMPTS": write_pearl_prompts(tmp_path)}
    real |= {
        name: write_solved(tmp_path / name, first)
        for name, first in {"test.jsonl": 10, "train.jsonl": 20}.items()
    }
    # written by write_pearl_prompts
    real |= {"VICUNA": tiny_target, "mt_bench.jsonl": tmp_path / "mt_bench.jsonl"}
    real |= {
        "/path/to/your/model": tiny_target,
        "/path/to/sharegpt.json": ROOT / "assets/chats.json",
    }
    if any(word.startswith("checkpoint=") for word in arguments):
        FUNCTIONS[job](composed(job, [*TOY[job].split(), f"output_dir={tmp_path / 'run'}"]))
        newest = max((tmp_path / "run" / "checkpoints").iterdir())
        real |= {"RUN/checkpoints/step_000500": newest}
    for name, path in real.items():
        arguments = [
            re.sub(rf"(?<=[=\[: ]){re.escape(name)}(?=[]:,}}]|$)", str(path), word)
            for word in arguments
        ]
    arguments = [*TOY[job].split(), *arguments, f"output_dir={tmp_path / 'run'}"]
    if "+experiment=llama_796m" in arguments:
        arguments += ["student.init=random"]  # a stage that TOY leaves out cuts the student
    if "+experiment=batches" in arguments:
        # one of six conditions
        arguments += ["batch_sizes=[4]", "temperatures=[0.0]", "sweep=[2]", "threads=1"]
    # our eight worked examples do not fit into the toy target's context
    if "benchmark=gsm8k_8_shot" in arguments:
        arguments += [f"benchmark.shots={real['train.jsonl']}"]
    if "+experiment=pearl_comparison" in arguments:  # tests/eval/test_eval_suites.py has GSM8K
        arguments += ["stages=['eval.run:humaneval','eval.run:mgsm','eval.run:mt_bench']"]
    if "+experiment=every_way" in arguments:
        # the search for skipped layers takes a two-layer target instead of fourteen layers
        arguments += [f"target.path={tiny_target}"]
    if any(word.startswith("batch_sizes=") for word in arguments):
        arguments += ["max_prompts=8", "sweep_prompts=4"]  # a full batch for each part
    own = composed(job, arguments)
    # these start processes, which are forked
    if "-m" in arguments or "parallel=ddp" in arguments or own.stages:
        succeed(job, *arguments)
    else:
        FUNCTIONS[job](own)
    if own.dry_run:
        return
    members = list((tmp_path / "run").glob("student.num_hidden_layers=*")) or [tmp_path / "run"]
    members = [tmp_path / "run" / stage.split(":")[-1] for stage in own.stages] or members
    assert len(members) == (3 if "-m" in arguments else len(own.stages) or 1)
    for member in members:
        assert (member / "manifest.json").is_file()
        assert (
            job != "eval.run"
            or member.name == "distill.skip_search"
            or (member / "report.html").is_file()
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "script", map(seldom, re.findall(r"`(?:python )?(scripts/bench/\w+\.py)`", COMMANDS))
)
def test_every_benchmark_runs_at_toy_size(script: str, tiny_target: Path, tmp_path: Path):
    options = f"rounds=1 threads=1 name={tmp_path / 'figures'} "
    if script.endswith("bandwidth.py"):
        options += (
            "layers=1 hidden_size=64 intermediate_size=64 heads=2 kv_heads=1 "
            "vocab_size=8192 forwards=1"
        )
    elif script.endswith("teacher_cache.py"):
        options += "hidden_size=192 vocab_size=512 draft_vocab_size=128 rows=2 length=64 "
        options += "tokens_per_step=64 steps=1"
    elif script.endswith("decoding.py"):
        options += (
            f"target={tiny_target} drafter={tiny_target} max_prompts=1 max_new_tokens=8 "
            f"dtypes=[float32]"
        )
    elif script.endswith(("replay.py", "server.py")):
        options += f"target={tiny_target} max_prompts=1 max_new_tokens=8"
    elif script.endswith("load.py"):
        options += (
            f"target={tiny_target} max_new_tokens=8 num_draft_tokens=1 batches=[1,2] "
            f"rates=[20] requests=3"
        )
    else:
        options += f"target={tiny_target} steps=1"
    done = subprocess.run(
        [sys.executable, script, *options.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "figures.json").read_text())["figures"]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_file_exists(page: Path):
    """Check paths in backticks, scripts in commands and the targets of links."""
    text = page.read_text()
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir())
    named = re.findall(r"(?:\./|python )(scripts/[\w/]+\.(?:sh|py))", text)
    named += re.findall(rf"`((?:{folders})/[\w/.]*)`", text)
    assert not [path for path in named if not (ROOT / path).exists() and "runs/" not in path]
    links = re.findall(r"\]\(([\w/.]+)(?:#[\w-]+)?\)", text)
    assert not [link for link in links if not (page.parent / link).is_file()]


def test_the_documented_forms_of_chats_and_prompts_are_read(tmp_path: Path):
    """Check every object of the table in docs/cli.md. Control: an object of a text is refused."""
    page = (ROOT / "docs" / "cli.md").read_text()
    section = page.split("## Files of chats and prompts\n")[1].split("\n## ")[0]
    objects = re.findall(r"`(\{[^`]*\})`", section)
    prompts = [one for one in objects if {"turns", "prompt", "question"} & json.loads(one).keys()]
    assert (len(objects), len(prompts)) == (6, 3)
    for number, one in enumerate(objects):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(one)
        assert len(read_prompts([file])) == 1
        if one not in prompts:
            chats, _ = read_chats([file])
            assert [m["role"] for m in chats[0].messages] == ["user", "assistant"]
    file.write_text('{"text": "..."}')
    with pytest.raises(UserError, match=r"[Ee]xpected objects"):
        read_prompts([file])


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 120
    rows = [line.split("|") for line in lines if line.startswith("|")]
    assert all(len(cell) <= 80 for row in rows for cell in row)


def test_the_guides_are_the_pages_of_the_site():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = re.findall(r"\w+\.md", str(nav))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= {*pages}


def test_the_python_example_runs(
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    for name in ("assets/target", "runs/quickstart/distill.train/drafter"):
        assert f'"{name}"' in code
        shutil.copytree(tiny_target, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_scripts_are_executable_and_parse():
    for script in [*ROOT.glob("scripts/**/*.sh"), ROOT / ".ci" / "run"]:
        assert subprocess.run(["bash", "-n", script]).returncode == 0
        assert script.name == "environment.sh" or os.access(script, os.X_OK)
