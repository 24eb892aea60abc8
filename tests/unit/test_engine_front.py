import hashlib
import os
import re
from pathlib import Path

import pytest
from engine_runtime import front, secret_files
from engine_runtime.secret_files import UsageError, read_keys, read_text
from hypothesis import given
from hypothesis import strategies as st

WORDS = st.text(alphabet=st.characters(codec="ascii", exclude_categories=["Cc", "Zs"]), min_size=1)
NAMES = st.text("abcXYZ019._-", min_size=1, max_size=64)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (front, secret_files):
        for name, file in (("KEYS_FILE", "keys"), ("CERTIFICATE_FILE", "cert"), ("CERTIFICATE_KEY_FILE", "key")):
            monkeypatch.setattr(module, name, tmp_path / file)
    return tmp_path


@given(st.dictionaries(WORDS.filter(lambda word: not word.startswith("#")), st.none() | NAMES, min_size=1))
def test_every_key_is_read_with_its_owners_name(
    tmp_path_factory: pytest.TempPathFactory, owners: dict[str, str | None]
) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# a comment\n\n" + "".join(f"  {key} {name or ''}\n" for key, name in owners.items()))
    assert read_keys(path) == {key: name or f"key-{line}" for line, (key, name) in enumerate(owners.items(), 3)}


@pytest.mark.parametrize("text", ["", "\n", "# sk-x\n"])
def test_a_file_without_a_key_has_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    assert read_keys(tmp_path / "keys") == {}
    assert read_keys(Path("/dev/null")) == {}
    assert read_keys(tmp_path / "absent") == {}


@pytest.mark.parametrize("text", ["sk-a b c", "sk-a \x01", "sk-a x\nsk-a y", "sk-a " + "n" * 65])
def test_a_line_that_is_no_key_is_refused_without_repeating_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UsageError, match="line") as caught:
        read_keys(tmp_path / "keys")
    assert "sk-" not in str(caught.value)


def test_a_secret_that_cannot_be_read_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"user {os.getuid()} cannot read"):
        read_text(tmp_path)


def test_haproxy_gets_the_hash_of_a_key_and_not_the_key(files: Path) -> None:
    (files / "keys").write_text("sk-of-alice alice\n")
    variables = front.prepare({}, files / "made")
    written = Path(variables["KEYS_FILE"])
    assert written.read_text() == f"{hashlib.sha256(b'sk-of-alice').hexdigest().upper()} alice\n"
    assert written.stat().st_mode & 0o777 == 0o600
    assert "TLS_FILE" not in variables
    assert "sk-of-alice" not in str(variables)


def test_certificate_and_private_key_become_one_file_that_nobody_else_reads(files: Path) -> None:
    (files / "keys").write_text("k\n")
    (files / "cert").write_text("CERT")
    (files / "key").write_text("PRIVATE\n")
    written = Path(front.prepare({}, files / "made")["TLS_FILE"])
    assert written.read_text() == "CERT\nPRIVATE\n"
    assert written.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("alone", ["cert", "key"])
def test_half_a_certificate_is_refused_and_not_served_in_the_clear(files: Path, alone: str) -> None:
    (files / "keys").write_text("k\n")
    (files / alone).write_text("PEM")
    with pytest.raises(UsageError, match="certificate"):
        front.prepare({}, files / "made")


def test_a_front_without_keys_serves_nobody(files: Path) -> None:
    with pytest.raises(UsageError, match="API_KEY_FILE"):
        front.prepare({}, files / "made")


@pytest.mark.parametrize("value", ["-1", "1.5", "x", "1 2", "1\n2", '1"', "9" * 10])
def test_a_limit_that_is_no_whole_number_is_refused_by_its_name(value: str) -> None:
    with pytest.raises(UsageError, match="CONCURRENT_REQUESTS"):
        front.settings({"CONCURRENT_REQUESTS": value})


def test_every_variable_of_the_configuration_is_set() -> None:
    asked = set(re.findall(r"\$\{(\w+)\}", front.CONFIGURATION.read_text()))
    assert asked == {*front.SETTINGS, "KEYS_FILE", "TLS_FILE"}
