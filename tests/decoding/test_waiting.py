"""How often a round waits for the device. On a CPU the host is made to believe that it runs ahead, and every way of reading a tensor is counted;
on a GPU, CUDA's sync debug mode is the judge. The rules that decide on the device are tested against their twins here.

Shapes: B rows, N drafted tokens, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import cuda, noise, verify
from decoding.chain import ChainDrafter
from decoding.chooser import Chooser
from decoding.drafter import Drafter, Proposal
from decoding.loop import Settings, decode, start
from decoding.policies import CostRatio
from decoding.sampling import Warper
from decoding.stopping import RoundCosts
from decoding.target import Target

from .rows import COSTS, ROWS, DrafterRow, Kit
from .tiny import hf_model, native_of, random_prompts

READERS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")


class Waits:
    """Waits counted inside `counting`: those that are meant, and stray ones, by name."""

    def __init__(self) -> None:
        self.meant = 0
        self.stray: list[str] = []
        self._meaning = False

    @contextmanager
    def counting(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        with patch.context() as context:
            for name in READERS:
                context.setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))
            context.setattr(torch, "tensor", self._counted("torch.tensor", torch.tensor))
            context.setattr(cuda, "tensor", self._free(cuda.tensor))
            context.setattr(cuda, "fill", self._free(cuda.fill))
            context.setattr(cuda, "read", self._read)
            yield

    def _counted(self, name: str, real: Any) -> Any:
        def reader(*given: Any, **named: Any) -> Any:
            if not self._meaning:
                self.stray.append(name)
            return real(*given, **named)

        return reader

    def _free(self, real: Any) -> Any:
        def function(*given: Any) -> Any:
            before, self._meaning = self._meaning, True
            result = real(*given)
            self._meaning = before
            return result

        return function

    def _read(self, *tensors: Tensor, real: Any = cuda.read) -> Any:
        self.meant += 1
        return self._free(real)(*tensors)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host believes that it runs ahead of the device, as on a GPU."""
    monkeypatch.setattr(cuda, "runs_ahead", lambda device: True)


def models(device: str = "cpu") -> tuple[Target, Target]:
    model = hf_model("llama")
    return native_of(model, device=device), native_of(model, noise=0.05, device=device)


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"verify": "token"},
    {"verify": "token", "top_k": 5, "top_p": 0.9},
    {"verify": "coupled"},
    {"verify": "coupled", "top_p": 0.8, "min_p": 0.01},
    {"verify": "block"},
    {"verify": "token", "stopping": "cost_ratio", "costs": RoundCosts(0.2, (1.0, 1.1, 1.2, 1.3))},
]


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    "way", WAYS, ids=lambda way: " ".join(str(v) for v in way.values() if isinstance(v, (str, float)))
)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("drafts", [True, False])
def test_a_round_waits_once(monkeypatch: pytest.MonkeyPatch, way: dict[str, Any], batch: int, drafts: bool) -> None:
    target, draft_model = models()
    assert target.backend == "native graph"
    settings = Settings(max_new_tokens=24, num_draft_tokens=3, **{"temperature": 1.0, **way})
    with torch.inference_mode():
        running = start(target, ChainDrafter(model=draft_model) if drafts else None, random_prompts(batch), settings)
        rounds, waits = 0, Waits()
        with waits.counting(monkeypatch):
            while running.rows:
                running.round()
                rounds += 1
    assert waits.stray == []
    assert waits.meant == rounds


CHAINS = ("chain", "self_speculation", "chain_with_lookup", "prompt_lookup", "suffix_lookup")
TREES = ("multi_candidate", "static_tree")  # under `token` each node is asked; the other trees ask while they grow


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (row, rule)
        for row in ROWS
        for rule in row.rules
        if row.name in CHAINS or (row.name in TREES and rule != "token")
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_rows_that_wait_once(monkeypatch: pytest.MonkeyPatch, row: DrafterRow, rule: str) -> None:
    target, draft_model = models()
    sampled: dict[str, Any] = {} if rule == "greedy" else {"temperature": 1.0, "verify": rule}
    settings = Settings(max_new_tokens=16, num_draft_tokens=3, stopping="fixed", costs=COSTS, **sampled)
    drafter = row.make(Kit(target, models()[0], draft_model, ()))
    with torch.inference_mode():
        running = start(target, drafter, random_prompts(2), settings)
        rounds, waits = 0, Waits()
        with waits.counting(monkeypatch):
            while running.rows:
                running.round()
                rounds += 1
    assert (waits.stray, waits.meant) == ([], rounds)


@pytest.mark.parametrize("way", WAYS[:-1], ids=lambda way: str(way.get("verify", "greedy")))
def test_running_ahead_changes_no_token(monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]) -> None:
    settings = Settings(max_new_tokens=32, num_draft_tokens=3, **{"temperature": 1.0, **way})
    texts = []
    for ahead in (False, True):
        monkeypatch.setattr(cuda, "runs_ahead", lambda device, ahead=ahead: ahead)
        target, draft_model = models()
        made = decode(target, ChainDrafter(model=draft_model), random_prompts(4), settings)
        texts.append([row.tokens for row in made])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["q", "point mass", "equal"])
def test_rules_on_the_device_equal_their_twins(rule: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same outcome for random rows of every draft count, and for p = q, where no residual is left."""
    generator = torch.Generator().manual_seed(1)
    chooser = Chooser(Warper(1.0), rule, 5, 7, torch.device("cpu"))
    function, outcomes = getattr(verify, rule), []
    for trial in range(60):
        counts_B = [trial % 5, 4, (trial * 7) % 5]
        logits_BNV = torch.randn(3, 5, 7, generator=generator)
        q_BNV = (logits_BNV[:, :4] if kind == "equal" else torch.randn(3, 4, 7, generator=generator)).softmax(-1)
        tokens_BN = q_BNV.flatten(0, 1).multinomial(1, generator=generator).view(3, 4)
        proposal = Proposal(tokens_BN, counts_B, None, None if kind == "point mass" else q_BNV)
        chooser.begin([noise.key(trial, b) for b in range(3)], [trial] * 3, [9, 4, 7], 5)
        host = function(logits_BNV, proposal, chooser)
        with monkeypatch.context() as context:
            context.setattr(cuda, "runs_ahead", lambda device: True)
            assert function(logits_BNV, proposal, chooser) == host
        outcomes += host.accepted_B
    assert {0, 1, 2 if kind == "point mass" else 4} <= set(outcomes)


def test_cost_ratio_by_the_round() -> None:
    """Without looking at tokens it takes the length with the most expected tokens a millisecond, and learns acceptance from rounds."""
    policy = CostRatio(RoundCosts(0.1, (1.0, 1.01, 1.02, 1.03, 1.04)), per_token=False)
    assert policy.reads == "nothing" and policy.more(1, None)
    for _ in range(300):
        policy.update(4, 4)
    assert policy.acceptance > 0.95 and policy.limit(4) == 4 and policy.limit(2) == 2
    for _ in range(900):  # rounds of one test each, which old rounds of four outweigh for long
        policy.update(4, 0)
    assert policy.acceptance < 0.05 and policy.limit(4) == 0
    for _ in range(600):  # half of the tested tokens pass: 1 + 0.5 over 1.11 ms, 1.75 over 1.22, 1.875 over 1.33 ...
        policy.update(4, 1)
    assert policy.acceptance == pytest.approx(0.5, abs=0.02)
    assert policy.limit(4) == 2


def test_reading_packs_whatever_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "runs_ahead", lambda device: True)
    assert cuda.read(
        torch.tensor([[1, 2], [3, 31999]]), torch.tensor([0.1], dtype=torch.float64), torch.zeros(2, 0)
    ) == [
        [[1, 2], [3, 31999]],
        [0.1],
        [[], []],
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.get("verify", "greedy")))
@pytest.mark.parametrize("drafts", [True, False])
def test_sync_debug_mode_finds_no_other_wait(way: dict[str, Any], drafts: bool) -> None:
    target, draft_model = models("cuda")
    drafter: Drafter | None = ChainDrafter(model=draft_model) if drafts else None
    settings = Settings(max_new_tokens=24, num_draft_tokens=3, **{"temperature": 1.0, **way})
    prompts = random_prompts(2)
    decode(target, drafter, prompts, settings)  # records every shape
    with torch.inference_mode():
        running = start(target, drafter, prompts, settings)
        with cuda.no_waiting(target.device):
            while running.rows:
                running.round()
