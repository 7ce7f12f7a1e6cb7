"""Tables and report from SIMULATED records (tests/eval/simulated.py), whose right answers are known."""

import dataclasses
import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from eval import words
from eval.duels import duels
from eval.lossless import judge
from eval.records import append_records, read_records, stalled
from eval.report import Provenance, page
from eval.rows import build_rows
from eval.schema import read_rows, write_rows
from eval.table import print_table

from . import simulated

PROVENANCE = Provenance(
    command="python -m eval.run drafters=[simulated]",
    date="2026-01-01 00:00:00",
    versions={"torch": "0"},
    prompt_counts={"read": 40, "measured": 40},
    prompt_file="simulated.jsonl",
    revision="none",
    unmeasured=["Everything: these records are simulated."],
)
VOID = {"meta", "path", "use", "line", "rect", "circle", "br", "image"}


@pytest.fixture(scope="module")
def records():
    return simulated.run()


@pytest.fixture(scope="module")
def rows(records):
    facts = {name: fact for name, (_, fact, _) in simulated.DRAFTERS.items()}
    return build_rows(simulated.run_facts(), facts, simulated.slices(), records)


@pytest.fixture(scope="module")
def html(rows, records):
    return page(rows, records, PROVENANCE)


def pick(rows, drafter, temperature=0.0, part="main"):
    return next(r for r in rows if (r.drafter, r.temperature, r.part) == (drafter, temperature, part))


# ---------------------------------------------------------------------------------------------- rows
def test_rows_find_the_truth_of_the_simulation(rows):
    good = pick(rows, "simulated-good", temperature=1.0)
    assert good.alpha == pytest.approx(0.72 - 0.05, abs=0.03)
    assert good.cost_ratio == pytest.approx(0.6 / 5.0)
    assert good.V[4] == pytest.approx(1.18)
    # A round takes 0.2 to 0.3 ms beyond its parts, and prompts are paced 5 % slower than the parts on average.
    assert 0.03 < good.overhead < 0.12
    assert good.speedup_low < good.speedup < good.speedup_high


def test_prediction_and_measurement_agree_when_the_model_holds(rows):
    for row in rows:
        if row.part == "main":
            assert row.predicted_speedup == pytest.approx(row.speedup, rel=0.05)


def test_a_prediction_that_fails_is_told_so(rows):
    good = pick(rows, "simulated-good")
    assert "does not agree" not in words.verdict_line(good)[2]
    off = dataclasses.replace(good, predicted_speedup=1.3 * good.speedup)
    assert f"does not agree with what was measured ({good.speedup:.2f}x)" in words.verdict_line(off)[2]


def test_the_length_that_was_used_stands_apart_from_the_one_that_the_formula_would_take(rows):
    good = pick(rows, "simulated-good")
    gamma, said = good.num_draft_tokens, f"{good.predicted_speedup:.2f}x"
    other = dataclasses.replace(good, best_gamma=gamma + 1)
    assert (
        words.foretold(other)
        == f"Used: gamma={gamma}, chosen in the sweep. Predicted: {said} at gamma={gamma}; {good.verdict}."
    )
    same = dataclasses.replace(good, best_gamma=gamma)
    assert words.foretold(same) == f"Used: gamma={gamma}, chosen in the sweep. Predicted: {good.verdict}."
    given = dataclasses.replace(other, length_rule="given")
    assert words.foretold(given).startswith(f"Used: gamma={gamma}, as given. Predicted: {said}")
    unforetold = dataclasses.replace(good, length_rule="own", predicted_speedup=None, verdict="there is no formula")
    assert words.foretold(unforetold) == f"Used: lengths of its own choice, up to gamma={gamma}. There is no formula."
    alone = dataclasses.replace(unforetold, length_rule="none", num_draft_tokens=0)
    assert words.foretold(alone) == "There is no formula."


def test_a_formula_that_fails_where_the_replay_holds_is_told_apart(rows):
    good = pick(rows, "simulated-good")
    off = dataclasses.replace(good, predicted_speedup=1.3 * good.speedup, schedule="pearl_virtual")
    explained = words.verdict_line(dataclasses.replace(off, replayed_speedup=1.02 * good.speedup))[2]
    assert "explains what was measured" in explained and "does not agree" not in explained
    assert "does not agree" in words.verdict_line(dataclasses.replace(off, replayed_speedup=1.4 * good.speedup))[2]


def test_policies_that_wait_for_the_device_are_marked_on_a_gpu(rows):
    good = pick(rows, "simulated-good")
    on_card = dataclasses.replace(good, device="cuda:0", stopping="entropy")
    assert words.drafter_label(on_card).startswith("simulated-good, entropy, eager (")
    for other in (dataclasses.replace(on_card, device="cpu"), dataclasses.replace(on_card, stopping="cost_ratio")):
        assert "eager" not in words.drafter_label(other)


@pytest.mark.parametrize("schedule", ["pearl_virtual", "alone"])
def test_neither_a_virtual_clock_nor_another_model_makes_a_headline(rows, records, schedule):
    shown = [row for row in rows if row.drafter != "prompt_lookup"]
    alone = [dataclasses.replace(row, schedule=schedule) for row in shown]
    assert '<div class="big' in page(shown, records, PROVENANCE)
    assert '<div class="big' not in page(alone, records, PROVENANCE)


def test_duels_are_paired_by_prompt(rows, records):
    """The simulation paces prompts alike for all, so a duel is surer than two speedups; the winner's own is the mirror of the second's."""
    shown = [row for row in rows if row.part == "main" and row.temperature == 1.0]
    fought = {duel.row.drafter: duel for duel in duels(shown, records)}
    assert fought.keys() == {row.drafter for row in shown}
    best = max(shown, key=lambda row: row.tokens_per_second).drafter
    second = fought[best].rival.drafter
    assert {duel.rival.drafter for name, duel in fought.items() if name != best} == {best}
    assert fought[best].ratio.value == pytest.approx(1 / fought[second].ratio.value)
    for row in shown:
        duel = fought[row.drafter]
        assert duel.ratio.value == pytest.approx(row.tokens_per_second / duel.rival.tokens_per_second)
        assert duel.ratio.low < duel.ratio.value < duel.ratio.high
    longer = dataclasses.replace(shown[0], num_draft_tokens=shown[0].num_draft_tokens + 1, tokens_per_second=1.0)
    assert {d.row.drafter: d.rival.drafter for d in duels([*shown, longer], records)} == {
        name: duel.rival.drafter for name, duel in fought.items()
    }, "a drafter is no rival of itself at another length"
    assert duels(shown[:1], records) == []
    alone = dataclasses.replace(shown[0], schedule="alone")
    assert duels([alone, shown[1]], records) == [], "a text of another model is no rival"


def test_a_drafter_that_loses_is_told_so(rows):
    slow = pick(rows, "simulated-slow")
    assert not slow.helps
    assert "no gamma can help" in slow.verdict
    assert slow.slower_prompts > slow.prompts / 2
    assert slow.worst_speedup < 1
    which, measured, _ = words.verdict_line(slow)
    assert which == "simulated-slow, greedy"
    assert "slower than no drafter" in measured
    assert "as a whole on code, maths, writing" in measured


def test_headlines_leave_looping_prompts_out(rows):
    good = pick(rows, "simulated-good")
    looping = sum(unit % 7 == 3 for unit in range(6, 40))
    assert good.headline_prompts == good.prompts - looping
    assert good.headline_speedup < good.speedup  # loops were easy to guess
    assert pick(rows, "simulated-good", 1.0).headline_prompts == good.prompts


def test_a_drafter_that_is_often_silent_is_predicted_from_its_offers(rows):
    lookup = pick(rows, "prompt_lookup", temperature=1.0)
    assert lookup.alpha == pytest.approx(0.40, abs=0.04)  # of the tokens that it offers
    assert lookup.tau < 1.4  # but it offers any in two rounds of five only
    assert lookup.predicted_speedup == pytest.approx(lookup.speedup, rel=0.03)


def test_a_drafter_that_never_offers_a_token_is_no_error(records):
    silent = [
        dataclasses.replace(
            record,
            tested_by_depth=[],
            accepted_by_depth=[],
            drafted=0,
            draft_steps=0,
            verified=0,
            rounds=len(record.tokens),
        )
        if record.drafter == "prompt_lookup"
        else record
        for record in records
    ]
    facts = {name: facts for name, (_, facts, _) in simulated.DRAFTERS.items()}
    row = pick(build_rows(simulated.run_facts(), facts, simulated.slices(), silent), "prompt_lookup")
    assert row.alpha is None
    assert row.predicted_speedup == pytest.approx(row.best_gamma_speedup, rel=0.1)


def test_categories_add_up(rows):
    good = pick(rows, "simulated-good")
    assert sum(part.prompts for part in good.categories) == good.prompts
    assert min(p.speedup for p in good.categories) <= good.speedup <= max(p.speedup for p in good.categories)


def test_rows_and_records_survive_their_files(rows, records, tmp_path):
    write_rows(tmp_path / "results.jsonl", rows)
    assert read_rows(tmp_path / "results.jsonl") == rows
    append_records(tmp_path / "records.jsonl", records[:5])
    append_records(tmp_path / "records.jsonl", records[5:9])
    assert read_records(tmp_path / "records.jsonl") == records[:9]
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"part": "ma')  # a run that was killed while it wrote
    assert read_records(tmp_path / "records.jsonl") == records[:9]


DESIGNED = (
    "target drafter drafter_layers drafter_parameters benchmark prompts batch_size temperature num_draft_tokens "
    "schedule verify lossless alpha alpha_by_depth tau t_draft_ms t_target_ms V cost_ratio tokens_per_second "
    "baseline_tokens_per_second speedup speedup_low speedup_high predicted_speedup overhead backend dtype threads "
    "context seed hardware"
)


def test_rows_have_the_names_that_other_jobs_read(rows):
    assert set(DESIGNED.split()) <= set(rows[0].__dataclass_fields__)


# ---------------------------------------------------------------------------------------------- equality
def differing(record, at, gap):
    return type(record)(**{**record.__dict__, "differs_at": at, "gap": gap})


def test_equality_is_judged_by_rule_tie_and_dtype(records):
    greedy = [r for r in records if r.temperature == 0 and r.drafter == "simulated-good"]
    sampled = [r for r in records if r.temperature == 1 and r.drafter == "simulated-good"]
    assert judge(greedy, verify="token", dtype="float32").word == "equal"
    assert judge(sampled, verify="token", dtype="float32").word == "by rule"
    assert judge(sampled, verify="coupled", dtype="float32").word == "equal"
    assert judge([*greedy, differing(greedy[0], 9, 5e-5)], verify="token", dtype="float32").word == "ties"
    assert judge([*greedy, differing(greedy[0], 9, 5e-3)], verify="token", dtype="float32").word == "differs"
    assert judge([*greedy, differing(greedy[0], 9, 5e-3)], verify="token", dtype="bfloat16").word == "half precision"
    assert judge(greedy, verify="token", dtype="bfloat16").word == "half precision"  # never called equal
    many = [differing(record, 9, 5e-5) for record in greedy[:10]]
    assert judge([*greedy, *many], verify="token", dtype="float32").word == "differs"  # too many for ties


# ---------------------------------------------------------------------------------------------- table
@pytest.mark.parametrize("width", [90, 160])
def test_the_terminal_table_fits_and_explains_itself(rows, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    print_table(rows, console)
    text = console.file.getvalue()
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in text.splitlines()) <= width
    assert "no gamma can help" in text.lower()
    assert "prompt_lookup" in text
    assert "none (autoregressive)" in text


def test_a_busy_machine_is_named(rows):
    assert words.disturbance(rows) == ""
    starved = [type(row)(**{**row.__dict__, "cpu_share": 0.4}) for row in rows]
    assert "only 40 % of the time" in words.disturbance(starved)
    console = Console(file=io.StringIO())
    print_table(starved, console)
    text = console.file.getvalue()
    assert (
        text.index("Other processes used this machine") < text.index("none (autoregressive)") < text.index("faster: ")
    )


def test_a_busy_machine_is_named_before_any_number_of_the_page(rows, records, html):
    starved = [dataclasses.replace(row, cpu_share=0.4) for row in rows]
    text = page(starved, records, PROVENANCE)
    assert text.index("Other processes used this machine") < text.index('<div class="big')
    assert '<div class="big good"' in html, "control: an undisturbed win is green"
    assert '<div class="big good"' not in text
    assert "Other processes" not in html


def test_the_best_of_several_rows_says_of_how_many(rows, records, html):
    assert html.count("<p>Best of 2: simulated-good") == 2, "two models under each of two conditions"
    alone = [row for row in rows if row.drafter != "simulated-slow"]
    assert "Best of" not in page(alone, records, PROVENANCE), "control: one row is the best of nothing"


def test_drafted_tokens_a_round_stand_in_every_table(rows, html):
    good, lookup = pick(rows, "simulated-good"), pick(rows, "prompt_lookup")
    assert good.drafted == good.num_draft_tokens
    assert 0.3 < lookup.drafted / lookup.num_draft_tokens < 0.5, "it offers tokens in two rounds of five"
    for row in (good, lookup):
        assert words.cells(row)["drafted"] == f"{row.drafted:.1f}"
    assert "<th>drafted</th>" in html


def test_without_a_terminal_the_table_is_plain_text(rows):
    console = Console(file=io.StringIO())
    print_table(rows, console)
    text = console.file.getvalue()
    assert "\x1b" not in text
    assert text.isascii()
    assert "slower than no drafter" in text


# ---------------------------------------------------------------------------------------------- report
class Checker(HTMLParser):
    """Collects addresses and ids, and checks that elements nest."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.ids = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.addresses.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_report_stands_alone(html):
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    assert all(address.startswith("#") for address in checker.addresses)
    assert {address[1:] for address in checker.addresses} <= set(checker.ids)
    assert len(set(checker.ids)) == len(checker.ids)
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert not re.search(r"(https?:)?//[a-z]|@import|url\((?!#)|<script", without_namespaces)


def test_plots_take_their_colours_from_the_page(html):
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.S)
    assert len(drawings) == 8
    for drawing in drawings:
        assert not re.search(r"#[0-9a-f]{6}", drawing.split("</defs>")[-1])
        assert "var(--series-1)" in drawing
        assert 'role="img"' in drawing


def test_the_report_says_what_matters(html, rows):
    text = re.sub(r"<[^>]+>", " ", html)
    good = pick(rows, "simulated-good")
    for needed in (
        f"{good.headline_speedup:.2f}×",
        f"{good.headline_speedup_low:.2f} to {good.headline_speedup_high:.2f}",
        "Prompt lookup, the control",
        "Used: gamma=4, chosen in the sweep. Predicted: ",
        "no gamma can help",
        "slower than no drafter",
        "What was not measured",
        "these records are simulated",
        "simulated processor",
        "2 threads",
        "float32",
        "python -m eval.run",
        "temperature 1, token verification",
    ):
        assert needed in text, needed


def test_names_from_outside_cannot_break_the_page(rows, records):
    evil = [type(row)(**{**row.__dict__, "target": "<script>x</script>"}) for row in rows]
    assert "<script" not in page(evil, records, PROVENANCE)


def test_results_are_json_without_nan(rows, tmp_path):
    write_rows(tmp_path / "results.jsonl", rows)
    for line in (tmp_path / "results.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))


def test_a_stall_of_the_machine_is_seen_and_a_slow_prompt_is_not(records):
    here = [record for record in records if record.part == "main" and record.temperature == 0]
    units = sorted({record.unit for record in here})
    before, last = [r for r in here if r.unit in units[:-1]], [r for r in here if r.unit == units[-1]]
    assert not stalled(last, before)
    slow = [dataclasses.replace(record, decode_seconds=1.5 * record.decode_seconds) for record in last]
    assert not stalled(slow, before)
    for index in range(len(last)):  # whichever arm it hits, the baseline too
        hit = [
            dataclasses.replace(r, decode_seconds=r.decode_seconds * (5 if i == index else 1))
            for i, r in enumerate(last)
        ]
        assert stalled(hit, before)
    assert not stalled(hit, [])
