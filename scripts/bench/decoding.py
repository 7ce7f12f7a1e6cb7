"""Decoding, ours against Hugging Face `generate`: same weights, prompts, length, dtype and threads,
the sides in turn.

    python scripts/bench/decoding.py target=assets/target \\
      drafter=runs/quickstart/distill.train/drafter
    python scripts/bench/decoding.py target=$SHALLOW_DRAFT_DATA/models/chat24m drafter=FOLDER \\
      prompts=$SHALLOW_DRAFT_DATA/data/eval/mt_bench.jsonl

Autoregressive: `generate` with sdpa, the better of its dynamic and static caches. Speculative:
`generate(assistant_model=...)` with the same drafter and the same fixed draft length (confidence
threshold 0, constant schedule). Nothing is compiled on either side. Whole calls are timed, prefill
included; stop tokens are ignored, so that every call makes the same number of tokens.
"""

import logging
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoModelForCausalLM

from decoding.costs.machine_limits import fastest, product, readers
from decoding.costs.roofline import Budget, forward_budget, round_budget
from decoding.costs.timing import time_parts
from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Drafter
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.models.native.model import NativeTarget
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.settings import Settings
from jobs.paths import resolve
from scripts.bench.common import judged, options, ratio, save, take_turns, timed
from training.data.chat import render_prompt
from training.data.readers import read_prompts
from training.models.build import dtype_of


@dataclass
class Options:
    target: str = "embedded:target"  # model folder
    drafter: str = ""  # drafter folder; empty: autoregressive decoding alone
    prompts: str = "embedded:prompts"  # evaluation JSONL
    max_prompts: int = 8  # prompts a round
    max_new_tokens: int = 96  # tokens of every call
    num_draft_tokens: int = 4  # gamma, on both sides
    # each measured on both sides
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # greedy and sampling
    rounds: int = 5  # rounds that count
    threads: int = 2  # CPU threads
    device: str = "cpu"  # cpu | cuda | cuda:N
    name: str = "decoding"  # of the results file


@dataclass
class Sides:
    """One dtype's models and prompts."""

    chosen: Options
    dtype: str
    prompts: list[list[int]]

    def __post_init__(self) -> None:
        folder = resolve(self.chosen.target)
        torch_dtype = dtype_of(self.dtype)
        device = self.chosen.device
        self.ours = load_target(folder, dtype=self.dtype, device=device)
        self.peer = _hugging_face(folder, torch_dtype, device)
        self.drafter = self.peer_drafter = None
        if self.chosen.drafter:
            self.drafter = ChainDrafter(
                resolve(self.chosen.drafter), dtype=self.dtype, device=device
            )
            self.peer_drafter = _hugging_face(resolve(self.chosen.drafter), torch_dtype, device)
            settings = self.peer_drafter.generation_config
            settings.num_assistant_tokens = self.chosen.num_draft_tokens
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0

    def our_call(self, temperature: float, drafter: Any) -> None:
        settings = Settings(
            max_new_tokens=self.chosen.max_new_tokens,
            temperature=temperature,
            num_draft_tokens=self.chosen.num_draft_tokens,
            ignore_eos=True,
        )
        for prompt in self.prompts:
            decode(self.ours, drafter, [prompt], settings)

    def peer_call(self, temperature: float, **more: Any) -> None:
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        for prompt in self.prompts:
            made = self.peer.generate(
                torch.tensor([prompt], device=self.chosen.device),
                max_new_tokens=self.chosen.max_new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **sampling,
                **more,
            )
            assert made.shape[1] - len(prompt) == self.chosen.max_new_tokens, made.shape

    def calls(self, temperature: float) -> dict[str, Callable[[], float]]:
        """Tokens a second of each side on all prompts."""
        tokens = len(self.prompts) * self.chosen.max_new_tokens
        calls: dict[str, Callable[[], Any]] = {
            "ours": lambda: self.our_call(temperature, None),
            "hf_dynamic": lambda: self.peer_call(temperature, cache_implementation="dynamic"),
            "hf_static": lambda: self.peer_call(temperature, cache_implementation="static"),
        }
        if self.drafter is not None:
            calls["ours_speculative"] = lambda: self.our_call(temperature, self.drafter)
            calls["hf_assisted"] = lambda: self.peer_call(
                temperature, assistant_model=self.peer_drafter
            )
        return {name: partial(_rate, tokens, call) for name, call in calls.items()}


def _rate(tokens: int, call: Callable[[], Any]) -> float:
    return tokens / timed(call)


def _hugging_face(folder: Path, dtype: torch.dtype, device: str) -> Any:
    model = (
        AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=False, dtype=dtype, attn_implementation="sdpa"
        )
        .eval()
        .to(device)
    )
    model.generation_config.eos_token_id = None
    return model


def measure(sides: Sides, temperature: float) -> dict[str, Any]:
    """Medians in tokens a second, and the ratios round by round."""
    figures = take_turns(sides.calls(temperature), sides.chosen.rounds)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    better = max(("hf_dynamic", "hf_static"), key=lambda name: medians[name])
    result: dict[str, Any] = {
        "tokens_per_second": medians,
        "better_cache": better,
        "autoregressive": ratio(figures, "ours", better),
    }
    if sides.drafter is not None:
        result["speculative"] = ratio(figures, "ours_speculative", "hf_assisted")
        result["speedup_over_ours"] = ratio(figures, "ours_speculative", "ours")
        result["overhead"] = overhead(sides, temperature)
    return result


def budgets(sides: Sides) -> dict[str, Any]:
    """What an autoregressive step and a whole round must read and compute, and the shares reached
    of plain reading and of a plain product.

    Greedy, medians over the prompts. Of small models that lie in the cache neither budget binds:
    then the calls of single operations do.
    """
    chosen, dtype = sides.chosen, dtype_of(sides.dtype)
    assert isinstance(sides.ours, NativeTarget), "the native backend is what is measured here"
    settings = Settings(
        max_new_tokens=chosen.max_new_tokens,
        num_draft_tokens=chosen.num_draft_tokens,
        ignore_eos=True,
    )
    context = (
        statistics.median_low([len(prompt) for prompt in sides.prompts])
        + chosen.max_new_tokens // 2
    )
    step = forward_budget(sides.ours.config, dtype, 1, context)
    plain = readers(step.weight_bytes, dtype, chosen.device)
    reading = max(size * fastest(action, chosen.device, 20) for action, size in plain.values())
    multiply, operations = product(dtype, chosen.device, 1024)
    computing = operations * fastest(multiply, chosen.device, 3)
    found: dict[str, Any] = {
        "plain_reading_gigabytes_per_second": reading / 1e9,
        "product_gigaflop_per_second": computing / 1e9,
    }
    shares: dict[str, float] = {}
    shapes: dict[str, tuple[Budget, Drafter | None]] = {"autoregressive step": (step, None)}
    if sides.drafter is not None:
        assert isinstance(sides.drafter.model, NativeTarget)
        draft = sides.drafter.model.config
        shapes["round"] = (
            round_budget(sides.ours.config, draft, dtype, chosen.num_draft_tokens, context),
            sides.drafter,
        )
    for name, (budget, drafter) in shapes.items():
        made = [decode(sides.ours, drafter, [prompt], settings)[0] for prompt in sides.prompts]
        rate = statistics.median(one.rounds / one.decode_seconds for one in made)
        found |= {
            f"{name}, megabytes": budget.bytes_read / 1e6,
            f"{name}, megaflop": budget.operations / 1e6,
        }
        shares |= {
            f"{name}, share_of_bandwidth": rate * budget.bytes_read / reading,
            f"{name}, share_of_operations": rate * budget.operations / computing,
        }
    return found | judged(shares)


def overhead(sides: Sides, temperature: float) -> float:
    """1 - (draft steps x t_draft + t_target(gamma + 1)) / round, the parts timed back to back with
    the rounds.
    """
    gamma = sides.chosen.num_draft_tokens
    settings = Settings(
        max_new_tokens=sides.chosen.max_new_tokens,
        temperature=temperature,
        num_draft_tokens=gamma,
        ignore_eos=True,
    )
    shares = []
    for prompt in sides.prompts:
        parts = time_parts(
            sides.ours,
            sides.drafter,
            prompt,
            widths=[gamma + 1],
            context=len(prompt) + sides.chosen.max_new_tokens // 2,
            repeats=15,
        )
        (made,) = decode(sides.ours, sides.drafter, [prompt], settings)
        assert parts.t_draft_ms is not None
        round_ms = 1e3 * made.decode_seconds / made.rounds
        shares.append(1 - (gamma * parts.t_draft_ms + parts.t_target_ms[gamma + 1]) / round_ms)
    return statistics.median(shares)


def main() -> None:
    chosen = options(Options)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = load_tokenizer(resolve(chosen.target))
    rendered = [
        render_prompt(tokenizer, [{"role": "user", "content": p.turns[0]}])
        for p in read_prompts(resolve(chosen.prompts))
    ]
    prompts = [ids for ids in rendered if len(ids) <= 300][: chosen.max_prompts]
    figures: dict[str, Any] = {}
    for dtype in chosen.dtypes:
        sides = Sides(chosen, dtype, prompts)
        for temperature in chosen.temperatures:
            print(f"{dtype}, temperature {temperature:g}", file=sys.stderr)
            figures[f"{dtype}, temperature {temperature:g}"] = measure(sides, temperature)
            save(chosen.name, chosen, figures, show=False)  # what is measured is not lost
        figures[f"{dtype}, budgets"] = budgets(sides)
    save(chosen.name, chosen, figures)


if __name__ == "__main__":
    main()
