"""The time limits of a KV transfer are measured with a clock that does not jump."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn

LIMIT_S = 300.0
HOUR = 3600.0


class Clocks:
    """The wall clock and the steady one, which both run only when told to."""

    def __init__(self) -> None:
        self.wall, self.steady = 1_000_000.0, 500.0

    def set_wall(self, by: float) -> None:
        self.wall += by

    def pass_time(self, seconds: float) -> None:
        self.wall, self.steady = self.wall + seconds, self.steady + seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    made = Clocks()
    monkeypatch.setattr(time, "time", lambda: made.wall)
    monkeypatch.setattr(time, "monotonic", lambda: made.steady)
    yield made


def manager(status: Any) -> Any:
    return SimpleNamespace(
        defer_decode_allocation=True,
        deferred_bootstrap=SimpleNamespace(complete=lambda *_: None),
        _notify_bootstrap=lambda *_: None,
        bootstrap_timeout=LIMIT_S,
        waiting_timeout=LIMIT_S,
        check_status=lambda room: status,
        record_failure=lambda *_: None,
        update_status=lambda *_: None,
    )


def sender() -> Any:
    made = SimpleNamespace(kv_mgr=manager(KVPoll.Bootstrapping), bootstrap_room=1, _prefill_complete_time=None)
    conn.CommonKVSender.mark_prefill_complete(made)
    return made


def receiver(status: Any) -> Any:
    """One that waits for the prompt's computation, or for its KV cache if `status` says so."""
    made = SimpleNamespace(
        kv_mgr=manager(status),
        bootstrap_room=1,
        conclude_state=None,
        init_time=None,
        _prefill_wait_start=time.monotonic(),
        abort=lambda: None,
        abort_notified=True,
        invalidate_cached_bootstrap_infos=lambda: None,
    )
    made._check_waiting_timeout = lambda: conn.CommonKVReceiver._check_waiting_timeout(made)
    return made


def poll(waits: Any) -> Any:
    return conn.CommonKVReceiver._poll(waits)


def test_a_wall_clock_that_is_set_ends_no_wait(clocks: Clocks) -> None:
    sends, computes, transfers = sender(), receiver(KVPoll.Bootstrapping), receiver(KVPoll.WaitingForInput)
    assert poll(transfers) == KVPoll.WaitingForInput
    for hours in (1, -2, 3):
        clocks.set_wall(hours * HOUR)
        assert conn.CommonKVSender._check_bootstrap_timeout(sends) is None
        assert poll(computes) == KVPoll.Bootstrapping
        assert poll(transfers) == KVPoll.WaitingForInput


def test_a_wall_clock_that_is_set_lengthens_no_limit(clocks: Clocks) -> None:
    sends, computes, transfers = sender(), receiver(KVPoll.Bootstrapping), receiver(KVPoll.WaitingForInput)
    assert poll(transfers) == KVPoll.WaitingForInput
    clocks.set_wall(-HOUR)
    clocks.pass_time(LIMIT_S + 1)
    assert conn.CommonKVSender._check_bootstrap_timeout(sends) == KVPoll.Failed
    assert poll(computes) == KVPoll.Failed
    assert poll(transfers) == KVPoll.Failed
