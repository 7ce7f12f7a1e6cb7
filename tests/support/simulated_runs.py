"""SIMULATED run folders of eval.run, for tests of comparisons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eval.measure.origins import origin_of, write_origins
from eval.measure.records import append_lines
from eval.statistics.rows import build_rows
from eval.statistics.schema import DrafterFacts, write_rows
from tests.support import simulated_records as simulated

LOOKUP = {"prompt_lookup": simulated.DRAFTERS["prompt_lookup"]}
WIDTH, VOCABULARY = 64, 1000


def drafter(
    alpha: float, layers: int, parameters: int, t_draft: float
) -> tuple[float, DrafterFacts, float]:
    """Return a simulated drafter for `write`, which adds its name to the facts.

    alpha: acceptance rate. t_draft: milliseconds per draft step.
    """
    return alpha, DrafterFacts("", layers, parameters, False), t_draft


def write(
    folder: Path,
    drafters: dict[str, tuple[float, DrafterFacts, float]],
    *,
    seed: int = 0,
    slower: float = 1.0,
    prompts: int = 26,
    tokens_seen: int | None = None,
    config: dict[str, Any] | None = None,
    inputs: dict[str, str] | None = None,
    **facts: object,
) -> Path:
    """Write the folder of a finished eval.run of `drafters` and prompt lookup, the control.

    slower: factor of all times. tokens_seen: number of training tokens in the drafters' cards;
    None writes no cards. config, inputs: further entries of config.yaml and of the manifest's
    inputs. facts: fields of `RunFacts`.
    """
    named = {
        name: (alpha, DrafterFacts(name, one.layers, one.parameters, False), t)
        for name, (alpha, one, t) in drafters.items()
    }
    everyone = {**named, **LOOKUP}
    folder.mkdir(parents=True)
    homes = {
        name: _home(folder.with_name(f"{folder.name}.drafters") / name, tokens_seen)
        for name in named
    }
    records = simulated.run(
        prompts=prompts, drafters=everyone, seed=seed, slower=slower, gammas=(2, 4)
    )
    slices = simulated.slices(everyone, slower=slower)
    rows = build_rows(
        simulated.run_facts(**facts),
        {name: fact for name, (_, fact, _) in everyone.items()},
        slices,
        records,
    )
    write_rows(folder / "results.jsonl", rows)
    append_lines(folder / "records.jsonl", records)
    settings = {
        "job": "eval.run",
        "experiment": "default",
        "target": {"path": "simulated"},
        "drafters": [str(home) for home in homes.values()],
    }
    OmegaConf.save(
        OmegaConf.create({**settings, "max_prompts": prompts, **(config or {})}),
        folder / "config.yaml",
    )
    manifest = {
        "job": "eval.run",
        "experiment": "default",
        "finished": True,
        "command": "python -m eval.run drafters=[simulated]",
        "inputs": {
            "simulated target": "0" * 64,
            "simulated prompts": "1" * 64,
            **{str(home): "2" * 64 for home in homes.values()},
        }
        | (inputs or {}),
        "git_revision": "none",
        "versions": {"torch": "0", "transformers": "0"},
        "started": "2026-01-01T00:00:00",
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    write_origins(
        folder, {name: origin_of(home, "2" * 64, rows[0].dtype) for name, home in homes.items()}
    )
    return folder


def _home(folder: Path, tokens_seen: int | None) -> Path:
    """Write the files of a drafter's folder that comparisons read: its shape and its card."""
    folder.mkdir(parents=True)
    shape = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(shape))
    if tokens_seen is not None:
        card = {
            "name": folder.name,
            "drafter_hash": "2" * 64,
            "shape": shape,
            "data": {"tokens_seen": tokens_seen},
        }
        (folder / "drafter_card.json").write_text(json.dumps(card))
    return folder
