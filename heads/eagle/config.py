"""Configuration of the training of EAGLE heads."""

from dataclasses import dataclass, field

from training.heads.config import HeadJobConfig, HeadOptions


@dataclass
class EagleOptions(HeadOptions):
    """Shape of an EAGLE head; other sizes are the target's."""

    # name in tables and in the head's card
    name: str = "eagle3"
    # layers of the target that the head reads, numbered as Hugging Face's hidden_states; empty: 2,
    # L // 2 and L - 3 of L layers; head=eagle1 reads the state after the final norm alone
    taps: list[int] = field(default_factory=list)
    # width of the feed-forward layer; 0: the target's
    intermediate_size: int = 0
    # size of the draft vocabulary; 0: all tokens, as head=eagle1 has them
    draft_vocab_size: int = 0
    # normalize each tapped state (EAGLE-3.1)
    fc_norm: bool = True
    # feed the normalized output back to the next step (EAGLE-3.1)
    norm_output: bool = True
    # the attention adds to the normalized state, not to the state itself
    norm_before_residual: bool = False
    # head=p_eagle: id of the token of mask elements, which no text has; null: an unused or reserved
    # one
    mask_token_id: int | None = None
    # head=p_eagle: a learned state for the masks of each depth (ParallelSpec); false: one for all
    masks_by_depth: bool = False
    # initial output layer: lm_head (the target's) | random; head=eagle1 has none
    start: str = "lm_head"
    # head=eagle1: add a bias to the joined embedding and state, as published; vLLM reads none
    fc_bias: bool = False


@dataclass
class EagleTrainConfig(HeadJobConfig):
    """A head of EAGLE-3 (arXiv 2503.01840), P-EAGLE, ParallelSpec or EAGLE-1 (2401.15077)."""

    head: EagleOptions = field(default_factory=EagleOptions)
