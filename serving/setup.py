"""Checks of the generate job's configuration and loading of its models."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.devices import device_of
from decoding.drafters.build import options_of
from decoding.drafters.fit import check_fits
from decoding.drafters.registry import head_of, imported
from decoding.drafters.trees.sampled_children import KINDS
from decoding.engine import Engine, stop_tokens, text_of, with_costs
from decoding.errors import UserError, without_stop
from decoding.interfaces import Drafter, precision
from decoding.loop import decode
from decoding.models.folder import CARD, read_config, read_json
from decoding.models.text.compatible import check_tokenizer_of
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.settings import Settings
from decoding.sampling.rule_names import check_verify, is_lossy
from decoding.stopping.policies import NAMES
from decoding.values import check_choice, check_settings
from decoding.verification.rules import check_rule
from jobs.config import refuse_parallel
from jobs.config_checks import refuse
from jobs.drafter_use import DrafterUse, refuse_eval_options
from jobs.drafters import build, describe, read_card_name, uses, with_execution
from jobs.paths import resolve_model
from jobs.targets import load_job_target
from serving.config import GenerateConfig

NONE = "none"  # drafter=none: plain decoding
DEFAULT_DRAFTER = "prompt_lookup"  # where no drafter is named
VICUNA = "vicuna"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class ChatModels:
    """Loaded models, the settings to decode with, and their description."""

    engine: Engine
    settings: Settings  # without measured costs
    about: str  # one line: target, drafter, sampling
    template: str = "auto"  # name of a chat template; auto: the tokenizer's


def check(cfg: GenerateConfig) -> None:
    """Raise UserError for invalid and contradictory settings."""
    refuse_parallel(cfg.target)
    least = {
        "beam_width": (1, "1 or more beams"),
        "beam_length": (1, "1 (no drafting) or more tokens, the target's first one included"),
        "max_prompt_tokens": (0, "0 (the size of the context) or more"),
        "max_prompts": (0, "0 (all) or more"),
        "batch_size": (1, "1 or more"),
        "baseline_tokens": (0, "0 (no speedup is measured) or more"),
    }
    refuse(cfg, [(key, vars(cfg)[key] >= low, words) for key, (low, words) in least.items()])
    check_choice("children", cfg.children, KINDS)
    check_choice("turns", cfg.turns, ("all", "first"))
    check_settings(cfg, ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "seed"))
    check_verify(cfg.verify)
    if cfg.stopping is not None:
        check_choice("stopping", cfg.stopping, NAMES)
    if not cfg.prompts and cfg.batch_size > 1:
        raise UserError(
            f"batch_size is {cfg.batch_size}, but a chat is one conversation. Set prompts=FILE or "
            f"batch_size=1."
        )
    if cfg.max_prompts and not cfg.prompts:
        raise UserError(
            f"max_prompts is {cfg.max_prompts}, but a chat has no prompts. Set prompts=FILE "
            f"(--eval_mt_bench), or remove max_prompts="
        )
    if cfg.output and not cfg.prompts:
        raise UserError(
            f"output={cfg.output} has no effect, as a chat is not recorded. Set prompts=FILE, or "
            f"remove output="
        )
    if cfg.output and not cfg.dry_run:
        _check_writable(Path(cfg.output))


def load(cfg: GenerateConfig, needs_template: bool = True) -> ChatModels:
    """Load target, tokenizer and drafter. Raises UserError if they do not fit together.

    needs_template: whether a target without a chat template is an error; if it is none, the name of
    the template is empty.
    """
    folder = resolve_model(cfg.target.path)
    device = device_of(cfg.target.device)
    if not cfg.tokenizer:
        tokenizer = load_tokenizer(folder, cfg.target.trust_remote_code)
    else:
        tokenizer = load_tokenizer(resolve_model(cfg.tokenizer, weights=False), of_model=False)
        check_tokenizer_of(tokenizer, folder, f"tokenizer={cfg.tokenizer} (--hf_tokenizer)")
    try:
        template, named = choose_template(cfg, tokenizer, folder)
    except UserError:
        if needs_template:
            raise
        template, named = "", ""
    cfg = replace(cfg, target=with_execution(cfg.target, folder))
    drafter, use = load_drafter(cfg, folder, device)
    if drafter is not None:
        # Reject a misfit before the larger model is loaded.
        check_rule(cfg.verify, cfg.temperature, drafter.capabilities, drafter.name)
    target = load_job_target(cfg.target, folder, cfg.threads)
    if drafter is not None:
        # Reject a misfit now, not after the first message.
        drafter.prepare(target, None)
    engine = Engine(target, drafter, tokenizer, stop_tokens(folder, tokenizer))
    settings = Settings(
        max_new_tokens=cfg.max_new_tokens,
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        min_p=cfg.min_p,
        num_draft_tokens=cfg.beam_length - 1,
        verify=cfg.verify,
        seed=cfg.seed,
        stop_token_ids=engine.stop_token_ids,
        text_of=lambda ids: text_of(engine, ids),
        **use.settings,
    )
    about = (
        f"target {target.name} ({target.backend}, {precision(target)}, {device}); "
        f"{_describe(cfg, drafter, device)}"
    )
    if named:
        about += f"; chat template {template}, {named}"
    return ChatModels(engine, settings, about, template)


def is_compared(settings: Settings) -> bool:
    """Return whether drafted and plain outputs must be equal (greedy or coupled decoding)."""
    return settings.temperature == 0 or settings.verify == "coupled"


def warm_up(engine: Engine, prompt: list[int], settings: Settings, batch_size: int = 1) -> Settings:
    """Decode a few tokens with and without the drafter, because the first run of a shape is slow.

    prompt: token ids, repeated for every row of the batch. Returns the settings, with measured
    round costs if the drafter needs them.
    """
    settings = with_costs(engine, prompt, settings, batch_size)
    brief = replace(settings, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
    for drafter in (None, engine.drafter):
        decode(engine.target, drafter, [prompt] * batch_size, brief)
    return settings


def _describe(cfg: GenerateConfig, drafter: Drafter | None, device: str) -> str:
    """Describe drafter and sampling, with the drafter's dtype if it differs from the target's."""
    sampling = f"temperature {cfg.temperature:g}" if cfg.temperature else "greedy"
    found = _mapping(cfg, device)
    if drafter is None or found is None:
        return f"no drafter; {sampling}"
    lossy = " (lossy)" if is_lossy(cfg.verify) else ""
    verified = f", verified by {cfg.verify}{lossy}" if cfg.temperature else ""
    dtype = found[1].get("dtype", cfg.target.dtype)
    name = drafter.name if dtype == cfg.target.dtype else f"{drafter.name} ({dtype})"
    return (
        f"drafter {name}, up to {cfg.beam_length - 1} drafted tokens a round; {sampling}{verified}"
    )


def load_drafter(
    cfg: GenerateConfig, target_folder: Path, device: str
) -> tuple[Drafter | None, DrafterUse]:
    """Return the configured drafter (None for plain decoding) and its loop options.

    Raises UserError if it does not fit the target, and for options that only eval.run supports.
    """
    found = _mapping(cfg, device)
    if found is None:
        return None, DrafterUse()
    name, mapping = found
    use = uses({name: mapping}, DrafterUse(cfg.stopping))
    refuse_eval_options(name, use[name])
    if use[name].schedule != "serial":
        raise UserError(
            f"drafter {name} has schedule={use[name].schedule}, which only eval.run supports. Use "
            f"schedule=serial."
        )
    drafter: Drafter = build({name: mapping}, use, target_folder)[name]
    return drafter, use[name]


def check_drafter(cfg: GenerateConfig, target_folder: Path) -> None:
    """Raise UserError for a missing drafter or a head of another target, without loading it."""
    if head := _head_folder(cfg):
        check_fits(target_folder, head)


def _mapping(cfg: GenerateConfig, device: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and Hydra mapping of the drafter, or None for plain decoding."""
    entry: dict[str, Any] = dict(cfg.drafter) or {"use": DEFAULT_DRAFTER}
    if entry.get("use") == NONE:
        return None
    folder = Path(str(entry.get("use", ""))).expanduser()
    if "name" not in entry and entry.get("use") and folder.is_dir():
        entry["name"] = read_card_name(folder)  # most folders are called `drafter`
    mappings = describe([entry], replace(cfg.target, device=device), control=False)
    ((name, mapping),) = mappings.items()
    if _holds_head(mapping):
        shape = {"beam_width": cfg.beam_width, "children": cfg.children, "by_cost": cfg.by_cost}
        taken = options_of(imported(mapping["_target_"])) or set()
        mapping |= {key: shape[key] for key in shape.keys() & taken - entry.keys()}
    return name, mapping


def _holds_head(mapping: dict[str, Any]) -> bool:
    """Return whether a drafter's folder holds a head."""
    return bool(mapping.get("folder")) and bool(head_of(mapping["folder"]))


def _check_writable(file: Path) -> None:
    """Raise UserError if the output file is not writable or already has content."""
    if file.is_file() and file.stat().st_size:
        raise UserError(
            f"output={file} exists already. Use another file, or delete it to answer again."
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    except OSError as error:
        raise UserError(
            f"output={file} cannot be written: {without_stop(error)}. Use another file."
        ) from error


def choose_template(
    cfg: GenerateConfig, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> tuple[str, str]:
    """Return the name of the chat template and, if it was inferred, its source.

    A head's card names the template of its training data. Heads in the published layout have no
    card and use Vicuna's template, the only one in the published code. Targets with `vicuna` in
    their names use it too. Raises UserError if no template is found.
    """
    if cfg.template != "auto" or tokenizer.chat_template:
        return cfg.template, ""
    if head := _head_folder(cfg):
        card = head / CARD
        if not card.is_file():
            return VICUNA, "the published heads'"
        if (trained := read_json(card).get("data", {}).get("template", "auto")) != "auto":
            return trained, "of the head's card"
    # folders of the Hub's cache
    cached = [part for part in folder.parts if part.startswith("models--")]
    named = (
        folder.name,
        Path(cfg.tokenizer).name,
        str(read_config(folder).get("_name_or_path", "")),
        *cached,
    )
    if any(VICUNA in name.lower() for name in named):
        return VICUNA, "by the target's name"
    raise UserError(
        f"the tokenizer of {cfg.tokenizer or cfg.target.path} has no chat template. Set template= "
        f"to the one that the target was trained with, such as template=vicuna."
    )


def _head_folder(cfg: GenerateConfig) -> Path | None:
    """Return the folder of the configured head, or None."""
    found = _mapping(cfg, "cpu")
    return resolve_model(found[1]["folder"]) if found and _holds_head(found[1]) else None
