"""The job: load the models, listen, and show the page until a signal ends it."""

import asyncio
import logging
import os
import socket
from types import FrameType
from typing import Any

from decoding.values import check_choice
from jobs.config import refuse_parallel
from serving.listening import (
    address_of,
    allow_connections,
    check_server,
    is_open_to_others,
    listen,
)
from serving.web.config import WebConfig
from serving.web.demo import Demo
from serving.web.models import check_folders, load

NEEDS = ("gradio",)
RULES = ("coupled", "token")
LEAST = {
    "num_draft_tokens": 0,
    "max_new_tokens": 1,
    "max_prompt_characters": 1,
    "idle_seconds": 1,
    "max_waiting": 1,
}
GRACE_SECONDS = 2  # that open connections get when the page is stopped


def check(cfg: WebConfig) -> None:
    """Raise UserError for invalid settings, and without the page's packages."""
    check_server(cfg, NEEDS, "web", LEAST)
    check_choice("verify", cfg.verify, RULES)
    refuse_parallel(cfg.target)


def run(cfg: WebConfig) -> None:
    """Show the page until SIGINT or SIGTERM; with dry_run only print what would be shown.

    Raises UserError for settings and models that do not fit, and for an address that is in use.
    """
    check(cfg)
    if cfg.dry_run:
        folder, names = check_folders(cfg)
        print(
            f"would show {folder} with the drafters {', '.join(names)} on {cfg.host}:{cfg.port}, "
            f"one visitor at a time, {cfg.max_waiting} in the queue"
        )
        return
    listener = listen(cfg.host, cfg.port)  # first, as the models may take long to load
    with listener:
        demo = Demo(load(cfg), cfg)
        try:
            serve(demo, cfg, listener)
        except KeyboardInterrupt:
            print("stopped")
        finally:
            demo.close()


def serve(demo: Demo, cfg: WebConfig, listener: socket.socket) -> None:
    """Serve the page on a socket until a signal arrives."""
    server, files = make_server(demo, cfg), allow_connections()
    print(
        f"{demo.models.about}\nopen http://{address_of(listener)} in a browser (at most {files:,} "
        f"connections, the limit of open files)",
        flush=True,
    )
    if is_open_to_others(listener):
        print("note: anybody who reaches this address may use it", flush=True)
    server.run(sockets=[listener])


def make_server(demo: Demo, cfg: WebConfig) -> Any:
    """Return the `uvicorn.Server` of a page."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported
    import uvicorn  # comes with gradio, which is an extra

    from serving.connections import IdleProtocol
    from serving.web.app import make_app

    class Server(uvicorn.Server):
        """A server that ends within GRACE_SECONDS, and which further signals do not disturb."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if not self.should_exit:
                super().handle_exit(sig, frame)

    server = Server(
        uvicorn.Config(
            make_app(demo, cfg),
            http=IdleProtocol,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=cfg.idle_seconds,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    return server


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Drop the traceback of a request that the end of the job cancels, as of an open page."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
