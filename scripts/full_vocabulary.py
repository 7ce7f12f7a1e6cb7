"""Write a copy of a drafter with a draft vocabulary that has an lm_head row for every token.

    python scripts/full_vocabulary.py FOLDER OUT [CHATS.json]

vLLM, llama.cpp, transformers and other readers need all rows. The drafted tokens keep theirs. The
others share one row, so that none of them is drafted: the row is opposed to a direction u in which
the state of every text has a projection of about 1. u is the least-squares solution of u . h = 1
over one half of the texts. The other half measures how often the copy drafts another token.

Shapes: N states, H hidden size, D tokens of the draft vocabulary, V vocabulary.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.models.draft_vocabulary import complete_head, draft_vocab_size, token_ids
from decoding.models.folder import CARD, hash_input, read_config, read_json
from decoding.models.text.tokenizer import load_tokenizer
from distill.drafter_folder import format_readme
from jobs.files import write_text
from jobs.paths import resolve_model
from scripts.usage import run_script, show_usage
from training.config import DataConfig
from training.data.from_config import read_samples
from training.data.packing import best_fit, collate
from training.drafter_folder import write_model
from training.models.build import known_config, load_causal_lm
from training.objectives import hidden_states

CHATS, MOST_CHATS, LENGTH = "embedded:chats", 200, 256
MARGIN = 20.0  # nats by which the drafted tokens outweigh all others together


class Agreement(NamedTuple):
    """How the copy differs from the drafter on texts that did not choose the shared row."""

    states: int
    # share of states with the same likeliest token
    same_argmax: float
    # probability that the copy gives to tokens outside the draft vocabulary: mean and largest
    mean_mass: float
    largest_mass: float


@torch.no_grad()
def text_states(model: Any, folder: Path, chats: str) -> Tensor:
    """Return the states [N, H] after the tokens of chats, in float64."""
    data = DataConfig(chats=[chats], max_samples=MOST_CHATS, max_length=LENGTH)
    samples = read_samples(load_tokenizer(folder), data, "train", False)
    rows = best_fit([len(sample.ids) for sample in samples], LENGTH)
    batches = (collate(samples, [row], LENGTH, torch.device("cpu")) for row in rows)
    return torch.cat([one.at_supervised(hidden_states(model, one)) for one in batches]).double()


def summarize(states_NH: Tensor, weight_DH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit [N] and the log of the sum of exp(logit) [N] over the D tokens."""
    largest, total = [], []
    for chunk_CH in states_NH.split(512):
        logits_CD = chunk_CH @ weight_DH.T
        largest.append(logits_CD.amax(-1))
        total.append(logits_CD.logsumexp(-1))
    return torch.cat(largest), torch.cat(total)


def opposed_row(states_NH: Tensor, weight_DH: Tensor, others: int) -> Tensor:
    """Return the row [H] that `others` tokens share, with small logits on these states.

    Together they get at most exp(-MARGIN) of the drafted tokens' probability, on the states whose
    projection on u is positive.
    """
    ones_N = torch.ones(len(states_NH), 1, dtype=states_NH.dtype)
    u_H = torch.linalg.lstsq(states_NH, ones_N, driver="gelsd").solution[:, 0]
    along_N = states_NH @ u_H
    _, total_N = summarize(states_NH, weight_DH)
    needed_N = (math.log(others) + MARGIN - total_N) / along_N
    return -u_H * needed_N[along_N > 0].max().clamp_min(1.0)


def measure(states_NH: Tensor, weight_DH: Tensor, row_H: Tensor, others: int) -> Agreement:
    """Compare the copy with the drafter on these states."""
    other_N, (largest_N, total_N) = states_NH @ row_H, summarize(states_NH, weight_DH)
    same_N = largest_N > other_N
    mass_N = torch.sigmoid(other_N + math.log(others) - total_N)
    figures = (float(same_N.double().mean()), float(mass_N.mean()), float(mass_N.max()))
    return Agreement(len(states_NH), *figures)


def export(folder: Path, out: Path, chats: str = CHATS) -> Agreement:
    """Write the copy and return its agreement with the drafter.

    chats: ShareGPT file. Raises UserError for a folder without a model, a draft vocabulary or a
    card, if the vocabulary has all tokens, and if `out` exists.
    """
    read_config(folder)
    if not draft_vocab_size(folder):
        raise UserError(
            f"{folder} has no draft vocabulary (draft_vocab_size in config.json), so every reader "
            f"loads it as it is. Expected a drafter that was trained with student.draft_vocab_size."
        )
    if out.exists():
        raise UserError(f"{out} exists already. Delete it, or name another folder.")
    card = read_json(folder / CARD)
    stored: Any = known_config(folder).dtype or torch.float32
    model = load_causal_lm(folder, torch.float32)
    ids_D, V = token_ids(model), model.config.vocab_size
    assert ids_D is not None
    states_NH, weight_DH = text_states(model, folder, chats), model.lm_head.weight.detach().double()
    others = V - len(ids_D)
    if not others:
        raise UserError(f"{folder} drafts from all {V} tokens, so it needs no copy.")
    row_H = opposed_row(states_NH[::2], weight_DH, others).to(stored)
    found = measure(states_NH[1::2], weight_DH, row_H.double(), others)
    complete_head(model, row_H.float())
    write_model(model, folder, out, stored, card["num_draft_tokens"])
    card |= {
        "drafter_hash": hash_input(out),
        "parameters": model.num_parameters(),
        "draft_vocabulary": None,
        "cost_ratio": None,  # that of the drafter with fewer tokens
        "copy_of": {"drafter_hash": hash_input(folder), "drafted": len(ids_D), **found._asdict()},
    }
    write_text(out / CARD, json.dumps(card, indent=1))
    write_text(out / "README.md", format_readme(card))
    return found


def main() -> None:
    """Export the folder named on the command line."""
    show_usage(__doc__)
    if len(sys.argv) not in (3, 4):
        sys.exit(f"usage: python {sys.argv[0]} FOLDER OUT [CHATS.json]")
    found = export(resolve_model(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    print(
        f"{sys.argv[2]}: on {found.states:,} held-out states the likeliest token is the same in "
        f"{found.same_argmax:.3%}; the other tokens get {found.mean_mass:.1e} of the probability, "
        f"at most {found.largest_mass:.1e}"
    )


if __name__ == "__main__":
    run_script(main)
