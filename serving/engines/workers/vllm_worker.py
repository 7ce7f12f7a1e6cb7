"""Decodes with vLLM, in one process. Runs in vLLM's environment."""

import os
import time
from typing import Any

from channel import Decode, serve

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
PARALLEL = {"p_eagle": "eagle3", "pard": "draft_model"}  # name here -> vLLM's method
NGRAM_SIZES = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}  # those of our prompt lookup


def start(config: dict[str, Any]) -> tuple[str, Decode]:
    """Load the target and the drafter; return vLLM's version and the decoder."""
    set_environment(config)
    import vllm  # after the environment, which it reads when imported

    method = config["method"]
    llm = vllm.LLM(
        model=config["target"],
        dtype=config["dtype"],
        max_model_len=config["max_length"],
        max_num_seqs=config["batch_size"],
        enforce_eager=config["eager"],
        # an earlier prompt in the cache would save its prefill in every later run
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        # prompts and answers are token ids, and a tiny random model has no tokenizer
        skip_tokenizer_init=not os.path.isfile(f"{config['target']}/tokenizer_config.json"),
        speculative_config=speculation(method),
    )
    return vllm.__version__, lambda prompts, sampling: decode(llm, method, prompts, sampling)


def set_environment(config: dict[str, Any]) -> None:
    """Keep vLLM offline, in one process, and on the given number of threads."""
    os.environ.update(
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        OMP_NUM_THREADS=str(config["threads"]),
        # numba, which looks n-grams up, otherwise raises the threads of OpenMP to all cores
        NUMBA_NUM_THREADS=str(config["threads"]),
        # Bound threads of several engines would share the same cores while others are idle.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


def speculation(method: dict[str, Any]) -> dict[str, Any] | None:
    """Return vLLM's speculative_config; None: autoregressive."""
    if method["name"] == "autoregressive":
        return None
    values = {"method": method["name"], "num_speculative_tokens": method["num_draft_tokens"]}
    if method["name"] == "ngram":
        return values | NGRAM_SIZES
    if method["name"] in PARALLEL:
        values |= {"method": PARALLEL[method["name"]], "parallel_drafting": True}
    return values | {"model": method["drafter"]}


def decode(
    llm: Any, method: dict[str, Any], prompts: list[list[int]], sampling: dict[str, Any]
) -> dict[str, Any]:
    """Decode one batch; return the fields of a BatchResult."""
    from vllm import SamplingParams, TokensPrompt

    params = [
        SamplingParams(
            max_tokens=sampling["max_new_tokens"],
            temperature=sampling["temperature"],
            top_k=sampling["top_k"],
            top_p=sampling["top_p"],
            # of each row its own: vLLM gives equal prompts with one seed equal answers
            seed=sampling["seed"] + row if sampling["temperature"] else None,
            ignore_eos=sampling["ignore_eos"],
            stop_token_ids=[] if sampling["ignore_eos"] else list(sampling["stop_token_ids"]),
            detokenize=False,
        )
        for row in range(len(prompts))
    ]
    before = count_drafts(llm)
    began = time.perf_counter()
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False
    )
    seconds = time.perf_counter() - began
    counts = {name: value - before.get(name, 0) for name, value in count_drafts(llm).items()}
    depths = method["num_draft_tokens"]
    return {
        "answers": [answer(output, seconds) for output in outputs],
        "seconds": seconds,
        "rounds": counts.get("num_drafts", 0),
        "drafted": counts.get("num_draft_tokens", 0),
        "accepted": counts.get("num_accepted_tokens", 0),
        "accepted_by_depth": [counts.get(f"accepted at {depth}", 0) for depth in range(depths)],
    }


def answer(output: Any, seconds: float) -> dict[str, Any]:
    """Return the fields of an Answer; a request without metrics ends with its batch."""
    times = output.metrics
    return {
        "tokens": list(output.outputs[0].token_ids),
        "first_token_seconds": times.first_token_latency if times else None,
        "seconds": (
            times.first_token_latency + times.last_token_ts - times.first_token_ts
            if times
            else seconds
        ),
    }


def count_drafts(llm: Any) -> dict[str, int]:
    """Return vLLM's counts of drafting since its start."""
    counts: dict[str, int] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in COUNTERS:
            counts[name] = metric.value
        elif name == "num_accepted_tokens_per_pos":
            counts |= {f"accepted at {depth}": n for depth, n in enumerate(metric.values)}
    return counts


if __name__ == "__main__":
    serve(start)
