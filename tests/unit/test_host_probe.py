import os
import socket
from pathlib import Path

import pytest

from deploy.host import probe
from deploy.host.errors import HostError


def test_a_port_in_use_names_the_process_that_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(HostError, match=rf"port {port} .* in use by .*\(pid {os.getpid()}\)"):
            probe.require_port("127.0.0.1", port)
        with pytest.raises(HostError):
            probe.require_port("0.0.0.0", port)
    probe.require_port("127.0.0.1", port)


def test_a_port_on_every_address_is_in_use_on_loopback_too() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server, pytest.raises(HostError):
        probe.require_port("127.0.0.1", server.getsockname()[1])


def test_a_disk_too_small_says_how_much_is_needed_and_free(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"too small for the model") as caught:
        probe.require_space(tmp_path / "not" / "there", 1 << 60, "the model")
    assert "1073741824.0 GiB are needed" in caught.value.why
    probe.require_space(tmp_path, 1, "the model")


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(HostError, match="too little memory for the stack"):
        probe.require_memory(1 << 60, "the stack")


def test_no_docker_client_is_found_on_an_empty_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.docker_facts().client is None


def test_a_client_that_hangs_counts_as_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in client: a real one hangs like this when its context points at a dead remote host."""
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\nexec sleep 60\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = probe.docker_facts(timeout_s=0.2)
    assert facts.server is None
    assert "no answer within" in facts.failure


def test_cdi_devices_of_all_spec_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("kind: nvidia.com/gpu\ndevices: [{name: '0'}]\n")
    (tmp_path / "b.json").write_text('{"kind": "nvidia.com/gpu", "devices": [{"name": "1"}]}')
    (tmp_path / "broken.yaml").write_text("kind: [")
    assert probe.cdi_devices((tmp_path, tmp_path / "absent")) == {"nvidia.com/gpu=0", "nvidia.com/gpu=1"}
