"""The OpenAI-compatible server on loopback, with small models in memory."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx2
from openai import AsyncOpenAI, OpenAI
from transformers import PreTrainedModel

from decoding.engine import Engine, text_of
from decoding.interfaces import Drafter
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from serving.api.config import ApiConfig
from serving.api.keys import Keys
from serving.api.service import Service, make_service
from serving.listening import listen
from serving.setup import ChatModels
from tests.decoding.row_kinds.kit import COSTS, Kit
from tests.decoding.rows import BY_NAME
from tests.support.tiny_targets import hf_model, native_of

TOKENIZER = Path(__file__).resolve().parents[2] / "assets" / "target"
DISTURBANCE = 0.01  # noise in the draft model's weights
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Models:
    """A random target in float64, its copy, and a draft model that agrees with it at times."""

    target: NativeTarget
    twin: NativeTarget
    draft: NativeTarget

    def drafter(self, name: str) -> Drafter | None:
        """Return the drafter of a row of tests/decoding/rows.py; None for "none"."""
        if name == "none":
            return None
        return BY_NAME[name].make(Kit(self.target, self.twin, self.draft, []))


@lru_cache
def small_model() -> PreTrainedModel:
    """Return a model with the embedded tokenizer's vocabulary and a context of 256 tokens."""
    return hf_model("llama", vocab_size=len(load_tokenizer(TOKENIZER)))


def make_models() -> Models:
    """Return models that no other server uses."""
    model = small_model()
    return Models(native_of(model), native_of(model), native_of(model, noise=DISTURBANCE))


def settings_of(engine: Engine, **changes: object) -> Settings:
    """Return the settings that a server's rows share."""
    given: dict = {"verify": "coupled", "temperature": 1.0, "stopping": "fixed", "costs": COSTS}
    given |= {"num_draft_tokens": 3, "text_of": lambda ids: text_of(engine, ids), **changes}
    return Settings(**given)


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    service: Service
    engine: Engine
    settings: Settings

    @property
    def model(self) -> str:
        return self.service.limits.model

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)

    def async_client(self, key: str = "none") -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S
        )

    def post(self, body: object, path: str = "/v1/completions") -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", json=body, timeout=PATIENCE_S)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = httpx2.get(f"{self.url}/metrics", timeout=PATIENCE_S).text.splitlines()
        found = [line for line in lines if line.startswith(f"shallow_draft_{name}")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def wait_until_empty(self) -> None:
        """Wait until no row runs and no request waits. Raises AssertionError after PATIENCE_S."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if self.metric("running_rows") == self.metric("waiting_requests") == 0:
                return
            time.sleep(0.02)
        raise AssertionError("rows or requests were left behind")


def make_engine(drafter: str) -> Engine:
    """Return the random target with this drafter, models that no other server uses."""
    models = make_models()
    return Engine(models.target, models.drafter(drafter), load_tokenizer(TOKENIZER), (2,))


@contextmanager
def serve(
    drafter: str | Engine = "chain", key_file: str = "", rule: str = "coupled", **changes: object
) -> Iterator[Served]:
    """Run the server with this drafter in a thread, on a free port.

    drafter: that of the random target, or another target with its drafter. rule: the verification
    rule. changes: settings of the job.
    """
    engine = make_engine(drafter) if isinstance(drafter, str) else drafter
    settings = settings_of(engine, verify=rule, stop_token_ids=engine.stop_token_ids)
    given: dict[str, Any] = {"grace_seconds": 1, **changes}
    cfg = ApiConfig(job="serving.api", output_dir="", **given)
    service = make_service(ChatModels(engine, settings, "", "auto"), cfg, Keys(key_file))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=service.run, args=[listener], daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield Served(url, service, engine, settings)
        finally:
            service.server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "the server does not end"


@lru_cache
def _reference() -> NativeTarget:
    return native_of(small_model())


def alone(prompt: list[int], settings: Settings, request_id: int = 0) -> Generation:
    """Return the target's autoregressive generation of one prompt, outside of the server."""
    (done,) = decode(_reference(), None, [prompt], settings, request_ids=[request_id])
    return done
