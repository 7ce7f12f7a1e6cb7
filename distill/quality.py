"""`python -m distill.quality`: measure the quality of the embedded target.

The job reports bits per byte on held-out modules, compared with `xz -9`, and the share of generated
functions that parse. assets/README.md lists both. The check matters because a target that writes
noise would make every drafter look good.
"""

import ast
import json
import lzma
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from decoding.loop import decode
from decoding.models.load import load_target
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.settings import Settings
from decoding.values import check_settings
from distill.config import QualityConfig
from jobs.config_checks import refuse
from jobs.files import write_text
from jobs.job import job_main
from jobs.paths import resolve, resolve_model
from jobs.run_files import read_object
from jobs.run_folder import RunFolder
from training.data import corpus
from training.data.chat import render_prompt
from training.data.readers import read_prompts
from training.models.build import known_config

# Shapes: B windows, T tokens of a window, V vocabulary.
_WINDOWS = 8
_ROWS = 10
_SHOWN = 3


@dataclass(frozen=True)
class ScoringWindow:
    """Consecutive tokens of a document that fit the context.

    The previous windows score the tokens before `scored_from`.
    """

    ids: list[int]
    scored_from: int


@dataclass(frozen=True)
class GeneratedFunction:
    """One function written by the target.

    finished: whether a stop token ended the answer. parses: whether the answer is finished and the
    function is valid Python with a body.
    """

    prompt: str
    body: str
    finished: bool
    parses: bool

    @property
    def text(self) -> str:
        return f"{self.prompt}\n{textwrap.indent(self.body, '    ')}"


def measure(config: QualityConfig, folder: Path) -> dict[str, Any]:
    """Measure the model in `folder` on held-out modules and the embedded prompts.

    Returns bits_per_byte, nats_per_token, xz_bits_per_byte, held_out_bytes, functions (their
    number), parse_share, finished_share, samples (texts of the first functions) and drawn (all
    functions as dicts).
    """
    documents = corpus.documents("held_out")
    nats, tokens = held_out_nats(folder, documents)
    size_bytes = sum(len(document.encode()) for document in documents)
    drawn = generate_functions(config, folder)
    return {
        "bits_per_byte": nats / math.log(2) / size_bytes,
        "nats_per_token": nats / tokens,
        "xz_bits_per_byte": xz_bits_per_byte(corpus.held_out_text()),
        "held_out_bytes": size_bytes,
        "functions": len(drawn),
        "parse_share": sum(one.parses for one in drawn) / len(drawn),
        "finished_share": sum(one.finished for one in drawn) / len(drawn),
        "samples": [one.text for one in drawn[:_SHOWN]],
        "drawn": [asdict(one) for one in drawn],
    }


def xz_bits_per_byte(text: str) -> float:
    """Return the size of `text` compressed by `xz -9` as one stream, in bits per byte."""
    content = text.encode()
    return 8 * len(lzma.compress(content, preset=9)) / len(content)


@torch.no_grad()
def held_out_nats(folder: Path, documents: Sequence[str]) -> tuple[float, int]:
    """Return the summed negative log-likelihood of the documents in nats, and the token count.

    Every document begins with BOS. Windows of the model's context overlap by half, and each token
    but BOS is scored once.
    """
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    ).eval()
    context = model.config.max_position_embeddings
    windows = [window for text in documents for window in _windows(tokenizer, text, context)]
    windows.sort(key=lambda window: len(window.ids))  # batch windows of similar length
    nats, tokens = 0.0, 0
    for start in range(0, len(windows), _WINDOWS):
        part = windows[start : start + _WINDOWS]
        length = max(len(window.ids) for window in part)
        # Right padding needs no mask under causal attention; padded positions are not scored.
        ids_BT = torch.tensor([window.ids + [0] * (length - len(window.ids)) for window in part])
        # -log p of each token from the second on, given the tokens before it
        nats_BT = cross_entropy(
            model(ids_BT).logits[:, :-1].transpose(1, 2), ids_BT[:, 1:], reduction="none"
        )
        for row, window in enumerate(part):
            nats += float(nats_BT[row, window.scored_from - 1 : len(window.ids) - 1].double().sum())
            tokens += len(window.ids) - window.scored_from
    return nats, tokens


def _windows(
    tokenizer: PreTrainedTokenizerBase, document: str, context: int
) -> Iterator[ScoringWindow]:
    ids = tokenizer(document, verbose=False)["input_ids"]
    if ids[:1] != [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    end = 1  # BOS is not scored
    for begin in range(0, len(ids), context // 2):
        if end < len(ids):
            yield ScoringWindow(ids[begin : begin + context], end - begin)
            end = min(begin + context, len(ids))


def generate_functions(config: QualityConfig, folder: Path) -> list[GeneratedFunction]:
    """Generate functions for the first embedded prompts that fit the context, and parse them."""
    tokenizer, target = load_tokenizer(folder), load_target(folder)
    longest = target.max_length - config.max_new_tokens
    texts = [prompt.turns[0] for prompt in read_prompts(resolve("embedded:prompts"))]
    prompts = {
        text: render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts
    }
    texts = [text for text in texts if len(prompts[text]) <= longest][: config.functions]
    settings = Settings(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=config.seed,
        stop_token_ids=(tokenizer.eos_token_id,),
    )
    functions = []
    for start in range(0, len(texts), _ROWS):
        part = texts[start : start + _ROWS]
        numbers = list(range(start, start + len(part)))
        ids = [prompts[text] for text in part]
        answers = decode(target, None, ids, settings, request_ids=numbers)
        for text, answer in zip(part, answers, strict=True):
            body = str(tokenizer.decode(answer.tokens, skip_special_tokens=True))
            finished = answer.finish == "stop"
            function = GeneratedFunction(text, body, finished, finished and parses(text, body))
            functions.append(function)
    return functions


def parses(request: str, body: str) -> bool:
    """Return whether a request (signature and docstring) and a body together are valid Python."""
    if not body.strip():
        return False
    try:
        ast.parse(f"{request}\n{textwrap.indent(body, '    ')}")
    except (SyntaxError, ValueError):  # ValueError: a NUL character
        return False
    return True


def run(config: QualityConfig) -> Path:
    """Measure the model, print figures and samples, and return output_dir/quality.json."""
    refuse(config, [("functions", config.functions >= 1, "1 or more")])
    check_settings(config, ("temperature", "max_new_tokens"))
    folder = resolve_model(config.model)
    known_config(folder)
    run_folder = RunFolder(config)
    path = run_folder.path / "quality.json"
    if config.dry_run:
        print(
            f"would measure bits per byte on the held-out modules and {config.functions} "
            f"functions of at most {config.max_new_tokens} tokens at temperature "
            f"{config.temperature:g} with {folder}, and write {path}; this takes a few minutes on "
            f"two cores"
        )
        return path
    if run_folder.finished(path):
        remedy = "Delete the file to measure again"
        _show(read_object(path, remedy, lambda one: {**one, "samples": list(one["samples"])}))
        return path
    figures = measure(config, folder)
    write_text(path, json.dumps(figures, indent=1))
    run_folder.write_manifest([folder], _short(figures), finished=True)
    _show(figures)
    return path


def _short(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if key not in ("samples", "drawn")}


def _show(figures: dict[str, Any]) -> None:
    print(json.dumps(_short(figures), indent=2))
    print("\n\n".join(map(str, figures["samples"])))


if __name__ == "__main__":
    job_main("distill.quality", QualityConfig, run)
