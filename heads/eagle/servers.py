"""How servers read the published layouts of EAGLE heads (heads/eagle/layouts.py)."""

from dataclasses import replace
from typing import Any

from heads.eagle.layouts import (
    ARCHITECTURE,
    LAYERS,
    MODELOPT,
    ONE_STATE,
    READ_AS,
    SERVED,
    SERVED_FIRST,
    SERVED_LAYERS,
    SERVED_PARALLEL,
    SPECFORGE,
    SPECFORGE_PARALLEL,
    SPECULATORS,
    SPECULATORS_PARALLEL,
    SWITCHES,
    layout_of,
)
from heads.eagle.model import NUM_TAPS, EagleConfig
from training.heads.config_keys import Key
from training.heads.published import (
    EMBEDDING_COPY,
    HIDDEN_STATES,
    OUTPUTS,
    PROPOSALS,
    Contract,
    Launch,
    PublishedLayout,
    Server,
    sglang_launch,
    vllm_launch,
)


def _unreadable_in_vllm(layout: str, shape: EagleConfig) -> list[str]:
    """Return what vLLM does not take over from the keys of speculators, and then misses."""
    found = []
    if layout == SPECULATORS.name and shape.num_taps != NUM_TAPS:
        found.append(f"it reads {NUM_TAPS} layers in this layout, and the head {shape.num_taps}")
    if layout == SPECULATORS.name and shape.parallel and shape.fc_norm:
        found.append("it knows no fc_norm in a P-EAGLE head of this layout")
    return found


def _launch_vllm(target: str, layout: str, shape: EagleConfig, tokens: int) -> Launch | None:
    if shape.fc_bias:  # it ignores the bias
        return None
    was_run = layout == SERVED.name or (layout == SPECULATORS.name and not shape.parallel)
    given: dict[str, Any] = {
        "method": "eagle" if shape.predicts_states else "eagle3",
        "num_speculative_tokens": shape.parallel or tokens or 3,
    }
    if shape.parallel:
        given["parallel_drafting"] = True
    return vllm_launch(target, was_run, **given)


def _launch_sglang(target: str, layout: str, shape: EagleConfig, tokens: int) -> Launch | None:
    if shape.parallel:  # it drafts token by token, and the head is trained for one pass
        return None
    steps = tokens or 3
    options = (
        f"--speculative-num-steps {steps} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {steps + 1}"
    )
    return sglang_launch(target, "EAGLE" if shape.predicts_states else "EAGLE3", options)


_OWN_EMBEDDING = "it reads an embedding of the head's own"
_IN_PARTS = (SERVED.name, SPECFORGE.name, MODELOPT.name)  # whose keys are not speculators'
_VLLM = Server(
    "vLLM 0.32",
    layers={LAYERS: HIDDEN_STATES, SERVED_LAYERS: HIDDEN_STATES},
    ignored=("t2d",),
    unreadable=_unreadable_in_vllm,
    launch=_launch_vllm,
    keys=(
        Key((SWITCHES[2],), SWITCHES[2], default=False, layouts=_IN_PARTS),
        # what it takes over from speculators has another default
        Key((SWITCHES[2],), SWITCHES[2], default=True, layouts=(SPECULATORS.name,)),
        Key(
            (SPECULATORS.verifier,),
            layouts=(SPECULATORS.name,),
            without="needs the target's name in its command",
        ),
        Key(
            (PROPOSALS,),
            layouts=(SPECULATORS.name,),
            effect="it drafts the number of tokens in it",
        ),
    ),
    architectures=dict.fromkeys(_IN_PARTS, (ARCHITECTURE, "Eagle3LlamaForCausalLM")),
)
_SGLANG = Server(
    "SGLang 0.5.23",
    layers={SERVED_LAYERS: OUTPUTS},
    assumed={"norm_before_residual": False, "parallel": 0},
    ignored=("t2d", "mask_hidden"),
    refused=(SPECULATORS.name,),
    launch=_launch_sglang,
    keys=(Key(("draft_vocab_size",), "num_drafted", without="takes the target's lm_head"),),
    architectures=dict.fromkeys(_IN_PARTS, (ARCHITECTURE,)),
)
_SPECULATORS = Server(
    "speculators 0.9",
    refused=_IN_PARTS,
    keys=(Key(("embed_requires_grad",), wanted=False, default=True, effect=_OWN_EMBEDDING),),
)
_SPECFORGE = Server(
    "SpecForge 0.2",
    refused=(SERVED.name, MODELOPT.name, SPECULATORS.name),
    keys=(
        Key(
            ("norm_output",),
            wanted=False,
            default=False,
            applies=lambda shape: shape.norm_output and not shape.parallel,
            effect="it norms the input of the lm_head by this key, and feeds back the state "
            "without its norm",
        ),
    ),
)
_PARALLEL_SERVERS = (
    # for SpecForge's own name: `Model architectures ['Eagle3PEagleDraftModel'] are not supported`
    replace(_VLLM, refused=(SPECFORGE.name,), only=ONE_STATE),
    replace(_SGLANG, refused=(SPECFORGE.name, SPECULATORS.name)),
    _SPECULATORS,
)


def _contract(servers: tuple[Server, ...], *layouts: PublishedLayout) -> Contract:
    named = {each.name: each for each in layouts}
    optional = frozenset({"t2d"})
    return Contract(named, layout_of, servers, READ_AS, frozenset({EMBEDDING_COPY}), optional)


CONTRACT = _contract(
    (_VLLM, _SGLANG, _SPECULATORS, _SPECFORGE), SERVED, SPECFORGE, MODELOPT, SPECULATORS
)
PARALLEL_CONTRACT = _contract(
    _PARALLEL_SERVERS, SERVED_PARALLEL, SPECFORGE_PARALLEL, SPECULATORS_PARALLEL
)
FIRST_CONTRACT = Contract(
    {SERVED_FIRST.name: SERVED_FIRST},
    layout_of,
    (
        Server("vLLM 0.32", assumed={"fc_bias": False}, launch=_launch_vllm),
        Server("SGLang 0.5.23", launch=_launch_sglang),
    ),
    READ_AS,
    frozenset({EMBEDDING_COPY}),
)
