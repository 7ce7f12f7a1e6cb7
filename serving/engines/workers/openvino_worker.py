"""Decode with OpenVINO GenAI's continuous batching. Target and drafter are exported folders."""

import os
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from channel import Decode, serve

PRECISION = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
CAPABILITY = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}  # names in its properties
LOOKUP = 3  # most tokens of the n-gram that is looked up


def start(config: dict[str, Any]) -> tuple[str, Decode]:
    """Load the models and return the engine's version and decoder."""
    method, device = config["method"], {"cpu": "CPU", "cuda": "GPU"}[config["device"]]
    precision = PRECISION[config["dtype"]]
    able = openvino.Core().get_property(device, "OPTIMIZATION_CAPABILITIES")
    # A processor without bfloat16 computes in float32, and refuses a cache in another precision.
    cached = precision if CAPABILITY[config["dtype"]] in able else "f32"
    if config["dtype"] == "bfloat16" and min(config["threads"], cores()) == 1:
        # On processors with AMX, OpenVINO 2026.4 divides by zero with one thread.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": cached,
        "INFERENCE_NUM_THREADS": config["threads"],
    }
    extra: dict[str, Any] = {}
    if method["name"] == "draft_model":
        extra["draft_model"] = openvino_genai.draft_model(method["drafter"], device, **properties)
    elif method["name"] == "ngram":
        extra["prompt_lookup"] = True
    elif method["name"] != "autoregressive":
        raise ValueError(f"method {method['name']} is not run in OpenVINO")
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = config["batch_size"]
    scheduler.max_num_batched_tokens = config["batch_size"] * config["max_length"]
    scheduler.enable_prefix_caching = False  # no memory of earlier prompts
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        config["target"], scheduler, device, {**properties, **extra}
    )

    def decode(prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any]:
        if extra and sampling["temperature"] > 0:
            # With the target as its own drafter, 69 % were accepted on chat24m at temperature 1:
            # neither p / q (100 %) nor a likeliest token (24 %) gives that.
            raise ValueError(
                "OpenVINO's rule of sampling with drafts is not known, so it is measured at "
                "temperature 0 only. Set temperatures=[0.0]"
            )
        settings = [
            generation(pipeline.get_config(), method, sampling, row) for row in range(len(prompts))
        ]
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        began = time.monotonic()
        results = pipeline.generate(inputs, settings)
        return batch(results, method, time.monotonic() - began)

    return str(openvino_genai.get_version()), decode


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def generation(
    settings: Any, method: dict[str, Any], sampling: dict[str, Any], row: int
) -> "openvino_genai.GenerationConfig":
    """Return the settings of one prompt. An answer ends at the model's own end tokens too."""
    settings.max_new_tokens = sampling["max_new_tokens"]
    stops = set() if sampling["ignore_eos"] else set(sampling["stop_token_ids"])
    settings.ignore_eos = not stops
    settings.stop_token_ids = stops
    settings.do_sample = sampling["temperature"] > 0
    if settings.do_sample:
        settings.temperature = sampling["temperature"]
        settings.top_p = sampling["top_p"]
        settings.top_k = sampling["top_k"] or 2**31 - 1
        settings.rng_seed = sampling["seed"] + row
    if method["name"] != "autoregressive":
        settings.num_assistant_tokens = method["num_draft_tokens"]
    if method["name"] == "ngram":
        settings.max_ngram_size = LOOKUP
    return settings


def batch(results: list[Any], method: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the fields of a BatchResult.

    The engine reports times and counts of a whole batch, no counts by depth, and none of lookup.
    """
    first = results[0].perf_metrics.get_ttft().mean / 1000
    answers = [
        {
            "tokens": list(result.m_generation_ids[0]),
            "first_token_seconds": first,
            "seconds": seconds,
        }
        for result in results
    ]
    counts: dict[str, Any] = dict.fromkeys(
        ("rounds", "drafted", "accepted", "accepted_by_depth"), None
    )
    if method["name"] == "autoregressive":
        counts = {"rounds": 0, "drafted": 0, "accepted": 0, "accepted_by_depth": []}
    elif method["name"] == "draft_model":
        metrics = results[0].extended_perf_metrics
        counts["drafted"] = metrics.get_num_draft_tokens()
        counts["accepted"] = metrics.get_num_accepted_tokens()
    return {"answers": answers, "seconds": seconds, **counts}


if __name__ == "__main__":
    serve(start)
