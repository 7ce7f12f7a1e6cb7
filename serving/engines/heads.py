"""Which trained heads vLLM runs, by which of its methods, and which it refuses or reads otherwise.

It also runs small models that draft in one pass (PARD); `tests/serving/test_vllm_load.py` serves
one. vLLM drafts a chain of each head's likeliest tokens. It numbers the layers that EAGLE-3 reads
as this project does, and those of DFlash by their outputs, as their config.json has both. It joins
their states in the order of the layers, whatever the order in config.json. Its own words are those
of vLLM 0.32.0 for CPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decoding.drafters.parallel import ParallelChain
from decoding.errors import UserError
from decoding.interfaces import Drafter
from decoding.models.folder import read_json
from heads.block.drafter import BlockDrafter
from heads.block.shape import EMBEDDING, FC, FILL_IN, GRU, MARKOV, SELECTOR, BlockConfig
from heads.eagle.drafter import EagleDrafter
from heads.eagle.layouts import ARCHITECTURE, PARALLEL
from heads.eagle.model import EagleConfig
from heads.eagle.parallel import ParallelEagleDrafter
from heads.eagle.servers import CONTRACT, PARALLEL_CONTRACT
from heads.medusa.drafter import MedusaDrafter
from heads.medusa.layouts import MODEL_TYPE as MEDUSA
from heads.medusa.layouts import unreadable_in_vllm

EAGLE, EAGLE3, P_EAGLE, DFLASH = "eagle", "eagle3", "p_eagle", "dflash"
PARD = "pard"
# vLLM's methods; p_eagle and pard are its eagle3 and draft_model with parallel_drafting
HEADS = (MEDUSA, EAGLE, EAGLE3, P_EAGLE, DFLASH)
_REFUSED = {
    MARKOV: "its DSpark needs a GPU (`Model Runner V1 does not support: dspark speculative "
    "decoding`, `Model Runner V2 requires Triton.`)",
    GRU: "it has no Domino (`Model architectures ['DominoDraftModel'] are not supported for now.`)",
    SELECTOR: "its DFlash has no candidate selector",
}


@dataclass(frozen=True)
class ServedHead:
    """How vLLM runs a head or a small model."""

    method: str
    num_draft_tokens: int = 0  # in every draft; 0: any number


def served_head(drafter: Drafter, folder: Path, num_layers: int) -> ServedHead | None:
    """Return how vLLM runs a head, or a model that drafts in one pass; None for other drafters.

    num_layers: the target's. Raises UserError for a head that vLLM refuses, or that it would load
    and read otherwise, so that fewer tokens are accepted.
    """
    if isinstance(drafter, ParallelChain):
        return ServedHead(PARD, drafter.tokens)
    if isinstance(drafter, MedusaDrafter):
        if read_json(folder / "config.json").get("model_type") != MEDUSA:
            raise _refusal(folder, "it does not read Medusa's original layout")
        if words := unreadable_in_vllm(drafter.config):
            raise _refusal(folder, f"{words}; train heads with head.draft_vocab_size=0")
        return ServedHead(MEDUSA, drafter.config.num_heads)
    if isinstance(drafter, EagleDrafter):
        if drafter.config.predicts_states:
            if drafter.config.fc_bias:
                raise _refusal(
                    folder, "it ignores the bias of fc; train one with head.fc_bias=false"
                )
            return ServedHead(EAGLE)
        _check_taps(folder, drafter.config.taps_of(num_layers), num_layers)
        _check_layout(folder, drafter.config)
        if not isinstance(drafter, ParallelEagleDrafter):
            return ServedHead(EAGLE3)
        _check_architectures(folder)
        return ServedHead(P_EAGLE, drafter.config.parallel)
    if isinstance(drafter, BlockDrafter):
        _check_block(folder, drafter.config)
        _check_taps(folder, drafter.config.taps, num_layers)
        return ServedHead(DFLASH, drafter.config.num_drafts)
    return None


def describe_misreading(backend: str, device: str, method: str, num_layers: int) -> str:
    """Return what an engine computes otherwise in a head that it runs; empty if nothing is known.

    backend: the engine and its version. num_layers: the head's.
    """
    known = backend.startswith("vllm 0.32.0") and device == "cpu"
    if not known or method != DFLASH or num_layers < 2:
        return ""
    return (
        f"vLLM 0.32.0 for CPUs normalizes the text's keys of all {num_layers} layers of this head "
        f"with the weights of the first layer's k_norm, which costs acceptance. A head of one "
        f"layer (head.num_layers=1) is read correctly."
    )


def _check_layout(folder: Path, config: EagleConfig) -> None:
    """Raise UserError for an EAGLE-3 or P-EAGLE head in a layout that vLLM refuses or misreads."""
    contract = PARALLEL_CONTRACT if config.parallel else CONTRACT
    values, vllm = read_json(folder / "config.json"), contract.servers[0]
    layout = contract.layout_of(values).name
    if words := vllm.refusal(layout, config) or vllm.misread_layers(values, config):
        raise _refusal(folder, f"it {words}")


def _check_architectures(folder: Path) -> None:
    """Raise UserError for a P-EAGLE head with a first architecture that vLLM does not load."""
    first = read_json(folder / "config.json")["architectures"][0]
    if first == PARALLEL:
        raise _refusal(
            folder,
            f"it does not load {first} (`Model architectures ['Eagle3{first}'] are not supported "
            f"for now.`); put {ARCHITECTURE} before it in the architectures of config.json",
        )


def _check_block(folder: Path, config: BlockConfig) -> None:
    """Raise UserError for a block drafter that vLLM does not read as DFlash."""
    if config.is_dflash:
        return
    if words := _REFUSED.get(config.correction):
        raise _refusal(folder, words)
    if config.layout != FILL_IN:
        raise _refusal(
            folder,
            f"its DFlash reads every block as {FILL_IN}, and the head's are {config.layout}; train "
            f"one with head.layout={FILL_IN}",
        )
    if config.denoising_steps > 1:
        raise _refusal(folder, "it drafts in one pass, and the head fills its blocks in several")
    if EMBEDDING in config.taps:
        raise _refusal(folder, "how it numbers the embedding, which the head reads, is not known")
    if config.fusion != FC:
        raise _refusal(
            folder,
            f"its DFlash has one projection of the target's states for all layers, and the head "
            f"the fusion {config.fusion}; train one with head.fusion={FC}",
        )
    missing = "confidence" if config.confidence else "convolution"
    raise _refusal(folder, f"its DFlash has no {missing}; train a head without one")


def _check_taps(folder: Path, taps: Sequence[int], num_layers: int) -> None:
    """Raise UserError for layers of which vLLM returns other states or another order."""
    if num_layers in taps:
        raise _refusal(
            folder,
            f"the head reads layer {num_layers} after the target's final norm, and vLLM before it; "
            f"train one with lower layers (head.taps)",
        )
    if list(taps) != sorted(taps):
        raise _refusal(
            folder,
            f"the head reads the layers {list(taps)} in this order, and vLLM in rising order; "
            f"train one with rising head.taps",
        )


def _refusal(folder: Path, why: str) -> UserError:
    return UserError(f"vLLM does not run the head {folder}: {why}. Measure it with engine=ours.")
