"""What counters must show for an accepted request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.stack.counters import Served, healthy_workers, parse_lost_transfers, parse_served, serving

PAGE = """\
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{engine_type="unified",is_streaming="false"} 2.0
sglang:num_requests_total{engine_type="unified",is_streaming="true"} 1.0
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true"} 310.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{engine_type="unified",is_streaming="true"} 48.0
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{mode="decode"} 99.0
"""
ROUTER = """\
# TYPE smg_worker_health gauge
smg_worker_health{worker="http://engine-2:30000"} 1
smg_worker_health{worker="http://engine:30000"} 0

# TYPE smg_worker_pool_size gauge
smg_worker_pool_size{worker_type="regular"} 2
"""


def test_what_an_engine_finished_is_read_without_its_health_probes() -> None:
    assert parse_served(PAGE) == Served(3, 310, 48)
    assert parse_served("") == Served()


@given(st.lists(st.integers(0, 99), max_size=4))
def test_lost_transfers_are_summed_over_the_ranks(ranks: list[int]) -> None:
    name = "sglang:num_transfer_failed_reqs_total"
    lines = [f'{name}{{tp_rank="{rank}"}} {lost}.0' for rank, lost in enumerate(ranks)]
    assert parse_lost_transfers("\n".join([f"# TYPE {name} counter", *lines, PAGE])) == sum(ranks)


def test_only_engines_that_the_router_calls_healthy_count() -> None:
    assert healthy_workers(ROUTER) == 1
    assert healthy_workers("") == 0


@given(st.integers(1, 9999), st.integers(1, 9999), st.integers(1, 4), st.data())
def test_one_engine_that_counted_exactly_the_request_is_accepted(
    prompt: int, answer: int, engines: int, data: st.DataObject
) -> None:
    who = data.draw(st.integers(0, engines - 1))
    gained = {f"engine-{k}": Served(1, prompt, answer) if k == who else Served() for k in range(engines)}
    assert serving(gained, prompt, answer) == []


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (Served(), "none of engine"),
        (Served(1, 299, 48), "299 prompt tokens"),
        (Served(1, 301, 48), "301 prompt tokens"),
        (Served(1, 300, 47), "47 answer tokens"),
        (Served(1, 300, 49), "49 answer tokens"),
        (Served(2, 299, 100), "299 prompt tokens"),
    ],
)
def test_a_request_that_is_not_all_there_is_a_contradiction(served: Served, words: str) -> None:
    found = serving({"engine": served, "engine-2": Served()}, 300, 48)
    assert len(found) == 1 and words in found[0]


def test_requests_of_others_meanwhile_are_no_contradiction() -> None:
    assert serving({"engine": Served(1, 300, 48), "engine-2": Served(5, 4000, 700)}, 300, 48) == []
