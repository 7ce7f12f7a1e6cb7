"""The server's parts put together: the decoding thread, the endpoints, and uvicorn."""

import asyncio
import socket
from dataclasses import dataclass
from typing import cast

import uvicorn

from decoding.errors import UserError
from decoding.interfaces import PoolKeeper
from decoding.models.text.tokenizer import longest_token
from serving.api.app import Api
from serving.api.config import ApiConfig
from serving.api.keys import Keys
from serving.api.metrics import Metrics
from serving.api.pools import Pools
from serving.api.requests import Limits
from serving.api.scheduler import Scheduler
from serving.connections import IdleProtocol
from serving.setup import ChatModels
from training.data.answer_spans import render_turns
from training.data.chat import template_source

ERROR_SECONDS = 5  # in which the requests that were not finished get their errors


class Server(uvicorn.Server):
    """uvicorn, which cancels what still runs when it stops; here the clients get an error first."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler, grace_seconds: float) -> None:
        super().__init__(config)
        self.scheduler, self.grace_seconds = scheduler, grace_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests run for `grace_seconds`, and end those that remain."""
        loop = asyncio.get_running_loop()
        end = loop.call_later(self.grace_seconds, self.scheduler.stop, False)
        await super().shutdown(sockets)
        end.cancel()


@dataclass(frozen=True)
class Service:
    """A server that is ready to run."""

    scheduler: Scheduler
    metrics: Metrics
    limits: Limits
    server: uvicorn.Server

    def run(self, listener: socket.socket) -> None:
        """Serve on this socket until a signal arrives, or `server.should_exit` is set."""
        self.scheduler.start()
        try:
            self.server.run(sockets=[listener])
        finally:
            self.scheduler.stop()


def make_service(loaded: ChatModels, cfg: ApiConfig, keys: Keys) -> Service:
    """Return the server of these models; the cache of all rows is allocated now.

    Raises UserError if the settings do not fit the drafter.
    """
    metrics, limits = Metrics(), _limits(loaded, cfg)
    scheduler = Scheduler(
        loaded.engine,
        loaded.settings,
        cfg.max_rows,
        cfg.max_waiting,
        metrics,
        cfg.num_draft_tokens_by_batch,
    )
    api = Api(
        loaded.engine,
        scheduler,
        limits,
        metrics,
        keys=keys,
        pools=_pools(loaded, cfg),
        most_body_bytes=cfg.max_body_mib << 20,
        body_seconds=cfg.body_seconds,
    )
    config = uvicorn.Config(
        api.app(),
        http=IdleProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=cfg.idle_seconds,
        timeout_graceful_shutdown=cfg.grace_seconds + ERROR_SECONDS,
    )
    return Service(scheduler, metrics, limits, Server(config, scheduler, cfg.grace_seconds))


def _limits(loaded: ChatModels, cfg: ApiConfig) -> Limits:
    engine, template = loaded.engine, loaded.template

    def render(messages: list[dict[str, str]]) -> str:
        if not template:
            raise UserError(
                f"the tokenizer of '{engine.target.name}' has no chat template. Send prompts to "
                f"/v1/completions, or start the server with template=."
            )
        source = template_source(engine.tokenizer, template)
        return render_turns(engine.tokenizer, source, messages, prompt=True)

    def encode(text: str, special: bool) -> list[int]:
        found = engine.tokenizer(text, add_special_tokens=special, verbose=False)
        return list(found["input_ids"])

    return Limits(
        model=cfg.model_name or engine.target.name,
        context=engine.target.max_length,
        most_characters=engine.target.max_length * longest_token(engine.tokenizer),
        vocab_size=engine.target.vocab_size,
        settings=loaded.settings,
        max_new_tokens=cfg.max_new_tokens,
        max_choices=cfg.max_rows,
        render=render,
        encode=encode,
    )


def _pools(loaded: ChatModels, cfg: ApiConfig) -> Pools | None:
    """Return the pools of the clients' keys, None if none are kept."""
    if not cfg.keep_pools:
        return None
    drafter = loaded.engine.drafter
    if drafter is None or not drafter.capabilities.keeps_pools:
        raise UserError(
            f"keep_pools=true needs a drafter that remembers texts, such as ouroboros, "
            f"suffix_lookup or chain_with_lookup; {drafter.name if drafter else 'plain decoding'} "
            f"does not. Set keep_pools=false."
        )
    return Pools(cast(PoolKeeper, drafter), cfg.pool_tokens)
