"""Reading of a block drafter's config.json (heads/block/layouts.py), checked key by key."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from decoding.models.folder import read_json
from decoding.models.text.mask_token import check_mask_token
from decoding.values import quote
from heads.block.layouts import (
    CAUSAL_HEAD,
    CONV_TAPS,
    FUSION,
    IS_CAUSAL,
    KIND,
    LAYERS,
    LAYOUT_KEY,
    OPTIONS,
    RANKS,
    SHIFT_KEY,
    SPECULATORS,
    STEPS,
    TEMPERATURES,
    BlockLayout,
    layout_of,
)
from heads.block.shape import (
    ANCHOR_FIRST,
    BIDIRECTIONAL,
    CAUSAL,
    EMBEDDING,
    FC,
    FILL_IN,
    FUSIONS,
    GRU,
    LAYOUTS,
    MARKOV,
    NONE,
    PROJECTORS,
    SELECTOR,
    BlockConfig,
)
from training.heads import checkpoint
from training.heads.config_keys import get

# values of keys that change a head's layers, of which others are not read
ONLY = (
    ("use_swa", False),
    ("attention_sink_bias", False),
    ("markov_head_type", "vanilla"),
    ("pure_draft_prefix_len", 1),
    ("input_embedding_scale", 1),
    ("output_multiplier", 1),
    ("final_logit_softcapping", None),
    ("hidden_act", "silu"),
    ("rope_scaling", None),
)


def read_head_config(folder: Path, layout: str | None = None) -> BlockConfig:
    """Read the shape of a head folder. layout, errors: see `heads.block.checkpoint.load_head`."""
    file = folder / "config.json"
    stored = read_json(file)
    published = layout_of(stored)
    reader = _Reader(file, published.flatten(stored), published)
    correction = reader.correction()
    config = BlockConfig(
        vocab_size=reader.size("vocab_size"),
        hidden_size=reader.size("hidden_size"),
        target_layers=reader.target_layers(),
        taps=reader.taps(),
        block_size=reader.size("block_size", 2),
        mask_token_id=reader.size("mask_token_id", 0),
        num_heads=reader.size("num_attention_heads"),
        num_kv_heads=reader.size("num_key_value_heads"),
        head_dim=reader.size("head_dim"),
        intermediate_size=reader.size("intermediate_size"),
        num_layers=reader.size("num_hidden_layers"),
        layout=reader.layout(layout),
        in_block_mask=CAUSAL if reader.causal else BIDIRECTIONAL,
        fusion=reader.fusion(),
        correction=correction,
        rank=reader.size(RANKS[correction]) if correction in RANKS else 0,
        gru_size=reader.size("gru_hidden_dim") if correction == GRU else 0,
        candidates=reader.size("selector_top_k") if correction == SELECTOR else 0,
        **reader.convolution(),
        denoising_steps=reader.denoising_steps(correction, reader.layout(layout)),
        confidence=reader.confidence(correction),
        temperatures=reader.temperatures(correction, reader.layout(layout)),
        norm_eps=reader.number("rms_norm_eps"),
        rope_theta=reader.number("rope_theta"),
        draft_vocab_size=reader.draft_vocab_size(),
    )
    checkpoint.check_trained(folder, config)
    check_mask_token(f"{file}: mask_token_id", config.mask_token_id, config.vocab_size)
    return config


def names_layout(folder: Path) -> bool:
    """Return whether a folder's config.json names the layout of its blocks."""
    stored = read_json(folder / "config.json")
    return _layout_value(layout_of(stored).flatten(stored)) is not None


def _layout_value(values: Mapping[str, Any]) -> Any:
    """Return the value of the layout in config.json; None if it has none."""
    options = values.get(OPTIONS, values)
    shift = options.get(SHIFT_KEY) if isinstance(options, Mapping) else None
    return values.get(LAYOUT_KEY, shift)


class _Reader:
    """Values of a config.json, checked one by one; options may be nested or at the top level."""

    def __init__(self, file: Path, values: Mapping[str, Any], published: BlockLayout) -> None:
        self.file, self.values, self.published = file, values, published
        self.layers_at = next(iter(published.layers))
        options = values.get(OPTIONS, values)
        if not isinstance(options, Mapping) or get(values, self.layers_at) is None:
            keys = f"{OPTIONS} with {LAYERS}, as in a DFlash or DSpark head"
            if published is SPECULATORS:
                keys = f"{self.layers_at}, as in a DFlash or DSpark head of speculators"
            raise UserError(
                f"{file}: expected {keys}, found {quote(options)[:60]}. Use `use: chain` for a "
                f"language model."
            )
        self.options = options
        rope = self.found("rope_parameters") or {}
        layers = set(self.found("layer_types") or ["full_attention"])
        for key, found, expected in (
            *((key, self.found(key), expected) for key, expected in ONLY),
            ("rope_parameters.rope_type", rope.get("rope_type"), "default"),
            ("layer_types", None if layers == {"full_attention"} else layers, "full_attention"),
        ):
            if found not in (None, expected):
                raise UserError(
                    f"{file}: {key} is {quote(found)}, which this project does not read; expected "
                    f"{quote(expected)}. Use a head without it."
                )

    def found(self, key: str) -> Any:
        """Return a value from the options or, if it is not there, from the top level."""
        return self.options.get(key, self.values.get(key))

    def size(self, key: str, least: int = 1) -> int:
        value = self.found(key)
        checkpoint.check_size(self.file, key, value, least)
        return int(value)

    def target_layers(self) -> int:
        """Return the number of the target's layers; 0: unknown, as in files of speculators."""
        if self.published is SPECULATORS and self.found("num_target_layers") is None:
            return 0
        return self.size("num_target_layers", 0)

    def draft_vocab_size(self) -> int:
        """Return the number of tokens of the draft vocabulary; 0: all."""
        if self.values.get("draft_vocab_size") is None:
            return 0
        drafted = self.size("draft_vocab_size")
        return 0 if drafted == self.size("vocab_size") else drafted

    def number(self, key: str) -> float:
        value = self.found(key)
        if key == "rope_theta" and value is None:
            value = (self.found("rope_parameters") or {}).get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self._error(key, value, "a number above 0")
        return float(value)

    @property
    def causal(self) -> bool:
        """Whether attention inside a block is causal, as all its spellings in the file agree."""
        inner = [self.flag(key) for key in ("causal", CAUSAL_HEAD) if key in self.options]
        outer = {key: self.values.get(key) for key in (IS_CAUSAL, "causal")}
        found = any(inner) if inner else any(value is True for value in outer.values())
        for key, value in outer.items():
            if not isinstance(value, bool | None):
                raise self._error(key, value, "true or false")
            if value not in (None, found):
                expected = f"{quote(found)}, as under another key of causal blocks"
                raise self._error(key, value, expected)
        return found

    def confidence(self, correction: str) -> bool:
        """Return whether the head has a confidence, which must read its correction's features."""
        has_one, reads = (
            self.flag(key) for key in ("enable_confidence_head", "confidence_head_with_markov")
        )
        if has_one and reads != (correction != NONE):
            expected = f"{quote(not reads)} with projector_type {PROJECTORS[correction]}"
            raise self._error("confidence_head_with_markov", reads, expected)
        return has_one

    def temperatures(self, correction: str, layout: str) -> tuple[float, ...]:
        """Return the temperatures of the confidence; empty if the file has none."""
        values = self.found(TEMPERATURES)
        if values is None:
            return ()
        drafts = self.size("block_size", 2) - (layout == FILL_IN)
        count = drafts if self.confidence(correction) else 0
        valid = isinstance(values, list) and len(values) == count > 0
        if not valid or not all(type(one) in (int, float) and 0 < one < math.inf for one in values):
            expected = f"{count} numbers above 0, one for each drafted token"
            raise self._error(
                TEMPERATURES, values, expected if count else "none in a head without a confidence"
            )
        return tuple(map(float, values))

    def flag(self, key: str) -> bool:
        value = self.options.get(key, False)
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def taps(self) -> tuple[int, ...]:
        """Return the target's layers in our numbers."""
        ids, ours = get(self.values, self.layers_at), self.options.get("taps")
        key, less = self.layers_at.rpartition(".")[2], self.published.layers[self.layers_at]
        # published folders have no number for the embedding
        first = (EMBEDDING + 1 if ours is None else EMBEDDING) + less
        valid = isinstance(ids, list) and bool(ids)
        if not valid or any(type(i) is not int or i < first for i in ids) or len({*ids}) < len(ids):
            raise self._error(key, ids, f"different layers from {first}")
        taps = tuple(layer - less for layer in ids)
        if ours is not None and ours != list(taps):
            raise UserError(
                f"{self.file}: {key} {quote(ids)} are the taps {list(taps)}, but taps is "
                f"{quote(ours)}. One of them was changed: use the config.json that was written "
                f"with these weights."
            )
        most = self.target_layers() or max(taps)
        if max(taps) > most:
            expected = f"layers up to {most + less}, as the target has {most} layers"
            raise self._error(key, ids, expected)
        return taps

    def correction(self) -> str:
        kind = self.options.get("projector_type", self.values.get(KIND))
        if kind is None:
            named = [each for each in (MARKOV, SELECTOR) if RANKS[each] in self.options]
            kind = PROJECTORS[named[0] if named else NONE]
        for correction, name in PROJECTORS.items():
            if kind == name:
                return correction
        raise self._error("projector_type", kind, f"one of {', '.join(PROJECTORS.values())}")

    def fusion(self) -> str:
        found = self.options.get(FUSION, FC)
        if found not in FUSIONS:
            raise self._error(FUSION, found, f"one of {', '.join(FUSIONS)}")
        return str(found)

    def convolution(self) -> dict[str, int]:
        """Return the fields of the convolution; empty if the head has none."""
        if self.found(CONV_TAPS) is None:
            return {}
        group, channels = self.size("conv_group_size"), self.size("hidden_size")
        if channels % group:
            raise self._error("conv_group_size", group, f"a divisor of hidden_size {channels}")
        return {"conv_taps": self.size(CONV_TAPS), "conv_group": group}

    def denoising_steps(self, correction: str, layout: str) -> int:
        """Return the passes of a draft, which fill in a block without a correction."""
        if self.found(STEPS) is None:
            return 0
        steps, most = self.size(STEPS), self.size("block_size", 2) - 1
        fills_in = layout == FILL_IN and correction == NONE
        if not fills_in or steps > most:
            plain = f"{LAYOUT_KEY} false and projector_type {PROJECTORS[NONE]}"
            raise self._error(STEPS, steps, f"at most {most} in a head with {plain}")
        return steps

    def layout(self, given: str | None) -> str:
        """Return the layout in the file, or the given one if the file has none."""
        if given is not None and given not in LAYOUTS:
            raise UserError(f"layout is {quote(given)}, expected one of {', '.join(LAYOUTS)}.")
        value = _layout_value(self.values)
        if value is None and given is not None:
            return given
        if value is None:
            raise UserError(
                f"{self.file} has no {LAYOUT_KEY}, so it is unknown which token a slot predicts; a "
                f"wrong guess loses nearly all acceptance. Set layout=fill_in for files of z-lab's "
                f"DFlash, layout=anchor_first for DeepSpec's, or add the key, which training "
                f"needs. `python scripts/check_head.py HEAD TARGET` finds the layout that fits."
            )
        if not isinstance(value, bool):
            raise self._error(LAYOUT_KEY, value, "true or false")
        found = ANCHOR_FIRST if value else FILL_IN
        if given not in (None, found):
            raise UserError(
                f"{self.file}: {LAYOUT_KEY} is {quote(value)}, the layout {found}, but "
                f"layout={given} was given. Leave out layout."
            )
        return found

    def _error(self, key: str, value: Any, expected: str) -> UserError:
        return UserError(
            f"{self.file}: {key} is {quote(value)}, expected {expected}. Use the config.json that "
            f"was written with these weights."
        )
