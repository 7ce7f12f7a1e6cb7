"""The shape of a block drafter, and the names of its switches."""

from dataclasses import dataclass

FILL_IN, ANCHOR_FIRST = "fill_in", "anchor_first"
LAYOUTS = (FILL_IN, ANCHOR_FIRST)
BIDIRECTIONAL, CAUSAL = "bidirectional", "causal"
MASKS = (BIDIRECTIONAL, CAUSAL)
# of the target's states at the taps: heads/block/fusion.py
FC, PER_LAYER, BOTH = "fc", "per_layer", "both"
FUSIONS = (FC, PER_LAYER, BOTH)
EMBEDDING = 0  # the tap of the text's embedded tokens, without a layer of the target
# of the logits: heads/block/corrections.py
NONE, MARKOV, GRU, SELECTOR = "none", "markov", "gru", "selector"
CORRECTIONS = (NONE, MARKOV, GRU, SELECTOR)
# their names in published files
PROJECTORS = {NONE: "dflash", MARKOV: "dspark", GRU: "domino", SELECTOR: "dflash2"}


@dataclass(frozen=True)
class BlockConfig:
    """Shape of a block drafter; sizes without a comment are those of its layers."""

    vocab_size: int  # of the target
    hidden_size: int  # H, the target's
    target_layers: int  # decoder layers of the target; 0: unknown
    # the layers that are read, numbered as in training/features/taps.py; (EMBEDDING,): none
    taps: tuple[int, ...]
    block_size: int  # S
    mask_token_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int = 2
    layout: str = FILL_IN
    in_block_mask: str = BIDIRECTIONAL
    correction: str = NONE
    rank: int = 0  # of the correction
    gru_size: int = 0  # of a GRU's state
    candidates: int = 0  # tokens among which a selector selects
    # passes of a draft of a head that is trained with random masks; 0: one pass over masks alone
    denoising_steps: int = 0
    conv_taps: int = 0  # slots that a convolution mixes; 0: no convolution
    conv_group: int = 0  # channels that share the variable part of its weights
    confidence: bool = False  # predicts each token's chance of acceptance
    # divide the confidence's logits at each depth (training/heads/temperatures.py); empty: by 1
    temperatures: tuple[float, ...] = ()
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    draft_vocab_size: int = 0  # tokens of the shortlist; 0: all
    fusion: str = FC

    @property
    def num_drafted(self) -> int:
        """Number of tokens that can be drafted."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def num_drafts(self) -> int:
        """Return K, the number of tokens that a block drafts."""
        return self.block_size - (self.layout == FILL_IN)

    @property
    def is_dflash(self) -> bool:
        """Whether a server that knows DFlash alone reads the head, causal or not."""
        plain = self.correction == NONE and not self.conv_taps and not self.confidence
        one_pass = self.layout == FILL_IN and self.passes == 1
        return plain and one_pass and self.fusion == FC and not self.reads_embedding

    # ---------------------------------------------------- values of files (heads/block/layouts.py)

    @property
    def projector(self) -> str:
        """Published name of the correction."""
        return PROJECTORS[self.correction]

    @property
    def anchor_first(self) -> bool:
        """Whether every slot predicts the token after it."""
        return self.layout == ANCHOR_FIRST

    @property
    def causal(self) -> bool:
        """Whether attention inside a block is causal."""
        return self.in_block_mask == CAUSAL

    @property
    def mixed_fusion(self) -> str:
        """The fusion if layers have mixtures of their own, else empty."""
        return "" if self.fusion == FC else self.fusion

    @property
    def passes(self) -> int:
        """Passes of a draft."""
        return max(self.denoising_steps, 1)

    @property
    def reads_embedding(self) -> bool:
        """Whether the text's embedded tokens are read in place of a layer of the target."""
        return EMBEDDING in self.taps

    @property
    def confidence_reads_tokens(self) -> bool:
        """Whether a confidence reads the correction's features of the tokens before."""
        return self.confidence and self.correction != NONE

    @property
    def rope(self) -> dict[str, float | str]:
        """Rotary embedding in Hugging Face's form."""
        return {"rope_theta": self.rope_theta, "rope_type": "default"}


def spread_taps(count: int, num_layers: int) -> tuple[int, ...]:
    """Return at most `count` layers of the target, from after its second layer to its last but two.

    This is the formula of DFlash and its relatives, raised by one, as they number a layer by its
    output. Layers of a small target that coincide are read once.
    """
    steps = [num_layers // 2]
    if count > 1:
        steps = [round(1 + j * (num_layers - 4) / (count - 1)) for j in range(count)]
    last = max(num_layers - 1, 1)
    return tuple(sorted({min(max(step + 1, 1), last) for step in steps}))
