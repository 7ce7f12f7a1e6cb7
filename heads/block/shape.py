"""The shape of a block drafter, and the names of its switches."""

from dataclasses import dataclass

FILL_IN, ANCHOR_FIRST = "fill_in", "anchor_first"
LAYOUTS = (FILL_IN, ANCHOR_FIRST)
BIDIRECTIONAL, CAUSAL = "bidirectional", "causal"
MASKS = (BIDIRECTIONAL, CAUSAL)
EMBEDDING = 0  # the tap of the text's embedded tokens, without a layer of the target
# of the logits: heads/block/corrections.py
NONE, MARKOV, GRU, SELECTOR = "none", "markov", "gru", "selector"
CORRECTIONS = (NONE, MARKOV, GRU, SELECTOR)


@dataclass(frozen=True)
class BlockConfig:
    """Shape of a block drafter; sizes without a comment are those of its layers."""

    vocab_size: int  # of the target
    hidden_size: int  # H, the target's
    target_layers: int  # decoder layers of the target
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
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    draft_vocab_size: int = 0  # tokens of the shortlist; 0: all

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
        one_pass = self.denoising_steps < 2
        return self.layout == FILL_IN and plain and one_pass and EMBEDDING not in self.taps
