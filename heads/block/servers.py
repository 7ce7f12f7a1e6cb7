"""How servers read the published layouts of block drafters (heads/block/layouts.py)."""

from decoding.models.draft_vocabulary import T2D
from heads.block.layouts import (
    CAUSAL_HEAD,
    DEEPSPEC,
    IS_CAUSAL,
    LAYERS,
    LAYOUT_KEY,
    OPTIONS,
    READ_AS,
    SERVED,
    SERVED_NAMES,
    SHIFT_KEY,
    SPECULATORS,
    TEMPERATURES,
    layout_of,
)
from heads.block.shape import FC, GRU, MARKOV, BlockConfig
from training.heads.config_keys import Key
from training.heads.published import (
    EMBEDDING_COPY,
    LM_HEAD_COPY,
    OUTPUTS,
    PROPOSALS,
    Contract,
    Launch,
    Server,
    sglang_launch,
    vllm_launch,
)


def _is_shifted(shape: BlockConfig) -> bool:
    """Return whether servers take each slot for another place (see _LAYOUT_KEYS)."""
    return shape.anchor_first and shape.correction != MARKOV


def _launch_vllm(target: str, layout: str, shape: BlockConfig, tokens: int) -> Launch | None:
    if _is_shifted(shape):
        return None
    method = "dspark" if shape.correction == MARKOV else "dflash"
    # by hand and in tests, on CPUs; its DSpark and DFlash2 need a GPU
    was_run = layout == SERVED.name and shape.is_dflash
    return vllm_launch(target, was_run, method=method, num_speculative_tokens=shape.num_drafts)


def _launch_sglang(target: str, layout: str, shape: BlockConfig, tokens: int) -> Launch | None:
    if _is_shifted(shape):
        return None
    algorithm = "DSPARK" if shape.correction == MARKOV else "DFLASH"
    options = f"--speculative-num-draft-tokens {shape.block_size}"
    return sglang_launch(target, algorithm, options)


_OUTPUT_LAYERS = {f"{OPTIONS}.{LAYERS}": OUTPUTS, LAYERS: OUTPUTS}
_READABLE = {"passes": 1, "reads_embedding": False, "gru_size": 0, "fusion": FC}
_BY_ARCHITECTURE = (
    *(each for each in SERVED_NAMES.values() if each != SERVED_NAMES[GRU]),
    *DEEPSPEC.corrections.values(),
)
_UNCALIBRATED = "stops by the confidence as it was trained"
# vLLM and SGLang read the key in DSpark alone, and take DFlash's blocks for fill_in
_LAYOUT_KEYS = (
    Key(
        (LAYOUT_KEY,),
        "anchor_first",
        default=True,
        applies=lambda shape: shape.correction == MARKOV,
        effect="every token would be drafted for another place",
    ),
    Key(
        (LAYOUT_KEY,),
        "anchor_first",
        default=False,
        ignored=True,
        applies=lambda shape: shape.correction != MARKOV,
        effect="every token would be drafted for another place",
    ),
)
_VLLM_KEYS = (
    Key(
        (f"{OPTIONS}.causal", IS_CAUSAL, "causal"),
        "causal",
        default=False,
        layouts=(SERVED.name,),
        effect="the slots of a block see others than in training",
    ),
    Key(
        ("sliding_window_non_causal",),
        wanted=True,
        default=False,
        layouts=(SPECULATORS.name,),
        effect="it makes blocks causal",
    ),
    *_LAYOUT_KEYS,
    Key(("enable_confidence_head",), "confidence", default=True, layouts=(SPECULATORS.name,)),
    Key(
        (SPECULATORS.verifier,),
        layouts=(SPECULATORS.name,),
        without="needs the target's name in its command",
    ),
    Key((PROPOSALS,), layouts=(SPECULATORS.name,), effect="it drafts the number of tokens in it"),
)
_SGLANG_KEYS = (
    *_LAYOUT_KEYS,
    Key(
        (f"{OPTIONS}.mask_token_id", "mask_token_id"),
        "mask_token_id",
        without="takes the token <|MASK|> for masks",
    ),
)
_SERVERS = (
    Server(
        "vLLM 0.32",
        layers={**_OUTPUT_LAYERS, **SPECULATORS.layers},
        only=_READABLE,
        ignored=(T2D,),
        needs={LM_HEAD_COPY: "draft_vocab_size"},
        launch=_launch_vllm,
        keys=_VLLM_KEYS,
        architectures={each.name: _BY_ARCHITECTURE for each in (SERVED, DEEPSPEC)},
        skips={f"{OPTIONS}.{TEMPERATURES}": _UNCALIBRATED, TEMPERATURES: _UNCALIBRATED},
    ),
    Server(
        "SGLang 0.5.23",
        layers=_OUTPUT_LAYERS,
        only=_READABLE,
        ignored=(T2D,),
        refused=("speculators",),
        launch=_launch_sglang,
        keys=_SGLANG_KEYS,
        skips={f"{OPTIONS}.{TEMPERATURES}": _UNCALIBRATED, TEMPERATURES: _UNCALIBRATED},
    ),
)
CONTRACT = Contract(
    {each.name: each for each in (SERVED, SPECULATORS, DEEPSPEC)},
    layout_of,
    _SERVERS,
    READ_AS,
    copies=frozenset({EMBEDDING_COPY, LM_HEAD_COPY}),
    optional=frozenset({T2D}),
    also_read=frozenset({CAUSAL_HEAD, IS_CAUSAL, SHIFT_KEY}),
)
