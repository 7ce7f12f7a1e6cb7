"""How often a round waits for the device. On a CPU the host is made to believe that it runs ahead, and every way of reading a tensor is counted;
on a GPU, CUDA's sync debug mode is the judge. The rules that decide on the device are tested against their twins here.

Shapes: B rows, N drafted tokens, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import cuda, noise, verify
from decoding.chain import ChainDrafter
from decoding.chooser import Chooser
from decoding.drafter import NO_NODE, Drafter, Proposal
from decoding.graph import GraphDrafter
from decoding.loop import Settings, decode, start
from decoding.policies import CostRatio
from decoding.sampling import Warper
from decoding.stopping import Fixed, RoundCosts
from decoding.target import Target
from decoding.trees import RankedTree
from decoding.with_lookup import LookupFirst

from .rows import COSTS, PICKED, ROWS, DrafterRow, Kit
from .tiny import hf_model, native_of, random_prompts

READERS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")
INDEXERS = ("__getitem__", "__setitem__")  # which wait where a list or a mask is the index


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
            for name in INDEXERS:
                context.setattr(Tensor, name, self._looked_at(name, getattr(Tensor, name)))
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

    def _looked_at(self, name: str, real: Any) -> Any:
        def indexer(tensor: Tensor, index: Any, *given: Any) -> Any:
            for part in index if isinstance(index, tuple) else (index,):
                if isinstance(part, list) or (isinstance(part, Tensor) and part.dtype == torch.bool):
                    self.stray.append(name)
            return real(tensor, index, *given)

        return indexer

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


TREE_RULES = ("greedy", "token", "coupled")
REAL = [row for row in ROWS if not row.name.startswith("oracle")]  # the test oracles are no product
REAL += [
    *PICKED,
    DrafterRow(
        "graph_with_early_lookup",
        make=lambda kit: LookupFirst(GraphDrafter(model=kit.draft_model, frontier=3), min_match=1),
        rules=TREE_RULES,
    ),
    DrafterRow(
        "budget_tree_with_early_lookup",
        make=lambda kit: LookupFirst(RankedTree(model=kit.draft_model, frontier=3, by_cost=True), min_match=1),
        rules=TREE_RULES,
    ),
]


def settings_of(rule: str, **fields: Any) -> Settings:
    sampled: dict[str, Any] = {} if rule == "greedy" else {"temperature": 1.0, "verify": rule}
    return Settings(
        **{"max_new_tokens": 16, "num_draft_tokens": 3, "stopping": "fixed", "costs": COSTS, **sampled, **fields}
    )


def waits_of(name: str, rounds: int, draft_steps: int) -> int:
    """The law: a round waits once, for what was accepted. Ouroboros looks phrases up on the host, so each forward of its model waits too."""
    return rounds + (draft_steps if name.startswith("ouroboros") else 0)


@lru_cache
def plain(rule: str) -> list[list[int]]:
    """What the target says by itself, with a host that does not run ahead."""
    return [row.tokens for row in decode(models()[0], None, random_prompts(3), settings_of(rule))]


@pytest.mark.parametrize(
    ("row", "rule"),
    [(row, rule) for row in REAL for rule in row.rules],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_row_waits_for_what_was_accepted_alone(
    monkeypatch: pytest.MonkeyPatch, row: DrafterRow, rule: str
) -> None:
    """And its output is that of a host that does not run ahead."""
    expected = plain(rule) if rule in ("greedy", "coupled") else None
    monkeypatch.setattr(cuda, "runs_ahead", lambda device: True)
    target, draft_model = models()
    drafter = row.make(Kit(target, target, draft_model, ()))
    with torch.inference_mode():
        running = start(target, drafter, random_prompts(3), settings_of(rule))
        done = [one.generation for one in running.rows]
        rounds, waits = 0, Waits()
        with waits.counting(monkeypatch):
            while running.rows:
                running.round()
                rounds += 1
    assert waits.stray == []
    assert waits.meant == waits_of(row.name, rounds, max(one.draft_steps for one in done))
    assert expected is None or [one.tokens for one in done] == expected


def test_a_round_that_asks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a graph that is merged and counted as for a host that waits anyway, and what an index may cost."""
    target, draft_model = models()
    drafter, waits = GraphDrafter(model=draft_model), Waits()
    with torch.inference_mode():
        running = start(target, drafter, random_prompts(2), settings_of("greedy"))
        monkeypatch.setattr(cuda, "runs_ahead", lambda device: True)
        with waits.counting(monkeypatch):
            running.round()
    assert set(waits.stray) == {"tolist"} and waits.meant == 1
    numbers_BN = torch.zeros(2, 3)
    with waits.counting(monkeypatch):
        numbers_BN[:, [0, 2]] += numbers_BN[numbers_BN > 0].sum()
    assert waits.stray[-3:] == ["__getitem__", "__getitem__", "__setitem__"]


ALONE = (
    "multi_candidate",
    "ranked_tree",
    "budget_tree",
    "graph",
    "recurrent",
    "recurrent_by_cost",
    "recurrent_drawn",
    "recurrent_drawn_by_cost",
)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, rule) for name in ALONE for rule in ("greedy", "token")]
    + [("budget_tree_picked", "token"), ("graph_picked", "token")],
)
def test_what_is_drafted_ahead_hangs_on_no_neighbour(name: str, rule: str) -> None:
    """Sizes and room come from the row's own rounds; how many nodes were drafted is told without the padding."""
    row = next(row for row in [*ROWS, *PICKED] if row.name == name)
    target, draft_model = models()
    drafter = row.make(Kit(target, target, draft_model, ()))
    prompts, settings = random_prompts(3, seed=3), settings_of(rule)
    together = decode(target, drafter, prompts, settings)
    for request, (prompt, expected) in enumerate(zip(prompts, together, strict=True)):
        (alone,) = decode(target, drafter, [prompt], settings, request_ids=[request])
        assert (alone.tokens, alone.rounds, alone.drafted, alone.tested_by_depth, alone.accepted_by_depth) == (
            expected.tokens,
            expected.rounds,
            expected.drafted,
            expected.tested_by_depth,
            expected.accepted_by_depth,
        )


@pytest.mark.parametrize("match", [0, 1, 2, 1000])
def test_a_graph_on_the_device_is_its_twin(monkeypatch: pytest.MonkeyPatch, match: int) -> None:
    """The same paths are proposed, copies of merged nodes among them."""
    target, draft_model = models()
    prompts, found, merged = random_prompts(12), [], 0
    for ahead in (False, True):
        monkeypatch.setattr(cuda, "runs_ahead", lambda device, ahead=ahead: ahead)
        drafter = GraphDrafter(model=draft_model, frontier=3, max_nodes=40, match=match, leaf_threshold=0.0)
        drafter.prepare(target, None)
        drafter.open(prompts, None, 64)
        chooser = Chooser(Warper(0.0), "greedy", 0, target.vocab_size, target.device)
        chooser.begin([], [], [], 5)
        proposal = drafter.propose(prompts, [4] * 9 + [3, 1, 0], [Fixed()] * 12, chooser)
        found.append([paths_of(proposal, row) for row in range(len(prompts))])
        merged += sum(len(pairs) for pairs in drafter._merged)
    assert found[0] == found[1]
    assert len(found[0][0]) > 10 and not found[0][-1]
    assert bool(merged) == (match < 2), "otherwise nothing is seen of merging"


def paths_of(proposal: Proposal, row: int) -> set[tuple[int, ...]]:
    """The paths of the nodes that a row counts, padding left out."""
    assert proposal.parents_BN is not None
    paths: list[tuple[int, ...]] = []
    for token, parent in list(zip(proposal.tokens_BN[row].tolist(), proposal.parents_BN[row].tolist()))[
        : proposal.counts_B[row]
    ]:
        paths.append((*(paths[parent] if parent >= 0 else ()), token) if parent != NO_NODE else ())
    return set(paths) - {()}


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize(
    ("row", "rule"),
    # The part of a target that drafts for it is recorded anew for every batch, which waits.
    [(row, rule) for row in REAL for rule in row.rules if not row.name.startswith("self_speculation")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_sync_debug_mode_finds_no_other_wait_in_any_row(row: DrafterRow, rule: str) -> None:
    target, draft_model = models("cuda")
    drafter = row.make(Kit(target, target, draft_model, ()))
    prompts, settings = random_prompts(2), settings_of(rule)
    decode(target, drafter, prompts, settings)  # records every shape
    with torch.inference_mode():
        running = start(target, drafter, prompts, settings)
        with cuda.no_waiting(target.device):
            while running.rows:
                running.round()
