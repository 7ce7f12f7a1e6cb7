"""Drafters with a draft vocabulary: the laws of decoding, both backends, and damaged folders.

Shapes: B rows, N new tokens, D tokens of the draft vocabulary, V vocabulary.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.ouroboros import Ouroboros
from decoding.drafters.trees.graph import GraphDrafter
from decoding.drafters.trees.multi_candidate import MultiCandidate
from decoding.drafters.trees.ranked import RankedTree
from decoding.drafters.trees.static import StaticTree
from decoding.drafters.with_lookup import ChainWithLookup
from decoding.errors import UserError
from decoding.interfaces import Proposal, Target
from decoding.loop import decode
from decoding.models.draft_vocabulary import D2T, draft_vocab_size, restrict_head, token_ids
from decoding.models.load import load_target
from decoding.sampling.warpers import Warper
from tests.support.restricted import even, restricted, restricted_table
from tests.support.tiny_targets import VOCABULARY, hf_model, random_prompts
from training.models.build import load_causal_lm

from . import test_law_of_gain as gains
from . import test_laws as laws
from .law_3 import FEW_DRAWS, P_LIMIT, law_holds
from .rows import DrafterRow, draft_table

IDS_D = torch.tensor([0, 2, 3, 9, 10, 30, 31, 47])
KINDS: dict[str, Callable[[Target], ChainDrafter]] = {
    "chain": lambda model: ChainDrafter(model=model),
    "multi_candidate": lambda model: MultiCandidate(model=model, branching=(3, 2)),
    "static_tree": lambda model: StaticTree(model=model),
    "ranked_tree": lambda model: RankedTree(model=model, frontier=3, max_nodes=10),
    "ranked_tree_picked": lambda model: RankedTree(
        model=model, frontier=3, max_nodes=10, children="top_k"
    ),
    "graph": lambda model: GraphDrafter(model=model, frontier=3),
    "ouroboros": lambda model: Ouroboros(model=model),
    "chain_with_lookup": lambda model: ChainWithLookup(model=model, min_match=2),
}
BRIEF = ("chain",)


def kinds(names: tuple[str, ...] = tuple(KINDS), brief: tuple[str, ...] = BRIEF) -> list:
    """Return drafters as parameters of a test; those not in `brief` run in the long suite."""
    return [
        pytest.param(name, marks=[pytest.mark.long] * (name not in brief), id=name)
        for name in names
    ]


def row_of(name: str) -> DrafterRow:
    """Return a row of the laws whose model drafts the even half of the vocabulary."""
    rules = ("greedy", "token", "block", "coupled") if name == "chain" else ("greedy", "token")
    return DrafterRow(
        f"{name}_of_half_the_tokens",
        make=lambda kit: KINDS[name](restricted(kit.draft_model, even(kit.draft_model))),
        rules=rules,
        gamma=6 if name == "ouroboros" else None,
    )


@pytest.mark.parametrize("name", kinds())
def test_law_1_holds(name: str) -> None:
    laws.test_law_1_greedy_output_is_the_targets_own(row_of(name))


@pytest.mark.parametrize("name", kinds())
def test_law_2_holds(name: str) -> None:
    laws.test_law_2_coupled_output_is_the_targets_own_sample(row_of(name), "all")


@pytest.mark.parametrize("ids", [[0, 2, 4], [3], [0, 1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("name", kinds(("chain", "multi_candidate", "ranked_tree", "static_tree")))
def test_law_3_holds(name: str, ids: list[int]) -> None:
    model = restricted_table(draft_table(), torch.tensor(ids))
    assert law_holds(KINDS[name](model), "token", "hot_top_p", draws=FEW_DRAWS) > P_LIMIT


def test_law_3_holds_for_block_verification() -> None:
    model = restricted_table(draft_table(), torch.tensor([0, 2, 4]))
    assert law_holds(ChainDrafter(model=model), "block", "hot_top_p") > P_LIMIT


def test_law_3_rejects_p_cut_to_the_draft_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict the target's distribution to the tokens of q, as if only they could be emitted."""
    kept_D, original = torch.tensor([0, 2, 3, 4]), Warper.probs

    def cut(self: Warper, logits_RV: Tensor) -> Tensor:
        p_RV = original(self, logits_RV)
        cut_RV = torch.zeros_like(p_RV).index_copy_(-1, kept_D, p_RV[..., kept_D])
        return cut_RV / cut_RV.sum(-1, keepdim=True)

    monkeypatch.setattr(Warper, "probs", cut)
    model = restricted_table(draft_table(), kept_D)
    assert law_holds(ChainDrafter(model=model), "token", "plain") < P_LIMIT


@pytest.mark.parametrize("rule", ["greedy", "token", "block", "coupled"])
def test_law_4_a_drafter_that_knows_the_text_gains_its_closed_form(rule: str) -> None:
    """Draft from the tokens of the text alone; the control lacks one of them."""
    gamma, rounds = 4, 3
    prompts, plain = gains.sure_texts(False, rule, (gamma + 1) * rounds)
    settings = laws.with_rule(rule, num_draft_tokens=gamma, max_new_tokens=(gamma + 1) * rounds)
    kit, found = gains.kit_of(True, True), {token for g in plain for token in g.tokens}
    ids_D = torch.tensor(sorted(found))
    drafter = ChainDrafter(model=restricted(kit.draft_model, ids_D))
    drafted = decode(kit.target, drafter, prompts, settings)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert [g.block_efficiency for g in drafted] == [gamma + 1] * len(prompts)
    lacking = ChainDrafter(model=restricted(kit.draft_model, ids_D[1:]))
    worse = decode(kit.target, lacking, prompts, settings)
    assert [g.tokens for g in worse] == [g.tokens for g in plain]
    assert min(g.block_efficiency for g in worse) < gamma + 1


@pytest.mark.parametrize("rule", ["greedy", "token", "coupled"])
def test_law_4_an_adversarial_drafter_changes_nothing(rule: str) -> None:
    prompts, plain = gains.sure_texts(True, rule, 24)
    kit = gains.kit_of(True, False, [g.tokens for g in plain])
    drafter = row_of("chain").make(kit)
    drafted = decode(kit.target, drafter, prompts, laws.with_rule(rule, max_new_tokens=24))
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert all(g.block_efficiency >= 1 for g in drafted)


@pytest.mark.parametrize(
    ("name", "rule"), [("chain", "token"), ("chain", "coupled"), ("ranked_tree", "greedy")]
)
def test_law_5_ragged_batches_equal_single_rows(name: str, rule: str) -> None:
    laws.test_law_5_ragged_batches_equal_single_rows(row_of(name), rule)


@pytest.mark.parametrize("rule", ["greedy", "token", "coupled"])
def test_no_token_outside_the_draft_vocabulary_is_drafted(rule: str) -> None:
    target, _, draft_model = laws.models()
    drafted: set[int] = set()

    class Recording(ChainDrafter):
        def propose(self, *args: object) -> Proposal:
            proposal = super().propose(*args)  # type: ignore[arg-type]
            drafted.update(proposal.tokens_BN.flatten().tolist())
            return proposal

    settings, prompts = laws.with_rule(rule, max_new_tokens=48), random_prompts(8)
    decode(target, Recording(model=restricted(draft_model, even(draft_model))), prompts, settings)
    assert len(drafted) > 10 and not any(token % 2 for token in drafted)
    decode(target, Recording(model=draft_model), prompts, settings)
    assert any(token % 2 for token in drafted), "the control drafts odd tokens"


# ------------------------------------------------------------------------------------ the folder
@pytest.fixture(scope="module", params=["llama_mha", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model that drafts from IDS_D; the llama's head was tied."""
    model = hf_model(request.param, dtype=torch.float32)
    restrict_head(model, IDS_D)
    path = tmp_path_factory.mktemp("restricted")
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("backend", ["native", "hf"])
def test_a_loaded_folder_gives_the_complete_models_logits(folder: Path, backend: str) -> None:
    family = json.loads((folder / "config.json").read_text())["model_type"]
    complete = hf_model("llama_mha" if family == "llama" else "qwen3", dtype=torch.float32)
    model = load_target(folder, backend=backend)
    tokens_BN = torch.tensor([[5, 7, 46, 1, 20]])  # most of them outside the draft vocabulary
    model.open(1, 16)
    with torch.inference_mode():
        logits_BNV, hidden_BNC = model.forward(tokens_BN)
        expected_BNV = complete(tokens_BN).logits
    assert logits_BNV.shape == (1, 5, VOCABULARY)
    torch.testing.assert_close(logits_BNV[..., IDS_D], expected_BNV[..., IDS_D], rtol=0, atol=2e-4)
    assert int(logits_BNV.isneginf().sum()) == 5 * (VOCABULARY - len(IDS_D))
    torch.testing.assert_close(model.lm_head(hidden_BNC), logits_BNV)
    stored = sum(
        t.numel() for name, t in load_file(folder / "model.safetensors").items() if name != D2T
    )
    assert model.num_parameters == stored, "the head counts its own rows"
    assert draft_vocab_size(folder) == len(IDS_D)


def test_both_backends_draft_the_same(folder: Path) -> None:
    target = load_target(folder.parent / folder.name, dtype="float64")
    texts = []
    for backend in ("native", "hf"):
        drafter = ChainDrafter(folder, backend=backend, dtype="float64")
        done = decode(target, drafter, random_prompts(6), laws.Settings(max_new_tokens=20))
        texts.append([(g.tokens, g.accepted_by_depth) for g in done])
    assert texts[0] == texts[1]
    assert all(set(tokens) <= set(IDS_D.tolist()) for tokens, _ in texts[0])


def test_training_loads_the_folder_with_its_draft_vocabulary(folder: Path) -> None:
    model = load_causal_lm(folder, torch.bfloat16)
    ids_D = token_ids(model)
    assert ids_D is not None and ids_D.tolist() == IDS_D.tolist()
    assert model.lm_head.weight.dtype == torch.bfloat16 and len(model.lm_head.weight) == len(IDS_D)
    assert model.d2t.dtype == torch.long


def config(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return rewrite


def duplicate(state: dict[str, Tensor]) -> None:
    state[D2T][3] = state[D2T][2] - 1


def past_the_end(state: dict[str, Tensor]) -> None:
    state[D2T][-1] += 1


def negative(state: dict[str, Tensor]) -> None:
    state[D2T][0] = -1


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "more tokens than the vocabulary": (
        config(draft_vocab_size=VOCABULARY + 1),
        "draft_vocab_size is 49, expected at most vocab_size 48",
    ),
    "a negative size": (config(draft_vocab_size=-1), "draft_vocab_size is -1, expected a whole"),
    "another size": (
        config(draft_vocab_size=7),
        r"'lm_head.weight' has shape \[8, 32\], expected \[7, 32\].*draft_vocab_size",
    ),
    "a full vocabulary": (config(draft_vocab_size=0), r"expected \[48, 32\]"),
    "a tied head": (
        config(tie_word_embeddings=True),
        "tie_word_embeddings is true, expected false",
    ),
    "duplicate ids": (tensors(duplicate), "'d2t' plus its index is not a rising list of token ids"),
    "an id past the vocabulary": (tensors(past_the_end), "is not a rising list .* below 48"),
    "a negative id": (tensors(negative), "is not a rising list of token ids"),
    "too few ids": (
        tensors(lambda state: state.update(d2t=state[D2T][:-1].clone())),
        r"'d2t' has shape \[7\], expected \[8\]",
    ),
    "no ids": (tensors(lambda state: state.pop(D2T)), "no tensor 'd2t', expected one of shape"),
    "ids of another dtype": (
        tensors(lambda state: state.update(d2t=state[D2T].float())),
        "'d2t' is stored as F32, expected I64",
    ),
    "other rows": (
        tensors(
            lambda state: state.update({"lm_head.weight": state["lm_head.weight"][1:].clone()})
        ),
        r"'lm_head.weight' has shape \[7, 32\], expected \[8, 32\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_draft_vocabulary_is_refused(damage: str, folder: Path, tmp_path: Path) -> None:
    change, message = DAMAGED[damage]
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    change(copied)
    for load in (
        lambda: load_target(copied),
        lambda: load_target(copied, backend="hf"),
        lambda: load_causal_lm(copied, torch.float32),
    ):
        with pytest.raises(UserError, match=message) as error:
            load()
        assert str(copied) in str(error.value)


@pytest.mark.parametrize("parallel", ["tp", "layers"])
def test_a_model_over_processes_has_no_draft_vocabulary(folder: Path, parallel: str) -> None:
    with pytest.raises(UserError, match="has a draft vocabulary of 8 tokens, expected all 48"):
        load_target(folder, parallel=parallel, processes=2)
