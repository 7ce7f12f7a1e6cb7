"""Decoding against Hugging Face's `generate`, with the sides in turn.

    python scripts/bench/decoding.py target=assets/target \\
      drafter=runs/quickstart/distill.train/drafter
    python scripts/bench/decoding.py target=$SHALLOW_DRAFT_DATA/models/chat24m drafter=FOLDER \\
      prompts=$SHALLOW_DRAFT_DATA/data/eval/mt_bench.jsonl

Weights, prompts, length, dtype and threads are equal. Autoregressive: `generate` with sdpa, the
better of its dynamic and static caches. Speculative: `generate(assistant_model=...)` with the same
drafter and the same fixed draft length (confidence threshold 0, constant schedule). Nothing is
compiled on either side. Complete calls are timed, prefill included. Stop tokens are ignored, so
every call emits the same number of tokens.
"""

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

from decoding.costs.machine_limits import measure_limits
from decoding.costs.roofline import ForwardBudget, forward_budget, round_budget
from decoding.costs.timing import time_parts
from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Drafter
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.models.native.model import NativeTarget
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.settings import Settings
from jobs.paths import resolve, resolve_model
from scripts.bench import common
from scripts.bench.common import BenchOptions
from scripts.usage import run_script
from training.data.chat import render_prompt
from training.data.readers import read_prompts
from training.models.build import dtype_of


@dataclass
class Options(BenchOptions):
    target: str = "embedded:target"  # model folder
    drafter: str = ""  # drafter folder; empty: autoregressive decoding alone
    prompts: str = "embedded:prompts"  # evaluation JSONL
    max_prompts: int = 8  # prompts per round
    max_new_tokens: int = 96  # tokens of every call
    num_draft_tokens: int = 4  # draft length of both sides
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])  # of both sides
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # 0 is greedy
    rounds: int = 5  # measured rounds
    name: str = "decoding"  # name of the results file


class ModelPair:
    """Target and drafter of both sides in one dtype, and the prompts."""

    def __init__(self, chosen: Options, dtype: str, prompts: list[list[int]]) -> None:
        self.chosen, self.dtype, self.prompts = chosen, dtype_of(dtype), prompts
        folder, drafter = resolve_model(chosen.target), chosen.drafter
        self.target = load_target(folder, dtype=dtype, device=chosen.device)
        self.peer = self._load_peer(folder)
        self.drafter = self.peer_drafter = None
        if drafter:
            self.drafter = ChainDrafter(resolve_model(drafter), dtype=dtype, device=chosen.device)
            self.peer_drafter = self._load_peer(resolve_model(drafter))
            settings = self.peer_drafter.generation_config
            settings.num_assistant_tokens = chosen.num_draft_tokens
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0

    def _load_peer(self, folder: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=False, dtype=self.dtype, attn_implementation="sdpa"
        )
        model.generation_config.eos_token_id = None
        return model.eval().to(self.chosen.device)

    def settings(self, temperature: float = 0.0) -> Settings:
        """Return settings under which every call emits the same number of tokens."""
        return Settings(
            max_new_tokens=self.chosen.max_new_tokens,
            temperature=temperature,
            num_draft_tokens=self.chosen.num_draft_tokens,
            ignore_eos=True,
        )

    def decode_ours(self, temperature: float, drafter: Any) -> None:
        """Decode all prompts with this project's loop. drafter: None for autoregressive."""
        for prompt in self.prompts:
            decode(self.target, drafter, [prompt], self.settings(temperature))

    def decode_theirs(self, temperature: float, **more: Any) -> None:
        """Decode all prompts with `generate`. more: further arguments of it."""
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        tokens = self.chosen.max_new_tokens
        more |= {"max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
        for prompt in self.prompts:
            ids_BT = torch.tensor([prompt], device=self.chosen.device)
            made = self.peer.generate(ids_BT, **sampling, **more)
            assert made.shape[1] - len(prompt) == tokens, made.shape

    def sides(self, temperature: float) -> dict[str, Callable[[], float]]:
        """Return side -> a function that decodes all prompts and returns tokens/s."""
        tokens = len(self.prompts) * self.chosen.max_new_tokens
        theirs = partial(self.decode_theirs, temperature)
        calls: dict[str, Callable[[], None]] = {
            "ours": partial(self.decode_ours, temperature, None),
            "hf_dynamic": partial(theirs, cache_implementation="dynamic"),
            "hf_static": partial(theirs, cache_implementation="static"),
        }
        if self.drafter is not None:
            calls["ours_speculative"] = partial(self.decode_ours, temperature, self.drafter)
            calls["hf_assisted"] = partial(theirs, assistant_model=self.peer_drafter)
        return {name: partial(_rate, tokens, call) for name, call in calls.items()}


def _rate(tokens: int, call: Callable[[], Any]) -> float:
    return tokens / common.measure_seconds(call)


def measure(models: ModelPair, temperature: float) -> dict[str, Any]:
    """Measure median tokens/s of all sides, and their ratios by round."""
    figures = common.take_turns(models.sides(temperature), models.chosen.rounds)
    medians = common.medians(figures)
    better = max(("hf_dynamic", "hf_static"), key=lambda name: medians[name])
    result: dict[str, Any] = {
        "tokens_per_second": medians,
        "better_cache": better,
        "autoregressive": common.ratio(figures, "ours", better),
    }
    if models.drafter is not None:
        result["speculative"] = common.ratio(figures, "ours_speculative", "hf_assisted")
        result["speedup_over_ours"] = common.ratio(figures, "ours_speculative", "ours")
        result["overhead"] = measure_overhead(models, temperature)
    return result


def measure_budgets(models: ModelPair) -> dict[str, Any]:
    """Measure the shares of the machine's limits that a step and a round reach.

    Decoding is greedy, and rates are medians over the prompts. Small models that fit the cache are
    bound by the calls of single operations instead.
    """
    chosen, dtype, device = models.chosen, models.dtype, models.chosen.device
    assert isinstance(models.target, NativeTarget), "budgets need the native backend"
    target = models.target.config
    prompt = statistics.median_low([len(prompt) for prompt in models.prompts])
    context = prompt + chosen.max_new_tokens // 2
    step = forward_budget(target, dtype, 1, context)
    limits = measure_limits(step.weight_bytes, dtype, device)
    found: dict[str, Any] = {
        "plain_reading_gigabytes_per_second": limits.bytes_a_second / 1e9,
        "product_gigaflop_per_second": limits.operations_a_second / 1e9,
    }
    shares: dict[str, float] = {}
    shapes: dict[str, tuple[ForwardBudget, Drafter | None]] = {"autoregressive step": (step, None)}
    if models.drafter is not None:
        assert isinstance(models.drafter.model, NativeTarget)
        drafter = models.drafter.model.config
        budget = round_budget(target, drafter, dtype, chosen.num_draft_tokens, context)
        shapes["round"] = budget, models.drafter
    for name, (budget, used) in shapes.items():
        made = [decode(models.target, used, [p], models.settings())[0] for p in models.prompts]
        rate = statistics.median(one.rounds / one.decode_seconds for one in made)
        found[f"{name}, megabytes"] = budget.bytes_read / 1e6
        found[f"{name}, megaflop"] = budget.operations / 1e6
        shares[f"{name}, share_of_bandwidth"] = rate * budget.bytes_read / limits.bytes_a_second
        shares[f"{name}, share_of_operations"] = (
            rate * budget.operations / limits.operations_a_second
        )
    return found | common.add_warnings(shares)


def measure_overhead(models: ModelPair, temperature: float) -> float:
    """Measure 1 - (draft steps x t_draft + t_target(gamma + 1)) / round, a median over prompts."""
    gamma, tokens, shares = models.chosen.num_draft_tokens, models.chosen.max_new_tokens, []
    for prompt in models.prompts:
        context, width = len(prompt) + tokens // 2, gamma + 1
        parts = time_parts(
            models.target, models.drafter, prompt, widths=[width], context=context, repeats=15
        )
        (made,) = decode(models.target, models.drafter, [prompt], models.settings(temperature))
        assert parts.t_draft_ms is not None
        round_ms = 1e3 * made.decode_seconds / made.rounds
        shares.append(1 - (gamma * parts.t_draft_ms + parts.t_target_ms[width]) / round_ms)
    return statistics.median(shares)


def main() -> None:
    """Measure every dtype and temperature, and write the results after each."""
    chosen = common.read_options(Options)
    tokenizer = load_tokenizer(resolve_model(chosen.target))
    chats = (
        [{"role": "user", "content": p.turns[0]}] for p in read_prompts(resolve(chosen.prompts))
    )
    rendered = [render_prompt(tokenizer, chat) for chat in chats]
    prompts = [ids for ids in rendered if len(ids) <= 300][: chosen.max_prompts]
    figures: dict[str, Any] = {}
    for dtype in chosen.dtypes:
        models = ModelPair(chosen, dtype, prompts)
        for temperature in chosen.temperatures:
            name = f"{dtype}, temperature {temperature:g}"
            print(name, file=sys.stderr)
            figures[name] = measure(models, temperature)
            common.save(chosen.name, chosen, figures, show=False)
        figures[f"{dtype}, budgets"] = measure_budgets(models)
    common.save(chosen.name, chosen, figures)


if __name__ == "__main__":
    run_script(main)
