"""Law 3 on engines: samples with a drafter against the target's exact distribution."""

import dataclasses
import sys
from pathlib import Path

import pytest

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.registry import DRAFTERS, head_of, imported
from decoding.models.load import load_target
from eval.engines.distribution import (
    exact_law,
    judge_sampling,
    read_or_test,
    write_drafter,
    write_model,
)
from eval.engines.ours import PointMassDrafter
from eval.statistics.joint_law import P_LIMIT
from heads.block.drafter import BlockDrafter
from heads.eagle.drafter import EagleDrafter
from heads.eagle.parallel import ParallelEagleDrafter
from serving.engines.heads import served_head
from serving.engines.interface import Sampling
from serving.engines.process import WORKERS
from serving.engines.registry import ENGINES
from tests.decoding.law_3 import law_holds
from tests.decoding.row_kinds.eagle import random_eagle, random_parallel_eagle
from tests.decoding.rows import draft_table
from tests.support.block_heads import LAW_3_SIZES, random_block

WARM = Sampling(1, temperature=0.7, top_k=3)


@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "p_eagle", "dflash"])
def test_point_masses_keep_the_targets_distribution(kind):
    chain = {"shape": "chain", "children": "top_k"}
    drafter = {
        "draft_model": lambda: PointMassDrafter(model=draft_table()),
        "eagle3": lambda: EagleDrafter(head=random_eagle(draft_table(), 2.0), **chain),
        "p_eagle": lambda: ParallelEagleDrafter(
            head=random_parallel_eagle(draft_table(), 2.0), children="top_k"
        ),
        "dflash": lambda: BlockDrafter(head=random_block(LAW_3_SIZES), **chain),
    }[kind]()
    assert not drafter.capabilities.has_q
    assert law_holds(drafter, "token", "plain") > P_LIMIT


def test_control_likeliest_tokens_tested_by_q_do_not():
    class Greedy(ChainDrafter):
        def propose(self, sequences_B, budgets_B, stopping_B, chooser):
            proposal = super().propose(sequences_B, budgets_B, stopping_B, chooser)
            proposal.tokens_BN.copy_(proposal.q_BNV.argmax(-1))
            return proposal

    assert law_holds(Greedy(model=draft_table()), "token", "plain") < P_LIMIT


def test_the_exact_law_sums_to_one_and_follows_the_warpers(tmp_path):
    law = exact_law(write_model(tmp_path / "target", seed=1), WARM)
    assert sum(law.values()) == pytest.approx(1.0)
    assert len(law) == 27


@pytest.mark.parametrize("method", ENGINES["vllm"].heads)
def test_every_head_that_vllm_runs_has_a_random_one_for_the_test(method, tmp_path):
    folder = Path(write_drafter(method, tmp_path / "head"))
    target = load_target(write_model(tmp_path / "target", seed=1), dtype="float32")
    drafter = imported(DRAFTERS[head_of(folder) or "parallel"].kind)(folder)
    drafter.prepare(target, None)
    assert served_head(drafter, folder, target.num_layers).method == method


@pytest.mark.exhaustive
def test_law_3_of_assisted_generation_is_judged_once_a_run(tmp_path):
    file = tmp_path / "hf_distribution.json"
    [found] = read_or_test(file, "hf", sys.executable, ["draft_model"], WARM)
    assert not found.is_biased, found.detail  # as of transformers 5.23
    again = read_or_test(file, "hf", "/nowhere/python", ["draft_model"], WARM)
    assert again == [found]


@pytest.mark.exhaustive
def test_control_law_3_rejects_assisted_generation_that_mixes_in_the_drafter(tmp_path, monkeypatch):
    """Check that the test finds the bias of a rule of transformers that is lossy by design."""
    program = tmp_path / "lossy_worker.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(WORKERS)!r})\nimport hf_worker\n"
        "from channel import serve\nplain = hf_worker.request\n"
        "hf_worker.request = lambda *two: {**plain(*two), 'assistant_ensemble_weight': 0.3}\n"
        "serve(hf_worker.start)\n"
    )
    lossy = dataclasses.replace(ENGINES["hf"], worker=str(program))
    monkeypatch.setitem(ENGINES, "lossy", lossy)
    found = judge_sampling("lossy", sys.executable, "draft_model", WARM, tmp_path / "log")
    assert found.is_biased, found.detail


def test_an_engine_that_fails_in_the_test_has_no_verdict_and_its_words_are_shown(tmp_path, capsys):
    file = tmp_path / "hf_distribution.json"
    found = read_or_test(file, "hf", sys.executable, ["no_such_method"], WARM)
    assert found == [] and not file.exists()
    shown = capsys.readouterr().err
    assert "the sampling of no_such_method is not tested: the engine failed with" in shown
    assert "transformers has no method no_such_method" in shown


@pytest.mark.engines
@pytest.mark.parametrize("method", ["ngram", "eagle3", "p_eagle", "dflash"])
def test_vllm_for_cpus_is_biased_by_one_of_its_functions(
    tmp_path, vllm_python, monkeypatch, method
):
    """Check that vLLM 0.32.0 for CPUs is found to be biased, and with a correction is not.

    Its CPU version of `expand` writes into a copy, so drafted positions have no temperature. The
    corrected worker is the control: it shows that the test itself favours no verdict.
    """
    program = tmp_path / "corrected_worker.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(WORKERS)!r})\nimport vllm_worker\n"
        "from channel import serve\n"
        "def expand(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=None):\n"
        "    import torch\n"
        "    counts = torch.diff(ends, prepend=ends.new_zeros(1))\n"
        "    values = torch.where(values == replace_from, replace_to, values)\n"
        "    output.copy_(values.repeat_interleave(counts))\n"
        "def start(config):\n"
        "    vllm_worker.set_environment(config)\n"
        "    import vllm.utils.cpu_triton_utils as replacements\n"
        "    replacements._expand_kernel_impl = expand\n"
        "    return vllm_worker.start(config)\n"
        "serve(start)\n"
    )
    corrected = dataclasses.replace(ENGINES["vllm"], worker=str(program))
    monkeypatch.setitem(ENGINES, "corrected", corrected)
    sampling, log = Sampling(1, temperature=1.0), tmp_path / "log"
    found = judge_sampling("vllm", str(vllm_python), method, sampling, log)
    if found.version != "0.32.0":
        pytest.skip(f"vLLM {found.version} is another version")
    assert found.is_biased, found.detail
    assert not judge_sampling("corrected", str(vllm_python), method, sampling, log).is_biased
