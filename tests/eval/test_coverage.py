"""The probability mass of the tokens that a target shares with a drafter of another vocabulary."""

import pytest
import torch

from eval.measure.coverage import measure_coverage
from tests.support.other_vocabularies import OTHERS, partly_shared, renamed_drafter
from tests.support.tiny_targets import VOCABULARY, hf_model, native_of, random_prompts

TEXTS = [(prompt, prompt[::-1]) for prompt in random_prompts(4)]


def test_the_mass_of_shared_tokens_is_that_of_the_models() -> None:
    target, model = (native_of(hf_model("llama", layers=2, seed=seed)) for seed in (0, 1))
    found = measure_coverage(target, partly_shared(model, VOCABULARY, 24, "tokens"), TEXTS)
    assert (found.shared_tokens, found.target_tokens, found.drafter_tokens) == (24, 48, 48)
    masses = []
    for prompt, answer in TEXTS:
        target.open(1, 64)
        logits_NV = target.forward(torch.tensor([[*prompt, *answer]]))[0][0]
        masses += logits_NV[len(prompt) - 1 : -1].softmax(-1)[:, :24].sum(-1).tolist()
    assert found.target_mass == pytest.approx(sum(masses) / len(masses), abs=1e-6)
    assert 0 < found.target_mass < 1
    assert 0 < found.drafter_mass < 1
    assert f"{100 * found.target_mass:.1f} % of the target's probability" in str(found)


def test_all_tokens_of_the_target_have_all_of_its_mass() -> None:
    target = native_of(hf_model("llama", layers=2))
    model = native_of(hf_model("llama", layers=2, seed=1))
    found = measure_coverage(target, renamed_drafter(model, "tokens"), TEXTS)
    assert found.target_mass == pytest.approx(1, abs=1e-6)
    assert found.drafter_tokens == VOCABULARY + OTHERS
    assert found.drafter_mass < 0.9, "the drafter's other tokens are its likeliest ones"
    with pytest.raises(ValueError, match="found none"):
        measure_coverage(target, renamed_drafter(model, "tokens"), [])
