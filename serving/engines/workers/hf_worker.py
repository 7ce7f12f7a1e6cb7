"""Decodes with `generate` of transformers, with its assisted generation and its prompt lookup."""

import os
import time
from collections.abc import Callable
from typing import Any

from channel import Decode, serve

NGRAM_SIZE = 3  # longest match of prompt lookup, that of ours


def start(config: dict[str, Any]) -> tuple[str, Decode]:
    """Load the target and the drafter; return the version of transformers and the decoder."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read on import
    import torch
    import transformers

    torch.set_num_threads(config["threads"])
    method = config["method"]

    def load(folder: str) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, config["dtype"])
        )
        # The folder's own settings of generation must not mix with those of the request.
        model.generation_config = transformers.GenerationConfig()
        return model.to(config["device"]).eval()

    options: dict[str, Any] = {}
    if method["name"] == "draft_model":
        assistant = load(method["drafter"])
        pinned = assistant.generation_config
        pinned.num_assistant_tokens = method["num_draft_tokens"]
        pinned.num_assistant_tokens_schedule = "constant"
        pinned.assistant_confidence_threshold = 0.0
        options["assistant_model"] = assistant
    elif method["name"] == "ngram":
        options["prompt_lookup_num_tokens"] = method["num_draft_tokens"]
        options["max_matching_ngram_size"] = NGRAM_SIZE
    elif method["name"] != "autoregressive":
        raise ValueError(f"transformers has no method {method['name']}")
    target, counter = load(config["target"]), Counter(method["num_draft_tokens"])
    counter.watch()

    @torch.inference_mode()
    def decode(prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any]:
        counter.clear()
        torch.manual_seed(sampling["seed"])
        # Assisted generation takes one prompt at a time.
        groups = [[ids] for ids in prompts] if options else [prompts]
        began, answers = time.perf_counter(), []
        for group in groups:
            answers += generate(target, group, request(sampling, options), began)
        return {"answers": answers, "seconds": time.perf_counter() - began, **counter.counts()}

    return transformers.__version__, decode


def request(sampling: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate`."""
    values = {
        **options,
        "max_new_tokens": sampling["max_new_tokens"],
        "do_sample": sampling["temperature"] > 0,
        "pad_token_id": 0,
        "use_cache": True,
    }
    if sampling["stop_token_ids"] and not sampling["ignore_eos"]:
        values["eos_token_id"] = list(sampling["stop_token_ids"])
    if sampling["temperature"]:
        values |= {name: sampling[name] for name in ("temperature", "top_k", "top_p")}
    return values


def generate(
    target: Any, prompts: list[list[int]], arguments: dict[str, Any], began: float
) -> list[dict[str, Any]]:
    """Decode prompts together, padded on the left; return the fields of their Answers."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    clock = Clock(began, len(prompts))
    output = target.generate(
        input_ids=ids, attention_mask=mask.to(target.device), streamer=clock, **arguments
    )
    answers = []
    for row in output[:, width:].tolist():
        ends = [row.index(stop) + 1 for stop in arguments.get("eos_token_id", []) if stop in row]
        tokens = row[: min(ends, default=len(row))]
        answers.append(
            {
                "tokens": tokens,
                "first_token_seconds": clock.first_token,
                "seconds": clock.at_token(len(tokens)),
            }
        )
    return answers


class Clock:
    """A streamer of `generate` that notes when each token of a batch is there."""

    def __init__(self, began: float, rows: int) -> None:
        self.began, self.rows = began, rows
        self.times: list[float] = []  # seconds at which each token of a row was there
        self.prompted = False

    def put(self, value: Any) -> None:
        if self.prompted:
            count = value.numel() // self.rows
            self.times += [time.perf_counter() - self.began] * count
        self.prompted = True  # the first call holds the prompts

    def end(self) -> None:
        """Do nothing, as all tokens have their times."""

    @property
    def first_token(self) -> float:
        return self.times[0]

    def at_token(self, count: int) -> float:
        """Return the seconds at which a row had `count` tokens."""
        return self.times[count - 1]


class Counter:
    """Counts of the rounds of assisted generation, read at its candidate generators."""

    def __init__(self, depths: int) -> None:
        self.depths = depths
        self.clear()

    def clear(self) -> None:
        self.rounds = self.drafted = self.length = 0
        self.tested, self.accepted = [0] * self.depths, [0] * self.depths

    def watch(self) -> None:
        """Observe every proposal, and how many of its tokens were kept."""
        from transformers.generation import candidate_generator as generators

        for kind in (
            generators.AssistedCandidateGenerator,
            generators.PromptLookupCandidateGenerator,
        ):
            for name, wrap in (
                ("get_candidates", self._proposing),
                ("update_candidate_strategy", self._judging),
            ):
                setattr(kind, name, wrap(getattr(kind, name)))

    def _proposing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def get_candidates(generator: Any, input_ids: Any, **more: Any) -> Any:
            ids, logits = method(generator, input_ids, **more)
            self.length = ids.shape[1] - input_ids.shape[1]
            return ids, logits

        return get_candidates

    def _judging(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def update(generator: Any, input_ids: Any, scores: Any, num_matches: Any) -> Any:
            kept = int(num_matches)
            self.rounds += self.length > 0
            self.drafted += self.length
            for depth in range(min(kept + 1, self.length)):
                self.tested[depth] += 1
            for depth in range(kept):
                self.accepted[depth] += 1
            return method(generator, input_ids, scores, num_matches)

        return update

    def counts(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": sum(self.accepted),
            "accepted_by_depth": self.accepted,
            "tested_by_depth": self.tested,
        }


if __name__ == "__main__":
    serve(start)
