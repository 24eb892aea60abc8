import json
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.host.docker_facts import DockerFacts, parse_info, require_docker, require_gpus
from deploy.host.errors import HostError
from deploy.host.parsers.docker import parse_version

GOOD = DockerFacts("28.2.2", "26.1.5+dfsg1", "", "2.26.1-4", "0.13.1", Path("/var/lib/docker"), (Path("/etc/cdi"),))


def info(**changes: object) -> str:
    """Look-alike of `docker info --format '{{json .}}'`."""
    plugins = [{"Name": "compose", "Version": "2.26.1-4"}, {"Name": "buildx", "Version": "0.13.1"}]
    body = {
        "ServerVersion": "26.1.5+dfsg1",
        "DockerRootDir": "/var/lib/docker",
        "CDISpecDirs": ["/etc/cdi"],
        "ClientInfo": {"Version": "28.2.2", "Plugins": plugins},
    }
    return json.dumps(body | changes) + "\n"


def test_a_running_engine_is_read_whole() -> None:
    assert parse_info(info()) == GOOD


def test_an_engine_that_does_not_answer_has_no_version_and_the_clients_words() -> None:
    stopped = info(ServerVersion="", DockerRootDir="", CDISpecDirs=None)
    facts = parse_info(stopped, "Cannot connect to the Docker daemon\n")
    assert facts.server is None
    assert facts.failure == "Cannot connect to the Docker daemon"
    assert facts.compose == "2.26.1-4"


@given(st.text(alphabet=string.printable, max_size=80))
def test_garbage_is_an_engine_that_does_not_answer(text: str) -> None:
    assert parse_info(text).server is None


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.sampled_from(["", "+dfsg1", "-4", "~ubuntu1"]))
def test_versions_are_read_as_numbers(parts: list[int], suffix: str) -> None:
    assert parse_version(".".join(map(str, parts)) + suffix) == tuple(parts)


def test_a_good_docker_passes() -> None:
    require_docker(GOOD, cdi=True)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (DockerFacts(), "not installed"),
        (DockerFacts("28.2.2", failure="Cannot connect"), "no Docker engine answers"),
        (
            DockerFacts("28.2.2", failure="permission denied while trying to connect to the Docker daemon socket"),
            "this user may not talk to Docker",
        ),
        (DockerFacts("20.10.24", "20.10.24"), "20.10.24 is too old"),
        (DockerFacts("27.0", "27.0"), "docker compose is missing"),
        (DockerFacts("27.0", "27.0", compose="v2.21.0"), "docker compose v2.21.0 is too old"),
        (DockerFacts("27.0", "27.0", compose="v2.26.1"), "CDI is switched off"),
    ],
)
def test_a_docker_that_cannot_run_the_stack_is_refused(facts: DockerFacts, words: str) -> None:
    with pytest.raises(HostError) as caught:
        require_docker(facts, cdi=True)
    assert words in caught.value.message
    assert caught.value.fix


def test_cdi_does_not_matter_without_gpus() -> None:
    require_docker(DockerFacts("27.0", "27.0", compose="2.26.1"), cdi=False)


def test_an_unknown_gpu_is_named_beside_those_that_exist() -> None:
    with pytest.raises(HostError) as caught:
        require_gpus(["gpu=2", "gpu=8"], {f"gpu={index}" for index in (10, 2, 1)}, (Path("/etc/cdi"),))
    assert caught.value.message == "this host has no gpu=8"
    assert caught.value.why == "the CDI specs in /etc/cdi name gpu=1, gpu=2, gpu=10"
