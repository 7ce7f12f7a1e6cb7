"""Part `exact`: drafted text equals autoregressive text on this device, and rounds wait once.

Every way to draft (scripts/bench/gpu_rows.py) runs in float64, where no token may differ. A chain,
a tree and beams then decode more and longer texts, below float64 too. There rounding sometimes
decides, so differences are only counted, with the gap between the target's two best tokens at the
first one. The hashes of the noise must equal the CPU's.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from decoding import devices
from decoding.drafters.remote import RemoteChain
from decoding.interfaces import Drafter, Target
from decoding.loop import decode, prefill_batch
from decoding.rounds.settings import Settings
from decoding.rounds.ties import choice_scores, first_difference, top_two_gap
from decoding.sampling import noise
from scripts.bench.gpu_rows import (
    DraftingMode,
    drafting_modes,
    embedded_kit,
    make_chain,
    make_kits,
    tokenize_prompts,
    write_draft_model,
)
from tests.decoding.rows import COSTS

SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    **{rule: {"temperature": 1.0, "verify": rule} for rule in ("token", "block", "coupled")},
}
WAYS = {way: SAMPLED[way] for way in ("greedy", "coupled")} | {
    "coupled, top-p": {"temperature": 0.8, "top_p": 0.9, "verify": "coupled"}
}
REPRODUCED = ("greedy", "coupled")  # rules under which drafting changes no token
# modes that decode more and longer texts
AT_SIZE = ("chain", "multi_candidate", "recurrent_chain", "recurrent")
# modes that also run eagerly, which is not how a card is used
EAGER = (*AT_SIZE, "recurrent_drawn")


def decode_all(
    target: Target,
    drafter: Drafter | None,
    prompts_B: list[list[int]],
    settings: Settings,
    batch: int,
) -> tuple[list[list[int]], float]:
    """Decode prompts in batches of `batch`; return their tokens and the block efficiency."""
    made = []
    for first in range(0, len(prompts_B), batch):
        part = prompts_B[first : first + batch]
        ids = range(first, first + len(part))
        made += decode(target, drafter, part, settings, request_ids=ids)
    tau = sum(len(row.tokens) for row in made) / sum(row.rounds for row in made)
    return [row.tokens for row in made], tau


def compare_texts(
    target: Target, drafter: Drafter, prompts_B: list[list[int]], settings: Settings, batch: int
) -> dict[str, Any]:
    """Compare drafted with autoregressive text; return counts, the largest gap and tau."""
    plain, _ = decode_all(target, None, prompts_B, settings, batch)
    drafted, tau = decode_all(target, drafter, prompts_B, settings, batch)
    gaps = []
    for request, (found, expected) in enumerate(zip(drafted, plain, strict=True)):
        at = first_difference(found, expected)
        if at is not None:
            before = prompts_B[request] + expected[:at]
            gaps.append(top_two_gap(choice_scores(target, before, settings, request)))
    return {
        "tokens": sum(map(len, plain)),
        "texts": len(plain),
        "texts_that_differ": len(gaps),
        "largest_gap_there": max(gaps, default=None),
        "tau": round(tau, 3),
    }


def find_wait(
    target: Target, drafter: Drafter, prompts_B: list[list[int]], settings: Settings
) -> str:
    """Run rounds in CUDA's sync debug mode, and return 'none' or the operation that waited.

    The same text must have been decoded before, so that every shape is recorded.
    """
    running = prefill_batch(target, drafter, prompts_B, settings)
    try:
        with devices.no_waiting(target.device):
            while running.rows:
                running.round()
    # the debug mode raises this; the other modes still run
    except RuntimeError as error:
        return str(error)
    finally:
        running.close()
    return "none"


def check_mode(
    mode: DraftingMode,
    target: Target,
    drafter: Drafter,
    asked: list[list[int]],
    tokens: int,
    batch: int,
    rules: Sequence[str],
) -> dict[str, Any]:
    """Compare a mode's texts under the rules that reproduce them, and find waits in its rounds.

    asked: prompts. Under other rules only tau is measured.
    """
    found: dict[str, Any] = {}
    rows = 1 if mode.one_row else batch
    for rule in rules:
        fields = {"num_draft_tokens": 3, "stopping": "fixed", **SAMPLED[rule], **mode.settings}
        settings = Settings(max_new_tokens=tokens, ignore_eos=True, seed=7, costs=COSTS, **fields)
        if rule in REPRODUCED:
            found[rule] = compare_texts(target, drafter, asked, settings, rows)
        else:
            tau = decode_all(target, drafter, asked[:rows], settings, rows)[1]
            found[rule] = {"tau": round(tau, 3)}
        if mode.waits_once:
            found[rule]["waits"] = find_wait(target, drafter, asked[:rows], settings)
    return found


def holds(found: dict[str, Any]) -> bool:
    """Return whether no text differs and no round waits."""
    return all(
        each.get("texts_that_differ", 0) == 0 and each.get("waits", "none") == "none"
        for each in found.values()
    )


def check_all_modes(execution: str, device: str, toy: bool, figures: Any) -> None:
    """Check every way to draft on a few prompts in float64, and record the figures."""
    count, tokens, batch = (2, 4, 2) if toy else (8, 48, 4)
    kits = make_kits("float64", device, execution, toy)
    asked = {head: tokenize_prompts(count, 12 if toy else 128, head) for head in kits}
    with TemporaryDirectory() as folder:
        write_draft_model(Path(folder), toy)
        for name, mode in drafting_modes(Path(folder), device).items():
            figure = f"{name}, float64, {execution}"
            if (execution == "eager" and name not in EAGER) or not figures.in_time(figure):
                continue
            kit = kits[mode.head]
            drafter = mode.make(kit)
            # toy: greedy and one sampled rule; the laws cover all rules on a CPU
            rules = mode.rules[:2] if toy else mode.rules
            given = (mode, kit.target, drafter, asked[mode.head], tokens, batch)
            found = check_mode(*given, rules)
            if isinstance(drafter, RemoteChain):
                drafter.close()
            figures.add(figure, found)
            figures.expect(figure, holds(found))


def compare_at_size(dtype: str, execution: str, device: str, toy: bool, figures: Any) -> None:
    """Compare many long texts of a chain, a tree and beams with autoregressive text.

    Only in float64 must they agree, and only in float64 do the heads run.
    """
    real = (64, 128, 32) if dtype == "float64" else (32, 64, 16)
    count, tokens, batch = (2, 4, 2) if toy else real
    kits = make_kits(dtype, device, execution, toy)
    modes = drafting_modes(Path(), device)
    for name in AT_SIZE:
        figure, head = f"equality, {name}, {dtype}, {execution}", modes[name].head
        if (head and dtype != "float64") or not figures.in_time(figure):
            continue
        kit, asked = kits[head], tokenize_prompts(count, 12 if toy else 128, head)
        drafter = modes[name].make(kit)
        found = {
            way: compare_texts(kit.target, drafter, asked, _settings(tokens, **named), batch)
            for way, named in WAYS.items()
        }
        figures.add(figure, found)
        figures.expect(figure, holds(found) or dtype != "float64")


def compare_compiled(device: str, toy: bool, figures: Any) -> None:
    """Compare texts of a chain with compiled layers, one row at a time."""
    if figures.in_time("equality, chain, float32, compiled"):
        kit = embedded_kit("float32", device, "compiled", toy)
        settings = _settings(4 if toy else 64)
        found = compare_texts(kit.target, make_chain(kit), tokenize_prompts(2), settings, 1)
        figures.add("equality, chain, float32, compiled", found)


def _settings(tokens: int, **named: Any) -> Settings:
    return Settings(max_new_tokens=tokens, num_draft_tokens=3, ignore_eos=True, seed=7, **named)


def compare_noise(device: str) -> dict[str, Any]:
    """Compare the noise's hashes and exponentials on the device with the CPU's."""
    keys = torch.tensor([[noise.signed(noise.key(3, position))] for position in range(64)])
    bits, values = [], []
    for place in ("cpu", device):
        ids = noise.scaled_ids(torch.arange(32000, device=place))
        bits.append(noise.mix_tensor(ids + keys.to(place)).cpu())
        values.append(noise.exponentials(keys.to(place), ids).cpu())
    return {
        "numbers": bits[0].numel(),
        "equal_hashes": bool(torch.equal(*bits)),
        "equal_exponentials": int((values[0] == values[1]).sum()),
        "largest_relative_difference": float(((values[0] - values[1]) / values[0]).abs().max()),
    }


def run(device: str, toy: bool, figures: Any) -> None:
    """Run all comparisons, the most important ones first."""
    found = compare_noise(device)
    figures.add("noise", found)
    figures.expect("the noise hash equals the CPU's", found["equal_hashes"])
    executions = ("graph",) if toy else ("graph", "eager")
    for execution in executions:
        check_all_modes(execution, device, toy, figures)
    for dtype in ("float64",) if toy else ("float64", "bfloat16", "float32"):
        for execution in executions:
            compare_at_size(dtype, execution, device, toy, figures)
    compare_compiled(device, toy, figures)
