"""Configuration of the training of block drafters."""

from dataclasses import dataclass, field

from training.heads.config import HeadJobConfig, HeadOptions


@dataclass
class BlockOptions(HeadOptions):
    """Shape of a block drafter; loss.predict_n_tokens is the number of drafted tokens."""

    # name in tables and in the head's card
    name: str = "block"
    # fill_in: a slot predicts its own token, and the tip's slot none | anchor_first: the next token
    layout: str = "fill_in"
    # attention between the slots of a block: bidirectional | causal
    in_block_mask: str = "bidirectional"
    # of the target's states: fc (one projection for all layers) | per_layer (a mixture in each
    # layer, and its own keys and values of the text) | both (the projection plus the mixtures)
    fusion: str = "fc"
    # logits that depend on the tokens drafted before: none | markov (the last one) | gru (all) |
    # selector (the last one, among the likeliest tokens)
    correction: str = "none"
    # rank of the correction
    rank: int = 256
    # correction=gru: size of its state
    gru_size: int = 512
    # correction=selector: number of the likeliest tokens among which it selects
    candidates: int = 16
    # slots of a block that a convolution around attention and MLP mixes; 0: no convolution
    conv_taps: int = 0
    # channels that share the variable part of the convolution's weights
    conv_group: int = 16
    # also predict each token's chance of acceptance, which may end drafts
    confidence: bool = False
    # passes that fill a block in drafting, after training with random masks; 0: one pass, and
    # training with masks alone. A drafter may choose another number
    denoising_steps: int = 0
    # decoder layers
    num_layers: int = 2
    # number of the target's layers that are read, spread evenly over its depth
    num_taps: int = 5
    # these layers instead, numbered as in Hugging Face's hidden_states (0: the embedding, so that a
    # head with [0] reads the text's tokens alone; 1: after the first layer)
    taps: list[int] = field(default_factory=list)
    # id of the token whose embedding fills a block, which no text has; null: an unused or reserved
    # one
    mask_token_id: int | None = None
    # size of the draft vocabulary; 0: all tokens
    draft_vocab_size: int = 0


@dataclass
class BlockTrainConfig(HeadJobConfig):
    """A block drafter (DFlash, arXiv 2602.06036, and its relatives) for the frozen target."""

    head: BlockOptions = field(default_factory=BlockOptions)
