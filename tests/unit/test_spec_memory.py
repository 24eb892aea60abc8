"""The memory plan against published weight sizes and SGLang's own formulas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.spec.memory import (
    ASSUMED_MIB,
    bytes_per_token,
    draft_bytes,
    least_fraction,
    plan_memory,
    weight_bytes,
    window_bytes,
)
from deploy.spec.model import Decode, Engine, Model, Prefill, Role, Spec, Variant


def replicas(size: int, engine: Engine, variant: Variant = "mxfp4") -> Spec:
    return Spec(
        profile="replicas",
        replica=(Role(gpus=tuple(range(size)), numa_node=0),),
        engine=engine,
        model=Model(variant=variant),
    )


@pytest.mark.parametrize(("variant", "published"), [("mxfp4", 160e9), ("nvfp4", 168e9)])
def test_the_weights_are_those_that_are_published(variant: Variant, published: float) -> None:
    # The published folders hold the MTP layer as well.
    assert weight_bytes(variant) + draft_bytes() == pytest.approx(published, rel=0.02)


@given(
    st.integers(8_000, 200_000),
    st.sampled_from([2, 4]),
    st.floats(0.3, 0.95),
    st.sampled_from(["none", "eagle", "dspark"]),
)
def test_a_plan_adds_up(mib: int, size: int, fraction: float, speculation: str) -> None:
    spec = replicas(size, Engine.model_validate({"memory_fraction": fraction, "speculation": speculation}))
    plan = plan_memory(mib, spec)
    assert plan.weights + plan.windows + plan.kv_cache + plan.rest == plan.total
    assert plan.tokens * bytes_per_token() <= max(plan.kv_cache, 0)
    assert plan.fits == (plan.tokens > 0)
    assert f"{plan.weights / 1024**3:.1f} hold weights" in str(plan)


def test_a_token_of_context_takes_what_its_compressed_entries_take() -> None:
    # By hand: 21 * 716 / 4 + 20 * 584 / 128 bytes.
    assert bytes_per_token() == 3759 + 91.25


def test_sliding_windows_are_those_of_sglangs_cap_mode() -> None:
    # By hand for 64 requests and chunks of 8192: (128 + 128 + 256 + 256) * 64 + 2 * 8192 + 256 + 4 * 64 * 384 tokens,
    # each 43 * 584 + 21 * 10240 / 32 bytes; and 66 * 128 + 1 states of 4096 bytes in 20 layers.
    tokens = 768 * 64 + 16384 + 256 + 256 * 384
    assert tokens % 256 == 0
    assert window_bytes(64, 8192, 0) == tokens * (43 * 584 + 6720) + 8449 * 4096 * 20


def test_limits_come_from_the_roles_or_from_the_variables() -> None:
    small = Spec(decode=Decode(max_running_requests=8), prefill=Prefill(chunked_prefill_size=2048))
    assert plan_memory(ASSUMED_MIB, small).windows == window_bytes(8, 2048, 0)
    spec = replicas(2, Engine()).model_copy(update={"variables": {"MAX_RUNNING_REQUESTS": 16}})
    assert plan_memory(ASSUMED_MIB, spec).windows == window_bytes(16, 8192, 0)
    broken = spec.model_copy(update={"variables": {"MAX_RUNNING_REQUESTS": "many"}})
    assert plan_memory(ASSUMED_MIB, broken).windows == window_bytes(64, 8192, 0)


def test_two_small_gpus_do_not_hold_the_model_and_the_least_fraction_does() -> None:
    assert not plan_memory(24576, replicas(2, Engine())).fits
    tight = plan_memory(ASSUMED_MIB, replicas(2, Engine(speculation="eagle")))
    assert not tight.fits
    fraction = least_fraction(tight, 131072)
    assert (
        plan_memory(ASSUMED_MIB, replicas(2, Engine(speculation="eagle", memory_fraction=fraction))).tokens >= 120_000
    )
