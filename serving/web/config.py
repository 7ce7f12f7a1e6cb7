"""Settings of `python -m serving.web`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jobs.config import JobConfig, TargetConfig


@dataclass
class WebConfig(JobConfig):
    """Show decoding with and without a drafter side by side in a browser.

    Visitors choose the drafter, its schedule and the temperature.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    # drafters that visitors choose from, as in eval.run: folders, names, or mappings with `use`;
    # empty: prompt_lookup
    drafters: list[Any] = field(default_factory=list)
    # address to listen on; any but a loopback address lets other machines in
    host: str = "127.0.0.1"
    # 0: a free port
    port: int = 7860
    # chat template: a built-in one by name, or auto: the tokenizer's; without any, the model
    # continues the prompt
    template: str = "auto"
    # drafted tokens of a round along a chain
    num_draft_tokens: int = 4
    # verification rule at temperature > 0: coupled (both panes show the same text) | token
    # (accepts more; the panes show two samples)
    verify: str = "coupled"
    # longest text that a visitor may ask for
    max_new_tokens: int = 256
    # longest prompt in characters; its tokens must leave room in the context too
    max_prompt_characters: int = 20000
    # seconds after which a connection without a request is closed
    idle_seconds: int = 30
    # visitors that wait for their turn; more are refused
    max_waiting: int = 16
