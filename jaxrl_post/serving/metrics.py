"""What a server counts, in the text format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxrl_post.serving.scheduler import Scheduler

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """Counters and histograms of one server; gauges ask its scheduler."""

    def __init__(self, scheduler: Scheduler):
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "jaxrl_requests", "HTTP requests by path and status", ["path", "status"], registry=registry
        )
        self.prompt_tokens = Counter("jaxrl_prompt_tokens", "Prompt tokens taken in", registry=registry)
        self.generated_tokens = Counter("jaxrl_generated_tokens", "Tokens sampled and sent", registry=registry)
        self.finished = Counter("jaxrl_samples", "Samples by why they ended", ["reason"], registry=registry)
        seconds = lambda name, text: Histogram(f"jaxrl_{name}_seconds", text, buckets=SECONDS, registry=registry)
        self.first_token = seconds("time_to_first_token", "From the request to its first token")
        self.per_token = seconds("time_per_output_token", "Between tokens of a sample, on average")
        self.whole = seconds("request_latency", "From the request to its last token")
        for name, text, value in (
            ("queued", "Samples without a slot", lambda: scheduler.queued),
            ("running", "Samples in slots", lambda: scheduler.running),
            ("slots", "Slots", lambda: len(scheduler.engine.slots)),
        ):
            Gauge(f"jaxrl_{name}", text, registry=registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self._registry)
