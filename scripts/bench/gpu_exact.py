"""Part `exact`: on this device, drafted text is autoregressive text, the noise is the CPU's, and a round waits for nothing but its `read`.

The target is the embedded one, the drafter its own first layers, so nothing has to be trained. A recurrent head, which would have to be, is
random, and so is its target, whose few tokens let some drafts pass. In float64 no token may differ; below that differences are counted, with
the gap between the target's two best tokens where the first one stands.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from decoding import cuda, noise
from decoding.chain import ChainDrafter
from decoding.drafter import Drafter
from decoding.folder import load_state, read_config
from decoding.loop import Settings, decode, start
from decoding.multi_candidate import MultiCandidate
from decoding.native import NativeTarget
from decoding.self_speculation import SelfSpeculation
from decoding.target import DTYPES
from decoding.weights import NativeConfig, Weights
from recurrent_drafting.drafter import RecurrentDrafter
from scripts.bench.random_models import Shape, random_head, random_weights

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "assets" / "target"
DRAFT_LAYERS = 4
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "verify": "coupled"},
    "coupled, top-p": {"temperature": 0.8, "top_p": 0.9, "verify": "coupled"},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "token": {"temperature": 1.0, "verify": "token"},
    "token, top-k": {"temperature": 1.0, "top_k": 20, "verify": "token"},
    "token, penalty": {"temperature": 1.0, "repetition_penalty": 1.2, "verify": "token"},
    "block": {"temperature": 1.0, "verify": "block"},
    "coupled": {"temperature": 1.0, "verify": "coupled"},
}
SAMPLED_TREES = {way: named for way, named in SAMPLED.items() if way != "block"}  # which tests chains
# kind -> how a random head drafts
BEAMS: dict[str, dict[str, Any]] = {
    "one beam": {"beam_width": 1},
    "beams": {"beam_width": 8},
    "drawn beams": {"beam_width": 8, "draws": "drawn"},
}
RANDOM = Shape(2, 64, 4, 96, 2, 16, 24)
SPREAD = 0.3  # of the random target's weights: with less it says one token for ever


class Models:
    """The embedded target and its first layers in one dtype; weights are shared by the executions."""

    def __init__(self, dtype: str, device: str) -> None:
        config, state = read_config(TARGET), load_state(TARGET)
        place = torch.device(device)
        self.weights = [
            Weights(NativeConfig.from_dict({**config, "num_hidden_layers": layers}), state, DTYPES[dtype], place, False)
            for layers in (config["num_hidden_layers"], DRAFT_LAYERS)
        ]

    def make(self, execution: str, kind: str) -> tuple[NativeTarget, Drafter]:
        """A target and a drafter of this kind: chain, tree, or layers, the target's own of which some are skipped."""
        whole, first = (NativeTarget(w, "embedded", None, None, execution) for w in self.weights)
        if kind == "layers":
            return whole, SelfSpeculation(attention=(2,), mlp=(1, 2))
        return whole, ChainDrafter(model=first) if kind == "chain" else MultiCandidate(model=first, branching=(3, 2, 1))


class Heads:
    """A random target and a random head of it in one dtype; weights are shared by the executions."""

    def __init__(self, dtype: str, device: str) -> None:
        self.weights = random_weights(RANDOM, DTYPES[dtype], device, 512, SPREAD)
        self.head = random_head(RANDOM, 2, DTYPES[dtype], device).requires_grad_(False)

    def make(self, execution: str, kind: str) -> tuple[NativeTarget, Drafter]:
        """A target and a drafter of this kind, a name of BEAMS."""
        target = NativeTarget(self.weights, "random", None, None, execution)
        return target, RecurrentDrafter(head=self.head, execution=execution, **BEAMS[kind])


def prompts(count: int) -> list[list[int]]:
    """Held-out prompts of the embedded target."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    rows = [json.loads(line) for line in (ROOT / "assets" / "prompts.jsonl").read_text().splitlines()[:count]]
    return [tokenizer(row["turns"][0])["input_ids"][:128] for row in rows]


def gap(target: NativeTarget, ids: Sequence[int], settings: Settings, request: int) -> float:
    """The best score minus the second best where the target chooses a token after `ids`, its noise included."""
    target.open(1, len(ids) + 1)
    logits_V = target.lm_head(target.features(cuda.tensor([list(ids)], target.device))[:, -1])[0].double()
    if settings.temperature > 0:
        key = cuda.tensor(noise.signed(noise.extend(noise.key(settings.seed, request), len(ids))), target.device)
        race_V = noise.exponentials(key, noise.scaled_ids(torch.arange(len(logits_V), device=target.device)))
        logits_V = settings.warper.probs(logits_V).log() - race_V.double().log()
    best, second = logits_V.topk(2).values.tolist()
    return best - second


def texts(
    target: NativeTarget, drafter: Drafter | None, prompts_B: list[list[int]], settings: Settings, batch: int
) -> tuple[list[list[int]], float]:
    """The tokens of every prompt, and the block efficiency."""
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
    return [row.tokens for row in made], sum(len(row.tokens) for row in made) / sum(row.rounds for row in made)


def equality(
    models: Models | Heads,
    execution: str,
    prompts_B: list[list[int]],
    tokens: int,
    batch: int,
    kinds: Sequence[str] = ("chain", "tree"),
) -> dict[str, Any]:
    """For every way of choosing: drafted text against autoregressive text."""
    found: dict[str, Any] = {}
    for way, named in WAYS.items():
        settings = Settings(max_new_tokens=tokens, num_draft_tokens=3, ignore_eos=True, seed=7, **named)
        for kind in kinds:
            target, drafter = models.make(execution, kind)
            plain, _ = texts(target, None, prompts_B, settings, batch)
            drafted, tau = texts(target, drafter, prompts_B, settings, batch)
            gaps = []
            for request, (ours, own) in enumerate(zip(drafted, plain)):
                at = next((i for i, pair in enumerate(zip(ours, own)) if pair[0] != pair[1]), None)
                if at is not None:
                    gaps.append(gap(target, prompts_B[request] + own[:at], settings, request))
            found[f"{way}, {kind}"] = {
                "tokens": sum(map(len, plain)),
                "texts": len(plain),
                "texts_that_differ": len(gaps),
                "largest_gap_there": max(gaps, default=None),
                "tau": round(tau, 3),
            }
    return found


def same_noise(device: str) -> dict[str, Any]:
    """The hash's integers and the exponentials made from them, here and on the CPU."""
    keys = torch.tensor([[noise.signed(noise.key(3, position))] for position in range(64)])
    ids = torch.arange(32000)
    bits = [noise.mix_tensor(noise.scaled_ids(ids.to(d)) + keys.to(d)).cpu() for d in ("cpu", device)]
    drawn = [noise.exponentials(keys.to(d), noise.scaled_ids(ids.to(d))).cpu() for d in ("cpu", device)]
    return {
        "numbers": bits[0].numel(),
        "equal_hashes": bool(torch.equal(*bits)),
        "equal_exponentials": int((drawn[0] == drawn[1]).sum()),
        "largest_relative_difference": float(((drawn[0] - drawn[1]) / drawn[0]).abs().max()),
    }


def waiting(
    models: Models | Heads,
    execution: str,
    prompts_B: list[list[int]],
    tokens: int,
    kind: str,
    ways: dict[str, dict[str, Any]],
) -> dict[str, str]:
    """Rounds in CUDA's sync debug mode: 'none', or what waited. The first pass makes every shape."""
    found = {}
    for way, named in ways.items():
        settings = Settings(max_new_tokens=tokens, num_draft_tokens=3, ignore_eos=True, **named)
        target, drafter = models.make(execution, kind)
        decode(target, drafter, prompts_B, settings)
        running = start(target, drafter, prompts_B, settings)
        found[f"{way}, {kind}"] = "none"
        try:
            with cuda.no_waiting(target.device):
                while running.rows:
                    running.round()
        except RuntimeError as error:  # what the debug mode raises; the other ways are still worth knowing
            found[f"{way}, {kind}"] = str(error)
    return found


def all_waits(execution: str, device: str, tokens: int) -> dict[str, str]:
    """Of chains, of trees, of the target's own layers and of a recurrent head's beams."""
    embedded, heads = Models("float32", device), Heads("float32", device)
    found = waiting(embedded, execution, prompts(2), tokens, "chain", SAMPLED)
    found |= waiting(embedded, execution, prompts(2), tokens, "tree", SAMPLED_TREES)
    found |= waiting(embedded, execution, prompts(2), tokens, "layers", SAMPLED)
    for kind in BEAMS:
        ways = SAMPLED if kind == "one beam" else SAMPLED_TREES
        found |= waiting(heads, execution, shortened(prompts(2)), tokens, kind, ways)
    return found


def shortened(prompts_B: list[list[int]]) -> list[list[int]]:
    """The prompts in the random target's few tokens."""
    return [[token % RANDOM.vocab_size for token in prompt] for prompt in prompts_B]


def run(device: str, toy: bool, figures: Any) -> None:
    """All of it."""
    found = same_noise(device)
    figures.add("noise", found)
    figures.expect("the noise hash equals the CPU's", found["equal_hashes"])
    executions = ("graph",) if toy else ("eager", "graph")
    for execution in executions:
        waits = all_waits(execution, device, 4 if toy else 64)
        figures.add(f"waits inside rounds, {execution}", waits)
        figures.expect(f"no wait inside a round, {execution}", set(waits.values()) == {"none"})
    count, tokens = (2, 4) if toy else (64, 128)  # the law's own size
    for execution in executions:
        name = f"equality, recurrent, float64, {execution}"
        if figures.in_time(name):
            heads, asked = Heads("float64", device), shortened(prompts(count))
            equal = equality(heads, execution, asked, tokens, min(32, count), ("one beam", "beams"))
            figures.add(name, equal)
            figures.expect(name, all(row["texts_that_differ"] == 0 for row in equal.values()))
    # In float64 the law's own size; below it, enough to see how often rounding decides.
    for dtype, count, tokens in (
        (("float64", 2, 4),) if toy else (("float64", 64, 128), ("float32", 32, 64), ("bfloat16", 32, 64))
    ):
        models = Models(dtype, device)
        for execution in executions:
            if figures.in_time(f"equality, {dtype}, {execution}"):
                equal = equality(models, execution, prompts(count), tokens, batch=min(16, count))
                figures.add(f"equality, {dtype}, {execution}", equal)
                exact = all(row["texts_that_differ"] == 0 for row in equal.values())
                figures.expect(f"equality, {dtype}, {execution}", exact or dtype != "float64")
    if figures.in_time(
        "equality, float32, compiled"
    ):  # layers take seconds a shape, so one row at a time and few of them
        equal = equality(Models("float32", device), "compiled", prompts(2), 4 if toy else 64, 1, ["chain"])
        figures.add("equality, float32, compiled", equal)
