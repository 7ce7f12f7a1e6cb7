"""Part `heads`: training and rounds of EAGLE-3, P-EAGLE and block drafters for an 8B target.

Weights are random, in LLaMA-3.1-8B's shapes and the published heads' (a draft vocabulary of 32,000
for EAGLE-3 and P-EAGLE, all tokens for the others). Options and losses are those of the presets in
conf/head, DSpark's confidence included; SpecDiff has DFlash's sizes. Times do not depend on the
weights; acceptance does, so a round is given with the tokens that it must emit to pay. The training
step is that of heads.train in one process, with the target's states computed in every step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import yaml
from torch import nn
from transformers import LlamaConfig

from decoding import devices
from decoding.interfaces import Drafter
from decoding.models.native.model import NativeTarget
from heads.block.drafter import BlockDrafter
from heads.block.model import BlockHead
from heads.block.predictions import BlockPredictions
from heads.block.shape import NONE, BlockConfig, spread_taps
from heads.eagle.drafter import EagleDrafter
from heads.eagle.model import EagleConfig, EagleHead, default_taps
from heads.eagle.parallel import ParallelEagleDrafter
from heads.eagle.predictions import EaglePredictions
from jobs.paths import data_folder
from scripts.bench.gpu_recurrent import Sizes, measure_rounds, measure_step
from scripts.bench.gpu_training import TrainingSizes, measure_training, random_chats
from scripts.bench.random_models import TOY_TARGET, llama, random_model, random_weights
from training.features.states import TargetStates
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.heads.predicting import PredictingHead
from training.objectives import freeze

LLAMA_8B = llama(32, 4096, 32, 14336, 8, vocab_size=128_256)
REAL = TrainingSizes(LLAMA_8B, torch.bfloat16, row=2048, forward_rows=2, step_rows=8, steps=2)
TOY = TrainingSizes(
    TOY_TARGET, torch.float32, row=32, forward_rows=2, step_rows=4, steps=1, chats=(8, 32), turn=8
)
TREE = 60  # nodes of EAGLE-3's tree, as published
DRAFTS_PER_ROW = 256
RANK = 256  # of DSpark's Markov head
CONF = data_folder("conf")
BLOCKS = ("DFlash", "DSpark", "SpecDiff")


@dataclass(frozen=True)
class HeadCase:
    """A head of an 8B target, how it trains and how it drafts."""

    name: str
    head: nn.Module
    kind: PredictingHead
    taps: tuple[int, ...]
    loss: HeadLossConfig
    drafter: Callable[[Any], Drafter]
    length: int  # drafted tokens of a chain, or depth of the tree


def preset(name: str) -> tuple[dict[str, Any], HeadLossConfig]:
    """Return the options and the loss of a file in conf/head, which is read without Hydra."""

    def read(group: str, file: str) -> dict[str, Any]:
        found: dict[str, Any] = yaml.safe_load((CONF / group / f"{file}.yaml").read_text())
        return found

    written = read("head", name)
    entries = [one for one in written.get("defaults", []) if isinstance(one, dict)]
    chosen = [one["override /loss"] for one in entries] or ["forward_kl"]
    loss = HeadLossConfig(**{**read("loss", chosen[-1]), **written["loss"]})
    return written.get("head", {}), loss


def eagle(target: LlamaConfig, toy: bool, parallel: bool) -> HeadCase:
    """Return P-EAGLE with a chain in one pass, or EAGLE-3 with a tree of TREE nodes."""
    taps, steps = default_taps(target.num_hidden_layers), 3 if toy else 7
    shape = EagleConfig(
        target.vocab_size,
        target.hidden_size,
        target.num_attention_heads,
        target.num_key_value_heads or target.num_attention_heads,
        target.head_dim or target.hidden_size // target.num_attention_heads,
        target.intermediate_size,
        taps,
        {"rope_type": "default", "rope_theta": 500_000.0},
        target.max_position_embeddings,
        draft_vocab_size=16 if toy else 32_000,
        parallel=steps if parallel else 0,
        mask_token_id=target.vocab_size - 1,
    )
    loss = replace(preset("p_eagle" if parallel else "eagle3")[1], predict_n_tokens=steps)
    if parallel:
        name, make = f"P-EAGLE, chain of {steps}", lambda head: ParallelEagleDrafter(head=head)
        return HeadCase(name, EagleHead(shape), EaglePredictions(), taps, loss, make, steps)
    nodes = 6 if toy else TREE
    return HeadCase(
        f"EAGLE-3, tree of {nodes}",
        EagleHead(shape),
        EaglePredictions(),
        taps,
        loss,
        lambda head: EagleDrafter(head=head, shape="tree", max_nodes=nodes, children="top_k"),
        3 if toy else 6,
    )


def block(target: LlamaConfig, toy: bool, name: str) -> HeadCase:
    """Return a preset of five layers: DSpark with blocks of 7 slots, or another with 16."""
    options, loss = preset(name.lower())
    size = (3 if toy else 7) if name == "DSpark" else (4 if toy else 16)
    correction = options["correction"]
    shape = BlockConfig(
        target.vocab_size,
        target.hidden_size,
        target.num_hidden_layers,
        tuple(options.get("taps") or spread_taps(1 if toy else 5, target.num_hidden_layers)),
        size,
        target.vocab_size - 1,
        target.num_attention_heads,
        target.num_key_value_heads or target.num_attention_heads,
        target.head_dim or target.hidden_size // target.num_attention_heads,
        target.intermediate_size,
        1 if toy else 5,
        options["layout"],
        options["in_block_mask"],
        correction,
        0 if correction == NONE else RANK,
        confidence=options.get("confidence", False),
        denoising_steps=options.get("denoising_steps", 0),
    )
    drafts = shape.num_drafts
    # so low that confidences are computed but end no draft
    stop_below = 1e-9 if shape.confidence else 0.0
    return HeadCase(
        f"{name}, block of {size}",
        BlockHead(shape),
        BlockPredictions(),
        shape.taps,
        replace(loss, predict_n_tokens=drafts, drafts_per_row=DRAFTS_PER_ROW),
        lambda head: BlockDrafter(head=head, stop_below=stop_below),
        drafts,
    )


@torch.inference_mode(False)
def cases(sizes: TrainingSizes, toy: bool, device: str) -> list[HeadCase]:
    """Return all cases, with their heads on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        made = [eagle(sizes.target, toy, parallel) for parallel in (False, True)]
        made += [block(sizes.target, toy, name) for name in BLOCKS]
    for case in made:
        case.head.to(sizes.dtype)
    return made


@torch.inference_mode(False)
def measure_head_training(
    case: HeadCase, target: Any, sizes: TrainingSizes, device: str
) -> dict[str, Any]:
    """Measure the tokens/s and the peak memory of training a head."""
    states = TargetStates(target, taps=case.taps, final=case.loss.name != "cross_entropy")
    objective = HeadObjective(case.kind, case.head, states, case.loss)
    found = measure_training(objective, case.head, random_chats(sizes), sizes, device)
    parameters = sum(parameter.numel() for parameter in case.head.parameters())
    return {**found, "head_parameters": parameters}


def run(device: str, toy: bool, figures: Any) -> None:
    """Measure and record the training of every head, and its rounds as graphs and eager."""
    sizes, place = TOY if toy else REAL, torch.device(device)
    made = cases(sizes, toy, device)
    with torch.inference_mode(False):
        target = freeze(random_model(sizes.target, sizes.dtype, device))
    for case in made:
        name = f"training, {case.name}"
        if figures.in_time(name):
            figures.add(name, measure_head_training(case, target, sizes, device))
        devices.release(place)
    del target
    devices.release(place)
    weights = random_weights(sizes.target, sizes.dtype, device)
    for execution in ("graph", "eager"):
        measure_execution(NativeTarget(weights, "target", execution=execution), made, toy, figures)
        devices.release(place)


def measure_execution(target: NativeTarget, made: list[HeadCase], toy: bool, figures: Any) -> None:
    """Measure and record autoregressive steps, and rounds of every head."""
    width = max([TREE, *(case.length for case in made)])
    rounds = Sizes(
        target=TOY_TARGET if toy else LLAMA_8B,
        dtype=torch.float32 if toy else torch.bfloat16,
        prompt=6 if toy else 64,
        tokens=24 if toy else 128,
        widths=(width,),
        lengths=(max(case.length for case in made),),
        batch=1,
        batch_width=1,
        parts_every=8 if toy else 16,
        repeats=1,
    )
    target.open(1, rounds.capacity)
    plain_ms = measure_step(target, rounds, 1)
    figures.add(f"autoregressive, {target.execution}", {"token_ms": plain_ms})
    for case in made:
        name = f"round, {case.name}, {target.execution}"
        if figures.in_time(name):
            head = case.head.requires_grad_(False).eval()
            found = measure_rounds(target, case.drafter(head), case.length, rounds)
            figures.add(name, {**found, "tau_that_pays": found["round_ms"] / plain_ms})
