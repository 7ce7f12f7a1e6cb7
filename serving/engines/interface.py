"""What a decoding engine takes and returns. Imports nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """How an engine decodes: autoregressively, or with drafts of one kind."""

    # autoregressive | draft_model | ngram, and the kinds of heads that the engine runs
    name: str = "autoregressive"
    drafter: str = ""  # folder of the drafter, if the method has one
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class EngineConfig:
    """Everything that is fixed when an engine starts."""

    target: str  # model folder
    dtype: str  # float32 | bfloat16 | float16
    device: str  # cpu | cuda
    threads: int
    max_length: int  # tokens of prompt and answer
    batch_size: int  # prompts decoded together
    eager: bool = False  # without compiling, which starts faster and decodes more slowly
    method: Method = Method()


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one batch are chosen. Temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # an answer ends with the first of these
    ignore_eos: bool = False  # generate max_new_tokens whatever the text


@dataclass(frozen=True)
class Answer:
    """The tokens of one prompt, a final stop token included."""

    tokens: list[int]
    # from the start of the batch to the first token; None: the engine does not report it
    first_token_seconds: float | None
    seconds: float  # from the start of the batch to the last token


@dataclass(frozen=True)
class BatchResult:
    """The answers of one batch, in the order of the prompts, and its counts of drafting.

    The counts are sums over the batch. They are None if the engine does not report them, and 0 or
    empty for autoregressive decoding.
    """

    answers: list[Answer]
    seconds: float  # wall time of the batch, prefill included
    rounds: int | None  # verifications of a proposal, of single rows
    drafted: int | None  # proposed tokens
    accepted: int | None  # of these
    accepted_by_depth: list[int] | None  # of these, at each position of a proposal
    # Proposals that were long enough to be tested at each position, with all earlier tokens
    # accepted. None: every proposal has its full length, so one position tests what the position
    # before it accepted.
    tested_by_depth: list[int] | None = None
