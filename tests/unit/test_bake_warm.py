from collections.abc import Generator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bake import warm
from deploy.bake.artifact import find, gpu_kind, tag, with_cache
from deploy.errors import DeployError
from deploy.host.report import Gpu
from deploy.lock.model import ImageLock, LockedCache
from deploy.stack.client import Endpoint, RequestFailed
from deploy.stack.compose import Stack
from loadtest.sse import Usage

STACK, TARGET = Stack(Path("/nowhere"), Path("/dev/null")), Endpoint("http://127.0.0.1:1", "tiny")


@given(st.integers(16, 1 << 20))
def test_prompts_grow_by_powers_of_two_to_half_of_the_context(context: int) -> None:
    found = warm.lengths(context)
    assert found[0] == 8 and all(b == 2 * a for a, b in pairwise(found))
    assert found[-1] <= max(8, context // 2) < 2 * found[-1] or found == [8]


@given(st.integers(1, 300))
def test_batches_grow_by_powers_of_two_to_the_engines_limit(most: int) -> None:
    found = warm.batches(most)
    assert found[0] == 1 and found[-1] == most and found == sorted(set(found))


def test_the_limits_are_the_engines_own() -> None:
    services = {
        "prefill": {"command": ["prefill", "--context-length=8192"]},
        "decode": {"command": ["decode", "--context-length=8192", "--max-running-requests=48"]},
        "router": {"command": None},
    }
    assert warm.limits({"services": services}) == (8192, 48)
    assert warm.limits({"services": {}}) == (warm.DEFAULT_CONTEXT, warm.DEFAULT_REQUESTS)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Stand-ins for two engines: they compile at the first and second prompt of 64 words, and refuse 512."""
    seen: dict[str, list[str]] = {"asked": [], "compiled": []}

    def stream(target: Endpoint, question: str, **_: object) -> Generator[str, None, Usage]:
        words = len(question.split()) - 1
        if words >= 512:
            raise RequestFailed("the router answered HTTP 400", "too long", "deploy logs router")
        seen["asked"].append(question)
        if words == 64 and len(seen["compiled"]) < 2:
            seen["compiled"].append(question)
        yield "a"
        return Usage(1, 1)

    def compiled(stack: Stack) -> dict[str, dict[str, int]]:
        return {"decode": {"triton": len(seen["compiled"])}, "prefill": {"triton": 0}}

    monkeypatch.setattr(warm, "stream", stream)
    monkeypatch.setattr(warm, "compiled", compiled)
    return seen


def test_rounds_go_on_until_nothing_is_compiled(engines: dict[str, list[str]]) -> None:
    steps: list[tuple[str, int, int]] = []

    def report(what: str, done: int, total: int) -> None:
        steps.append((what, done, total))

    rounds = list(warm.warm(STACK, TARGET, 1024, 2, report))
    assert [found.total for found in rounds] == [1, 1, 0]
    assert rounds[0].compiled == {"decode": {"triton": 1}, "prefill": {"triton": 0}}
    assert {found.refused for found in rounds} == {1}
    assert steps[0] == ("round 1: 1 x 8 words", 0, 9)
    assert len(set(engines["asked"])) > 1


def nothing_compiled(stack: Stack) -> dict[str, dict[str, int]]:
    return {}


def nobody(what: str, done: int, total: int) -> None:
    """Is told and says nothing."""


def test_a_stack_that_refuses_everything_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Iterator[str]:
        yield from ()
        raise RequestFailed("the router answered HTTP 400", "no", "deploy logs router")

    monkeypatch.setattr(warm, "stream", refuse)
    monkeypatch.setattr(warm, "compiled", nothing_compiled)
    with pytest.raises(RequestFailed, match="no request was answered"):
        list(warm.warm(STACK, TARGET, 16, 1, nobody))


def test_the_kind_of_gpu_is_its_compute_capability() -> None:
    gpus = [Gpu(index=index, compute_capability="12.0") for index in range(2)]
    assert gpu_kind("pd", gpus) == "sm_120"
    assert gpu_kind("cpu", []) == "cpu"
    for bad in ([], [*gpus, Gpu(index=2, compute_capability="9.0")], [Gpu(index=0)]):
        with pytest.raises(DeployError):
            gpu_kind("pd", bad)


def test_a_newer_cache_takes_the_place_of_that_for_the_same_gpus() -> None:
    image = ImageLock(inputs="a" * 64, environment="b" * 64)
    one, other, newer = (
        LockedCache(gpu=gpu, manifest=f"sha256:{digit * 64}", blob=f"sha256:{digit * 64}", size=1)
        for gpu, digit in (("sm_120", "1"), ("cpu", "2"), ("sm_120", "3"))
    )
    for cache in (one, other, newer):
        image = with_cache(image, cache)
    assert image.cache == (other, newer)
    assert find(image, "sm_120") == newer and find(image, "sm_90") is None and find(None, "cpu") is None
    assert tag(image, "sm_120") == f"{'a' * 16}-caches-sm_120"
