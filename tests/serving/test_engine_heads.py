"""Which trained heads vLLM runs, and the folders that it loads. It runs them in its own tests."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.interfaces import Drafter
from heads.block.drafter import BlockDrafter
from heads.block.layouts import SERVED as LAYOUT
from heads.eagle.drafter import EagleDrafter
from heads.eagle.layouts import SERVED, SERVED_FIRST, SERVED_PARALLEL
from heads.eagle.model import EagleConfig, EagleHead
from heads.eagle.parallel import ParallelEagleDrafter
from heads.export import export
from heads.medusa.drafter import MedusaDrafter
from heads.medusa.layouts import VLLM
from heads.medusa.model import MedusaConfig, MedusaHeads
from serving.engines.conversion import for_vllm
from serving.engines.heads import ServedHead, served_head
from serving.engines.interface import EngineConfig, Method
from tests.support.block_heads import random_block
from training.heads.checkpoint import save_head

SIZES = {"vocab_size": 13, "hidden_size": 8, "target_layers": 4}


def block(**fields: Any) -> BlockDrafter:
    return BlockDrafter(head=random_block(SIZES, **fields))


def eagle_head(*taps: int, **fields: Any) -> EagleHead:
    sizes: dict[str, Any] = {
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 4,
        "intermediate_size": 12,
    }
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = EagleConfig(13, 8, **sizes, taps=taps, rope=rope, max_positions=64, **fields)
    return EagleHead(config)


def eagle(*taps: int) -> EagleDrafter:
    return EagleDrafter(head=eagle_head(*taps))


def stored(drafter: Drafter, folder: Path) -> Path:
    """Return the folder, with the head of an EAGLE or Medusa drafter in the layout of training."""
    if isinstance(drafter, MedusaDrafter):
        save_head(VLLM, drafter.config, drafter.heads, folder)
    elif isinstance(drafter, EagleDrafter):
        layout = SERVED_FIRST if drafter.config.predicts_states else SERVED
        save_head(layout, drafter.config, drafter.cache.head, folder)
    return folder


def medusa(**fields: Any) -> MedusaDrafter:
    heads = MedusaHeads(MedusaConfig(13, 8, num_heads=2, **fields))
    if fields.get("draft_vocab_size"):
        heads.token_ids_V = torch.tensor([1, 3, 4, 9])
    return MedusaDrafter(heads=heads)


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (eagle(1, 3), ServedHead("eagle3")),
        (
            EagleDrafter(head=eagle_head(predicts_states=True, fc_norm=False)),
            ServedHead("eagle"),
        ),
        (block(), ServedHead("dflash", 6)),
        (block(in_block_mask="causal", block_size=4), ServedHead("dflash", 3)),
        (block(draft_vocab_size=4), ServedHead("dflash", 6)),
        (medusa(), ServedHead("medusa", 2)),
        (medusa(shared=True), ServedHead("medusa", 2)),
    ],
    ids=[
        *("eagle3", "eagle1", "dflash", "jetspec", "dflash with a draft vocabulary"),
        *("medusa", "medusa with a shared projection"),
    ],
)
def test_heads_that_vllm_runs_have_a_method_and_a_length(
    drafter: Drafter, expected: ServedHead, tmp_path: Path
) -> None:
    assert served_head(drafter, stored(drafter, tmp_path / "head"), 4) == expected


def test_other_drafters_have_none(tiny_target: Path) -> None:
    assert served_head(ChainDrafter(tiny_target), tiny_target, 4) is None


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (
            block(layout="anchor_first", correction="markov", rank=3),
            r"vLLM does not run the head mine: its DSpark needs a GPU \(`Model Runner V1 does not "
            r"support: dspark .* Measure it with engine=ours",
        ),
        (
            block(layout="anchor_first", correction="gru", rank=3, gru_size=4),
            r"it has no Domino \(`Model architectures \['DominoDraftModel'\] are not supported",
        ),
        (
            block(correction="selector", rank=3, candidates=3),
            "its DFlash has no candidate selector",
        ),
        (block(conv_taps=3, conv_group=4), "its DFlash has no convolution"),
        (block(layout="anchor_first"), "reads every block as fill_in, and .* are anchor_first"),
        (block(confidence=True), "its DFlash has no confidence"),
        (block(denoising_steps=2), "drafts in one pass, and the head fills its blocks in several"),
        (block(taps=(0,)), "how it numbers the embedding, which the head reads, is not known"),
        (
            block(fusion="both"),
            "one projection of the target's states for all layers, and the head",
        ),
        (eagle(1, 4), "reads layer 4 after the target's final norm, and vLLM before it"),
        (
            EagleDrafter(head=eagle_head(predicts_states=True, fc_norm=False, fc_bias=True)),
            "ignores the bias of fc; train one with head.fc_bias=false",
        ),
        (eagle(3, 1), r"reads the layers \[3, 1\] in this order, and vLLM in rising order"),
        (
            medusa(draft_vocab_size=4),
            r"it loads no draft vocabulary of Medusa heads \(`assert loaded_weight.*`\); train "
            r"heads with head.draft_vocab_size=0",
        ),
        (medusa(draft_vocab_size=4, shared=True), r"not initialized from .*: {'token_map'}`\)"),
    ],
    ids=[
        *("dspark", "domino", "selector", "convolution", "anchor first", "confidence"),
        *("denoising", "embedding", "fusion", "last layer", "bias", "order of layers"),
        "medusa with a draft vocabulary",
        "medusa with a shared projection to one",
    ],
)
def test_heads_that_vllm_refuses_or_reads_otherwise_are_refused(
    drafter: Drafter, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        served_head(drafter, stored(drafter, Path("mine")), 4)


@pytest.mark.parametrize(
    ("layout", "fields", "words"),
    [
        ("served", {}, ""),
        ("speculators", {}, ""),
        ("modelopt", {}, r"it reads hidden_states 0, 1, 2 .*, NOT 1, 2, 3: fewer tokens"),
        ("specforge", {}, r"it reads hidden_states 0, 1, 2 .*, NOT 1, 2, 3: fewer tokens"),
        ("speculators", {"taps": (1, 3)}, "reads 3 layers in this layout, and the head 2"),
        ("served", {"parallel": 3}, ""),
        ("speculators", {"parallel": 3}, ""),
        ("speculators", {"parallel": 3, "fc_norm": True}, "knows no fc_norm in a P-EAGLE head"),
        ("served", {"parallel": 3, "masks_by_depth": True}, "read a head with masks_by_depth true"),
        ("specforge", {"parallel": 3}, "does not read the layout specforge"),
    ],
    ids=str,
)
def test_eagle_heads_in_layouts_that_vllm_refuses_or_misreads_are_refused(
    layout: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    shape = {"taps": (1, 2, 3), "fc_norm": False, "norm_output": False, **fields}
    head = eagle_head(*shape.pop("taps"), **shape, mask_token_id=12 if "parallel" in shape else 0)
    parallel = bool(head.config.parallel)
    save_head(SERVED_PARALLEL if parallel else SERVED, head.config, head, tmp_path / "ours")
    folder = tmp_path / "head"
    export(tmp_path / "ours", layout, folder)
    drafter = (ParallelEagleDrafter if parallel else EagleDrafter)(folder)
    if not words:
        expected = ServedHead("p_eagle", 3) if parallel else ServedHead("eagle3")
        assert served_head(drafter, folder, 4) == expected
        return
    with pytest.raises(UserError, match=words):
        served_head(drafter, folder, 4)


def test_a_p_eagle_head_is_run_if_vllm_knows_its_first_architecture(tmp_path: Path) -> None:
    head, folder = eagle_head(1, 3, parallel=3, mask_token_id=12), tmp_path / "head"
    save_head(SERVED_PARALLEL, head.config, head, folder)
    drafter = ParallelEagleDrafter(folder)
    assert served_head(drafter, folder, 4) == ServedHead("p_eagle", 3)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": ["PeagleLlamaForCausalLM"]}))
    words = r"\['Eagle3PeagleLlamaForCausalLM'\] are not .*; put LlamaForCausalLMEagle3 before it"
    with pytest.raises(UserError, match=words):
        served_head(drafter, folder, 4)


@pytest.mark.parametrize("tied", [True, False])
def test_vllm_gets_the_output_rows_of_a_block_drafters_vocabulary(
    tied: bool, tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=4,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    target = LlamaForCausalLM(config)
    target.save_pretrained(tmp_path / "target")
    head, ids_N = random_block(SIZES, draft_vocab_size=4), torch.tensor([1, 3, 4, 9])
    head.token_ids_V = ids_N
    folder = tmp_path / "head"
    save_head(LAYOUT, head.config, head, folder)
    method = Method("dflash", str(folder), 6)
    asked = EngineConfig(str(tmp_path / "target"), "float32", "cpu", 1, 64, 1, method=method)
    given = Path(for_vllm(asked, tmp_path / "cache").method.drafter)
    assert (given / "config.json").read_text() == (folder / "config.json").read_text()
    before, after = (load_file(each / "model.safetensors") for each in (folder, given))
    assert torch.equal(after.pop("lm_head.weight"), target.lm_head.weight[ids_N])
    assert after.keys() == before.keys()
    assert torch.equal(after["d2t"] + torch.arange(4), ids_N)  # as vLLM computes the ids
    written = (given / "model.safetensors").stat().st_mtime_ns
    assert for_vllm(asked, tmp_path / "cache").method.drafter == str(given)
    assert (given / "model.safetensors").stat().st_mtime_ns == written
    plain = replace(asked, method=Method("eagle3", str(folder), 6))
    assert for_vllm(plain, tmp_path / "cache") == plain
