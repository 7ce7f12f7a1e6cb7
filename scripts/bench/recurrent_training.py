"""Part `training` of recurrent.py: a step of recurrent_drafting.train against the published recipe.

The published recipe (apple/ml-recurrent-drafter, train/ and cmd/train.py at bd8586b) is reproduced
operation by operation: every chat is padded; embeddings are rolled left once per head; the logits
of all heads and positions are stacked and copied to float32 (accelerate widens a model's outputs);
the loss is the sum over heads of the mean cross-entropy on shifted contiguous copies; each head and
k = 1 .. 5 has a separate top-k over the complete vocabulary; every figure is fetched from the
device at once; weights are float32 under bfloat16 autocast, with torch's AdamW and the norm clipped
at 1. Its other costs (Trainer, data loader, gradient exchange of an unused lm_head) are left out,
which makes it faster here.
"""

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from jobs.paths import resolve_model
from recurrent_drafting.head import HeadConfig, RecurrentHead
from recurrent_drafting.predictions import PREDICTIONS
from scripts.bench.common import (
    StepRecorder,
    check_losses,
    goal,
    loop_config,
    medians,
    ratio,
    read_chat_samples,
    take_turns,
    train_steps,
)
from scripts.bench.padded import pad_rows
from scripts.bench.peak_memory import peak_bytes
from training.data.packing import PackedData, Sample, collate
from training.features.states import TargetStates
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.losses.config import CROSS_ENTROPY
from training.models.build import dtype_of, load_causal_lm
from training.objectives import freeze
from training.optimizer_config import OptimizerConfig

IGNORED = -100
TOP_K = 5
GOAL_OVER_PUBLISHED, GOAL_OVER_LONGEST, GOAL_PEAK = 4.0, 2.0, 1 / 3


class Published(nn.Module):
    """Published model, which computes with a head's modules.

    The forward over padded ids returns all logits [heads, B, T, V] in float32.
    """

    def __init__(self, target: Any, head: RecurrentHead, heads: int, autocast: bool) -> None:
        super().__init__()
        self.head, self.heads, self.autocast = head, heads, autocast
        self.targets = [target]  # in a list, so that it is not a trained module

    def output(self, features: Tensor) -> Tensor:
        """Return the logits of features, after the published residual blocks."""
        for linear in self.head.linears:
            features = features + F.silu(linear(features))
        return F.linear(features, self.head.output)

    def forward(self, ids_BT: Tensor, attention_BT: Tensor) -> Tensor:
        target = self.targets[0]
        with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=self.autocast):
            with torch.inference_mode():
                hidden_BTH = target.base_model(
                    input_ids=ids_BT, attention_mask=attention_BT, use_cache=False
                )[0]
                embedded_BTH = target.get_input_embeddings()(ids_BT)
            hidden_BTH, embedded_BTH = hidden_BTH.clone(), embedded_BTH.clone()
            state_BTH = torch.zeros_like(hidden_BTH)
            logits = []
            for _ in range(self.heads):
                embedded_BTH = torch.roll(embedded_BTH, -1, dims=1)
                state_BTH = F.silu(self.head.rnn_w(embedded_BTH) + self.head.rnn_u(state_BTH))
                logits.append(self.output(torch.cat([hidden_BTH, state_BTH], dim=-1)))
            return torch.stack(logits, dim=0).float()


def published_loss(logits_KBTV: Tensor, labels_BT: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Return the sum of the heads' mean cross-entropies, and every head's loss and accuracies."""
    total = torch.zeros((), device=labels_BT.device)
    log: dict[str, float] = {}
    for i in range(len(logits_KBTV)):
        logits_NV = logits_KBTV[i, :, : -(2 + i)].contiguous().view(-1, logits_KBTV.shape[-1])
        labels_N = labels_BT[:, 2 + i :].contiguous().view(-1)
        loss = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED)
        total = total + loss
        supervised_N = labels_N != IGNORED
        for k in range(1, TOP_K + 1):
            best_Nk = logits_NV.topk(k, dim=-1).indices[supervised_N]
            right_N = (best_Nk == labels_N[supervised_N][:, None]).any(dim=-1)
            log[f"redrafter{i}_top{k}"] = right_N.float().mean().item()
        log[f"redrafter{i}_loss"] = loss.item()
    return total, log


class PublishedSide:
    """Optimizer steps of the published recipe over the chats in turn.

    length: tokens that every chat is padded to, 0 for the longest of its batch.
    """

    def __init__(
        self, chosen: Any, target: Any, head: RecurrentHead, samples: Sequence[Sample], length: int
    ) -> None:
        self.chosen, self.samples, self.length, self.place = chosen, samples, length, 0
        autocast, copied = chosen.dtype == "bfloat16", copy.deepcopy(head)
        self.model = Published(target, copied, chosen.heads, autocast).to(chosen.device)
        self.optimizer = torch.optim.AdamW(copied.parameters(), lr=1e-3, weight_decay=0.0)

    def __call__(self) -> float:
        """Take a step for warm-up, then time a round and return its supervised tokens/s."""
        self.step()
        began, supervised = time.perf_counter(), 0
        for _ in range(self.chosen.steps):
            supervised += self.step()
        return supervised / (time.perf_counter() - began)

    def step(self) -> int:
        """Take one optimizer step and return its supervised tokens."""
        supervised = 0
        for _ in range(self.chosen.forwards):
            rows = self.next_rows()
            self.backward(rows)
            supervised += sum(int(row.mask.sum()) for row in rows)
        nn.utils.clip_grad_norm_(self.model.head.parameters(), 1.0).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return supervised

    def loss(self, rows: Sequence[Sample], length: int) -> Tensor:
        """Return the loss of chats padded to `length` tokens, or to the longest chat."""
        batch = {key: part.to(self.chosen.device) for key, part in pad_rows(rows, length).items()}
        labels_BT = batch["input_ids"].where(batch["supervised"], IGNORED)
        return published_loss(self.model(batch["input_ids"], batch["attention_mask"]), labels_BT)[0]

    def backward(self, rows: Sequence[Sample]) -> None:
        """Run one forward over chats and add its gradient to the head's."""
        (self.loss(rows, self.length) / self.chosen.forwards).backward()

    def next_rows(self) -> list[Sample]:
        """Return the chats of the next forward."""
        first, self.place = self.place, self.place + self.chosen.rows
        return [self.samples[i % len(self.samples)] for i in range(first, self.place)]


class OurSide:
    """Steps of training/loop.py on packed rows, with hard labels and the target's states."""

    def __init__(self, chosen: Any, target: Any, head: RecurrentHead, data: PackedData) -> None:
        self.chosen, self.data, self.states = chosen, data, TargetStates(target)
        self.head = copy.deepcopy(head).to(chosen.device, dtype_of(chosen.dtype))
        self.objective = self._objective(self.head)

    def _objective(self, head: RecurrentHead) -> HeadObjective:
        loss = HeadLossConfig(CROSS_ENTROPY, predict_n_tokens=self.chosen.heads)
        return HeadObjective(PREDICTIONS, head, self.states, loss)

    def __call__(self) -> float:
        """Train a copy of the head and return supervised tokens/s."""
        chosen, recorder, head = self.chosen, StepRecorder(), copy.deepcopy(self.head)
        tokens = self.data.rows_per_step * self.data.capacity
        part = min(tokens, chosen.rows * chosen.max_length)
        optimizer = OptimizerConfig(lr=1e-3)
        loop = loop_config(
            chosen.steps + 1, tokens, chosen.dtype, optimizer, micro_batch_tokens=part
        )
        objective = self._objective(head)
        train_steps("ours", objective, head, self.data, loop, chosen.device, recorder)
        return recorder.rate("supervised_tokens")


@torch.no_grad()
def compare_losses(
    ours: OurSide, theirs: PublishedSide, samples: Sequence[Sample], capacity: int
) -> dict[str, float]:
    """Return both sides' losses on the same chats and weights; exit if they differ."""
    rows = [[i] for i in range(len(samples))]
    batch = collate(samples, rows, capacity, ours.chosen.device)
    mine = float(ours.objective(batch)[0]) / batch.supervised
    published = float(theirs.loss(samples, 0))
    check_losses(mine, published)
    return {"ours": mine, "published": published}


def run(chosen: Any) -> dict[str, Any]:
    """Measure the rates of all sides in turn, their peak memory, and the padding of batches."""
    folder, dtype = resolve_model(chosen.target), dtype_of(chosen.dtype)
    packed = freeze(load_causal_lm(folder, dtype)).to(chosen.device)
    eager: Any = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=False, dtype=dtype, attn_implementation="sdpa"
    )
    eager = freeze(eager).to(chosen.device)
    context = chosen.context or min(chosen.max_length, packed.config.max_position_embeddings)
    samples, account = read_chat_samples(chosen.target, chosen.chats, context)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
    samples = [samples[i] for i in order.tolist()]
    torch.manual_seed(0)
    width = packed.config.hidden_size
    shape = HeadConfig(packed.config.vocab_size, width, 2 * width, chosen.num_draft_layers)
    head = RecurrentHead(shape)
    tokens = account.tokens / len(samples) * chosen.rows * chosen.forwards
    data = PackedData(samples, context, max(1, round(tokens / context)), 0)
    ours = OurSide(chosen, packed, head, data)
    fixed, longest = (
        PublishedSide(chosen, eager, head, samples, length) for length in (chosen.max_length, 0)
    )
    same = compare_losses(ours, fixed, samples[:4], context)
    peaks = measure_peaks(ours, fixed, longest)
    sides: dict[str, Callable[[], float]] = {
        "ours": ours,
        "published": fixed,
        "published_to_longest": longest,
    }
    figures = take_turns(sides, chosen.rounds)
    slots = account.tokens / (len(samples) * chosen.max_length)
    over = {name: ratio(figures, "ours", name) for name in ("published", "published_to_longest")}
    over_fixed, over_longest = (one["median"] for one in over.values())
    return {
        "goals": judge_goals(over_fixed, over_longest, peaks["ours"] / peaks["published"]),
        "supervised_tokens_per_second": medians(figures),
        **{f"ours_over_{name}": one for name, one in over.items()},
        "peak_bytes": peaks,
        **{f"peak_of_{name}_over_ours": peaks[name] / peaks["ours"] for name in over},
        "share_of_positions_with_a_token": {"ours": data.fill, "published": slots},
        "supervised_share_of_tokens": data.supervised / data.tokens,
        "loss_on_the_same_chats": same,
    }


def judge_goals(
    over_published: float, over_longest: float, peak: float
) -> dict[str, dict[str, Any]]:
    """Compare every goal with the figures. peak: peak memory over the published recipe's."""
    published, longest = over_published >= GOAL_OVER_PUBLISHED, over_longest >= GOAL_OVER_LONGEST
    padded_to_longest = f"{GOAL_OVER_LONGEST:g}x the same, padded to the longest row"
    return {
        f"{GOAL_OVER_PUBLISHED:g}x the published recipe": goal(over_published, published),
        padded_to_longest: goal(over_longest, longest),
        "a third of its peak memory": goal(peak, peak <= GOAL_PEAK),
    }


def measure_peaks(ours: OurSide, fixed: PublishedSide, longest: PublishedSide) -> dict[str, int]:
    """Return side -> peak bytes of a forward and backward pass over equally many positions."""
    chosen, data = ours.chosen, ours.data
    rows = max(1, chosen.rows * chosen.max_length // data.capacity)
    batch = collate(data.samples, [data.row(i) for i in range(rows)], data.capacity, chosen.device)
    chats = fixed.samples[: chosen.rows]
    passes: dict[str, Callable[[], None]] = {
        "ours": lambda: ours.objective(batch)[0].backward(),
        "published": lambda: fixed.backward(chats),
        "published_to_longest": lambda: longest.backward(chats),
    }
    for one in passes.values():
        one()  # makes the gradients, which stay
    found = {name: peak_bytes(one, chosen.device) for name, one in passes.items()}
    for module in (ours.objective, fixed.model, longest.model):
        module.zero_grad(set_to_none=True)
    return found
