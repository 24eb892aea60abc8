import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_runtime import launch
from hypothesis import given
from hypothesis import strategies as st


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


@pytest.mark.parametrize("text", ["", "\n", "  \n"])
def test_an_empty_key_file_means_no_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    assert launch.read_key(tmp_path / "key") is None
    assert launch.read_key(Path("/dev/null")) is None
    assert launch.read_key(tmp_path / "absent") is None


@given(st.text(alphabet=st.characters(codec="ascii", exclude_categories=["Cc", "Zs"]), min_size=1))
def test_a_key_is_read_without_the_white_space_around_it(tmp_path_factory: pytest.TempPathFactory, key: str) -> None:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(f" {key}\n")
    assert launch.read_key(path) == key


def test_a_key_file_that_is_not_one_word_is_refused_without_repeating_it(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-one sk-two")
    with pytest.raises(launch.UsageError) as caught:
        launch.read_key(tmp_path / "key")
    assert "sk-" not in str(caught.value)


def test_a_key_file_that_cannot_be_read_is_an_error_and_not_an_open_router(tmp_path: Path) -> None:
    with pytest.raises(launch.UsageError, match=f"user {os.getuid()} cannot read"):
        launch.read_key(tmp_path)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(address: str) -> None:
    launch.check_exposure(address, None)


@pytest.mark.parametrize("address", ["0.0.0.0", "", "192.168.1.5", "::", "[::]", "example.org"])
def test_other_addresses_need_a_key(address: str) -> None:
    launch.check_exposure(address, "key")
    with pytest.raises(launch.UsageError, match="API_KEY_FILE"):
        launch.check_exposure(address, None)


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
