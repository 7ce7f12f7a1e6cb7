"""Check the folder of a drafter head against its target: tensors, keys and the layout probe.

    python scripts/check_head.py HEAD TARGET

It lists what the head reads, the keys of config.json that this project does not know, and how well
each reading of its taps and slots explains text that the target writes (training/heads/probe.py).
It ends with status 1 for a folder that is incomplete, of another target, or read in the wrong
layout: decoding would still be lossless, but hardly any drafted token would be accepted.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from decoding.drafters.registry import check_fits, head_of
from decoding.engine import load
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.folder import read_config, read_json
from decoding.models.text.messages import prompt_ids
from decoding.rounds.settings import Settings
from heads.registry import kind_in
from jobs.paths import resolve_model
from scripts.usage import show_usage
from training.data.packing import Sample
from training.features.taps import check_layers
from training.heads.checkpoint import check_sizes
from training.heads.probe import check_reading, probe
from training.models.build import known_config, load_causal_lm
from training.objectives import freeze

QUESTIONS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a list and a tuple in Python?",
    "Give me three tips for sleeping better.",
)
NEW_TOKENS = 48  # of each answer


def write_texts(target: Path) -> list[Sample]:
    """Return the target's own greedy answers, prompts included; only answers are supervised."""
    engine = load(target)
    prompts = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = chat if engine.tokenizer.chat_template else question
        prompts.append(
            prompt_ids(engine.tokenizer, text, engine.target.vocab_size, engine.target.name)
        )
    settings = Settings(NEW_TOKENS, ignore_eos=True)
    answers = decode(engine.target, None, prompts, settings)
    samples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = np.asarray([*prompt, *answer.tokens], dtype=np.int32)
        samples.append(Sample(ids, np.arange(len(ids)) >= len(prompt)))
    return samples


def key_names(values: dict[str, Any]) -> list[str]:
    """Return the names of all keys, inner ones included; layouts nest the same keys differently."""
    inner = (key_names(value) for value in values.values() if isinstance(value, dict))
    return [*values, *(name for names in inner for name in names)]


def check_folder(folder: Path, target: Path) -> None:
    """Print what the head is and how it is read. Raises UserError for a head that does not fit."""
    kind = kind_in(folder)
    check_fits(target, folder)
    shape, sizes = kind.read_shape(folder), known_config(target)
    check_sizes(folder, shape, sizes)
    check_layers(kind.taps(shape), sizes.num_hidden_layers)
    head = kind.load(folder).eval()
    written = key_names(kind.layout.config(shape, torch.float32))
    unknown = sorted({*key_names(read_json(folder / "config.json"))} - {*written})
    layers = ", ".join(map(str, kind.taps(shape))) or f"{sizes.num_hidden_layers} (final norm)"
    print(f"{folder}: {head_of(folder)}, {kind.describe(shape)}; reads hidden_states {layers}")
    print(f"{len(head.state_dict())} tensors, all expected, with the right shapes")
    if unknown:
        print(f"keys of config.json that are not read: {', '.join(unknown)}")
    model = freeze(load_causal_lm(target, torch.float32))
    samples, cpu = write_texts(target), torch.device("cpu")
    found = probe(kind, head, kind.taps(shape), model, samples, cpu, kind.longest_draft(shape))
    print(found.table())
    check_reading(found, str(folder))
    print(
        f"as stored, its predictions agree with {found.stored.agreement:.1%} of the target's text"
    )


def main() -> None:
    """Check the folder named on the command line."""
    show_usage(__doc__)
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} HEAD TARGET")
    try:
        head, target = (resolve_model(name) for name in sys.argv[1:])
        read_config(target)
        check_folder(head, target)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
