"""Counts and times of the server, in the form that Prometheus reads."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from decoding.rounds.stats import Generation

PREFIX = "shallow_draft"
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """The metrics of one server; their number does not grow with the requests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            f"{PREFIX}_requests",
            "Requests by their end: stop, length, cancelled, refused or failed.",
            ["outcome"],
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of the prompts.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens of the answers.")
        self.drafted_tokens = self._counter("drafted_tokens", "Tokens that were drafted.")
        self.accepted_tokens = self._counter("accepted_tokens", "Drafted tokens in the answers.")
        self.rounds = self._counter(
            "row_rounds", "Target forwards, counted for each of their rows."
        )
        self.waited = self._histogram("queue_seconds", "Seconds until a request gets its rows.")
        self.first_token = self._histogram("first_token_seconds", "Seconds to the first token.")
        self.answered = self._histogram("request_seconds", "Seconds to the end of an answer.")

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", about, registry=self.registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", about, buckets=SECONDS, registry=self.registry)

    def watch(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Add a gauge that calls `value` when it is read."""
        Gauge(f"{PREFIX}_{name}", about, registry=self.registry).set_function(value)

    def count_row(self, generation: Generation) -> None:
        """Add the counts of a row that has left the batch."""
        self.generated_tokens.inc(len(generation.tokens))
        self.drafted_tokens.inc(generation.drafted)
        self.accepted_tokens.inc(generation.accepted)
        self.rounds.inc(generation.rounds)

    def text(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)
