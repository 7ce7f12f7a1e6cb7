"""Held-out scores of `distill.train`: what evaluates a student, and what is timed for it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from decoding.costs.prediction import Costs
from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Drafter, Target
from decoding.models.draft_vocabulary import token_ids
from decoding.models.load import DTYPES
from decoding.models.native.model import NativeTarget
from distill.acceptance import HeldOutAcceptance, score_mixture
from distill.config import TrainConfig
from distill.parallel_drafting.held_out import HeldOutParallel
from distill.parallel_drafting.setup import parallel_chain, settings_of
from training.data.from_config import held_out_domains
from training.data.packing import Sample
from training.held_out.costs import Timing
from training.held_out.speedup import LONGEST_DRAFT, SpeedupPrediction
from training.models.shapes import sizes_of
from training.parallel.strategy import Parallel


def make_held_out(
    config: TrainConfig,
    student: Any,
    teacher: Any,
    tokenizer: Any,
    parallel: Parallel,
    target_texts: list[Sample],
    costs: Costs | None,
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the student on the target's answers and the domains.

    target_texts: the target's answers. costs: those of a round; None predicts no speedup.
    """
    chosen = config.held_out
    known = (student, teacher)
    limits = (config.data.max_length, chosen.temperature)
    prediction = None
    if costs is not None:
        prediction = SpeedupPrediction(costs, chosen.max_new_tokens, longest_draft(config))
    if config.parallel_drafting.tokens:
        tokens, mask_token = settings_of(student)
        answers: HeldOutAcceptance = HeldOutParallel(
            *known,
            target_texts,
            *limits,
            prediction,
            tokens=tokens,
            mask_token=mask_token,
            max_new_tokens=chosen.max_new_tokens,
        )
    else:
        answers = HeldOutAcceptance(*known, target_texts, *limits, prediction)
    domains = held_out_domains(tokenizer, config.data, parallel.is_main)
    if not domains:
        return answers
    scorers = {name: HeldOutAcceptance(*known, texts, *limits) for name, texts in domains.items()}
    return partial(score_mixture, answers, scorers)


def make_timing(config: TrainConfig, student: Any, target: Any) -> Timing:
    """Return what is timed for held-out predictions: the student, as eval.run would load it.

    target: the target's Hugging Face configuration.
    """

    def make_drafter(target: Target) -> Drafter:
        model = NativeTarget.from_state(
            student.config.to_dict(),
            student.state_dict(),
            dtype=DTYPES[config.target.dtype],
            device=str(target.device),
            execution=target.execution if isinstance(target, NativeTarget) else "eager",
        )
        return parallel_chain(student, model) if parallel else ChainDrafter(model=model)

    ids, parallel = token_ids(student), config.parallel_drafting.tokens
    drafter = sizes_of(student.config) | {"draft_vocab_size": 0 if ids is None else len(ids)}
    if parallel:
        drafter["parallel_tokens"] = parallel
    return Timing(make_drafter, sizes_of(target), drafter, longest_draft(config))


def longest_draft(config: TrainConfig) -> int:
    """Return the longest draft that held-out predictions consider."""
    return config.parallel_drafting.tokens or LONGEST_DRAFT
