"""The front door: load a target with a drafter, generate text, stream it.

For example:

    from decoding import load, generate
    engine = load("assets/target", "runs/quickstart/distill.train/drafter")
    print(generate(engine, "def add(a, b):", max_new_tokens=64).text)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from transformers import PreTrainedTokenizerBase

from decoding.costs.measure import measure_costs, widths_to_time
from decoding.drafters.build import choose_drafter, make_drafter
from decoding.errors import UserError, note_if_slow
from decoding.interfaces import Drafter, RoundCosts, Target
from decoding.loop import check, decode, prefill_batch
from decoding.models.folder import is_gguf, read_json
from decoding.models.gguf.file import end_tokens, read_gguf
from decoding.models.hub import find_folder
from decoding.models.load import AUTO, load_target
from decoding.models.model_check import check_end_tokens
from decoding.models.text.messages import Prompt, prompt_ids
from decoding.models.text.text_stream import TextStream
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.claims import Claim
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.schedules.by_name import decides_by_cost
from decoding.values import check_value, quote

COST_SECONDS = 3.0  # after which no further window of costs is measured
COST_WINDOWS, COST_TOKENS = 5, 12


@dataclass(frozen=True)
class Engine:
    """A target, its drafter, and the target's tokenizer.

    Threads may share an engine: their calls wait for each other. A stream cannot continue after
    another call has used the engine (see `generate`).
    """

    target: Target
    drafter: Drafter | None
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    # measured by the first `generate` whose drafter needs them; key: "schedule, rule, batch size"
    costs: dict[str, RoundCosts] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """Generated text without special tokens, its token ids, and the counts of the run."""

    text: str
    tokens: list[int]
    stats: Generation


def load(
    target: str | Path,
    drafter: str | Path | Mapping[str, Any] | Drafter | None = None,
    *,
    backend: str = "native",
    dtype: str = "float32",
    device: str = "cpu",
    max_length: int | None = None,
    parallel: str = "none",
    processes: int = 0,
    execution: str = AUTO,
) -> Engine:
    """Load a target with a drafter, and the target's tokenizer.

    target: a model folder, a GGUF file (which runs in llama.cpp), or a name on the Hugging Face Hub
    (OWNER/NAME or OWNER/NAME@REVISION), which is downloaded once. drafter: such a folder, file or
    name of a model, the folder or name of a head, the name of a drafter without a folder (such as
    "prompt_lookup"; all are in decoding/drafters/registry.py), a mapping {"use": name or folder,
    option: value}, a `Drafter`, or None (autoregressive decoding). It uses the target's dtype and
    device unless its options specify others. The other settings are described at `load_target`.

    Raises UserError for an invalid setting, for a folder that cannot be loaded, and for a drafter
    that does not fit the target: a model with another tokenizer, a head trained for another target.
    """
    if not isinstance(target, str | Path):
        raise UserError(f"target is {quote(target)}, expected the path of a model folder.")
    target = find_folder(target)
    choice = None
    if isinstance(drafter, str | Path | Mapping):
        choice = choose_drafter(drafter)
    elif drafter is not None and not hasattr(drafter, "propose"):
        raise UserError(
            f"drafter is {quote(drafter)}, expected the path of a model folder, a name, a mapping "
            f"with `use`, a Drafter or None."
        )
    tokenizer = load_tokenizer(target)
    place: dict[str, Any] = {"backend": backend, "dtype": dtype, "device": device}
    split: dict[str, Any] = {"parallel": parallel, "processes": processes}
    model = load_target(target, max_length=max_length, execution=execution, **place, **split)
    if choice is not None:
        chosen = getattr(model, "execution", AUTO)
        drafter = make_drafter(choice, target, **place, execution=chosen)
    return Engine(model, cast(Drafter | None, drafter), tokenizer, stop_tokens(target, tokenizer))


def stop_tokens(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the end-of-text ids of generation_config.json, or a GGUF file, and of the tokenizer.

    Raises UserError if generation_config.json cannot be read, or if its eos_token_id is invalid or
    outside the vocabulary in config.json.
    """
    path = Path(folder) / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    listed = found if isinstance(found, list) else [found]
    if is_gguf(folder):
        listed = end_tokens(read_gguf(folder))
    ids = [one for one in (*listed, tokenizer.eos_token_id) if one is not None]
    check_value("stop_token_ids", ids, key=f"{path}: eos_token_id")
    config = path.with_name("config.json")
    if config.is_file():
        check_end_tokens(path, found, read_json(config).get("vocab_size"))
    return tuple(sorted(set(ids)))


def encode(engine: Engine, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt: a string, a chat or a sequence of ids.

    A chat is rendered with the tokenizer's chat template and its generation prompt. Raises
    UserError for an invalid prompt.
    """
    return prompt_ids(engine.tokenizer, prompt, engine.target.vocab_size, engine.target.name)


def text_of(engine: Engine, tokens: Sequence[int]) -> str:
    """Return the text of token ids without special tokens."""
    return str(engine.tokenizer.decode(list(tokens), skip_special_tokens=True))


@overload
def generate(
    engine: Engine, text_or_messages: Prompt, *, stream: Literal[False] = False, **settings: Any
) -> Reply: ...
@overload
def generate(
    engine: Engine, text_or_messages: Prompt, *, stream: Literal[True], **settings: Any
) -> Iterator[str]: ...
def generate(
    engine: Engine, text_or_messages: Prompt, *, stream: bool = False, **settings: Any
) -> Reply | Iterator[str]:
    """Continue a string or token ids, or answer a chat (messages).

    settings: the fields of `decoding.Settings`. The text ends with the token that completes a stop
    string, if any does. stream=True returns an iterator over pieces of text, at most one per round.
    If another call uses the engine between two pieces, the iterator raises UserError, since that
    call has overwritten the caches. Raises UserError for an invalid prompt or setting.

    If the stopping policy (such as "cost_ratio"), the drafter or the schedule decides from the
    costs of a round, the first call measures them. A seed then reproduces its text with the same
    engine only; verify="coupled" or given `costs` reproduce it with any engine. With
    schedule="pearl_plus_wall", which decides by the clock, only verify="coupled" reproduces it. In
    half precision neither greedy nor coupled text is independent of such decisions, except with
    the fused execution; on a CPU the default policy then drafts a fixed length.
    """
    known = [one.name for one in fields(Settings)]
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise UserError(
                f"generate() has no setting '{name}'; the nearest is '{near}'. Use a field of "
                f"decoding.Settings."
            )
    check_value("stream", stream)
    settings.setdefault("stop_token_ids", engine.stop_token_ids)
    settings.setdefault("text_of", lambda ids: text_of(engine, ids))
    chosen = Settings(**settings)
    check(engine.target, engine.drafter, chosen)
    # no other thread uses the models between measuring costs and the last token
    with Claim(engine.target, engine.drafter):
        ids = encode(engine, text_or_messages)
        chosen = with_costs(engine, ids, chosen)
        if stream:
            return _stream(engine, ids, chosen)
        (result,) = decode(engine.target, engine.drafter, [ids], chosen)
        return Reply(text_of(engine, result.tokens), result.tokens, result)


def with_costs(
    engine: Engine, prompt: Sequence[int], settings: Settings, batch_size: int = 1
) -> Settings:
    """Return the settings, with measured costs of a round if a decision needs them.

    The stopping policy, the drafter or the schedule may decide from costs. They are measured once
    for each schedule, rule and batch size, until COST_SECONDS have passed, and for at least some
    sixty target forwards. A note on stderr names the reason if this takes over NOTE_SECONDS.
    Measuring overwrites the caches, so call this before a decode begins.
    """
    drafter = engine.drafter
    if drafter is None or settings.costs is not None:
        return settings
    use = (drafter.capabilities, settings.schedule, settings.stopping)
    if not decides_by_cost(*use, engine.target):
        return settings
    rule = settings.verify if settings.temperature else "greedy"
    key = f"{settings.schedule}, {rule}, {batch_size}"
    with Claim(engine.target, drafter):
        if key not in engine.costs:
            note = (
                f"measuring what a round with {drafter.name} costs here ({rule}), for this and "
                f"later calls"
            )
            with note_if_slow(note):
                engine.costs[key] = measure_costs(
                    engine.target,
                    drafter,
                    prompt or [0],
                    settings,
                    widths=widths_to_time(
                        drafter, min(settings.num_draft_tokens, settings.max_new_tokens)
                    ),
                    batch_size=batch_size,
                    windows=COST_WINDOWS,
                    repeats=2,
                    tokens=max(COST_TOKENS, settings.num_draft_tokens + 1),
                    seconds=COST_SECONDS,
                    least_windows=1,
                )
    return replace(settings, costs=engine.costs[key])


def _stream(engine: Engine, prompt: list[int], settings: Settings) -> Iterator[str]:
    """Yield pieces of text, each at the end of its round."""
    stream = TextStream(lambda ids: text_of(engine, ids))
    pieces: list[str] = []
    with torch.inference_mode():
        batch = prefill_batch(
            engine.target,
            engine.drafter,
            [prompt],
            settings,
            on_tokens=lambda _, new: pieces.append(stream.add(new)),
        )
    try:
        while batch.rows:
            with torch.inference_mode():
                batch.round()
            if not batch.rows:
                pieces.append(stream.end())
            if any(pieces):
                yield "".join(pieces)
            pieces.clear()
    finally:
        batch.close()
