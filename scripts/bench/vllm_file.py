"""Settings of a drafter with draft lengths by batch size, as a file that `vllm serve` reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.prompt_lookup import PromptLookup
from decoding.errors import UserError
from decoding.interfaces import Drafter
from decoding.models.draft_vocabulary import draft_vocab_size
from heads.medusa.layouts import MODEL_TYPE as MEDUSA
from jobs.paths import name_anywhere
from serving.engines.heads import EAGLE3, P_EAGLE, PARD, ServedHead, served_head

KEY = "num_speculative_tokens_per_batch_size"
SIZES = (1, 3)  # tokens of an n-gram of our prompt lookup
NGRAM, DRAFT_MODEL = "ngram", "draft_model"
PARALLEL = {P_EAGLE: EAGLE3, PARD: DRAFT_MODEL}  # -> vLLM's method, with parallel_drafting
# Why vLLM ends with an error when a round drafts fewer tokens than num_speculative_tokens. In its
# vllm/v1/spec_decode: MedusaProposer.propose, and extra_slots_per_request in llm_base_proposer.py.
CONSTANT = {
    MEDUSA: "its Medusa asserts it",
    **dict.fromkeys(PARALLEL, "it lays out the mask tokens of the longest draft"),
}


def speculative_config(
    drafter: Drafter, folder: Path | None, table: Sequence[Sequence[int]], num_layers: int
) -> dict[str, Any]:
    """Return vLLM's speculative_config of a drafter.

    A table with one draft length for all numbers of rows is written as that length, as vLLM with a
    table captures no complete CUDA graphs in its first runner.

    folder: the drafter's, None for one without. table: see draft_lengths.py. num_layers: the
    target's. Raises UserError for a drafter that vLLM does not run, for a table without any drafts,
    and for one with several lengths where vLLM drafts a constant number of tokens.
    """
    method, head = _method(drafter, folder, num_layers)
    longest = max(tokens for *_, tokens in table)
    if not longest:
        raise UserError(f"no number of rows gains from {drafter.name}, so there is nothing to set.")
    most = head.num_draft_tokens or longest
    lengths = [[first, last, min(tokens, most)] for first, last, tokens in table]
    if len({tokens for *_, tokens in lengths}) == 1:
        return method | {"num_speculative_tokens": lengths[0][2]}
    if why := CONSTANT.get(head.method):
        raise UserError(
            f"vLLM drafts a constant number of tokens with {drafter.name} ({why}), and the table "
            f"has {KEY}={lengths}. Choose one of its lengths as num_speculative_tokens for all "
            f"numbers of rows, or serve the drafter with serving.api."
        )
    return method | {"num_speculative_tokens": most, KEY: lengths}


def _method(
    drafter: Drafter, folder: Path | None, num_layers: int
) -> tuple[dict[str, Any], ServedHead]:
    """Return vLLM's method and model, and how it runs the drafter."""
    if type(drafter) is PromptLookup:
        least, most = SIZES
        sizes = {"prompt_lookup_min": least, "prompt_lookup_max": most}
        return {"method": NGRAM, **sizes}, ServedHead(NGRAM)
    head = None
    if folder is not None:
        is_chain = type(drafter) is ChainDrafter
        head = ServedHead(DRAFT_MODEL) if is_chain else served_head(drafter, folder, num_layers)
    if folder is None or head is None:
        raise UserError(f"vLLM does not run {drafter.name}.")
    if head.method in (DRAFT_MODEL, PARD) and (size := draft_vocab_size(folder)):
        raise UserError(
            f"vLLM does not read the draft vocabulary of {size:,} tokens in {folder}. `python "
            f"scripts/full_vocabulary.py {folder} COPY` makes a drafter for it."
        )
    method: dict[str, Any] = {"method": head.method}
    if head.method in PARALLEL:
        method = {"method": PARALLEL[head.method], "parallel_drafting": True}
    return method | {"model": name_anywhere(str(folder))}, head


def format_file(speculative: dict[str, Any], target: str) -> str:
    """Return the YAML file. target: path or name on the Hub."""
    settings = {"speculative-config": speculative}
    body = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    return f"# vllm serve {name_anywhere(target)} --config THIS_FILE\n{body.rstrip()}"
