"""Run folders of eval.run with an engine, written from two decodings of our own loop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import decoding
from decoding.loop import decode
from decoding.models.folder import hash_input
from decoding.rounds.settings import Settings
from eval.engines.measure import FILE
from eval.engines.records import EngineRecord
from eval.measure.origins import origin_of, write_origins
from eval.measure.records import append_lines

NAME = "mine"  # of the drafter in the tables
TOKENS = 32


def write_engine_run(
    folder: Path, target: Path, drafter: Path, as_read: Path, prompts: Sequence[Sequence[int]]
) -> Path:
    """Write a run whose engine `hf` decodes with another folder than that of the drafter.

    as_read: the folder that holds the drafter as the engine reads it. prompts: token ids.
    """
    folder.mkdir()
    for engine, read in (("hf", as_read), ("ours", drafter)):
        append_lines(folder / FILE, _records(engine, target, read, prompts))
    hashes = {str(one): hash_input(one) for one in (target, drafter)}
    write_origins(folder, {NAME: origin_of(drafter, hashes[str(drafter)], "float32")})
    manifest = {"job": "eval.run", "finished": True, "inputs": hashes}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def _records(
    engine: str, target: Path, drafter: Path, prompts: Sequence[Sequence[int]]
) -> list[EngineRecord]:
    """Return the records of an engine, a prompt each, past stop tokens."""
    loaded = decoding.load(str(target), str(drafter), dtype="float32", device="cpu")
    settings = Settings(TOKENS, num_draft_tokens=4, stopping="fixed", ignore_eos=True)
    records = []
    for unit, prompt in enumerate(prompts):
        [done] = decode(loaded.target, loaded.drafter, [[*prompt]], settings)
        records.append(
            EngineRecord(
                engine=engine,
                method="draft_model",
                drafter=NAME,
                num_draft_tokens=4,
                rule="greedy",
                ignore_eos=True,
                temperature=0.0,
                batch_size=1,
                unit=unit,
                turn=0,
                sample=0,
                prompt_ids=[str(unit)],
                outputs=[done.tokens],
                seconds=1.0,
                first_token_seconds=[None],
                rounds=done.rounds,
                drafted=done.drafted,
                accepted=sum(done.accepted_by_depth),
                tested_by_depth=done.tested_by_depth,
                accepted_by_depth=done.accepted_by_depth,
                differs_at=[None],
                gaps=[None],
            )
        )
    return records


def without_depths(records: Sequence[EngineRecord]) -> list[EngineRecord]:
    """Return the records of an engine that reports totals alone."""
    return [
        dataclasses.replace(one, tested_by_depth=None, accepted_by_depth=None) for one in records
    ]
