"""The job: load the models, listen, and serve until a signal ends it."""

import socket
from dataclasses import replace

from decoding.engine import encode
from decoding.errors import UserError
from decoding.sampling.rule_names import split_rule
from decoding.sessions.draft_lengths import check_ranges
from jobs.config import refuse_parallel
from jobs.paths import resolve_model
from serving.api.config import ApiConfig
from serving.api.keys import Keys
from serving.config import GenerateConfig
from serving.listening import (
    address_of,
    allow_connections,
    check_server,
    is_open_to_others,
    listen,
)
from serving.setup import DEFAULT_DRAFTER, check_drafter, load, warm_up
from serving.setup import check as check_generation

NEEDS = ("starlette", "uvicorn", "prometheus_client")
EXACT_RULES = ("coupled", "token", "block")
LEAST = {
    "num_draft_tokens": 0,
    "max_rows": 1,
    "max_waiting": 0,
    "max_new_tokens": 0,
    "max_body_mib": 1,
    "body_seconds": 1,
    "idle_seconds": 1,
    "grace_seconds": 0,
    "pool_tokens": 1,
}
MEASURED_TOKENS = 256  # that an answer may have where the costs of a round are measured


def check(cfg: ApiConfig) -> None:
    """Raise UserError for invalid and contradictory settings, and without the server's packages."""
    check_server(cfg, NEEDS, "server", LEAST)
    refuse_parallel(cfg.target)
    if cfg.verify not in EXACT_RULES:
        raise UserError(
            f"verify is {cfg.verify}, expected one of {', '.join(EXACT_RULES)}: these keep the "
            f"target's distribution."
        )
    check_ranges(cfg.num_draft_tokens_by_batch, cfg.num_draft_tokens, cfg.verify)
    if cfg.keep_pools and split_rule(cfg.verify)[0] != "coupled":
        raise UserError(
            f"keep_pools=true needs verify=coupled, found {cfg.verify}: a text would depend on "
            f"earlier requests. Set verify=coupled or keep_pools=false."
        )
    check_generation(_generation(cfg))


def _generation(cfg: ApiConfig) -> GenerateConfig:
    """Return the settings with which the models are loaded."""
    return GenerateConfig(
        job=cfg.job,
        output_dir=cfg.output_dir,
        seed=cfg.seed,
        threads=cfg.threads,
        target=cfg.target,
        drafter=cfg.drafter,
        beam_width=cfg.beam_width,
        beam_length=cfg.num_draft_tokens + 1,
        children=cfg.children,
        by_cost=cfg.by_cost,
        verify=cfg.verify,
        stopping=cfg.stopping,
        template=cfg.template,
        max_new_tokens=cfg.max_new_tokens or MEASURED_TOKENS,
    )


def run(cfg: ApiConfig) -> None:
    """Serve until SIGINT or SIGTERM; with dry_run only print what would be served.

    Raises UserError for settings and models that do not fit, and for an address that is in use.
    """
    check(cfg)
    if cfg.dry_run:
        print(_plan(cfg))
        return
    keys = Keys(cfg.key_file)
    listener = listen(cfg.host, cfg.port)  # first, as the models may take long to load
    with listener:
        try:
            _serve(cfg, keys, listener)
        except KeyboardInterrupt:
            print("stopped")


def _plan(cfg: ApiConfig) -> str:
    folder = resolve_model(cfg.target.path)
    check_drafter(_generation(cfg), folder)
    return (
        f"would serve {folder} with drafter {cfg.drafter.get('use', DEFAULT_DRAFTER)} on "
        f"{cfg.host}:{cfg.port}: up to {cfg.max_rows} rows at a time, {cfg.max_waiting} requests "
        f"in the queue"
    )


def _serve(cfg: ApiConfig, keys: Keys, listener: socket.socket) -> None:
    from serving.api.service import make_service  # its packages are an extra

    loaded = load(_generation(cfg), needs_template=False)
    settings = warm_up(loaded.engine, encode(loaded.engine, "Hello"), loaded.settings)
    service = make_service(replace(loaded, settings=settings), cfg, keys)
    files = allow_connections()
    print(
        f"{loaded.about}\nserving '{service.limits.model}' at http://{address_of(listener)}/v1: "
        f"{cfg.max_rows} rows at a time, {cfg.max_waiting} requests in the queue, at most "
        f"{files:,} connections (the limit of open files)",
        flush=True,
    )
    if not keys and is_open_to_others(listener):
        print("note: anybody who reaches this address may use it; set key_file=", flush=True)
    service.run(listener)
