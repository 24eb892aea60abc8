"""Which GPU the plan is made for, and what is refused."""

from pathlib import Path

import pytest
from lookalike import EIGHT_GPUS, host

from deploy.host.probe_host import probe
from deploy.spec.load import SpecError, parse
from deploy.stack.memory import plan_on, require_memory

GPUS = probe(host(EIGHT_GPUS)).gpus
REPLICA = 'profile = "replicas"\n[[replica]]\ngpus = [0, 1]\nnuma_node = 0\n'


def test_the_smallest_gpu_that_the_spec_names_decides() -> None:
    mixed = [gpu.model_copy(update={"memory_mib": 50000 if gpu.index == 1 else 90000}) for gpu in GPUS]
    planned = plan_on(parse(REPLICA, Path("deploy.toml")).spec, mixed)
    assert planned and planned[0].total == 50000 * 1024**2 and "the driver says" in planned[1]
    others = plan_on(parse(REPLICA.replace("0, 1", "2, 3"), Path("deploy.toml")).spec, mixed)
    assert others and others[0].total == 90000 * 1024**2


def test_without_gpus_the_size_is_assumed_and_that_is_said() -> None:
    planned = plan_on(parse("", Path("deploy.toml")).spec, [])
    assert planned and "assumed" in planned[1]
    assert plan_on(parse('profile = "cpu"\n', Path("deploy.toml")).spec, GPUS) is None


def test_a_spec_without_room_for_a_kv_cache_is_refused_at_its_line_with_the_fraction_that_would_do() -> None:
    spec_file = parse(REPLICA + '[engine]\nspeculation = "eagle"\nmemory_fraction = 0.8\n', Path("deploy.toml"))
    planned = plan_on(spec_file.spec, [])
    assert planned
    with pytest.raises(SpecError) as caught:
        require_memory(spec_file, planned[0])
    problem = caught.value.problems[0]
    assert problem.position.line == 7 and "hold weights" in problem.why
    fraction = problem.fix.split("memory_fraction = ")[1].split(",")[0]
    mended = spec_file.spec.model_copy(
        update={"engine": spec_file.spec.engine.model_copy(update={"memory_fraction": float(fraction)})}
    )
    again = plan_on(mended, [])
    assert again and again[0].fits


def test_gpus_that_are_too_small_at_any_fraction_are_said_to_be() -> None:
    small = [gpu.model_copy(update={"memory_mib": 24576}) for gpu in GPUS]
    spec_file = parse(REPLICA, Path("deploy.toml"))
    planned = plan_on(spec_file.spec, small)
    assert planned
    with pytest.raises(SpecError) as caught:
        require_memory(spec_file, planned[0])
    assert "four GPUs" in caught.value.problems[0].fix and caught.value.problems[0].position.line == 1
