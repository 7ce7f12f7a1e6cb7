"""Our loop over llama.cpp beside llama.cpp's own greedy decoding, on quantised and half files.

Drafts of a chain change no token. A batch or a tree shares the cache between its sequences, so sums
run in another order and are quantised otherwise: texts may differ where the two best tokens are
close, closer than twice the rounding at that place, which is measured here.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import decoding
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.prompt_lookup import PromptLookup
from decoding.drafters.trees.ranked import RankedTree
from decoding.errors import UserError
from decoding.interfaces import Drafter, Target
from decoding.loop import decode
from decoding.models.gguf.writer import write_gguf
from decoding.models.llama_cpp.library import load_library
from decoding.rounds.settings import Settings
from decoding.rounds.ties import choice_scores, first_difference, top_two_gap

from .test_real_models import chats

pytest.importorskip("gguf")
pytestmark = pytest.mark.engines
SETTINGS = Settings(max_new_tokens=32, stopping="fixed", num_draft_tokens=3, ignore_eos=True)
PROMPTS = 6
DTYPE = "float16"  # of the cache, llama.cpp's own default


class Own(NamedTuple):
    """A file, its target in our loop, prompts, and llama.cpp's own answers."""

    file: Path
    target: Target
    prompts: list[list[int]]
    texts: list[list[int]]


@pytest.fixture(scope="module", params=["q4_1", "bfloat16"])
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Own:
    """Skip where llama-cpp-python is missing."""
    try:
        load_library()
    except UserError as error:
        pytest.skip(str(error))
    if request.param == "q4_1":
        file: Path = request.getfixturevalue("smollm2_gguf")
    else:
        file = tmp_path_factory.mktemp("own") / "chat24m.gguf"
        write_gguf(request.getfixturevalue("chat24m"), file, "bfloat16")
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setenv("LLAMA_ARG_REPACK", "0")  # see docs/real_models.md
        engine = decoding.load(file, dtype=DTYPE)
        prompts = chats(engine.tokenizer, PROMPTS)
        return Own(file, engine.target, prompts, own_texts(file, prompts))


def own_texts(file: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Decode with llama.cpp's greedy sampler, as its example programs do."""
    functions = load_library().functions
    settings = functions.llama_model_default_params()
    settings.use_extra_bufts = False
    model = functions.llama_model_load_from_file(os.fsencode(file), settings)
    settings = functions.llama_context_default_params()
    settings.n_ctx, settings.n_batch = 1024, 512
    settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
    context = functions.llama_init_from_model(model, settings)
    sampler = functions.llama_sampler_init_greedy()
    texts = []
    for prompt in prompts:
        functions.llama_memory_clear(functions.llama_get_memory(context), True)
        tokens: list[int] = []
        new = list(prompt)
        while len(tokens) < SETTINGS.max_new_tokens:
            ids = (functions.llama_token * len(new))(*new)
            batch = functions.llama_batch_get_one(ids, len(new))
            assert functions.llama_decode(context, batch) == 0
            new = [functions.llama_sampler_sample(sampler, context, -1)]
            tokens += new
        texts.append(tokens)
    functions.llama_sampler_free(sampler)
    functions.llama_free(context)
    functions.llama_model_free(model)
    return texts


def rounding(own: Own, tokens: Sequence[int]) -> float:
    """Return the largest difference of the last logits between a text alone and one in a batch."""
    others = [(own.prompts[row] * len(tokens))[: len(tokens)] for row in range(1, PROMPTS)]
    last = []
    with torch.inference_mode():
        for rows in ([list(tokens)], [list(tokens), *others]):
            own.target.open(len(rows), len(tokens))
            last.append(own.target.forward(torch.tensor(rows))[0][0, -1])
    return float((last[0] - last[1]).abs().max())


def gaps(own: Own, texts: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Return the gap between the two best tokens where each differing text first differs.

    Each gap comes with its limit, twice the rounding there: two logits may move towards each other.
    """
    found = []
    for prompt, expected, text in zip(own.prompts, own.texts, texts, strict=True):
        at = first_difference(expected, text)
        if at is not None:
            before = [*prompt, *expected[:at]]
            gap = top_two_gap(choice_scores(own.target, before, SETTINGS, 0))
            found.append((gap, 2 * rounding(own, before)))
    assert all(gap < limit for gap, limit in found), found
    return found


def test_plain_text_is_llama_cpps_own(own: Own) -> None:
    texts = [decode(own.target, None, [prompt], SETTINGS)[0].tokens for prompt in own.prompts]
    found = gaps(own, texts)
    print(f"{own.file.stem}: {len(found)} of {PROMPTS} differ, gaps and limits {found}")
    assert len(found) <= PROMPTS // 2


def make(kind: str, own: Own) -> Drafter | None:
    makers: dict[str, Callable[[], Drafter | None]] = {
        "no drafter": lambda: None,
        "chain": lambda: ChainDrafter(own.file, dtype=DTYPE),
        "prompt_lookup": PromptLookup,
        "ranked_tree": lambda: RankedTree(own.file, dtype=DTYPE),
    }
    return makers[kind]()


@pytest.mark.parametrize("kind", ["chain", "prompt_lookup"])
def test_drafts_of_one_row_change_no_token(own: Own, kind: str) -> None:
    drafter = make(kind, own)
    for prompt in own.prompts:
        [plain], [drafted] = (
            decode(own.target, one, [prompt], SETTINGS) for one in (None, drafter)
        )
        assert drafted.tokens == plain.tokens
        assert kind != "chain" or len(drafted.tokens) > 3 * drafted.rounds


@pytest.mark.parametrize("kind", ["no drafter", "chain", "prompt_lookup", "ranked_tree"])
def test_a_batch_differs_at_close_tokens_alone(own: Own, kind: str) -> None:
    answers = decode(own.target, make(kind, own), own.prompts, SETTINGS)
    found = gaps(own, [answer.tokens for answer in answers])
    print(f"{own.file.stem}, {kind}: {len(found)} of {PROMPTS} differ, gaps and limits {found}")


def test_control_a_wrong_token_is_noticed(own: Own) -> None:
    """Replace the token with the widest gap by the second best."""
    places = [(row, at) for row in range(PROMPTS) for at in range(0, SETTINGS.max_new_tokens, 2)]
    scores = [
        choice_scores(own.target, [*own.prompts[row], *own.texts[row][:at]], SETTINGS, 0)
        for row, at in places
    ]
    (row, at), best = max(zip(places, scores, strict=True), key=lambda one: top_two_gap(one[1]))
    print(f"{own.file.stem}: widest gap {top_two_gap(best):.3f}")
    wrong = [[*text] for text in own.texts]
    wrong[row][at] = int(best.topk(2).indices[1])
    with pytest.raises(AssertionError):
        gaps(own, wrong)
