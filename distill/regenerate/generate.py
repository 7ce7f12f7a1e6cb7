"""Generation of the target's answers to a batch of requests, with or without a drafter.

The noise of target and drafter is keyed by (seed, request), so an answer depends neither on the
drafter nor on the batch. It equals the answer of `decoding.decode` to the request alone, in 32 bits
or fewer up to near ties of two tokens.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from decoding.costs.measure import measure_costs, widths_to_time
from decoding.devices import device_of
from decoding.engine import stop_tokens
from decoding.errors import UserError
from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.sampling import noise
from decoding.schedules.by_name import decides_by_cost
from decoding.sessions.conversations import ConversationBatches
from distill.config import RegenerateConfig
from distill.regenerate.dialogues import Answer, Key, Message
from jobs import ranks
from jobs.aliases import current_costs
from jobs.drafter_use import DrafterUse, refuse_eval_options
from jobs.drafters import build, describe, uses, with_execution
from jobs.files import write_text
from jobs.run_files import read_object
from jobs.targets import load_job_target

# Fields of the configuration that are settings of decoding under the same name.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "seed")
# Answer length when only the speed is measured.
PACE_TOKENS = 32


@dataclass(frozen=True)
class Request:
    """Request to the target: a chat up to the next answer."""

    key: Key
    messages: list[Message]
    # tokens of the messages with the generation prompt
    ids: list[int]
    # True for the last request of its chat
    last: bool


# Returns one answer per request, in order. The second argument is True if the requests continue
# chats of the last call, which may still be cached.
AnswerFunction = Callable[[Sequence[Request], bool], list[Answer]]


class AnswerGenerator:
    """Generator of answers with a target and a drafter, which the first call loads.

    costs_file: file that keeps the measured round costs, for a drafter whose policy needs them.
    """

    def __init__(
        self, config: RegenerateConfig, folder: Path, tokenizer: Any, costs_file: Path | None = None
    ) -> None:
        self.config, self.folder = config, folder
        self.tokenizer, self.costs_file = tokenizer, costs_file
        self.settings = Settings(
            num_draft_tokens=config.num_draft_tokens,
            verify="coupled",  # the only rule under which a drafter cannot change sampled answers
            stop_token_ids=stop_tokens(folder, tokenizer),
            **{name: vars(config)[name] for name in SAMPLING},
        )
        self._costs: RoundCosts | None = None

    @cached_property
    def target(self) -> Target:
        return load_job_target(
            self.config.target,
            self.folder,
            self.config.threads,
            None if self.config.dry_run else Path(self.config.output_dir),
            device=rank_device(self.config.target.device),
            max_length=self.config.data.max_length,
        )

    @cached_property
    def drafting(self) -> tuple[Drafter | None, DrafterUse]:
        """Drafter (or None) and its loop options. Raises UserError if it does not fit."""
        if not self.config.drafters:
            return None, DrafterUse()
        target = with_execution(self.config.target, self.folder)
        mappings = describe_drafter(replace(self.config, target=target))
        used = uses(mappings, DrafterUse())
        (drafter,) = build(mappings, used, self.folder).values()
        drafter.prepare(self.target, None)
        (use,) = used.values()
        return drafter, use.with_default_stopping(drafter.capabilities, self.target)

    def load(self) -> None:
        """Load the target and the drafter. Raises UserError if the drafter does not fit."""
        _ = self.target, self.drafting

    @cached_property
    def turns(self) -> ConversationBatches:
        return ConversationBatches(self.target, self.drafting[0])

    def __call__(self, requests: Sequence[Request], continues: bool = False) -> list[Answer]:
        """Return one answer per request, in order, decoded as one ragged batch.

        continues: the requests continue chats of the last call.
        """
        settings = self._settings(requests)
        if not continues:
            self.turns.forget()
        began = perf_counter()
        generations = self._decode(requests, settings)
        seconds = perf_counter() - began
        tokens = sum(len(generation.tokens) for generation in generations)
        return [
            self._answer(request, generation, seconds * len(generation.tokens) / tokens)
            for request, generation in zip(requests, generations, strict=True)
        ]

    def tokens_per_second(self, requests: Sequence[Request]) -> float:
        """Return the tokens per second of a batch, measured on a few tokens after a warm-up."""
        few = min(PACE_TOKENS, self.config.max_new_tokens)
        settings = replace(self._settings(requests), max_new_tokens=few, ignore_eos=True)
        self._decode(requests, settings)
        self.turns.forget()
        began = perf_counter()
        generations = self._decode(requests, settings)
        return sum(len(generation.tokens) for generation in generations) / (perf_counter() - began)

    def _decode(self, requests: Sequence[Request], settings: Settings) -> list[Generation]:
        return self.turns.decode(
            [request.key[:2] for request in requests],
            [request.ids for request in requests],
            [request.last for request in requests],
            settings,
            request_ids=[noise.key(*request.key) for request in requests],
        )

    def _answer(self, request: Request, generation: Generation, seconds: float) -> Answer:
        tokens, stopped = list(generation.tokens), generation.finish == "stop"
        body = tokens[:-1] if stopped else tokens
        text = str(self.tokenizer.decode(body, skip_special_tokens=True))
        return Answer(
            *request.key,
            prompt_tokens=len(request.ids),
            read_tokens=generation.prefilled,
            tokens=tokens,
            finish=generation.finish,
            text=text if stopped else text.rstrip("\ufffd"),  # an incomplete character
            rounds=generation.rounds,
            seconds=round(seconds, 6),
        )

    def _settings(self, requests: Sequence[Request]) -> Settings:
        """Return the decoding settings, with round costs if the drafter's policy needs them."""
        drafter, use = self.drafting
        settings = replace(self.settings, **use.settings)
        if drafter is None or not decides_by_cost(
            drafter.capabilities, use.schedule, use.stopping, self.target
        ):
            return settings
        if self._costs is None:
            self._costs = self._read_or_measure(drafter, settings, requests)
        return replace(settings, costs=self._costs)

    def _read_or_measure(
        self, drafter: Drafter, settings: Settings, requests: Sequence[Request]
    ) -> RoundCosts:
        """Read the round costs from the file, or measure and write them.

        With the file, a resumed run drafts as before. requests: a typical batch to measure on.
        """
        file = self.costs_file
        if file is not None and file.is_file():
            return read_object(
                file,
                "Delete it to measure the costs again",
                lambda entry: RoundCosts.read(current_costs(entry)),
            )
        prompts = sorted((request.ids for request in requests), key=len)
        prompt = prompts[len(prompts) // 2]
        costs = measure_costs(
            self.target,
            drafter,
            prompt,
            settings,
            widths=widths_to_time(drafter, settings.num_draft_tokens),
            context=len(prompt) + settings.max_new_tokens // 2,
            batch_size=len(prompts),
        )
        if file is not None:
            write_text(file, json.dumps(asdict(costs), indent=1))
        return costs


def describe_drafter(config: RegenerateConfig) -> dict[str, dict[str, Any]]:
    """Return name -> Hydra mapping of the drafter; empty without a drafter.

    Raises UserError for several drafters, a schedule other than serial, and options that only
    eval.run supports.
    """
    if not config.drafters:
        return {}
    target = replace(config.target, device=rank_device(config.target.device))
    mappings = describe(config.drafters, target, control=False)
    if len(mappings) > 1:
        raise UserError(
            f"drafters names {len(mappings)} ({', '.join(mappings)}), expected at most one, "
            f"because all drafters give the same answers"
        )
    for name, use in uses(mappings, DrafterUse()).items():
        refuse_eval_options(name, use)
        if use.schedule != "serial":
            raise UserError(
                f"drafters: {name} has schedule={use.schedule}, expected serial, because answers "
                f"are generated in batches"
            )
    return mappings


def rank_device(name: str) -> str:
    """Return the device of this rank: a GPU for each rank, or the CPU.

    Raises UserError if `name` has an index (`cuda:0`) and there are several ranks.
    """
    if ranks.world_size() > 1 and ":" in name:
        raise UserError(
            f"target.device is '{name}', expected cuda, auto or cpu, because every rank needs its "
            f"GPU"
        )
    device = device_of(name)
    return f"cuda:{ranks.local_rank()}" if device == "cuda" and ranks.world_size() > 1 else device
