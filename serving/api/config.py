"""Settings of `python -m serving.api`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jobs.config import JobConfig, TargetConfig


@dataclass
class ApiConfig(JobConfig):
    """Serve a target with a drafter to OpenAI clients, on one machine.

    A request's text depends neither on its neighbours nor on the drafter.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    # {use: FOLDER or NAME, and its options}; drafter=FOLDER is short for {use: FOLDER}; {}:
    # prompt_lookup; {use: none}: plain decoding
    drafter: dict[str, Any] = field(default_factory=dict)
    # address to listen on; any but a loopback address lets other machines in
    host: str = "127.0.0.1"
    # 0: a free port
    port: int = 8000
    # file of the keys that clients may send, one a line; empty: no key is needed
    key_file: str = ""
    # name of the model in requests; empty: the target's name
    model_name: str = ""
    # chat template: a built-in one by name, or auto: the tokenizer's; if it has none, the head's
    template: str = "auto"
    # drafted tokens of a round along a chain
    num_draft_tokens: int = 4
    # draft lengths by the number of running rows, such as [[1,2,4],[3,8,0]]: 4 tokens with 1 or 2
    # rows, none with 3 to 8; []: always num_draft_tokens. scripts/bench/load.py measures them
    num_draft_tokens_by_batch: list[Any] = field(default_factory=list)
    # number of beams of a recurrent head; the maximum if by_cost is set
    beam_width: int = 10
    # beams of a head when answers are sampled: sampled (without replacement) | top_k
    children: str = "sampled"
    # adapt a head's drafts to the measured costs of a round; false: fixed
    by_cost: bool = True
    # verification rule at temperature > 0: coupled (a seed gives the same text with any drafter and
    # neighbours) | token | block (rows of other sampling settings then wait for their turn)
    verify: str = "coupled"
    # stopping policy of a chain, as in eval.run; null: the drafter's default
    stopping: str | None = None
    # rows that are decoded together; the cache of all of them is allocated at once
    max_rows: int = 8
    # requests that wait for a row; more are refused with status 429
    max_waiting: int = 256
    # largest max_tokens of a request, and its default; 0: what the context holds
    max_new_tokens: int = 0
    # largest body of a request, in MiB
    max_body_mib: int = 4
    # seconds in which the body of a request must arrive
    body_seconds: int = 60
    # seconds after which a connection without a request is closed
    idle_seconds: int = 30
    # seconds that running requests get to finish when the server is stopped
    grace_seconds: int = 5
    # let a request begin with the phrases and texts of earlier requests with the same key, for
    # drafters that keep any (ouroboros, lookahead, lookups, and all drafters with lookup first)
    keep_pools: bool = False
    # tokens of earlier texts that are kept for each key
    pool_tokens: int = 4096
