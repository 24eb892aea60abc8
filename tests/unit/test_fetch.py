import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deploy.fetch
from deploy.errors import DeployError
from deploy.fetch import Advice, Item, fetch, http_client
from tests.unit.web import Fault, Server, serve

CONTENT = bytes(range(256)) * 8192  # 2 MiB
SHA256 = hashlib.sha256(CONTENT).hexdigest()
ADVICE = Advice("advice for altered", "advice for missing", "advice for unreachable")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.fetch, "PAUSE_S", 0.001)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    return tmp_path


def get(server: Server, target: Path, size: int = len(CONTENT), sha256: str = SHA256, name: str = "a.bin") -> list[str]:
    """Fetch one file and return what was noted."""
    notes: list[str] = []
    with http_client() as http:
        fetch([Item(name, f"{server.address}/{name}", sha256, target, size)], http, ADVICE, note=notes.append)
    return notes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_file_is_fetched_once_and_then_verified_in_place_without_network(folder: Path) -> None:
    target = folder / "cache" / "a"
    seen: list[tuple[int, int]] = []
    with serve(folder) as server, http_client() as http:
        item = Item("a", f"{server.address}/a.bin", SHA256, target, len(CONTENT))
        fetch([item], http, ADVICE, lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == CONTENT
    assert seen[0] == (0, len(CONTENT)) and seen[-1] == (len(CONTENT), len(CONTENT))
    with http_client() as http:
        fetch([item], http, ADVICE)
    assert names(folder / "cache") == ["a"]


faults = st.one_of(
    st.builds(Fault, st.just("cut"), bytes=st.integers(0, len(CONTENT) - 1)),
    st.builds(Fault, st.just("status"), status=st.sampled_from([408, 429, 500, 502, 503])),
    st.builds(Fault, st.just("slow"), seconds=st.just(0.01)),
)


@settings(max_examples=40)
@given(st.lists(faults, max_size=4), st.booleans(), st.booleans())
def test_whatever_passes_goes_wrong_on_the_way_the_right_bytes_arrive(
    tmp_path_factory: pytest.TempPathFactory, wrong: list[Fault], ranges: bool, size_known: bool
) -> None:
    folder = tmp_path_factory.mktemp("web")
    (folder / "a.bin").write_bytes(CONTENT)
    with serve(folder, faults=wrong, ranges=ranges) as server:
        get(server, folder / "cache" / "a", len(CONTENT) if size_known else 0)
    assert (folder / "cache" / "a").read_bytes() == CONTENT
    assert names(folder / "cache") == ["a"]


def test_a_cut_transfer_goes_on_where_it_was_cut(folder: Path) -> None:
    with serve(folder, faults=[Fault("cut", bytes=1_500_000)]) as server:
        get(server, folder / "cache" / "a")
    # Nothing that arrived is sent twice.
    assert server.sent == len(CONTENT)
    assert len(server.requested) == 2


def test_another_process_goes_on_where_a_killed_one_was(folder: Path) -> None:
    target = folder / "cache" / "a"
    code = (
        "import sys, pathlib; from deploy.fetch import *;"
        "http = http_client();"
        "fetch([Item('a', sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4]))], http,"
        " Advice('', '', ''))"
    )
    faults = [Fault("cut", bytes=1_000_000), Fault("slow", seconds=30)]
    with serve(folder, faults=faults) as server:
        arguments = [f"{server.address}/a.bin", SHA256, str(target), str(len(CONTENT))]
        process = subprocess.Popen([sys.executable, "-c", code, *arguments])
        deadline = time.monotonic() + 20
        while len(server.requested) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.wait()
        assert names(folder / "cache") == [".a.part"]
        before = server.sent
        get(server, target)
        assert target.read_bytes() == CONTENT
        assert before == 1_000_000
        assert server.sent - before == len(CONTENT) - 1_000_000


def test_two_at_once_transfer_a_file_once(folder: Path) -> None:
    with serve(folder, faults=[Fault("slow", seconds=0.3)]) as server:
        threads = [threading.Thread(target=get, args=(server, folder / "cache" / "a")) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.requested == ["/a.bin"]
    assert (folder / "cache" / "a").read_bytes() == CONTENT


def test_wrong_bytes_are_fetched_again_and_named(folder: Path) -> None:
    with serve(folder, faults=[Fault("wrong")]) as server:
        (note,) = get(server, folder / "cache" / "a")
    spoilt = hashlib.sha256(bytes(byte ^ 1 for byte in CONTENT)).hexdigest()
    assert note == f"a.bin: sha256 {spoilt} instead of {SHA256}; fetched again"
    assert (folder / "cache" / "a").read_bytes() == CONTENT


@pytest.mark.parametrize("size", [0, len(CONTENT)])
def test_a_file_in_place_with_other_bytes_is_fetched_again_and_named(folder: Path, size: int) -> None:
    target = folder / "there"
    target.write_bytes(b"x" * len(CONTENT))
    with serve(folder) as server:
        (note,) = get(server, target, size)
    assert note.startswith("a.bin: sha256 ")
    assert target.read_bytes() == CONTENT


def test_a_cut_file_in_place_is_completed_and_named(folder: Path) -> None:
    target = folder / "there"
    target.write_bytes(CONTENT[:1_000_000])
    with serve(folder) as server:
        notes = get(server, target)
        assert server.sent == len(CONTENT) - 1_000_000
    assert notes == [f"a.bin: 1000000 of {len(CONTENT)} bytes; the rest is fetched"]
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("length", [1000, len(CONTENT), len(CONTENT) + 1])
def test_a_beginning_that_does_not_belong_to_the_file_is_thrown_away(folder: Path, length: int) -> None:
    (folder / "cache").mkdir()
    (folder / "cache" / ".a.part").write_bytes(b"x" * length)
    with serve(folder) as server:
        get(server, folder / "cache" / "a")
    assert (folder / "cache" / "a").read_bytes() == CONTENT


def test_other_bytes_than_the_locked_are_refused_with_both_hashes_and_not_kept(folder: Path) -> None:
    with serve(folder) as server, pytest.raises(DeployError) as raised:
        get(server, folder / "cache" / "a", sha256="1" * 64)
    assert SHA256 in raised.value.why and "1" * 64 in raised.value.why
    assert raised.value.fix == "advice for altered"
    assert names(folder / "cache") == []


def test_a_file_that_grows_without_end_is_cut_off(folder: Path) -> None:
    with serve(folder) as server, pytest.raises(DeployError) as raised:
        get(server, folder / "cache" / "a", size=1000)
    assert "is not what was locked" in raised.value.message
    assert server.sent <= 2 * len(CONTENT)


@pytest.mark.parametrize("status", [403, 404, 410])
def test_what_is_not_there_is_named_at_once(folder: Path, status: int) -> None:
    with serve(folder, faults=[Fault("status", status=status)]) as server, pytest.raises(DeployError) as raised:
        get(server, folder / "cache" / "a")
    assert str(status) in raised.value.why
    assert raised.value.fix == "advice for missing"
    assert server.requested == ["/a.bin"]
    assert names(folder / "cache") == []


def test_a_server_that_keeps_failing_is_given_up_with_what_it_said(folder: Path) -> None:
    with serve(folder, faults=[Fault("status", status=502)] * 99) as server, pytest.raises(DeployError) as raised:
        get(server, folder / "cache" / "a")
    assert "502" in raised.value.why
    assert len(server.requested) == deploy.fetch.ATTEMPTS


def test_no_network_is_an_error_with_a_fix(tmp_path: Path) -> None:
    with http_client() as http, pytest.raises(DeployError) as raised:
        fetch([Item("a", "http://127.0.0.1:1/a", SHA256, tmp_path / "a")], http, ADVICE)
    assert raised.value.fix.startswith("advice for unreachable")
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    (folder / "file").write_text("")
    with serve(folder) as server, pytest.raises(DeployError) as raised:
        get(server, folder / "file" / "a")
    assert str(folder / "file") in raised.value.why


def test_one_failure_leaves_what_else_arrived(folder: Path) -> None:
    with serve(folder, faults=[]) as server, http_client() as http:
        good = Item("a", f"{server.address}/a.bin", SHA256, folder / "cache" / "a", len(CONTENT))
        gone = Item("b", f"{server.address}/b.bin", SHA256, folder / "cache" / "b", len(CONTENT))
        with pytest.raises(DeployError, match="b is not there"):
            fetch([good, gone], http, ADVICE)
        fetch([good], http, ADVICE)
    assert names(folder / "cache") == ["a"]


@pytest.mark.parametrize("away", ["http://[::1", f"http://{'a' * 300}.example/", "file:///etc/passwd", "/"])
def test_a_server_that_sends_us_nowhere_is_given_up(tmp_path: Path, away: str) -> None:
    answer = httpx.MockTransport(lambda _: httpx.Response(302, headers={"Location": away}))
    item = Item("a", "http://server.example/a", SHA256, tmp_path / "a", 10)
    with httpx.Client(transport=answer, follow_redirects=True) as http, pytest.raises(DeployError, match="unreachable"):
        fetch([item], http, ADVICE)
    assert names(tmp_path) == []
