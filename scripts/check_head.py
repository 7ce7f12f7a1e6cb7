"""Check the folder of a drafter head: its form and, with a target, the layout probe.

    python scripts/check_head.py HEAD [TARGET] [layout=fill_in | anchor_first]

It lists every tensor with its shape, those that are missing, unknown or of another shape, the
layers that the head reads and that servers would read, and the keys of config.json that this
project does not know. With a target it also measures how well each reading of its taps and slots
explains text that the target writes (training/heads/probe.py). It ends with status 1 for a folder
that is incomplete, of another target, or read in the wrong layout: decoding would still be
lossless, but fewer drafted tokens would be accepted.

A block drafter whose config.json has no sample_from_anchor needs `layout=`. With a target instead,
both layouts are probed, and the one that fits is printed.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from decoding.drafters.fit import check_fits
from decoding.drafters.registry import head_of
from decoding.engine import load
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.folder import load_state, read_config, read_json
from decoding.models.text.messages import prompt_ids
from decoding.rounds.settings import Settings
from heads.export import form_of
from heads.registry import kind_in
from jobs.paths import resolve_model
from scripts.usage import run_script, show_usage, split_option
from training.data.packing import Sample
from training.features.taps import check_layers
from training.heads.checkpoint import check_sizes
from training.heads.kind import HeadKind
from training.heads.probe import (
    Probe,
    check_reading,
    choose_layout,
    describe_doubt,
    probe,
)
from training.heads.published import EMBEDDING_COPY, LM_HEAD_COPY
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


def check_form(folder: Path, kind: HeadKind) -> Any:
    """Print the form of a folder, and return the shape of its head, which is of this kind.

    Raises UserError for a folder that is incomplete.
    """
    shape = kind.read_shape(folder)
    form = form_of(kind, folder, shape)
    layout = f", layout {form.layout}" if form.layout else ""
    print(f"{folder}: {head_of(folder)}, {kind.describe(shape)}{layout}")
    print("\n".join([*map(str, form.tensors), *form.notes]))
    form.check(folder)
    print(f"{len(form.tensors)} tensors, all expected, with the right shapes")
    published = kind.contract.layouts.values() if kind.contract else ()
    layouts = (kind.layout, *(each for each in published if not each.cannot_hold(shape)))
    known = {key for each in layouts for key in key_names(each.config(shape, torch.float32))}
    known |= kind.contract.also_read if kind.contract else set()
    if unknown := sorted({*key_names(read_json(folder / "config.json"))} - known):
        print(f"keys of config.json that are not read: {', '.join(unknown)}")
    return shape


def check_folder(folder: Path, target: Path, layout: str | None = None) -> None:
    """Print how the head is read. Raises UserError for a head that does not fit the target.

    layout: of the slots of a block drafter whose config.json does not name it. None: both are
    probed, and the one that fits is printed.
    """
    sizes, kind = known_config(target), kind_in(folder)
    open_layouts = [] if layout else [*kind.open_layouts(folder)]
    layout = next(iter(open_layouts), layout)
    kind = kind.assume(layout, sizes.num_hidden_layers)
    if open_layouts:
        print(
            f"{folder / 'config.json'} does not name the layout of its blocks, in each of which "
            f"the tensors are the same. At first it is read as {layout}"
        )
    shape = check_form(folder, kind)
    check_fits(target, folder)
    check_sizes(folder, shape, sizes)
    check_layers(kind.taps(shape), sizes.num_hidden_layers)
    model = freeze(load_causal_lm(target, torch.float32))
    check_copies(folder, kind, kind.load(folder), model)
    samples = write_texts(target)
    found = probe_folder(folder, kind, model, samples)
    if open_layouts:
        name = f"{folder}, read as {' and as '.join(open_layouts)}"
        if fits := choose_layout(found, name):
            layout = fits
            found = probe_folder(folder, kind.assume(layout), model, samples)
    print(found.table())
    check_reading(found, str(folder))
    if open_layouts:
        print(
            f"the layout of blocks that fits is {layout}: give layout={layout}, or add "
            f"sample_from_anchor to config.json (true for anchor_first, false for fill_in)"
        )
    if doubt := describe_doubt(found):
        print(f"warning: {doubt}")
    print(
        f"as stored, its predictions agree with {found.stored.agreement:.1%} of the target's text"
    )


def probe_folder(folder: Path, kind: HeadKind, model: Any, samples: list[Sample]) -> Probe:
    """Return all readings of a folder's head on texts of its target, the model."""
    shape, head, cpu = kind.read_shape(folder), kind.load(folder).eval(), torch.device("cpu")
    return probe(kind, head, kind.taps(shape), model, samples, cpu, kind.longest_draft(shape))


def check_copies(folder: Path, kind: HeadKind, head: Any, model: Any) -> None:
    """Raise UserError for stored copies that are not the target's tensors, which are read instead.

    kind, head: of the folder. model: the target.
    """
    embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    ids_N = getattr(head, "token_ids_V", None)
    ends = {EMBEDDING_COPY: embedding, LM_HEAD_COPY: lm_head if ids_N is None else lm_head[ids_N]}
    stored = load_state(folder)
    for name in (kind.contract.copies if kind.contract else frozenset()) & stored.keys():
        copy, own = stored[name], ends[name]
        if copy.shape != own.shape or not torch.equal(
            copy.to(own.dtype), own.to(copy.dtype).to(own.dtype)
        ):
            raise UserError(
                f"{folder}: {name} differs from the target's own, which this project reads in its "
                f"place. Expected a head that was trained with the target's embedding and lm_head."
            )


def main() -> None:
    """Check the folder named on the command line."""
    show_usage(__doc__)
    arguments, layout = split_option("layout")
    if len(arguments) not in (1, 2):
        sys.exit(f"usage: python {sys.argv[0]} HEAD [TARGET] [layout=BLOCK_LAYOUT]")
    head, *targets = (resolve_model(name) for name in arguments)
    if not targets:
        check_form(head, kind_in(head).assume(layout))
    for target in targets:
        read_config(target)
        check_folder(head, target, layout)


if __name__ == "__main__":
    run_script(main)
