"""Metrics for Prometheus: vLLM's names under our prefix where the meaning is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vlmfast.api.answer import Answer
from vlmfast.engine.engine import Load
from vlmfast.engine.prefix_cache import CacheStats

from .shadow import Agreement

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1)
_TOKENS = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000)
OTHER = "other"


class _Live(Collector):
    """Gauges that are read from the engine when they are asked for.

    Parameters
    ----------
    load : callable
        The engine's `Load`, ``None`` while there is none.
    cache : callable
        Statistics of the prefix cache.
    preparing : callable
        Number of requests whose media are read.
    model : str
    """

    def __init__(
        self,
        load: Callable[[], Load | None],
        cache: Callable[[], CacheStats | None],
        preparing: Callable[[], int],
        model: str,
    ) -> None:
        self._load, self._cache, self._preparing, self._model = load, cache, preparing, model

    def collect(self) -> Iterator[Metric]:
        load, cache = self._load(), self._cache()
        if load is None or cache is None:
            return
        running = load.prefilling + load.decoding
        share = load.cache_bytes / load.max_cache_bytes
        gauges = {
            "num_requests_preparing": ("Requests whose media are read", self._preparing()),
            "num_requests_running": ("Requests that are prefilled or decoded", running),
            "num_requests_decoding": ("Requests that are decoded", load.decoding),
            "num_requests_waiting": ("Requests that wait for the engine", load.waiting),
            "kv_cache_usage_perc": (
                "Upper bound on the caches of running requests, as a fraction of their limit",
                share,
            ),
            "engine_steps": ("Steps of the engine so far", load.steps),
            "prefix_cache_bytes": ("Bytes in the prefix cache", cache.bytes),
            "prefix_cache_limit_bytes": ("Upper bound on the prefix cache", cache.limit),
        }
        for name, (about, value) in gauges.items():
            family = GaugeMetricFamily(f"vlmfast:{name}", about, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family


class Metrics:
    """What the server counts.

    Parameters
    ----------
    model : str
    load, cache, preparing : callable
        As in `_Live`.
    recipes : iterable of str
        Labels of recipes; all others are counted together, so that their number is bounded.
    stages : iterable of str
        Labels of stages.
    """

    def __init__(
        self,
        model: str,
        load: Callable[[], Load | None],
        cache: Callable[[], CacheStats | None],
        preparing: Callable[[], int],
        recipes: Iterable[str],
        stages: Iterable[str],
    ) -> None:
        self.registry, self._model = CollectorRegistry(), model
        self._recipes, self._stages = frozenset(recipes), frozenset(stages)
        self.registry.register(_Live(load, cache, preparing, model))
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._fed = self._counter("prompt_tokens_fed", "Rows that the language model prefilled")
        self._generated = self._counter("generation_tokens", "Tokens of answers")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens in the prefix cache")
        self._success = self._counter("request_success", "Answered requests", "finished_reason")
        self._ended = self._counter("request_errors", "Requests without an answer", "status")
        self._recipe = self._counter("request_recipe", "Answered requests", "recipe")
        self._visual = self._counter("visual_tokens", "Visual tokens after each stage", "stage")
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds of speculation")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted drafts")
        self._ttft = self._seconds("time_to_first_token", "From the request to its first token")
        self._gap = self._seconds("request_time_per_output_token", "Between two tokens", _GAPS)
        self._whole = self._seconds("e2e_request_latency", "From the request to its last token")
        self._queue = self._seconds("request_queue_time", "From submission to prefill")
        self._prefill = self._seconds("request_prefill_time", "Vision tower and prefill")
        self._again = self._counter(
            "shadow_answers", "Greedy answers that the full model has computed too", "recipe"
        )
        self._equal = self._counter(
            "shadow_answers_equal", "Those with the same tokens as the full model's", "recipe"
        )
        self._left_out = self._counter("shadow_left_out", "Requests that were not answered again")
        self._overlap = Histogram(
            "vlmfast:shadow_first_token_overlap",
            "Probability of the first token that a recipe and the full model share",
            ["model_name", "recipe"],
            registry=self.registry,
            buckets=_SHARES,
        )
        for recipe in sorted(self._recipes - {"none"}):  # 0 from the beginning
            for family in (self._again, self._equal, self._overlap):
                family.labels(model, recipe)
        self._lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        names = ["model_name", *labels]
        found = Counter(f"vlmfast:{name}", about, names, registry=self.registry)
        return found if labels else found.labels(self._model)  # which is 0 from the beginning

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        found = Histogram(
            f"vlmfast:{name}", about, ["model_name"], registry=self.registry, buckets=buckets
        )
        return found.labels(self._model)

    def _seconds(self, name: str, about: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return self._histogram(f"{name}_seconds", f"{about}, in seconds", buckets)

    def answered(
        self, answer: Answer, prompt_tokens: int, first_s: float | None, total_s: float
    ) -> None:
        """Count an answer.

        Parameters
        ----------
        prompt_tokens : int
            Ids of the prompt, placeholders included.
        first_s, total_s : float
            From the request to its first and its last token.
        """
        model, stats = self._model, answer.stats
        self._prompt.inc(prompt_tokens)
        self._fed.inc(stats.prompt_tokens)
        self._generated.inc(stats.generated_tokens)
        self._cached.inc(stats.cached_tokens)
        self._success.labels(model, answer.finish_reason).inc()
        self._recipe.labels(model, self._label(answer.canonical_recipe)).inc()
        self._visual.labels(model, "input").inc(stats.visual_tokens_in)
        for stage, kept in stats.visual_tokens_kept.items():
            name = stage if stage in self._stages else OTHER
            self._visual.labels(model, name).inc(kept)
        self._drafts.inc(stats.rounds)
        self._drafted.inc(stats.drafted)
        self._accepted.inc(stats.accepted)
        if first_s is not None:
            self._ttft.observe(first_s)
        if stats.generated_tokens > 1:
            self._gap.observe(stats.tpot_s)
        self._whole.observe(total_s)
        self._queue.observe(stats.queue_s)
        self._prefill.observe(stats.time_vision_s + stats.time_prefill_s)
        self._lengths.observe(prompt_tokens)

    def _label(self, recipe: str) -> str:
        return recipe if recipe in self._recipes else OTHER

    def compared(self, found: Agreement | None) -> None:
        """Count a request that was answered again, or ``None`` for one that was not."""
        if found is None:
            self._left_out.inc()
            return
        labels = self._model, self._label(found.recipe)
        self._overlap.labels(*labels).observe(found.overlap)
        if found.equal is not None:
            self._again.labels(*labels).inc()
            self._equal.labels(*labels).inc(found.equal)

    def failed(self, status: int) -> None:
        """Count a request without an answer; 499 is a client that has left."""
        self._ended.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)
