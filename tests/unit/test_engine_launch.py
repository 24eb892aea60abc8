import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_runtime import launch


def test_a_role_becomes_sglangs_own_flag() -> None:
    assert launch.arguments(["prefill", "--tp-size=4"], {}) == (
        "prefill",
        ["--tp-size=4", "--disaggregation-mode=prefill"],
    )
    assert launch.arguments(["decode"], {}) == ("decode", ["--disaggregation-mode=decode"])


def test_the_aggregated_engine_and_the_router_get_their_arguments_unchanged() -> None:
    assert launch.arguments(["engine", "--port=1"], {}) == ("engine", ["--port=1"])
    assert launch.arguments(["router", "--prefill", "http://p:1", "8998"], {})[1] == ["--prefill", "http://p:1", "8998"]


def test_extra_arguments_are_split_like_a_shell_would_and_come_last_where_they_win() -> None:
    _, rest = launch.arguments(["engine", "--a=1"], {"EXTRA_ARGUMENTS": "--a=2 --json '{\"b\": 1}'"})
    assert rest == ["--a=1", "--a=2", "--json", '{"b": 1}']


@pytest.mark.parametrize("command", [[], ["serve"], ["--prefill"]])
def test_anything_but_a_role_is_refused_with_the_list_of_roles(command: list[str]) -> None:
    with pytest.raises(launch.UsageError, match="prefill, decode, engine, router"):
        launch.arguments(command, {})


def test_unbalanced_quotes_are_refused_by_the_variables_name() -> None:
    with pytest.raises(launch.UsageError, match="EXTRA_ARGUMENTS"):
        launch.arguments(["engine"], {"EXTRA_ARGUMENTS": "--a 'b"})


@pytest.mark.parametrize("flag", launch.SECRET_ARGUMENTS)
@pytest.mark.parametrize("form", ["{}=sk-secret", "{} sk-secret"])
def test_a_key_on_the_command_line_is_refused_without_repeating_it(flag: str, form: str) -> None:
    text = form.format(flag)
    for command, environment in ((["router", *text.split()], {}), (["router"], {"EXTRA_ARGUMENTS": text})):
        with pytest.raises(launch.UsageError) as caught:
            launch.arguments(command, environment)
        assert "sk-secret" not in str(caught.value)


def test_the_router_takes_one_key_and_refuses_more_without_repeating_them(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert launch.router_key(path) is None
    path.write_text("sk-one alice\n")
    assert launch.router_key(path) == "sk-one"
    path.write_text("sk-one\nsk-two\n")
    with pytest.raises(launch.UsageError, match=r"compose\.front\.yaml") as caught:
        launch.router_key(path)
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_the_router_itself_may_be_published_on_loopback(address: str) -> None:
    launch.check_exposure(address)


@pytest.mark.parametrize("address", ["0.0.0.0", "", "192.168.1.5", "::", "[::]", "example.org"])
def test_on_other_addresses_only_the_front_may_be_published(address: str) -> None:
    with pytest.raises(launch.UsageError, match=r"compose\.front\.yaml"):
        launch.check_exposure(address)


def test_the_gate_listens_where_the_router_was_told_to() -> None:
    assert launch.listen_address(["--prefill", "http://p:1", "8998"]) == "0.0.0.0"
    assert launch.listen_address(["--host=0.0.0.0", "--port=30000", "--host", "127.0.0.1"]) == "127.0.0.1"


def test_how_long_an_engine_may_be_silent_is_a_number_above_the_time_of_a_question() -> None:
    assert launch.engine_silence({}, 3, 10) == launch.engine_silence({"ENGINE_SILENCE": ""}, 3, 10) == 10
    assert launch.engine_silence({"ENGINE_SILENCE": "45"}, 3, 10) == 45
    for text in ("3", "-1", "nan", "inf", "ten"):
        with pytest.raises(launch.UsageError, match="ENGINE_SILENCE is a number of seconds above 3"):
            launch.engine_silence({"ENGINE_SILENCE": text}, 3, 10)


def test_a_prefill_whose_bootstrap_port_is_taken_is_refused_and_the_port_is_left_free() -> None:
    with socket.create_server(("", 0)) as holder:
        port = f"--disaggregation-bootstrap-port={holder.getsockname()[1]}"
        with pytest.raises(launch.UsageError, match="cannot be had: Address already in use"):
            launch.check_bootstrap_port([port])
    launch.check_bootstrap_port([port])
    launch.check_bootstrap_port([port])


class FakeRouter:
    """Stands in for the router's two Python modules, which only the image has."""

    class Arguments:
        def __init__(self) -> None:
            self.api_key: str | None = None
            self.control_plane_api_keys: list[tuple[str, ...]] = []

    def __init__(self) -> None:
        self.started: FakeRouter.Arguments | None = None
        self.RouterArgs = self.Router = self

    def add_cli_args(self, parser: object) -> None:
        del parser

    def from_cli_args(self, parsed: object) -> Arguments:
        del parsed
        return self.Arguments()

    def from_args(self, arguments: Arguments) -> "FakeRouter":
        self.started = arguments
        return self

    def start(self) -> None:
        pass


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRouter]:
    fake = FakeRouter()

    def import_it(name: str) -> FakeRouter:
        assert name.startswith("sglang_router.")
        return fake

    monkeypatch.setattr(launch, "_import", import_it)
    yield fake


def test_the_router_is_started_with_the_keys_of_the_files(router: FakeRouter) -> None:
    launch.run_router([], "sk-client", "sk-admin", "sk-gate")
    assert router.started is not None
    assert router.started.api_key == "sk-client"
    assert router.started.control_plane_api_keys == [
        ("admin", "admin", "sk-admin", "admin"),
        ("gate", "gate", "sk-gate", "admin"),
    ]


def test_without_an_admin_key_the_admin_routes_get_one_that_nobody_knows(router: FakeRouter) -> None:
    keys: set[str] = set()
    for _ in range(2):
        launch.run_router([], None, None, "")
        assert router.started is not None
        keys |= {key for _, _, key, _ in router.started.control_plane_api_keys}
    assert len(keys) == 4
    assert all(len(key) > 30 for key in keys)


def test_numa_nodes_from_the_driver_leave_out_the_nodes_that_arguments_name_and_nothing_else() -> None:
    command = ["engine", "--tp-size=2", "--numa-node", "0", "0", "--port=1"]
    given = {"NUMA_NODES_FROM": "driver", "EXTRA_ARGUMENTS": "--numa-node 1 1 --a b --numa-node=1"}
    assert launch.arguments(command, given) == ("engine", ["--tp-size=2", "--port=1", "--a", "b"])
    assert launch.arguments(command, {"NUMA_NODES_FROM": "arguments"})[1] == command[1:]
    with pytest.raises(launch.UsageError, match="arguments or driver"):
        launch.arguments(command, {"NUMA_NODES_FROM": "drivers"})
