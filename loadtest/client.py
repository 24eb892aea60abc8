"""Sends one request of a plan and turns what happens into a sample. Runs on gevent, knows nothing of Locust."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import gevent

from loadtest import workload
from loadtest.samples import Sample
from loadtest.sse import StreamRecord
from loadtest.stream import Connection, StreamError

EPOCH = time.time() - time.perf_counter()
"""Wall clock of this process minus its monotonic clock, fixed, so that a clock that is set does not bend a run."""


def new_sample(request: workload.Request, worker: str, scheduled: float | None = None) -> Sample:
    """A sample that starts now; `scheduled` (monotonic) is when an open loop should have sent it."""
    sample = Sample(request.index, worker, EPOCH + time.perf_counter(), 0.0, request.asked_input, request.asked_output)
    sample.scheduled = None if scheduled is None else EPOCH + scheduled
    return sample


def perform(
    connection: Connection,
    plan: workload.Plan,
    request: workload.Request,
    sample: Sample,
    on_read: Callable[[int, float], None] = lambda _arrivals, _late: None,
) -> str:
    """Does one request, fills in `sample` and returns the answer's text (of conversations only, else empty).

    `on_read` hears of each read: how many arrivals it held and how long it waited for us. Failures go into the sample;
    only a kill of the greenlet goes up, with the sample marked as cancelled.
    """
    conversation = isinstance(plan.workload, workload.Synthetic) and plan.workload.turns > 1
    record = StreamRecord(plan.endpoint, keep_text=conversation)
    payload = json.dumps(workload.body(plan, request)).encode()
    start = time.perf_counter()
    sample.start = EPOCH + start

    def on_headers(now: float) -> None:
        sample.headers = now - start

    def on_body(now: float, block: bytes) -> None:
        sample.end = now - start
        on_read(record.feed(now, block), time.perf_counter() - now)

    try:
        connection.post(workload.path(plan), payload, on_headers, on_body)
        if record.error is not None:
            sample.error, sample.detail = "server", record.error
        elif plan.endpoint == "chat" and not record.done:
            sample.error, sample.detail = "cut", "the stream ended without [DONE]"
        elif record.usage is None:
            sample.error, sample.detail = "no_usage", "the stream ended without token counts"
    except StreamError as error:
        sample.error, sample.detail, sample.status = error.kind, error.detail, error.status
    except ValueError as error:
        sample.error, sample.detail = "protocol", f"malformed event: {error}"
    except gevent.GreenletExit:
        sample.error, sample.detail = "cancelled", "the run ended first"
        raise
    finally:
        if not sample.ok:
            sample.end = time.perf_counter() - start
        sample.times = [t - start for t in record.times]
        sample.counts = record.counts
        sample.first_token = sample.times[0] if sample.times else None
        sample.first_content = record.first_content - start if record.first_content is not None else None
        sample.finish = record.finish
        if record.usage is not None:
            sample.prompt_tokens = record.usage.prompt
            sample.completion_tokens = record.usage.completion
            sample.cached_tokens = record.usage.cached
            sample.reasoning_tokens = record.usage.reasoning
    return record.text
