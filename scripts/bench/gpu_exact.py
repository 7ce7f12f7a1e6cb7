"""Part `exact`: drafted text equals autoregressive text on this device, and rounds wait once.

Every way to draft (scripts/bench/gpu_rows.py) runs in float64, where no token may differ. A chain,
a tree and beams then run at the size of the law, and below float64, where rounding sometimes
decides: there differences are counted, with the gap between the target's two best tokens at the
first one. The noise must equal the CPU's.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from decoding import devices
from decoding.drafters.remote import RemoteChain
from decoding.interfaces import Drafter
from decoding.loop import decode, prefill_batch
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from decoding.sampling import noise
from decoding.sampling.logits_processors import make_processors
from scripts.bench.gpu_rows import DraftingMode, chain, embedded_kit, prompts, random_kit, uses
from tests.decoding.rows import COSTS, Kit

SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    **{rule: {"temperature": 1.0, "verify": rule} for rule in ("token", "block", "coupled")},
}
WAYS = {way: SAMPLED[way] for way in ("greedy", "coupled")} | {
    "coupled, top-p": {"temperature": 0.8, "top_p": 0.9, "verify": "coupled"}
}
REPRODUCED = ("greedy", "coupled")  # rules under which drafting changes no token
AT_SIZE = (
    "chain",
    "multi_candidate",
    "recurrent_chain",
    "recurrent",
)  # ways that run at the size of the law
# ways that also run eagerly, which is not how a card is used
EAGER = (*AT_SIZE, "recurrent_drawn")


def gap(target: NativeTarget, ids: Sequence[int], settings: Settings, request: int) -> float:
    """Return the gap between the target's two best scores after `ids`, noise included."""
    target.open(1, len(ids) + 1)
    logits_V = target.lm_head(target.features(devices.tensor([list(ids)], target.device))[:, -1])[
        0
    ].double()
    processors = make_processors(settings.repetition_penalty, settings.allowed)
    if processors is not None:
        logits_V = processors(logits_V[None, None], [ids])[0, 0]
    if settings.temperature > 0:
        key = devices.tensor(
            noise.signed(noise.extend(noise.key(settings.seed, request), len(ids))), target.device
        )
        race_V = noise.exponentials(
            key, noise.scaled_ids(torch.arange(len(logits_V), device=target.device))
        )
        logits_V = settings.warper.probs(logits_V).log() - race_V.double().log()
    best, second = logits_V.topk(2).values.tolist()
    return best - second


def texts(
    target: NativeTarget,
    drafter: Drafter | None,
    prompts_B: list[list[int]],
    settings: Settings,
    batch: int,
) -> tuple[list[list[int]], float]:
    """Return the tokens of every prompt, and the block efficiency."""
    made = [
        row
        for first in range(0, len(prompts_B), batch)
        for row in decode(
            target,
            drafter,
            prompts_B[first : first + batch],
            settings,
            request_ids=range(first, min(first + batch, len(prompts_B))),
        )
    ]
    return [row.tokens for row in made], sum(len(row.tokens) for row in made) / sum(
        row.rounds for row in made
    )


def equality(
    target: NativeTarget,
    drafter: Drafter,
    prompts_B: list[list[int]],
    settings: Settings,
    batch: int,
) -> dict[str, Any]:
    """Compare drafted text with autoregressive text."""
    plain, _ = texts(target, None, prompts_B, settings, batch)
    drafted, tau = texts(target, drafter, prompts_B, settings, batch)
    gaps = []
    for request, (ours, own) in enumerate(zip(drafted, plain)):
        at = next((i for i, pair in enumerate(zip(ours, own)) if pair[0] != pair[1]), None)
        if at is not None:
            gaps.append(gap(target, prompts_B[request] + own[:at], settings, request))
    return {
        "tokens": sum(map(len, plain)),
        "texts": len(plain),
        "texts_that_differ": len(gaps),
        "largest_gap_there": max(gaps, default=None),
        "tau": round(tau, 3),
    }


def waiting(
    target: NativeTarget, drafter: Drafter, prompts_B: list[list[int]], settings: Settings
) -> str:
    """Run rounds in CUDA's sync debug mode, and return 'none' or the operation that waited.

    The same text was decoded before, so that every shape is recorded.
    """
    running = prefill_batch(target, drafter, prompts_B, settings)
    try:
        with devices.no_waiting(target.device):
            while running.rows:
                running.round()
    # the debug mode raises this; the other rows still run
    except RuntimeError as error:
        return str(error)
    finally:
        running.close()
    return "none"


def tried(
    use: DraftingMode,
    rules: Sequence[str],
    drafter: Drafter,
    kit: Kit,
    asked: list[list[int]],
    tokens: int,
    batch: int,
) -> dict[str, Any]:
    """Run a way to draft under these rules: equality where it holds, and waits of the rounds."""
    found: dict[str, Any] = {}
    rows = 1 if use.alone else batch
    assert isinstance(kit.target, NativeTarget)
    for rule in rules:
        fields = {"num_draft_tokens": 3, "stopping": "fixed", **SAMPLED[rule], **use.settings}
        settings = Settings(max_new_tokens=tokens, ignore_eos=True, seed=7, costs=COSTS, **fields)
        if rule in REPRODUCED:
            found[rule] = equality(kit.target, drafter, asked, settings, rows)
        else:
            found[rule] = {
                "tau": round(texts(kit.target, drafter, asked[:rows], settings, rows)[1], 3)
            }
        if use.waits_once:
            found[rule]["waits"] = waiting(kit.target, drafter, asked[:rows], settings)
    return found


def holds(found: dict[str, Any]) -> bool:
    """Return whether no text differs and no round waits."""
    return all(
        each.get("texts_that_differ", 0) == 0 and each.get("waits", "none") == "none"
        for each in found.values()
    )


def all_uses(execution: str, device: str, toy: bool, figures: Any) -> None:
    """Run every way to draft with few prompts in float64."""
    count, tokens, batch = (2, 4, 2) if toy else (8, 48, 4)
    with TemporaryDirectory() as folder:
        embedded = embedded_kit("float64", device, execution, toy, Path(folder))
        kits = {False: embedded, True: random_kit("float64", device, execution)}
        asked = {head: prompts(count, 12 if toy else 128, head) for head in kits}
        for name, use in uses(Path(folder), device).items():
            figure = f"{name}, float64, {execution}"
            if (execution == "eager" and name not in EAGER) or not figures.in_time(figure):
                continue
            drafter = use.make(kits[use.head])
            # toy: greedy and one sampled rule; the laws cover all rules on a CPU
            rules = use.rules[:2] if toy else use.rules
            found = tried(use, rules, drafter, kits[use.head], asked[use.head], tokens, batch)
            if isinstance(drafter, RemoteChain):
                drafter.close()
            figures.add(figure, found)
            figures.expect(figure, holds(found))


def at_size(dtype: str, execution: str, device: str, toy: bool, figures: Any) -> None:
    """Compare texts of a chain, a tree and beams, in float64 at the size of the law."""
    count, tokens, batch = (
        (2, 4, 2) if toy else (64, 128, 32) if dtype == "float64" else (32, 64, 16)
    )
    kits = {
        False: embedded_kit(dtype, device, execution, toy),
        True: random_kit(dtype, device, execution),
    }
    known = uses(Path(), device)
    for name in AT_SIZE:
        figure, head = f"equality, {name}, {dtype}, {execution}", known[name].head
        if (head and dtype != "float64") or not figures.in_time(figure):
            continue
        kit, asked = kits[head], prompts(count, 12 if toy else 128, head)
        assert isinstance(kit.target, NativeTarget)
        drafter = known[name].make(kit)
        found = {
            way: equality(kit.target, drafter, asked, _settings(tokens, named), batch)
            for way, named in WAYS.items()
        }
        figures.add(figure, found)
        figures.expect(figure, holds(found) or dtype != "float64")


def compiled(device: str, toy: bool, figures: Any) -> None:
    """Compare texts of a chain with compiled layers, one row at a time."""
    if figures.in_time("equality, chain, float32, compiled"):
        kit = embedded_kit("float32", device, "compiled", toy)
        assert isinstance(kit.target, NativeTarget)
        settings = _settings(4 if toy else 64, {})
        found = equality(kit.target, chain(kit), prompts(2), settings, 1)
        figures.add("equality, chain, float32, compiled", found)


def _settings(tokens: int, named: dict[str, Any]) -> Settings:
    return Settings(max_new_tokens=tokens, num_draft_tokens=3, ignore_eos=True, seed=7, **named)


def same_noise(device: str) -> dict[str, Any]:
    """Compare the hash's integers and its exponentials with the CPU's."""
    keys = torch.tensor([[noise.signed(noise.key(3, position))] for position in range(64)])
    ids = torch.arange(32000)
    bits = [
        noise.mix_tensor(noise.scaled_ids(ids.to(d)) + keys.to(d)).cpu() for d in ("cpu", device)
    ]
    drawn = [
        noise.exponentials(keys.to(d), noise.scaled_ids(ids.to(d))).cpu() for d in ("cpu", device)
    ]
    return {
        "numbers": bits[0].numel(),
        "equal_hashes": bool(torch.equal(*bits)),
        "equal_exponentials": int((drawn[0] == drawn[1]).sum()),
        "largest_relative_difference": float(((drawn[0] - drawn[1]) / drawn[0]).abs().max()),
    }


def run(device: str, toy: bool, figures: Any) -> None:
    """Run all comparisons, the most important ones first."""
    found = same_noise(device)
    figures.add("noise", found)
    figures.expect("the noise hash equals the CPU's", found["equal_hashes"])
    executions = ("graph",) if toy else ("graph", "eager")
    for execution in executions:
        all_uses(execution, device, toy, figures)
    for dtype in ("float64",) if toy else ("float64", "bfloat16", "float32"):
        for execution in executions:
            at_size(dtype, execution, device, toy, figures)
    compiled(device, toy, figures)
