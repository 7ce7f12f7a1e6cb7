"""A test of an engine's sampling with a drafter against the target's exact distribution.

It is law 3's: a target and a drafter of five symbols with random weights, whose first three tokens
have a distribution that 31 forwards give exactly. A drafted text can be wrong in many ways that no
reader sees; this test finds a bias of some percent.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.drafters.parallel import MASK_TOKEN, TRAINED_TOKENS
from decoding.errors import UserError
from decoding.models.load import load_target
from decoding.sampling.warpers import Warper
from eval.statistics.joint_law import LENGTH, P_LIMIT, Triple, joint, p_value
from heads.block.kind import KIND as BLOCK
from heads.block.shape import BlockConfig
from heads.eagle.kind import FIRST, KIND, PARALLEL
from heads.eagle.model import EagleConfig
from heads.medusa.kind import KIND as MEDUSA
from heads.medusa.model import MedusaConfig
from jobs.files import write_text
from serving.engines.heads import EAGLE, EAGLE3, HEADS, P_EAGLE, PARD
from serving.engines.interface import EngineConfig, Method, Sampling
from serving.engines.process import EngineProcess
from serving.engines.registry import ENGINES
from training.heads.checkpoint import save_head
from training.heads.kind import HeadKind

DRAWS = 2_000
A_BATCH = 250  # draws of one request to the engine
ROWS = 50  # of these decoded together, if the engine can
SYMBOLS, LAYERS, CONTEXT, DRAFTED = 5, 2, 32, 3
WIDTH = 64  # of two attention heads of 32, the smallest that vLLM has for CPUs
SPREAD = 0.2  # standard deviation of random weights
PROMPT = [3, 1, 4, 2, 4]


@dataclass(frozen=True)
class Verdict:
    """What the test found for one engine, method and sampling."""

    engine: str
    version: str
    method: str
    temperature: float
    top_k: int
    top_p: float
    draws: int
    p_value: float

    @property
    def is_biased(self) -> bool:
        return self.p_value < P_LIMIT

    @property
    def detail(self) -> str:
        """A sentence with the test and its outcome."""
        found = "are not of" if self.is_biased else "fit"
        return (
            f"{self.draws} samples of three tokens of a tiny model {found} its exact distribution "
            f"(p = {self.p_value:.1e}; {self.engine} {self.version})"
        )


def write_model(folder: Path, seed: int, spread: float = SPREAD, **more: Any) -> Path:
    """Write a random model of five symbols.

    spread: standard deviation of its weights. more: further values of config.json.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=SYMBOLS,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **more,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_drafter(method: str, folder: Path) -> str:
    """Write a random drafter of a method; return its folder, empty if the method has none."""
    if method == "draft_model":
        return str(write_model(folder, seed=2))
    if method == PARD:
        return str(write_model(folder, 2, **{MASK_TOKEN: SYMBOLS - 1, TRAINED_TOKENS: DRAFTED}))
    if method not in HEADS:
        return ""
    kind, shape = _random_head(method)
    head = kind.empty(shape)
    torch.manual_seed(2)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=SPREAD)
    save_head(kind.layout, shape, head, folder)
    return str(folder)


def _random_head(method: str) -> tuple[HeadKind, Any]:
    """Return the kind of a method's head, and its shape for a model of `write_model`."""
    sizes: dict[str, Any] = {"vocab_size": SYMBOLS, "hidden_size": WIDTH}
    if method == MEDUSA.name:
        return MEDUSA, MedusaConfig(**sizes, num_heads=DRAFTED)
    sizes |= {"num_heads": 2, "num_kv_heads": 2, "head_dim": WIDTH // 2, "intermediate_size": 24}
    if method in (EAGLE, EAGLE3, P_EAGLE):
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        sizes |= {"rope": rope, "max_positions": CONTEXT}
        if method == EAGLE:
            return FIRST, EagleConfig(**sizes, taps=(), predicts_states=True, fc_norm=False)
        eagle = EagleConfig(**sizes, taps=(1,))
        if method == EAGLE3:
            return KIND, eagle
        return PARALLEL, dataclasses.replace(eagle, parallel=DRAFTED, mask_token_id=SYMBOLS - 1)
    block: dict[str, Any] = {
        "target_layers": LAYERS,
        "block_size": DRAFTED + 1,
        "mask_token_id": SYMBOLS - 1,
    }
    return BLOCK, BlockConfig(**sizes, **block, taps=(1,))


def exact_law(target_folder: Path, sampling: Sampling) -> dict[Triple, float]:
    """Return the exact distribution of the first three tokens after PROMPT."""
    target = load_target(target_folder, backend="hf", dtype="float32", device="cpu")
    warper = Warper(sampling.temperature, sampling.top_k, sampling.top_p, 0.0)

    def next_row(text: list[int]) -> list[float]:
        target.open(1, CONTEXT)
        logits_V = target.forward(torch.tensor([text]))[0][0, -1]
        return list(warper.probs(logits_V.double()).tolist())

    with torch.inference_mode():
        return joint(next_row, PROMPT)


def judge_sampling(
    engine: str, python: str, method: str, sampling: Sampling, log: Path, draws: int = DRAWS
) -> Verdict:
    """Sample with an engine and a drafter, and compare with the exact distribution.

    sampling: temperature, top_k and top_p of the test. log: file for what the engine prints.
    """
    with tempfile.TemporaryDirectory() as name:
        target = write_model(Path(name, "target"), seed=1)
        drafter = write_drafter(method, Path(name, "drafter"))
        config = EngineConfig(
            target=str(target),
            dtype="float32",
            device="cpu",
            threads=1,
            max_length=CONTEXT,
            batch_size=ROWS,
            eager=True,
            method=Method(method, drafter, DRAFTED),
        )
        counts: Counter[Triple] = Counter()
        with EngineProcess(ENGINES[engine].worker, config, log, python) as process:
            for first in range(0, draws, A_BATCH):  # rows take the seeds from the first on
                request = dataclasses.replace(
                    sampling, seed=first, max_new_tokens=LENGTH + 2, ignore_eos=True
                )
                result = process.decode([PROMPT] * A_BATCH, request)
                counts.update(tuple(answer.tokens[:LENGTH]) for answer in result.answers)
        return Verdict(
            engine=engine,
            version=process.version,
            method=method,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            draws=counts.total(),
            p_value=p_value(counts, exact_law(target, sampling)),
        )


def read_or_test(
    file: Path, engine: str, python: str, methods: Sequence[str], sampling: Sampling
) -> list[Verdict]:
    """Return the verdicts on an engine's methods, from the run folder's file if it has them.

    A method whose test fails has none, and the failure is printed: the run has been measured.
    """
    have = [Verdict(**values) for values in json.loads(file.read_text())] if file.is_file() else []
    place = (sampling.temperature, sampling.top_k, sampling.top_p)
    found = []
    for method in methods:
        same = [v for v in have if (v.method, v.temperature, v.top_k, v.top_p) == (method, *place)]
        if not same:
            log = file.with_name(f"{engine}-sampling-test.log")
            print(f"engines: testing how {engine} samples with {method}, {DRAWS} draws", flush=True)
            try:
                same = [judge_sampling(engine, python, method, sampling, log)]
            except UserError as error:
                print(f"the sampling of {method} is not tested: {error}", file=sys.stderr)
                continue
            have += same
            write_text(file, json.dumps([dataclasses.asdict(verdict) for verdict in have]))
        found += same
    return found
