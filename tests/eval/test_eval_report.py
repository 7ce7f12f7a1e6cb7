"""Tables and report from SIMULATED records with known results."""

import dataclasses
import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from eval.measure.records import stalled
from eval.report import evaluation_tables as tables
from eval.report import text as texts
from eval.report.evaluation_plots import speedup_by_gamma, time_of_a_round
from eval.report.page import evaluation_page as page
from eval.report.plots import COLOURS, drafter_styles
from eval.report.terminal import print_evaluation
from eval.statistics.metrics import MIN_PROMPTS
from eval.statistics.paired_samples import PARTS
from eval.statistics.schema import write_rows
from tests.support.simulated_records import PROVENANCE, pick
from tests.support.tiers import tiered
from training.models.shapes import millions

VOID = {"meta", "path", "use", "line", "rect", "circle", "br", "wbr", "image"}


@pytest.mark.parametrize("schedule", tiered(["pearl_virtual", "alone"], ["pearl_virtual"]))
def test_neither_a_virtual_clock_nor_another_model_makes_a_headline(rows, records, schedule):
    shown = [row for row in rows if row.drafter != "prompt_lookup"]
    alone = [dataclasses.replace(row, schedule=schedule) for row in shown]
    assert '<div class="big' in page(shown, records, PROVENANCE)
    assert '<div class="big' not in page(alone, records, PROVENANCE)


def test_a_lossy_row_is_marked_in_every_table_and_makes_no_headline(rows, records):
    lossy = [
        dataclasses.replace(row, lossless="lossy", lossless_detail="it is lossy")
        if row.drafter == "simulated-good"
        else row
        for row in rows
    ]
    text = page(lossy, records, PROVENANCE)
    assert "NOT LOSSLESS: simulated-good (lossy): it is lossy" in text
    assert "simulated-good, lossy (" in text
    assert "<p>simulated-slow" in text, "the lossless model has the headline"
    assert "<p>simulated-good" not in text and "over it [95 %]" in text
    for row in re.findall(r"<tr.*?</tr>", text, re.DOTALL):
        assert "simulated-good" not in row or "lossy" in row
    assert "lossy" not in re.sub("lossy:", "", page(rows, records, PROVENANCE)), "control"


# -------------------------------------------------------------------------------------------- table
@pytest.mark.parametrize("width", [90, 160])
def test_the_terminal_table_fits_and_has_its_rows(rows, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    print_evaluation(rows, console)
    text = console.file.getvalue()
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in text.splitlines()) <= width
    assert "prompt_lookup" in text
    assert "none (autoregressive)" in text


def test_a_busy_machine_is_named(rows):
    assert texts.disturbance(rows) == ""
    starved = [type(row)(**{**row.__dict__, "cpu_share": 0.4}) for row in rows]
    assert "only 40 % of the time" in texts.disturbance(starved)
    waiting = [type(row)(**{**row.__dict__, "schedule": "pearl_wall"}) for row in starved]
    assert texts.disturbance([*rows, *waiting]) == "", (
        "it waits for its drafter's process, undisturbed"
    )
    console = Console(file=io.StringIO())
    print_evaluation(starved, console)
    text = console.file.getvalue()
    assert text.index("Other processes used this machine") < text.index("none (autoregressive)")


def test_a_busy_machine_is_named_before_any_number_of_the_page(rows, records, html):
    starved = [dataclasses.replace(row, cpu_share=0.4) for row in rows]
    text = page(starved, records, PROVENANCE)
    assert text.index("Other processes used this machine") < text.index('<div class="big')
    assert '<div class="big good"' in html, "control: an undisturbed win is green"
    assert '<div class="big good"' not in text and "Unreliable: the machine was busy. " in text
    assert "Other processes" not in html and "Unreliable" not in html


def test_processes_that_shared_a_device_are_named_and_colour_no_headline(rows, records, html):
    shared = [dataclasses.replace(row, shards=4, shards_per_device=4) for row in rows]
    text = page(shared, records, PROVENANCE)
    warning = "4 processes (shards=4) shared the processor"
    assert text.index(warning) < text.index('<div class="big')
    assert '<div class="big good"' not in text and "4 shared the prompts, 4 on each" in text
    assert '<div class="big good"' in html and warning not in html, "control: one process"
    apart = [dataclasses.replace(row, shards=4, device="cuda") for row in rows]
    text = page(apart, records, PROVENANCE)
    assert '<div class="big good"' in text and "shards=4" not in text, "control: a GPU each"


def test_the_best_row_shows_its_number_of_rivals(rows, records, html):
    assert html.count("<p>Best of 2 drafters: simulated-good") == 2, (
        "two models under each of two conditions"
    )
    alone = [row for row in rows if row.drafter != "simulated-slow"]
    assert "Best of" not in page(alone, records, PROVENANCE), "control: a single row has no rivals"


@pytest.mark.parametrize(
    "changes",
    tiered(
        [{"length_rule": "cap"}, {"stopping": "cost_ratio"}, {"stopping": "entropy"}],
        [{"stopping": "cost_ratio"}],
    ),
    ids=str,
)
def test_a_headline_distinguishes_a_cap_from_a_length(rows, records, html, changes):
    capped = [dataclasses.replace(row, **changes) for row in rows]
    assert "gamma &lt;= 4, alpha" in page(capped, records, PROVENANCE)
    assert all(row.stopping == "fixed" for row in rows)
    assert "gamma 4, alpha" in html and "gamma &lt;= 4, alpha" not in html


@pytest.mark.parametrize(
    ("count", "unit", "label"),
    [
        (836_200, "", "0.8 M"),
        (3_100_000, "", "3.1 M"),
        (1_200_000_000, "", "1.2 B"),
        (2628, "", "2.6 k"),
        (836_200, "B", "0.8 MB"),
        (12, "B", "12 B"),
        (0, "", "–"),
        (None, "", "–"),
    ],
)
def test_counts_have_the_form_that_training_prints(count, unit, label):
    assert texts.amount(count, unit) == label
    if label.endswith(" M"):
        assert label == millions(count)


def test_every_table_shows_drafted_tokens_per_round(rows, html):
    good, lookup = pick(rows, "simulated-good"), pick(rows, "prompt_lookup")
    assert good.drafted == good.num_draft_tokens
    assert 0.3 < lookup.drafted / lookup.num_draft_tokens < 0.5, (
        "it offers tokens in two rounds of five"
    )
    for row in (good, lookup):
        assert tables.result_cells(row)["drafted"] == f"{row.drafted:.1f}"
    assert '<th scope="col">drafted</th>' in html


def test_without_a_terminal_the_table_is_plain_text(rows):
    console = Console(file=io.StringIO())
    print_evaluation(rows, console)
    text = console.file.getvalue()
    assert "\x1b" not in text
    assert text.isascii()
    assert "Where each drafter loses" in text


# ------------------------------------------------------------------------------------------- report
class Checker(HTMLParser):
    """A parser that collects addresses and ids, and checks that elements are nested correctly."""

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


def test_the_report_is_self_contained(html):
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    assert all(address.startswith("#") for address in checker.addresses)
    assert {address[1:] for address in checker.addresses} <= set(checker.ids)
    assert len(set(checker.ids)) == len(checker.ids)
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", html)
    assert not re.search(r"(https?:)?//[a-z]|@import|url\((?!#)|<script", without_namespaces)


def test_plots_are_drawn_inside_the_page_with_a_text_for_each(html):
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.S)
    assert len(drawings) == 10
    for drawing in drawings:
        assert re.match(r'<svg viewBox="[^"]+" role="img" aria-label="[^"]+">', drawing)


def test_plots_take_all_colours_from_the_page_which_has_them_light_and_dark(html):
    drawings = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.S))
    assert not re.search(r": #[0-9a-f]{3}", drawings), "no colour of one theme alone"
    used = set(re.findall(r"var\(--([\w-]+)\)", drawings))
    assert {"page", "ink", "muted", "series-1", "series-2", "rest"} <= used
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w+);", block))
        for block in re.findall(r":root \{(.*?)\}", html, flags=re.S)
    )
    assert light.keys() == dark.keys() >= used
    assert all(light[name] == colour for name, colour in COLOURS.items()), "PNG files look alike"
    assert all(light[name] != dark[name] for name in light)


def test_the_page_goes_from_the_headline_to_the_definitions(html):
    parts = (
        *('<div class="big', "<h2>All drafters", "Depth against throughput: greedy"),
        *("Acceptance by depth: greedy", "Where the time of a round goes: greedy"),
        *("<h2>Where each drafter loses", "<h2>What the words mean", "<h2>How it was measured"),
    )
    places = [html.index(part) for part in parts]
    assert places == sorted(places)


def test_depths_are_compared_where_drafters_have_several(rows, records, html, drawn):
    """Check the plot of throughput by depth, which says nothing of a single depth."""
    alike = [dataclasses.replace(row, drafter_layers=min(row.drafter_layers, 1)) for row in rows]
    assert "Depth against throughput: greedy" not in page(alike, records, PROVENANCE)
    assert "Depth against throughput: greedy" in html


def test_bars_show_the_parts_of_a_round_where_they_were_measured(rows):
    """Check the widths of the bars, and that a run without measured parts has its timed ones."""
    shown = [pick(rows, "simulated-good"), pick(rows, "prompt_lookup")]
    without = [dataclasses.replace(row, parts_ms={}, baseline_parts_ms={}) for row in shown]
    for some, names in ((shown, list(PARTS)), (without, ["propose", "forward", "rest"])):
        plot = time_of_a_round(some, "greedy")
        [axes] = plot.figure.axes
        assert [bars.get_label() for bars in axes.containers] == names
        widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
        rounds = [shown[0].baseline_round_ms, *(row.round_ms for row in shown)]
        assert [sum(parts) for parts in zip(*widths, strict=True)] == pytest.approx(rounds)
        assert ("timed outside the rounds" in plot.caption) == (some is without)


def test_a_single_prompt_is_not_plural(rows, records, html):
    assert "prompts whose text does not loop" in html
    single = [
        dataclasses.replace(row, prompts=1, prompts_asked=1, headline_prompts=1) for row in rows
    ]
    assert "1 of 1 text does not loop, and a headline counts at least 5" in page(
        single, records, PROVENANCE
    )
    assert "\nAll 1 prompt; no text" in page(single, records, PROVENANCE)


def test_too_few_prompts_that_do_not_loop_make_no_headline(rows, records):
    for count, shows in ((MIN_PROMPTS - 1, False), (MIN_PROMPTS, True)):
        few = [
            dataclasses.replace(row, headline_prompts=count, headline_speedup=9.0) for row in rows
        ]
        html = page(few, records, PROVENANCE)
        assert ("9.00×" in html) == shows == ('<div class="big' in html)
        assert (" prompts, loops included: " in html) != shows
        words = (
            rf"more prompts\. {count} of \d+ texts do not loop, and a headline counts at least 5"
        )
        assert bool(re.search(words, html)) != shows


def test_a_benchmark_of_any_name_is_named_once(rows, records):
    """Check that prompts.jsonl, whose rows name it `prompts`, gives no `prompts of prompts`."""
    named = [dataclasses.replace(row, benchmark="prompts") for row in rows]
    html = page(named, records, PROVENANCE)
    assert re.search(r" Benchmark prompts: \d+ prompts, up to ", html)
    assert not re.search(r"\bprompts?( \([^)]*\))? of prompts\b", html)


def test_a_caption_names_intervals_only_if_some_are_drawn(rows):
    styles = drafter_styles({row.drafter: "" for row in rows})
    swept = [row for row in rows if row.part == "sweep" and row.temperature == 0]
    few = [dataclasses.replace(r, prompts=1, speedup_low=None, speedup_high=None) for r in swept]
    caption = speedup_by_gamma(swept, styles, "greedy").caption
    assert caption.startswith("Points: measured on 6 prompts, with 95 % intervals. Dashed")
    caption = speedup_by_gamma(few, styles, "greedy").caption
    assert caption.startswith("Points: measured on 1 prompt. Dashed")


def test_a_caption_names_dashed_lines_only_if_some_are_drawn(rows):
    styles = drafter_styles({row.drafter: "" for row in rows})
    swept = [row for row in rows if row.part == "sweep" and row.temperature == 0]
    doubted = [dataclasses.replace(row, unreliable="of noise") for row in swept]
    single = [row for row in swept if row.num_draft_tokens == swept[0].num_draft_tokens]
    assert " Dashed: predicted. Below 1x" in speedup_by_gamma(swept, styles, "greedy").caption
    for some in (doubted, single):
        assert "Dashed" not in speedup_by_gamma(some, styles, "greedy").caption


def test_long_names_break_and_numbers_do_not(rows, records):
    named = [dataclasses.replace(row, worst_prompt="a_file/<9>:1") for row in rows]
    html = page(named, records, PROVENANCE)
    assert '<td class="words">a_<wbr>file/<wbr>&lt;9&gt;:<wbr>1</td>' in html
    assert "&lt;wbr" not in html and not re.search(r"\d<wbr>|\.<wbr>", html)


def test_a_headline_is_green_only_if_its_control_is_slower(rows, records):
    control = pick(rows, "prompt_lookup")
    ahead = [dataclasses.replace(r, headline_speedup=9.0) if r is control else r for r in rows]
    green = 'class="big good"'
    assert page(ahead, records, PROVENANCE).count(green) < page(rows, records, PROVENANCE).count(
        green
    )


def test_one_unit_measured_again_is_not_plural(rows, records):
    again = [dataclasses.replace(records[0], attempt=2), *records[1:]]
    assert "1 unit measured again" in page(rows, again, PROVENANCE)
    assert "0 units measured again" in page(rows, records, PROVENANCE), "control"


def test_the_report_shows_the_results(html, rows):
    text = re.sub(r"<[^>]+>", " ", html)
    good = pick(rows, "simulated-good")
    for needed in (
        f"{good.headline_speedup:.2f}×",
        f"{good.headline_speedup_low:.2f} to {good.headline_speedup_high:.2f}",
        "Prompt lookup, the control",
        "sweep, by the formula",
        f"{good.speedup:.2f}x [{good.speedup_low:.2f}, {good.speedup_high:.2f}]",
        f"{good.predicted_speedup:.2f}x",
        "Where each drafter loses",
        f"{good.slower_prompts} of {good.prompts}",
        "acceptance rate",
        "What was not measured",
        "these records are simulated",
        "simulated processor",
        "2 threads",
        "float32",
        "python -m eval.run",
        "temperature 1, token verification",
    ):
        assert needed in text, needed


@pytest.mark.usefixtures("drawn")
def test_names_from_outside_cannot_break_the_page(rows, records):
    evil = [type(row)(**{**row.__dict__, "target": "<script>x</script>"}) for row in rows]
    assert "<script" not in page(evil, records, PROVENANCE)


def test_results_are_json_without_nan(rows, tmp_path):
    write_rows(tmp_path / "results.jsonl", rows)
    for line in (tmp_path / "results.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))


def test_a_stall_is_detected_and_a_slow_prompt_is_not(records):
    here = [record for record in records if record.part == "main" and record.temperature == 0]
    units = sorted({record.unit for record in here})
    before, last = (
        [r for r in here if r.unit in units[:-1]],
        [r for r in here if r.unit == units[-1]],
    )
    assert not stalled(last, before)
    slow = [
        dataclasses.replace(record, decode_seconds=1.5 * record.decode_seconds) for record in last
    ]
    assert not stalled(slow, before)
    for index in range(len(last)):  # whichever arm is disturbed, the baseline included
        hit = [
            dataclasses.replace(r, decode_seconds=r.decode_seconds * (5 if i == index else 1))
            for i, r in enumerate(last)
        ]
        assert stalled(hit, before)
    assert not stalled(hit, [])
