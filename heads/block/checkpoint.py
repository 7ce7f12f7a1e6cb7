"""Folders of block drafters in the layout of z-lab's DFlash and of SpecForge.

config.json has the fields of a Qwen3 model, `block_size`, and `dflash_config` with the mask token,
the target's layers, the attention inside a block, and the projector of other heads. In these files
layer i is the output of decoder layer i, from 0: the tap i + 1 of this project. A folder also holds
`taps` in our numbers, and a reader compares the two.

`sample_from_anchor` (of speculators) is the layout of a block: true for anchor_first, false for
fill_in. Published files do not all have it, and the wrong one costs nearly all acceptance without
an error, so a folder without it is read only if the layout is given. DeepSpec's files have the keys
of `dflash_config` at the top level, and copies of the target's embedding and lm_head, which are not
read.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from decoding.errors import UserError
from decoding.models.draft_vocabulary import check_tokens
from decoding.models.folder import WEIGHTS, load_state, read_json
from decoding.values import quote
from heads.block.model import BlockHead
from heads.block.shape import (
    ANCHOR_FIRST,
    BIDIRECTIONAL,
    CAUSAL,
    FILL_IN,
    GRU,
    LAYOUTS,
    MARKOV,
    NONE,
    BlockConfig,
)
from training.heads import checkpoint

OPTIONS = "dflash_config"
_LAYOUT = "sample_from_anchor"
_SHIFT = "shift_label"  # the same in Domino's files
_PROJECTORS = {NONE: "dflash", MARKOV: "dspark", GRU: "domino"}
_NAMES = {NONE: "DFlashDraftModel", MARKOV: "DSparkDraftModel", GRU: "DominoDraftModel"}
_RANKS = {MARKOV: "markov_rank", GRU: "emb_dim"}
# copies of the target's weights in DeepSpec's files
_COPIES = ("embed_tokens.weight", "lm_head.weight")


class BlockLayout:
    """Keys of config.json and names of tensors."""

    def config(self, shape: BlockConfig, dtype: torch.dtype) -> dict[str, Any]:
        options: dict[str, Any] = {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in shape.taps],
            "taps": list(shape.taps),
            "taps_convention": "taps are Hugging Face's hidden_states[k]; target_layer_ids are "
            "the layers whose outputs these are",
            "causal": shape.in_block_mask == CAUSAL,
            "projector_type": _PROJECTORS[shape.correction],
        }
        if shape.correction == MARKOV:
            options |= {"markov_rank": shape.rank, "markov_head_type": "vanilla"}
        if shape.correction == GRU:
            options |= {"emb_dim": shape.rank, "gru_hidden_dim": shape.gru_size}
            options |= {"pure_draft_prefix_len": 1, _SHIFT: shape.layout == ANCHOR_FIRST}
        if shape.confidence:
            options |= {"enable_confidence_head": True}
            options |= {"confidence_head_with_markov": shape.correction != NONE}
        values = {
            "architectures": [_NAMES[shape.correction]],
            "model_type": "qwen3",
            OPTIONS: options,
            _LAYOUT: shape.layout == ANCHOR_FIRST,
            "block_size": shape.block_size,
            "num_target_layers": shape.target_layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.intermediate_size,
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        return values | ({"draft_vocab_size": n} if (n := shape.draft_vocab_size) else {})

    def stored_name(self, name: str) -> str:
        name = re.sub(r"^correction\.markov", "markov_head.markov", name)
        return re.sub(r"^confidence\.", "confidence_head.", name.removeprefix("correction."))

    def extensions(self, shape: BlockConfig) -> list[str]:
        found = []
        if shape.draft_vocab_size:
            found.append(f"a draft vocabulary of {shape.draft_vocab_size} tokens without lm_head")
        if shape.confidence and shape.correction == GRU:
            found.append("a confidence head that reads the features of a GRU")
        return found


LAYOUT = BlockLayout()


def load_head(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str | None = None,
) -> BlockHead:
    """Load the head of a folder, for drafting.

    layout: that of a folder without the key `sample_from_anchor`. Raises UserError for a folder of
    another kind, and for tensors that are missing, unknown, not finite, or of another shape than
    config.json describes.
    """
    config = read_head_config(folder, layout)
    with torch.device("meta"):
        head = BlockHead(config)
    described = f"{config.num_layers} layers that read {len(config.taps)} layers of the target"
    file, stored = folder / WEIGHTS, load_state(folder)
    if OPTIONS not in read_json(folder / "config.json"):
        stored = {name: each for name, each in stored.items() if name not in _COPIES}
    checkpoint.load_weights(head, stored, LAYOUT.stored_name, file, described)
    if head.token_ids_V is not None:
        check_tokens(file, "tensor 'd2t' plus its index", head.token_ids_V, config.vocab_size)
    return head.to(device, dtype).requires_grad_(False).eval()


def read_head_config(folder: Path, layout: str | None = None) -> BlockConfig:
    """Read the shape of a head folder. layout, errors: see `load_head`."""
    file = folder / "config.json"
    values = read_json(file)
    reader = _Reader(file, values, values.get(OPTIONS, values))
    correction = reader.correction()
    config = BlockConfig(
        vocab_size=reader.size("vocab_size"),
        hidden_size=reader.size("hidden_size"),
        target_layers=reader.size("num_target_layers"),
        taps=reader.taps(),
        block_size=reader.size("block_size", 2),
        mask_token_id=reader.size("mask_token_id", 0),
        num_heads=reader.size("num_attention_heads"),
        num_kv_heads=reader.size("num_key_value_heads"),
        head_dim=reader.size("head_dim"),
        intermediate_size=reader.size("intermediate_size"),
        num_layers=reader.size("num_hidden_layers"),
        layout=reader.layout(layout),
        in_block_mask=CAUSAL if reader.flag("causal") else BIDIRECTIONAL,
        correction=correction,
        rank=reader.size(_RANKS[correction]) if correction in _RANKS else 0,
        gru_size=reader.size("gru_hidden_dim") if correction == GRU else 0,
        confidence=reader.confidence(correction),
        norm_eps=reader.number("rms_norm_eps"),
        rope_theta=reader.number("rope_theta"),
        draft_vocab_size=reader.size("draft_vocab_size", 1) if "draft_vocab_size" in values else 0,
    )
    check_mask_token(f"{file}: mask_token_id", config.mask_token_id, config.vocab_size, ())
    return config


def check_mask_token(where: str, token: int, vocab_size: int, used: tuple[int, ...]) -> None:
    """Raise UserError for a mask token outside the embedding, or one that texts use.

    where: its key, for the error. used: the target's pad and end tokens.
    """
    if 0 <= token < vocab_size and token not in used:
        return
    others = f", and none of {', '.join(map(str, used))} (pad and end tokens)" if used else ""
    raise UserError(
        f"{where} is {token}, expected a row of the target's embedding, from 0 to "
        f"{vocab_size - 1}{others}. Use an id that the tokenizer never produces."
    )


class _Reader:
    """Values of a config.json, checked one by one; options may be nested or at the top level."""

    def __init__(self, file: Path, values: Mapping[str, Any], options: Any) -> None:
        self.file, self.values = file, values
        if not isinstance(options, Mapping) or "target_layer_ids" not in options:
            raise UserError(
                f"{file}: expected {OPTIONS} with target_layer_ids, as in a DFlash or DSpark "
                f"head, found {quote(options)[:60]}. Use `use: chain` for a language model."
            )
        self.options = options
        for key, expected in (
            ("use_swa", False),
            ("attention_sink_bias", False),
            ("markov_head_type", "vanilla"),
            ("pure_draft_prefix_len", 1),
        ):
            found = options.get(key)
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

    def number(self, key: str) -> float:
        value = self.found(key)
        if key == "rope_theta" and value is None:
            value = (self.found("rope_parameters") or {}).get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self._error(key, value, "a number above 0")
        return float(value)

    def confidence(self, correction: str) -> bool:
        """Return whether the head has a confidence, which must read its correction's features."""
        has_one, reads = (
            self.flag(key) for key in ("enable_confidence_head", "confidence_head_with_markov")
        )
        if has_one and reads != (correction != NONE):
            expected = f"{quote(not reads)} with projector_type {_PROJECTORS[correction]}"
            raise self._error("confidence_head_with_markov", reads, expected)
        return has_one

    def flag(self, key: str) -> bool:
        value = self.options.get(key, False)
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def taps(self) -> tuple[int, ...]:
        """Return the target's layers in our numbers."""
        ids = self.options["target_layer_ids"]
        valid = isinstance(ids, list) and bool(ids) and all(type(i) is int and i >= 0 for i in ids)
        if not valid or len(set(ids)) < len(ids):
            raise self._error("target_layer_ids", ids, "different layers from 0")
        taps = tuple(layer + 1 for layer in ids)
        ours = self.options.get("taps")
        if ours is not None and ours != list(taps):
            raise UserError(
                f"{self.file}: target_layer_ids {quote(ids)} are the taps {list(taps)}, but taps "
                f"is {quote(ours)}. One of them was changed: use the config.json that was written "
                f"with these weights."
            )
        return taps

    def correction(self) -> str:
        kind = self.options.get("projector_type")
        if kind is None:
            kind = _PROJECTORS[MARKOV if _RANKS[MARKOV] in self.options else NONE]
        for correction, name in _PROJECTORS.items():
            if kind == name:
                return correction
        raise self._error("projector_type", kind, f"one of {', '.join(_PROJECTORS.values())}")

    def layout(self, given: str | None) -> str:
        """Return the layout in the file, or the given one if the file has none."""
        if given is not None and given not in LAYOUTS:
            raise UserError(f"layout is {quote(given)}, expected one of {', '.join(LAYOUTS)}.")
        value = self.values.get(_LAYOUT, self.options.get(_SHIFT))
        if value is None and given is not None:
            return given
        if value is None:
            raise UserError(
                f"{self.file} has no {_LAYOUT}, so it is unknown which token a slot predicts; a "
                f"wrong guess loses nearly all acceptance. Set layout=fill_in for files of z-lab's "
                f"DFlash, layout=anchor_first for DeepSpec's, or add the key."
            )
        if not isinstance(value, bool):
            raise self._error(_LAYOUT, value, "true or false")
        found = ANCHOR_FIRST if value else FILL_IN
        if given not in (None, found):
            raise UserError(
                f"{self.file}: {_LAYOUT} is {quote(value)}, the layout {found}, but layout={given} "
                f"was given. Leave out layout."
            )
        return found

    def _error(self, key: str, value: Any, expected: str) -> UserError:
        return UserError(
            f"{self.file}: {key} is {quote(value)}, expected {expected}. Use the config.json that "
            f"was written with these weights."
        )
