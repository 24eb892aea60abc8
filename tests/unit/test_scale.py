"""The simulation against what can be computed by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from deploy.cli import app
from deploy.lock.model import Lock, LockedFile, LockedLayer, ModelLock
from deploy.scale.distribution import PIECES, SLOTS, WAYS, Network, Way, spread
from deploy.scale.report import GIGABIT, PACKED_BYTES, Assumed, fleets, image_bytes, model_bytes, request_bytes
from deploy.spec.model import Spec

ROOT = Path(__file__).parents[2]
rates = st.floats(0.5, 200).map(lambda value: value * GIGABIT)
networks = st.builds(Network, origin=rates, cache=rates, host=rates)


@pytest.mark.slow
@given(st.floats(1e6, 1e12), st.integers(1, 24), networks, st.sampled_from(WAYS), st.integers(0, 5))
@settings(max_examples=25)
def test_no_host_is_faster_than_its_line_and_nothing_leaves_the_origin_faster_than_its_own(
    size: float, hosts: int, network: Network, way: Way, seed: int
) -> None:
    times = spread(size, hosts, network, way, seed)
    assert len(times) == hosts
    assert times == sorted(times)
    assert times[0] >= size / network.host * 0.999
    copies = {"origin": hosts, "caches": -(-hosts // network.hosts_per_cache), "peers": 1}[way]
    assert times[-1] >= copies * size / network.origin * 0.999
    assert spread(size, hosts, network, way, seed) == times


@pytest.mark.parametrize("hosts", [1, 8, 64])
def test_a_narrow_origin_alone_is_shared_without_loss(hosts: int) -> None:
    network = Network(origin=1e9, cache=1e9, host=1e9)
    last = spread(64e9, hosts, network, "origin")[-1]
    assert last == pytest.approx(hosts * 64, rel=0.05)


@pytest.mark.slow
def test_peers_make_the_time_nearly_independent_of_the_number_of_hosts() -> None:
    network = Network(origin=10 * GIGABIT, cache=25 * GIGABIT, host=25 * GIGABIT)
    few, many = (spread(160e9, hosts, network, "peers")[-1] for hosts in (4, 200))
    assert many < 1.3 * few
    assert many < spread(160e9, 200, network, "caches")[-1] / 5
    # Pieces pass from host to host, so that the last piece comes a few piece times after the origin has sent it.
    assert many < 160e9 / network.origin + 20 * 160e9 / PIECES * SLOTS / network.host


def test_sizes_are_the_locks_where_it_has_them() -> None:
    locked = Lock(model=ModelLock(file=(LockedFile(path="a", size=7, sha256="0" * 64),)))
    assert model_bytes(Spec(), locked) == 7
    assert 150e9 < model_bytes(Spec(), Lock()) < 170e9
    assert image_bytes(Lock())[0] == PACKED_BYTES
    layer = LockedLayer(diff_id="sha256:" + "0" * 64, size=9, blob="sha256:" + "1" * 64, blob_size=3)
    assert layer.blob_size == 3


def test_a_prompts_cache_is_the_compressed_one_of_every_rank_and_its_windows() -> None:
    # 21 layers with an entry and an index key every 4 tokens, 20 with an entry every 128, 43 windows of 128.
    one = 21 * (584 + 132) / 4 + 20 * 584 / 128
    assert request_bytes(8192, 4) == pytest.approx(4 * (8192 * one + 128 * 43 * 584))
    assert request_bytes(1, 1) == pytest.approx(one + 43 * 584)


def test_what_grows_with_the_hosts() -> None:
    assumed = Assumed(Network(1e9, 1e9, 1e9))
    one, ten = fleets(Spec(), Lock(), [1, 10], assumed)
    assert (one.requests, ten.requests) == (64, 640)
    assert (one.routers, ten.routers) == (2, 3)
    assert one.traffic == 0 < ten.traffic
    assert one.later == ten.later
    assert ten.first["peers"] < ten.first["origin"]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    deploy = Path(sys.executable).parent / "deploy"
    return subprocess.run([str(deploy), "scale", *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_the_verb_prints_a_table_or_json_and_refuses_what_is_no_number_of_hosts() -> None:
    done = run("--hosts", "2,3", "--json")
    assert done.returncode == 0, done.stderr
    assert [fleet["hosts"] for fleet in json.loads(done.stdout)] == [2, 3]
    assert "peers" in run("--hosts", "2").stdout
    for wrong in ("", "x", "0", "1,,2", "100000"):
        assert run("--hosts", wrong).returncode == 2


@pytest.mark.parametrize("option", ["--network", "--registry", "--cache", "--disk", "--unpack", "--compile"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e308", "-1"])
def test_a_rate_that_nobody_has_is_refused(option: str, value: str) -> None:
    assert CliRunner().invoke(app, ["scale", "--hosts", "2", f"{option}={value}"]).exit_code == 2
