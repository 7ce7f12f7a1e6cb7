"""Counts and times of the server, in the form that Prometheus reads."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from decoding.rounds.stats import Generation

PREFIX = "shallow_draft"
# upper ends of the buckets of all histograms
SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5),
    *(1, 2, 3, 5, 10, 20, 30, 50, 100),
)
# of counters by depth, after those of vLLM, which also count positions from 0
BY_DEPTH = f"{PREFIX}_spec_decode_num"


class Metrics:
    """The metrics of one server; their number grows with the longest draft alone."""

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
        self.tested_by_depth = self._by_depth(
            "tested", "Drafted tokens that were tested, as all before them were accepted"
        )
        self.accepted_by_depth = self._by_depth("accepted", "Drafted tokens in the answers")
        self.rounds = self._counter(
            "row_rounds", "Target forwards, counted for each of their rows."
        )
        self.waited = self._histogram("queue_seconds", "Seconds until a request gets its rows.")
        self.first_token = self._histogram("first_token_seconds", "Seconds to the first token.")
        self.per_token = self._histogram(
            "time_per_output_token_seconds",
            "Seconds for each token of a row after those of its first round.",
        )
        self.answered = self._histogram(
            "request_seconds", "Seconds to the end of an answer that ended by stop or length."
        )

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", about, registry=self.registry)

    def _by_depth(self, name: str, about: str) -> Counter:
        return Counter(
            f"{BY_DEPTH}_{name}_tokens_per_pos",
            f"{about}, by their position in the draft.",
            ["position"],
            registry=self.registry,
        )

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
        for counter, counts in (
            (self.tested_by_depth, generation.tested_by_depth),
            (self.accepted_by_depth, generation.accepted_by_depth),
        ):
            for position, count in enumerate(counts):
                counter.labels(position).inc(count)

    def text(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)
