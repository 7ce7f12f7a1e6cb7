"""`eval.replay` as a job: equality with eval.run, its files, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from eval.analyze import lines, read
from eval.config import BenchmarkConfig, ReplayConfig
from eval.logged.rows import replay_table
from eval.replay import ROWS, check, read_rows, run
from eval.report.plots import Plot
from eval.run import run as evaluate
from eval.statistics.schema import read_rows as read_evaluation
from jobs.config import TargetConfig
from tests.support import tiny_folders as tiny
from tests.support.forks import succeed


def config(home: Path, name: str, **changes: Any) -> ReplayConfig:
    """Return a replay of the drafter `shallow` in `home` on the target's evaluation there."""
    values = {
        "job": "eval.replay",
        "output_dir": str(home / name),
        "log": str(home / "evaluated"),
        "target": TargetConfig(path=str(home / "target"), dtype="float64", device="cpu"),
        "drafters": [str(home / "shallow")],
        "num_draft_tokens": [3],
        "bootstrap_resamples": 50,
    }
    return ReplayConfig(**{**values, **changes})


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an evaluation of the drafter `shallow`, on prompts of two turns."""
    home = tmp_path_factory.mktemp("replay")
    tiny.save(home / "target", layers=3)
    tiny.save(home / "shallow", layers=1)
    prompts = tiny.prompts(home / "prompts.jsonl", count=5, turns=2)
    asked = tiny.config(
        home,
        "evaluated",
        benchmark=BenchmarkConfig(path=str(prompts), turns="all"),
        temperatures=[0.0],
        sweep=[],
        sweep_prompts=0,
        num_draft_tokens=[3],
        max_new_tokens=24,
        timing_repeats=1,
        stop_at_eos=True,
        drafters=[
            str(home / "shallow"),
            {"use": str(home / "shallow"), "lookup": 2, "name": "first"},
        ],
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Plot, "svg", "")
        patched.setattr(Plot, "png", b"")
        evaluate(asked)
    return home


def test_a_replay_equals_the_evaluation_that_wrote_the_log(evaluated: Path) -> None:
    drafters = [
        str(evaluated / "shallow"),
        {"use": str(evaluated / "shallow"), "lookup": 2, "name": "first"},
    ]
    folder = run(config(evaluated, "replayed", drafters=drafters))
    replayed = {row.drafter: row for row in read_rows(folder / ROWS)}
    measured = read_evaluation(evaluated / "evaluated" / "results.jsonl")
    assert (
        {row.drafter for row in measured}
        == replayed.keys()
        == {"shallow", "first", "prompt_lookup"}
    )
    for row in measured:
        other = replayed[row.drafter]
        for name in ("tokens", "rounds", "tested_by_depth", "accepted_by_depth", "alpha", "tau"):
            assert getattr(other, name) == getattr(row, name), (row.drafter, name)
        assert other.drafted == pytest.approx(row.drafted)
        assert (other.prompts, other.outputs, other.temperature) == (5, 10, 0.0)
        assert other.drafter_parameters == row.drafter_parameters
    assert replayed["shallow"].break_even_cost_ratio == pytest.approx(
        (replayed["shallow"].tau - 1) / replayed["shallow"].drafted
    )
    assert replayed["prompt_lookup"].break_even_cost_ratio is None
    assert replayed["first"].break_even_cost_ratio is None


def test_positions_past_a_drafters_context_are_printed(
    evaluated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = str(tiny.save(evaluated / "short", layers=1, context=40))
    drafters = [
        {"use": str(evaluated / "shallow"), "name": "long"},
        {"use": short, "name": "brief"},
        {"use": short, "name": "brief first", "lookup": 2},
    ]
    asked = config(evaluated, "past", drafters=drafters, num_draft_tokens=[2, 3])
    rows = {row.drafter: row for row in read_rows(run(asked) / ROWS)}
    row = rows["brief"]
    assert row.drafter_context == 40 and 0 < row.past_context < row.tokens
    assert rows["brief first"].past_context == row.past_context
    assert (rows["long"].drafter_context, rows["long"].past_context) == (256, 0)
    assert rows["prompt_lookup"].past_context is rows["prompt_lookup"].drafter_context is None
    for again in (False, True):  # a finished run prints them too
        if again:
            run(asked)
        printed = " ".join(capsys.readouterr().out.split())
        for name in ("brief", "brief first"):
            words = f"{row.past_context} of {row.tokens} positions lie past the context of {name} "
            words += "(40 tokens), where its model drafts nothing. Its tau includes them."
            assert printed.count(words) == 1
        assert printed.count("lie past the context") == 2, "control: not for the other drafters"


def test_the_table_shows_in_how_many_rounds_a_drafter_drafts(evaluated: Path) -> None:
    """Check the share against the drafted tokens of one a round."""
    folder = run(config(evaluated, "share", num_draft_tokens=[1]))
    rows = read_rows(folder / ROWS)
    table = replay_table(rows)
    for row, share, drafted in zip(
        rows, table.column("drafts in"), table.column("drafted"), strict=True
    ):
        assert (share, drafted) == (f"{row.drafted:.0%}", f"{row.drafted:.2f}")
    assert rows[1].drafter == "prompt_lookup" and rows[1].drafted < rows[0].drafted <= 1


def test_control_another_text_gives_other_rounds(evaluated: Path) -> None:
    records = (evaluated / "evaluated" / "records.jsonl").read_text().splitlines()
    plain = [json.loads(line) for line in records]
    target = [one for one in plain if one["drafter"] == "autoregressive"]
    log = evaluated / "reversed.txt"
    log.write_text(
        "".join(f"tensor([{one['tokens'][::-1]}])\n" for one in target if not one["turn"])
    )
    asked = BenchmarkConfig(path=str(evaluated / "prompts.jsonl"), turns="all")
    folder = run(config(evaluated, "reversed", log=str(log), benchmark=asked))
    row = read_rows(folder / ROWS)[0]
    measured = read_evaluation(evaluated / "evaluated" / "results.jsonl")[0]
    assert row.outputs == 5 and row.alpha != measured.alpha
    assert row.temperature is None


def test_the_loop_gives_the_same_rows_as_one_pass(evaluated: Path) -> None:
    lengths = [1, 4]
    found = [
        read_rows(
            run(config(evaluated, f"ways{way}", one_pass=way, num_draft_tokens=lengths)) / ROWS
        )
        for way in (True, False)
    ]
    for one, other in zip(*found, strict=True):
        timed = ("positions_per_second", "passes")
        assert {k: v for k, v in vars(one).items() if k not in timed} == {
            k: v for k, v in vars(other).items() if k not in timed
        }
    assert [row.passes for row in found[0]] == [1, 1, 2, 2]


def test_trees_and_stopping_rules_are_replayed(evaluated: Path) -> None:
    shallow = str(evaluated / "shallow")
    drafters = [
        {"use": "ranked_tree", "folder": shallow},
        {"use": shallow, "stopping": "confidence", "name": "by confidence"},
    ]
    rows = read_rows(run(config(evaluated, "trees", drafters=drafters)) / ROWS)
    assert [row.drafter for row in rows] == ["ranked_tree", "by confidence", "prompt_lookup"]
    assert all(row.tau > 1 for row in rows[:2])


def test_a_finished_replay_is_kept(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = config(evaluated, "twice", write_totals=True)
    first = (run(asked) / ROWS).read_text()
    capsys.readouterr()
    assert (run(asked) / ROWS).read_text() == first
    printed = capsys.readouterr().out
    assert "is finished; nothing is replayed again" in printed
    assert "the rounds are those of greedy speculative decoding" in " ".join(printed.split())
    manifest = json.loads((evaluated / "twice" / "manifest.json").read_text())
    assert str(evaluated / "evaluated" / "records.jsonl") in manifest["inputs"]
    with pytest.raises(UserError, match="belongs to another configuration"):
        run(config(evaluated, "twice", num_draft_tokens=[2], write_totals=True))


def test_a_finished_replay_says_again_what_it_left_out(
    evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    texts = [{"prompt": "a b", "output": "c d e"}, {"prompt": "a b", "output": ""}]
    log.write_text("".join(json.dumps(text) + "\n" for text in texts))
    asked = config(evaluated, str(tmp_path / "left"), log=str(log))
    printed = []
    for _ in range(2):
        run(asked)
        printed.append(" ".join(capsys.readouterr().out.split()))
    assert [text.count("left out") for text in printed] == [1, 1]


def test_names_that_differ_in_spaces_alone_have_files_of_their_own(evaluated: Path) -> None:
    names = ["a b", "a/b", "a_b", "a_b_2"]
    drafters = [{"use": "prompt_lookup", "name": name} for name in names]
    asked = config(
        evaluated, "names", drafters=drafters, write_totals=True, prompt_lookup_control=False
    )
    folder = run(asked)
    written = {path.name for path in (folder / "totals").iterdir()}
    assert written == {f"{name}-3.txt" for name in ("a_b", "a_b_2", "a_b_3", "a_b_2_2")}


def test_totals_and_lines_of_a_replay_agree(evaluated: Path) -> None:
    """Check that the published output file of a replay has its rounds, and analyze all three."""
    folder = run(config(evaluated, "totals", write_totals=True))
    row = read_rows(folder / ROWS)[0]
    (published,) = read(folder / "totals" / "shallow-3.txt", 3)
    of_replay = {(one.name, one.num_draft_tokens): one for one in read(folder)}
    of_run = {one.name: one for one in read(evaluated / "evaluated")}
    for found in (published, of_replay["shallow", 3], of_run["shallow, T=0"]):
        assert [one.emitted for one in found.outputs] == [
            one.emitted for one in of_replay["shallow", 3].outputs
        ]
        assert f"Average tokens matched per dataset: {row.tau:.4f}" in lines(found)
    text = "\n".join(lines(of_replay["shallow", 3]))
    assert f"accepted drafts: {sum(row.accepted_by_depth) / row.rounds:.4f} a round" in text
    assert f"acceptance rate alpha: {row.alpha:.4f}" in text


NEEDY = {
    "lookahead": "reads guesses from the target's verifying forward",
    "self_speculation": "drafts with the target's own layers",
    "ouroboros": "learns phrases from the target's choices",
}


@pytest.mark.parametrize("name", NEEDY)
def test_drafters_that_need_the_target_are_refused_by_name(name: str, evaluated: Path) -> None:
    options = {
        "ouroboros": {"folder": str(evaluated / "shallow")},
        "self_speculation": {"skips": "x"},
    }
    asked = {"use": name, **options.get(name, {})}
    with pytest.raises(UserError, match=f"drafters: {name} {NEEDY[name]}.*python -m eval.run"):
        run(config(evaluated, "needy", drafters=[asked]))


def test_heads_are_refused_by_name(evaluated: Path, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"model_type": "medusa"}')
    with pytest.raises(UserError, match=r"is a head \(medusa\), which reads the target's hidden"):
        run(config(evaluated, "head", drafters=[str(tmp_path / "head")]))
    for asked in ("medusa", {"use": "eagle3"}):  # before their folders are asked for
        with pytest.raises(UserError, match="is a head, which reads .*python -m eval.run"):
            check(config(evaluated, "head", drafters=[asked]))
    check(config(evaluated, "control", drafters=["suffix_lookup"]))


def test_what_needs_costs_is_refused(evaluated: Path) -> None:
    shallow = str(evaluated / "shallow")
    for asked, words in (
        ({"use": "budget_tree", "folder": shallow}, "by_cost: false"),
        ({"use": shallow, "stopping": "cost_ratio"}, "needs a target's costs"),
        ({"use": shallow, "stopping": "thompson_calibrated"}, "needs a target's costs"),
        ({"use": shallow, "schedule": "pearl_virtual"}, "schedule=serial"),
        ({"use": shallow, "verify": "block"}, "which only eval.run supports"),
    ):
        with pytest.raises(UserError, match=words):
            run(config(evaluated, "costs", drafters=[asked]))


def test_a_drafter_of_another_tokenizer_is_refused(evaluated: Path, tiny_target: Path) -> None:
    with pytest.raises(UserError, match="cannot draft for .* their tokenizers differ"):
        run(config(evaluated, "tokenizer", drafters=[str(tiny_target)]))


def test_a_folder_with_a_tokenizer_is_enough(evaluated: Path, tmp_path: Path) -> None:
    """Check that the target's folder and its tokenizer alone give the same rows."""
    tiny.tokenizer().save_pretrained(tmp_path / "words")
    log = tmp_path / "answers.jsonl"
    log.write_text('{"prompt": "Hi?", "output": "Hello there, hello there"}')
    shallow = str(evaluated / "shallow")
    found = []
    for target in (evaluated / "target", tmp_path / "words"):
        asked = config(
            evaluated,
            f"read with {target.name}",
            log=str(log),
            target=TargetConfig(path=str(target), dtype="float64", device="cpu"),
            drafters=[shallow, {"use": "other_vocabulary", "folder": shallow, "name": "other"}],
        )
        rows = read_rows(run(asked) / ROWS)
        assert all((row.target, row.tokenized) == (target.name, 1) for row in rows)
        found.append([(row.drafter, row.tested_by_depth, row.accepted_by_depth) for row in rows])
    assert found[0] == found[1]


def test_figures_of_text_are_qualified_also_when_shown_again(
    evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "answers.jsonl"
    log.write_text('{"prompt": "Hi?", "output": "Hello there"}')
    for asked, is_text in (
        (config(evaluated, "of text", log=str(log)), True),
        (config(evaluated, "of ids"), False),
    ):
        for _ in range(2):
            run(asked)
            printed = " ".join(capsys.readouterr().out.split())
            assert ("1 of 1 outputs are text, tokenized here" in printed) == is_text
            assert ("if it is greedy, which it does not state" in printed) == is_text


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_figures_of_a_sampled_log_are_claimed_for_lookups_alone(
    temperature: float, evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "responses.jsonl"
    request = {"prompt": "Hi?", "temperature": temperature}
    response = {"choices": [{"index": 0, "text": "Hello there", "finish_reason": "length"}]}
    log.write_text(json.dumps({"request": request, "response": response}))
    run(config(evaluated, f"at {temperature}", log=str(log)))
    printed = " ".join(capsys.readouterr().out.split())
    assert ("a lookup has the same ones; a model's differ" in printed) == (temperature > 0)
    assert ("Exact for the tokens of the log" in printed) == (temperature == 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"log": ""}, "log is '', expected a file or a run folder"),
        ({"log": "/nowhere"}, "/nowhere does not exist"),
        ({"num_draft_tokens": []}, "num_draft_tokens is"),
        ({"num_draft_tokens": [0]}, "num_draft_tokens is"),
        ({"max_outputs": -1}, "max_outputs is -1"),
        ({"stopping": "never"}, "stopping"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], words: str, evaluated: Path) -> None:
    with pytest.raises(UserError, match=words):
        run(config(evaluated, "wrong", **changes))


def test_run_folders_without_outputs_of_a_target_are_refused(
    evaluated: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"holds no records.jsonl, expected a run folder"):
        run(config(evaluated, "empty", log=str(tmp_path)))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name in ("config.yaml", "records.jsonl"):
        (damaged / name).write_bytes((evaluated / "evaluated" / name).read_bytes())
    content = (damaged / "records.jsonl").read_text()
    (damaged / "records.jsonl").write_text(content.replace('"rounds": ', '"rounds": 9', 1))
    with pytest.raises(UserError, match=r"records.jsonl, line 1: its checksum does not match"):
        run(config(evaluated, "damaged", log=str(damaged)))


def test_a_dry_run_writes_nothing(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(config(evaluated, "dry", dry_run=True, log="later.jsonl"))
    assert not folder.exists()
    assert "would replay" in (printed := capsys.readouterr().out) and "not there yet" in printed


@pytest.mark.long
def test_both_jobs_run_from_the_command_line(evaluated: Path) -> None:
    folder = evaluated / "command"
    printed = succeed(
        "eval.replay",
        f"log={evaluated / 'evaluated'}",
        f"target.path={evaluated / 'target'}",
        f"drafters=[{evaluated / 'shallow'}]",
        f"output_dir={folder}",
    )
    assert "pays below c" in printed
    assert "Average tokens matched per dataset:" in succeed("eval.analyze", f"path={folder}")


def test_folders_without_rounds_are_refused(evaluated: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds neither replays.jsonl nor records.jsonl"):
        read(tmp_path)
    asked = run(config(evaluated, "cut"))
    (asked / "replays.jsonl").write_text('{"drafter": "shallow"}\n')
    with pytest.raises(UserError, match=r"replays.jsonl, line 1: .*Replay again"):
        read(asked)
