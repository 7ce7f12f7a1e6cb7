"""Rows made from SIMULATED records with known results, and their tables."""

import dataclasses

import pytest

from eval.engines.plan import EngineArm
from eval.engines.records import EngineRecord
from eval.engines.rows import build_engine_rows
from eval.measure.records import append_lines, read_records
from eval.report import evaluation_tables as tables
from eval.report import text
from eval.statistics.lossless import judge
from eval.statistics.paired_comparison import paired_comparisons
from eval.statistics.rows import build_rows
from eval.statistics.schema import read_rows, write_rows
from tests.support import simulated_records as simulated
from tests.support.simulated_records import DRAFTERS, pick


def test_rows_find_the_truth_of_the_simulation(rows):
    good = pick(rows, "simulated-good", temperature=1.0)
    assert good.alpha == pytest.approx(0.72 - 0.05, abs=0.03)
    assert good.cost_ratio == pytest.approx(0.6 / 5.0)
    assert good.V[4] == pytest.approx(1.18)
    # A round takes 0.2 to 0.3 ms beyond its parts, and prompts are paced 5 % slower than the parts
    # on average.
    assert 0.03 < good.overhead < 0.12
    assert good.speedup_low < good.speedup < good.speedup_high


def test_prediction_and_measurement_agree_when_the_model_holds(rows):
    for row in rows:
        if row.part == "main":
            assert row.predicted_speedup == pytest.approx(row.speedup, rel=0.05)


def cells_of(table, number=0):
    return dict(zip(table.columns, table.rows[number], strict=True))


def test_a_prediction_that_fails_is_marked(rows):
    good = pick(rows, "simulated-good")
    off = dataclasses.replace(good, predicted_speedup=1.3 * good.speedup)
    table = tables.predictions_table([("good", good), ("off", off)])
    assert table.marks == ["", "bad"]
    assert cells_of(table, 1)["predicted / measured"] == "1.30"
    assert cells_of(table)["speedup"] == f"{good.speedup:.2f}x"


def test_a_far_negative_overhead_and_a_length_set_by_doubtful_costs_are_unreliable(rows):
    good = pick(rows, "simulated-good")
    for overhead, shown in ((-0.28, "unreliable"), (-0.02, "-2 %"), (0.07, "7 %")):
        row = dataclasses.replace(good, overhead=overhead)
        assert tables.result_cells(row)["overhead"] == shown
    doubted = dataclasses.replace(good, unreliable="a reason")
    cells = cells_of(tables.predictions_table([("good", doubted)]))
    assert cells["length set by"] == "sweep, by the formula (unreliable)"
    given = dataclasses.replace(doubted, length_rule="given")
    assert cells_of(tables.predictions_table([("good", given)]))["length set by"] == "given"


def test_used_and_predicted_lengths_are_shown_separately(rows):
    good = dataclasses.replace(pick(rows, "simulated-good"), best_gamma=5)
    cells = cells_of(tables.predictions_table([("good", good)]))
    assert (cells["gamma"], cells["length set by"]) == ("4", "sweep, by the formula")
    assert (cells["best gamma"], cells["predicted there"]) == (
        "5",
        f"{good.best_gamma_speedup:.2f}x",
    )
    given = dataclasses.replace(good, length_rule="given", helps=False)
    cells = cells_of(tables.predictions_table([("good", given)]))
    assert (cells["length set by"], cells["best gamma"]) == ("given", "none")
    alone = dataclasses.replace(
        good, length_rule="none", num_draft_tokens=0, predicted_speedup=None
    )
    cells = cells_of(tables.predictions_table([("good", alone)]))
    assert {cells[name] for name in ("gamma", "length set by", "predicted", "best gamma")} == {"–"}


def test_policies_that_wait_for_the_device_are_marked_on_a_gpu(rows):
    good = pick(rows, "simulated-good")
    on_card = dataclasses.replace(good, device="cuda:0", stopping="entropy")
    assert text.drafter_label(on_card).startswith("simulated-good, entropy, eager (")
    for other in (
        dataclasses.replace(on_card, device="cpu"),
        dataclasses.replace(on_card, stopping="cost_ratio"),
    ):
        assert "eager" not in text.drafter_label(other)


def test_drafters_are_compared_in_pairs_by_prompt(rows, records):
    """Check that each drafter is compared by prompt with the fastest other drafter.

    The winner's ratio is the inverse of the second's. The simulation gives a prompt the same pace
    for all drafters.
    """
    shown = [row for row in rows if row.part == "main" and row.temperature == 1.0]
    found = {pair.row.drafter: pair for pair in paired_comparisons(shown, records)}
    assert found.keys() == {row.drafter for row in shown}
    best = max(shown, key=lambda row: row.tokens_per_second).drafter
    second = found[best].rival.drafter
    assert {pair.rival.drafter for name, pair in found.items() if name != best} == {best}
    assert found[best].ratio.value == pytest.approx(1 / found[second].ratio.value)
    for row in shown:
        pair = found[row.drafter]
        assert pair.ratio.value == pytest.approx(
            row.tokens_per_second / pair.rival.tokens_per_second
        )
        assert pair.ratio.low < pair.ratio.value < pair.ratio.high
    longer = dataclasses.replace(
        shown[0], num_draft_tokens=shown[0].num_draft_tokens + 1, tokens_per_second=1.0
    )
    assert {
        d.row.drafter: d.rival.drafter for d in paired_comparisons([*shown, longer], records)
    } == {name: pair.rival.drafter for name, pair in found.items()}, (
        "a drafter is not a rival of itself at another length"
    )
    assert paired_comparisons(shown[:1], records) == []
    alone = dataclasses.replace(shown[0], schedule="alone")
    assert paired_comparisons([alone, shown[1]], records) == [], (
        "a drafter alone, with the text of another model, is not a rival"
    )


def test_a_losing_drafter_is_reported(rows):
    slow = pick(rows, "simulated-slow")
    assert not slow.helps
    assert "no gamma can help" in slow.verdict
    assert slow.slower_prompts > slow.prompts / 2
    assert slow.worst_speedup < 1
    cells = cells_of(tables.losses_table([("slow", slow)]))
    assert cells["slower prompts"] == f"{slow.slower_prompts} of {slow.prompts}"
    assert cells["worst prompt"] == slow.worst_prompt
    assert cells["speedup there"] == f"{slow.worst_speedup:.2f}x"
    assert cells["slower categories"] == "code, maths, writing"
    good = cells_of(tables.losses_table([("good", pick(rows, "simulated-good"))]))
    assert good["slower categories"] == "none", "control"


def test_headlines_leave_looping_prompts_out(rows):
    good = pick(rows, "simulated-good")
    looping = sum(unit % 7 == 3 for unit in range(6, 40))
    assert good.headline_prompts == good.prompts - looping
    assert good.headline_speedup < good.speedup  # loops are easy to draft
    assert pick(rows, "simulated-good", 1.0).headline_prompts == good.prompts


def test_a_drafter_with_few_offers_is_predicted_from_its_offers(rows):
    lookup = pick(rows, "prompt_lookup", temperature=1.0)
    assert lookup.alpha == pytest.approx(0.40, abs=0.04)  # of the tokens that it offers
    assert lookup.tau < 1.4  # it offers tokens in only two rounds of five
    assert lookup.predicted_speedup == pytest.approx(lookup.speedup, rel=0.03)


def test_draft_steps_are_charged_by_their_beams(records):
    """Check that each draft step is charged the time of a step from its number of beams.

    The first step of a draft starts from the tip alone, and later steps start from eight beams.
    """
    name, tip_ms, wide_ms = "simulated-good", 0.2, 1.4
    per_step = DRAFTERS[name][2]

    def beams(record):
        if record.drafter != name:
            return record
        wide = record.draft_steps - record.rounds
        longer = (record.rounds * tip_ms + wide * wide_ms - record.draft_steps * per_step) / 1000
        return dataclasses.replace(
            record,
            draft_beams=record.rounds + 8 * wide,
            decode_seconds=record.decode_seconds + 1.05 * longer,
        )

    def built(by_beams):
        widest = {"t_draft_ms": wide_ms, "t_draft_by_beams_ms": by_beams}
        parts = [
            dataclasses.replace(one, **widest) if one.drafter == name else one
            for one in simulated.slices()
        ]
        facts = {name: facts for name, (_, facts, _) in DRAFTERS.items()}
        made = build_rows(
            simulated.run_facts(), facts, parts, [beams(record) for record in records]
        )
        return {
            row.num_draft_tokens: row
            for row in made
            if row.drafter == name and row.temperature == 1.0
        }

    rows = built({1: tip_ms, 8: wide_ms})
    assert {1, 4} <= set(rows)
    for gamma, row in rows.items():
        assert row.draft_ms_per_round == pytest.approx(tip_ms + (gamma - 1) * wide_ms)
        assert row.t_draft_ms == pytest.approx(row.draft_ms_per_round / gamma)
        assert row.cost_ratio == pytest.approx(row.t_draft_ms / row.t_target_ms[1])
        assert row.predicted_speedup == pytest.approx(row.speedup, rel=0.06)
    alike = built({})
    assert alike[1].draft_ms_per_round == pytest.approx(wide_ms), (
        "control: without the widths a short draft is overpriced"
    )
    assert alike[1].overhead < 0 < rows[1].overhead


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
    facts = {name: facts for name, (_, facts, _) in DRAFTERS.items()}
    row = pick(
        build_rows(simulated.run_facts(), facts, simulated.slices(), silent), "prompt_lookup"
    )
    assert row.alpha is None
    assert row.predicted_speedup == pytest.approx(row.best_gamma_speedup, rel=0.1)


def test_categories_add_up(rows):
    good = pick(rows, "simulated-good")
    assert sum(part.prompts for part in good.categories) == good.prompts
    assert (
        min(p.speedup for p in good.categories)
        <= good.speedup
        <= max(p.speedup for p in good.categories)
    )


def test_rows_and_records_survive_their_files(rows, records, tmp_path):
    write_rows(tmp_path / "results.jsonl", rows)
    assert read_rows(tmp_path / "results.jsonl") == rows
    append_lines(tmp_path / "records.jsonl", records[:5])
    append_lines(tmp_path / "records.jsonl", records[5:9])
    assert read_records(tmp_path / "records.jsonl") == records[:9]
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"part": "ma')  # a run killed during a write
    assert read_records(tmp_path / "records.jsonl") == records[:9]


DESIGNED = (
    "target drafter drafter_layers drafter_parameters benchmark prompts batch_size temperature "
    "num_draft_tokens schedule verify lossless alpha alpha_by_depth tau t_draft_ms t_target_ms V "
    "cost_ratio tokens_per_second baseline_tokens_per_second speedup speedup_low speedup_high "
    "predicted_speedup overhead backend dtype threads context seed hardware"
)


def test_rows_have_the_designed_fields(rows):
    assert set(DESIGNED.split()) <= set(rows[0].__dataclass_fields__)


def differing(record, at, gap):
    return type(record)(**{**record.__dict__, "differs_at": at, "gap": gap})


def judged(records, **changes):
    return judge(
        records, **{"verify": "token", "dtype": "float32", "backend": "native", **changes}
    ).word


def test_equality_is_judged_by_rule_tie_and_dtype(records):
    greedy = [r for r in records if r.temperature == 0 and r.drafter == "simulated-good"]
    sampled = [r for r in records if r.temperature == 1 and r.drafter == "simulated-good"]
    far = [*greedy, differing(greedy[0], 9, 5e-3)]
    assert judged(greedy) == "equal"
    assert judged(sampled) == "by rule"
    assert judged(sampled, verify="coupled") == "equal"
    assert judged([*greedy, differing(greedy[0], 9, 5e-5)]) == "ties"
    assert judged(far) == "differs"
    assert judged(far, dtype="bfloat16") == "half precision"
    # not equal, although the texts are
    assert judged(greedy, dtype="bfloat16") == "half precision"
    fused = {"dtype": "bfloat16", "backend": "native fused"}
    assert judged(greedy, **fused) == "equal"
    assert judged(far, **fused) == "differs"
    near = [*greedy, differing(greedy[0], 9, 0.0)]
    assert judged(near) == "ties"
    assert judged(near, **fused) == "differs", "equal bits have no ties"
    assert judged(far, dtype="bfloat16", backend="native graph") == "half precision"
    # more differences than ties can explain
    assert judged([*greedy, *(differing(record, 9, 5e-5) for record in greedy[:10])]) == "differs"


def engine_record(arm, tokens):
    return EngineRecord(
        **vars(arm),
        rule="greedy",
        ignore_eos=True,
        temperature=0.0,
        batch_size=1,
        unit=0,
        turn=0,
        sample=0,
        prompt_ids=["simulated-0"],
        outputs=[tokens],
        seconds=1.0,
        first_token_seconds=[None],
        **dict.fromkeys(("rounds", "drafted", "accepted", "tested_by_depth", "accepted_by_depth")),
        differs_at=[None],
        gaps=[None],
    )


@pytest.mark.parametrize("backend", ["native fused", "native"])
def test_the_tables_of_drafters_and_of_engines_judge_our_texts_alike(records, backend):
    facts = {name: fact for name, (_, fact, _) in DRAFTERS.items()}
    run = simulated.run_facts(dtype="bfloat16", backend=backend)
    drafted = pick(build_rows(run, facts, simulated.slices(), records), "simulated-good")
    draft = EngineArm("ours", "draft_model", "simulated-good", 4)
    other = EngineArm("vllm")
    arms = [EngineArm("ours"), draft, other]
    measured = [engine_record(arm, list(range(64))) for arm in arms]
    versions = {"vllm": "0.20"}
    rows = build_engine_rows(run, facts, measured, arms, versions, [], ignore_eos=True)
    assert rows[1].lossless == drafted.lossless
    assert drafted.lossless == ("equal" if backend == "native fused" else "half precision")
    assert rows[2].lossless == "half precision"  # the control: only our fused step promises it
