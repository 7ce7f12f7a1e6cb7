"""Plans from acceptances on several sets of prompts: none of them is taken for another."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from eval.plan.acceptance import AcceptanceModel, Prospect, rate_of, usual_prompts
from eval.plan.curves import Curve, write_curves
from eval.plan.rows import MEASURED, PREDICTED
from tests.support import plans

AT = {"medusa": -1.1, "eagle3": -0.3, "recurrent": -0.5, "dflash": -0.9}  # log-odds on chats
ON_CODE = 1.2  # more


def curve(kind: str, benchmark: str) -> Curve:
    """Return the acceptance of a head on these prompts."""
    alpha = rate_of(AT[kind] + ON_CODE * (benchmark == "code"))
    values: dict[str, Any] = {
        **dict.fromkeys(("target", "target_hash", "drafter_class"), "known"),
        **dict.fromkeys(("drafter", "drafter_hash", "kind"), kind),
        **{"layers": 0, "hidden_size": 0, "draft_vocab_size": 0, "training_tokens": 1 << 20},
        **{"draft_shape": "chain", "stopping": "fixed", "temperature": 0.0},
        "alpha_by_depth": [alpha] * 3,
        "tested_by_depth": [4000] * 3,
        "benchmark": benchmark,
        "source": "eval.run",
    }
    return Curve(**values)


ON_CHATS = [curve(kind, "chat") for kind in ("medusa", "eagle3", "recurrent")]
KNOWN = [*ON_CHATS, *(curve(kind, "code") for kind in ("medusa", "recurrent", "dflash"))]


def test_what_prompts_change_is_not_taken_for_what_a_drafter_does():
    asked = dataclasses.replace(Prospect.of(curve("dflash", "chat")), kind="domino")
    (there,) = AcceptanceModel.fit(ON_CHATS).predict(asked, 1)
    (found,) = AcceptanceModel.fit(KNOWN).predict(asked, 1)
    assert found == pytest.approx(there, abs=0.05)
    (on_code,) = AcceptanceModel.fit(KNOWN).predict(dataclasses.replace(asked, benchmark="code"), 1)
    assert on_code > found + 0.1
    mixed = [dataclasses.replace(one, benchmark="chat") for one in KNOWN]
    (control,) = AcceptanceModel.fit(mixed).predict(asked, 1)
    assert control > there + 0.1, "a control: without the names of the prompts it is in between"


def test_the_usual_prompts_are_those_of_the_most_forms():
    assert usual_prompts([*ON_CHATS, *KNOWN[3:5]]) == "chat"
    assert usual_prompts(KNOWN) == "code", "the last one of two with three forms"
    seeds = [dataclasses.replace(KNOWN[3], drafter_hash=str(seed)) for seed in range(5)]
    assert usual_prompts([*ON_CHATS, *seeds]) == "chat", "seeds of one form count once"
    assert usual_prompts([]) == ""


@pytest.mark.long
def test_a_plan_is_for_one_set_of_prompts_and_names_it(home: Path, tmp_path: Path, capsys: Any):
    file = tmp_path / "acceptance.jsonl"
    on_chats = [plans.curve(home, "chain", 1, 0.5), plans.curve(home, "medusa", 0, 0.4)]
    on_code = [
        plans.curve(home, "chain", 1, 0.9, benchmark="code"),
        plans.curve(home, "chain", 2, 0.9, benchmark="code"),
    ]
    write_curves(file, [*on_code, *on_chats])

    def rates(**asked: str) -> list[tuple[str, float]]:
        rows = plans.rows_in(plans.again(home, tmp_path, acceptance=str(file), **asked))
        return [(row.acceptance, round(row.alpha_by_depth[0], 1)) for row in rows]

    found = rates()
    assert found[:3] == [(MEASURED, 0.5), (MEASURED, 0.9), (MEASURED, 0.4)]
    shown = " ".join(capsys.readouterr().out.split())
    assert "Acceptance is that on prompts. Those on code count" in shown
    assert "Measured on other prompts alone, and shown as there: 2 layers, width 32 (code)" in shown
    other = rates(prompts="code")
    assert other[:3] == [(MEASURED, 0.9), (MEASURED, 0.9), (MEASURED, 0.4)], "one was asked for"
    assert other[3][0] == found[3][0] == PREDICTED
    assert other[3][1] > found[3][1], "the unknown one too"
    assert "shown as there: medusa (prompts)" in " ".join(capsys.readouterr().out.split())
    write_curves(file, on_chats)
    rates()
    shown = " ".join(capsys.readouterr().out.split())
    assert "Acceptance is that on prompts, the only prompts with measured drafters." in shown
    with pytest.raises(UserError, match=r"prompts is cod, on which no .*expected one of prompts\."):
        rates(prompts="cod")
