"""SIMULATED rows of drafters in engines."""

from typing import Any

from eval.statistics.engine_row import EngineRow

GAINS = {"ours": 1.25, "hf": 0.9, "vllm": 1.1, "llama_cpp": 0.8, "openvino": 1.02}


def engine_row(
    engine: str, drafter: str, dtype: str, batch_size: int, temperature: float
) -> EngineRow:
    """Return a SIMULATED row; drafter: empty for the engine alone."""
    gain = GAINS[engine] if drafter else 1.0
    pace = {"float32": 100.0, "bfloat16": 200.0}[dtype] * batch_size
    nothing: dict[str, Any] = dict.fromkeys(
        [
            *("rounds", "drafted", "accepted", "alpha", "alpha_by_depth", "tested_by_depth"),
            *("accepted_by_depth", "tau", "first_token_ms", "checked_alpha_by_depth"),
            *("ours_alpha_by_depth", "over_ours_low", "over_ours_high"),
        ]
    )
    return EngineRow(
        engine=engine,
        backend="ours native fused" if engine == "ours" else f"{engine} 1.0",
        method="draft_model" if drafter else "autoregressive",
        target="simulated",
        target_layers=30,
        target_parameters=1,
        drafter=drafter,
        drafter_layers=1,
        drafter_parameters=1,
        drafter_dtype=dtype,
        benchmark="benchmark",
        prompts=16,
        tokens=1000,
        batch_size=batch_size,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=64,
        num_draft_tokens=3 if drafter else 0,
        schedule="serial",
        verify="greedy",
        lossless="equal",
        lossless_detail="",
        tokens_per_second=gain * pace,
        baseline_tokens_per_second=pace,
        speedup=gain,
        speedup_low=gain - 0.05,
        speedup_high=gain + 0.05,
        over_ours=1.0,
        agreement="agrees",
        agreement_detail="",
        dtype=dtype,
        device="cpu",
        threads=2,
        seed=0,
        hardware="simulated processor",
        **nothing,
    )
