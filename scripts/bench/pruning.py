"""Ways to prune, side by side: held-out acceptance and block efficiency after equal distillation, and what each way costs.

    python scripts/bench/pruning.py target=$SHALLOW_DRAFT_DATA/models/chat24m chats=[CHATS.json] prompts=PROMPTS.jsonl

Sides: `importance` (the layers that a probe finds), `l0` (learned masks), `even` (first, last and evenly spaced layers), `random` (the same
shape from scratch). All are distilled on the same rows for as many steps; what a side spends before that is told beside it, as run and at the
published settings (LLaMA-7B to 5 layers, width 2560: 0.419 B tokens of mask training; 1,024 sequences of 4,096 tokens and all probes).
"""

import dataclasses
import logging
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from decoding.engine import encode, load
from decoding.errors import UserError
from decoding.loop import Settings, decode
from distill.config import ImportanceConfig, L0Config, PruneConfig
from distill.drafter_folder import write_model
from distill.dry_run import importance_flops
from distill.prune import stage_shapes, workbench
from distill.prune_modes import MODES, Source
from distill.shapes import forward_flops, parameter_counts, student_config
from scripts.bench.common import options, save
from scripts.bench.mixing import paired
from training.config import DataConfig, LoopConfig, OptimizerConfig, StudentConfig, TargetConfig
from training.data import read_prompts
from training.models import target_config
from training.paths import resolve

SIDES = {
    "importance": "importance",
    "l0": "l0",
    "even": "importance",
    "random": "random",
}  # side -> mode of distill.prune
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_WIDE = StudentConfig(num_hidden_layers=5, hidden_size=2560, num_attention_heads=32, head_dim=128)
_MASK_TOKENS = 3200 * 32 * 4096


@dataclass
class Options:
    target: str = "embedded:target"  # model folder
    chats: list[str] = field(default_factory=lambda: ["embedded:chats"])  # to distil on, and to score by
    held_out_chats: list[str] = field(
        default_factory=lambda: ["embedded:held_out_chats"]
    )  # for acceptance; never trained on
    prompts: str = "embedded:prompts"  # evaluation prompts, for block efficiency
    max_prompts: int = 24  # of them
    max_new_tokens: int = 64  # of each
    num_draft_tokens: int = 4  # draft length
    layers: list[int] = field(default_factory=lambda: [4, 2, 1])  # layers left
    sides: list[str] = field(default_factory=lambda: [*SIDES])  # what is compared
    max_length: int = 256  # tokens a row
    tokens_per_step: int = 4096  # tokens a step, of all training
    steps: int = 200  # of distillation behind every cut
    mask_steps: int = 200  # of l0's training before it
    probe_steps: int = 10  # of a candidate's distillation
    sequences: int = 1024  # rows that are scored
    lr: float = 3e-3  # peak learning rate of distillation
    mask_weights_lr: float = 1e-4  # of the weights while masks are learned
    seeds: int = 3  # runs of every side
    threads: int = 2  # CPU threads
    device: str = "cpu"  # cpu | cuda
    name: str = "pruning"  # of the results file


def configured(chosen: Options, side: str, layers: int, seed: int, cache: Path) -> PruneConfig:
    """The configuration of distill.prune for one run."""
    loop = LoopConfig(
        max_steps=chosen.steps,
        tokens_per_step=chosen.tokens_per_step,
        micro_batch_tokens=chosen.tokens_per_step,
        eval_every=0,
        checkpoint_every=0,
        optimizer=OptimizerConfig(lr=chosen.lr),
    )
    of_masks = dataclasses.replace(
        loop, max_steps=chosen.mask_steps, optimizer=OptimizerConfig(lr=chosen.mask_weights_lr)
    )
    return PruneConfig(
        job="distill.prune",
        output_dir=str(cache),
        seed=seed,
        target=TargetConfig(path=chosen.target, device=chosen.device),
        drafter=StudentConfig(num_hidden_layers=layers),
        mode=SIDES[side],
        data=DataConfig(
            chats=chosen.chats, held_out_chats=chosen.held_out_chats, max_length=chosen.max_length, max_bad=0.1
        ),
        importance=ImportanceConfig(
            sequences=chosen.sequences,
            cache_dir=str(cache / "scores"),
            choice="even" if side == "even" else "probe",
            probe_steps=chosen.probe_steps,
        ),
        l0=L0Config(),
        loop=of_masks,
        between=loop,
    )


def run(chosen: Options, side: str, layers: int, seed: int, cache: Path) -> dict[str, Any]:
    """Prune, distil, and look: acceptance on held-out text, block efficiency by real decoding, and what the pruning took."""
    torch.manual_seed(seed)
    config = configured(chosen, side, layers, seed, cache)
    folder = resolve(chosen.target)
    bench = workbench(config, folder)
    source = Source(bench.teacher, folder)
    with tempfile.TemporaryDirectory() as place:
        student, notes, _ = MODES[config.mode](
            bench, source, student_config(config.drafter, bench.teacher.config), Path(place)
        )
        spent = {"seconds": sum(bench.seconds.values()), "flops": sum(bench.flops.values())}
        before = bench.acceptance(student)["acceptance"]
        began = time.monotonic()
        bench.distil(f"{side} {layers} {seed}", student, config.between, Path(place) / "distil")
        distilling = time.monotonic() - began
        after = bench.acceptance(student)
        write_model(student, folder, Path(place) / "drafter", torch.float32)
        taus = {str(t): block_efficiency(chosen, Path(place) / "drafter", t, seed) for t in (0.0, 1.0)}
    return {
        "layers": notes["layers"],
        "acceptance_before": before,
        "acceptance": after["acceptance"],
        "greedy_acceptance": after["greedy_acceptance"],
        "tau_greedy": taus["0.0"],
        "tau_sampled": taus["1.0"],
        "pruning": spent,
        "distilling_seconds": distilling,
    }


def block_efficiency(chosen: Options, drafter: Path, temperature: float, seed: int) -> float:
    """Tokens a target forward, over all prompts, by real speculative decoding."""
    engine = load(resolve(chosen.target), drafter, device=chosen.device)
    stops = engine.stop_token_ids
    settings = Settings(
        max_new_tokens=chosen.max_new_tokens,
        temperature=temperature,
        num_draft_tokens=chosen.num_draft_tokens,
        seed=seed,
        stop_token_ids=stops,
        stopping="fixed",
    )
    tokens = rounds = 0
    for number, prompt in enumerate(read_prompts(resolve(chosen.prompts))[: chosen.max_prompts]):
        ids = encode(engine, [{"role": "user", "content": prompt.turns[0]}])
        if len(ids) + chosen.max_new_tokens >= engine.target.max_length:
            continue
        done = decode(engine.target, engine.drafter, [ids], settings, request_ids=[number])[0]
        tokens, rounds = tokens + len(done.tokens), rounds + done.rounds
    return tokens / rounds


def published() -> dict[str, float]:
    """Operations of both modes at the published settings, LLaMA-7B to 796 M: importance in one cut, and as the recipe does it in two.

    The recipe's short distillation between its cuts is told apart: it trains the student, and is no part of choosing it.
    """
    llama = target_config(TargetConfig(path="nowhere/llama_7b", config=_LLAMA))
    between = LoopConfig(max_steps=300, tokens_per_step=16384)
    config = PruneConfig(
        drafter=_WIDE,
        largest_cut=0.625,
        data=DataConfig(max_length=4096),
        between=between,  # 32 -> 12 -> 5 layers
    )
    masks = 6.0 * parameter_counts(llama)["all"] * _MASK_TOKENS
    once = importance_flops(config, llama, llama, student_config(_WIDE, llama))
    shapes = stage_shapes(config, llama)
    staged = sum(
        importance_flops(config, source, llama, shape) for source, shape in zip([llama, *shapes], shapes, strict=False)
    )
    a_token = sum(6.0 * parameter_counts(shape)["all"] + forward_flops(llama) for shape in shapes[:-1])
    return {
        "l0": masks,
        "importance": once,
        "ratio": masks / once,
        "importance_in_stages": staged,
        "ratio_in_stages": masks / staged,
        "distillation_between": a_token * between.max_steps * between.tokens_per_step,
    }


def main() -> None:
    chosen = options(Options)
    unknown = sorted({*chosen.sides} - {*SIDES})
    if unknown:
        sys.exit(f"error: sides has '{unknown[0]}', expected some of {', '.join(SIDES)}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for layers in chosen.layers:
            by_side = runs.setdefault(str(layers), {side: [] for side in chosen.sides})
            for seed in range(chosen.seeds):
                for side in chosen.sides:
                    found = run(chosen, side, layers, seed, Path(cache))
                    by_side[side].append(found)
                    print(
                        f"  {layers} layers, {side}, seed {seed}: acceptance {found['acceptance']:.4f} (before {found['acceptance_before']:.4f}), "
                        f"tau {found['tau_greedy']:.3f} greedy {found['tau_sampled']:.3f} sampled, {found['pruning']['seconds']:.0f} s to prune",
                        file=sys.stderr,
                    )
            save(chosen.name, chosen, figures(chosen, runs), show=False)
    save(chosen.name, chosen, figures(chosen, runs))


def figures(chosen: Options, runs: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """The runs, importance over every other side (paired over seeds), and the costs at published settings."""
    over: dict[str, Any] = {}
    for layers, by_side in runs.items():
        for side in by_side.keys() - {"importance"}:
            if "importance" in by_side:
                over.setdefault(layers, {})[side] = {
                    key: paired([one[key] for one in by_side["importance"]], [one[key] for one in by_side[side]])
                    for key in ("acceptance", "tau_greedy", "tau_sampled")
                }
    return {"importance_over": over, "published_flops": published(), "runs": runs}


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
