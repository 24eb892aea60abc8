"""The bug report: no planted secret survives, what diagnosis needs does."""

import gzip
import io
import json
import tarfile
import urllib.parse
from pathlib import Path

import lookalike
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookalike import EIGHT_GPUS, host

from deploy.doctor.finding import Needs
from deploy.errors import DeployError
from deploy.host.probe_host import probe
from deploy.report.archive import contents, known_identities, last_lines, pack, save
from deploy.report.redact import Redactor
from deploy.report.verb import collect, report
from deploy.stack.state import State

REPOSITORY = Path(__file__).parents[2]
SECRETS = {
    "host name": "inference-17.rack4.example-corp.net",
    "short host name": "inference-17",
    "GPU": lookalike.uuid(5),
    "serial": "1320024000005",
    "machine id": "0d9f7c52-6f3b-4a51-9b1e-5d9c3f0a7e11",
    "IPv4": "10.44.7.201",
    "IPv6": "2001:db8:77:1::c0de",
    "MAC": "3c:ec:ef:4a:91:0b",
    "API key": 'k"1\\é/our-own-key',
    "hub token": "hf_aBcDeFgHiJkLmNoPqRsT",
    "OpenAI key": "sk-proj-0123456789abcdef",
    "GitHub token": "ghp_0123456789abcdefghijABCDEFGHIJ456789",
    "bearer": "c2VjcmV0LWJlYXJlcg==",
    "password": "correct-horse",
    "URL password": "svc:hunter22",
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEF123",
    "home": "/home/mallory/secret-project/model",
    "user": "mallory",
    "e-mail": "mallory@example-corp.net",
    "mirror": "mirror.example-corp.net",
    "private key": "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
}
LOG = f"""\
[2026-11-29 10:00:00] server_args=ServerArgs(model_path='{SECRETS["home"]}/weights', api_key='{SECRETS["API key"]}')
connect {SECRETS["IPv4"]}:8998 from [{SECRETS["IPv6"]}]:41200 via {SECRETS["MAC"]} on {SECRETS["host name"]}
Authorization: Bearer {SECRETS["bearer"]}
HF_TOKEN={SECRETS["hub token"]} OPENAI={SECRETS["OpenAI key"]} {SECRETS["GitHub token"]} {SECRETS["JWT"]}
pull https://{SECRETS["URL password"]}@{SECRETS["mirror"]}/debian failed, mail {SECRETS["e-mail"]}
{{"password": "{SECRETS["password"]}", "machine": "{SECRETS["machine id"]}"}}
Serial Number : {SECRETS["serial"]}  {SECRETS["GPU"]} user {SECRETS["user"]} at {SECRETS["short host name"].upper()}
-----BEGIN PRIVATE KEY-----
{SECRETS["private key"]}
-----END PRIVATE KEY-----
"""
KEPT = (
    "PCI 0000:a4:00.0 and 00000000:A4:00.0, driver 580.95.05, SGLang 0.5.23, cpus 0-47,96-143, http://127.0.0.1:30000, "
    "listening on 0.0.0.0:30000 and [::1]:80, at 12:34:56, NCCL 2.28.9, https://github.com/NVIDIA/nccl/issues/2079, "
    "max_total_tokens=8192, api_key=None, torch::c10, sha256:9f86d081884c7d659a2feaa0c55ad015, http://prefill:30000, "
    "#token: 351, #new-token: 12\x1b[0m, #full token: 7. token usage: 0.02, 'Authorization: Bearer KEY'\n"
)


def unpacked(archive: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive))) as tar:
        return {entry.name: (tar.extractfile(entry) or io.BytesIO()).read().decode() for entry in tar.getmembers()}


REPORT = probe(host(EIGHT_GPUS).with_file("/proc/sys/kernel/hostname", SECRETS["host name"]))


def redactor() -> Redactor:
    return Redactor(known_identities(REPORT, [SECRETS["API key"]], "/home/mallory", "mallory"))


def archive_of(texts: dict[str, str]) -> bytes:
    return pack(contents(texts, redactor()), "report")


def test_no_planted_secret_is_in_the_archive() -> None:
    texts = {
        "logs/decode.log": LOG,
        "host.json": json.dumps({"log": LOG, "lines": LOG.split("\n")}),
        "nested.json": json.dumps({"text": json.dumps(LOG)}),
        "config.yaml": "".join(
            f"- key: '{secret}'\n" for name, secret in SECRETS.items() if name != "private key"
        ).replace("key: ", "token: "),
        "url.txt": f"http://127.0.0.1/?q={urllib.parse.quote(SECRETS['API key'], safe='')}\n",
    }
    raw = gzip.decompress(archive_of(texts)).decode()
    for name, secret in SECRETS.items():
        for form in {secret, secret.lower(), json.dumps(secret)[1:-1], urllib.parse.quote(secret, safe="")}:
            assert form not in raw and form not in raw.lower(), f"{name} survived"


@pytest.mark.parametrize("name", SECRETS)
def test_each_secret_is_found_alone_in_its_own_kind_of_line(name: str) -> None:
    lines = [line for line in LOG.split("\n") if SECRETS[name] in line or SECRETS[name] in line.lower()]
    block = LOG if name == "private key" else "\n".join(lines)
    assert lines and SECRETS[name].lower() not in redactor().text(block).lower()


def test_what_diagnosis_needs_stays() -> None:
    assert redactor().text(KEPT) == KEPT


def test_the_lock_stays_as_it_is() -> None:
    lock = (REPOSITORY / "deploy.lock").read_text()
    assert redactor().text(lock) == lock
    assert redactor().text(json.dumps(lock)) == json.dumps(lock)


@pytest.mark.parametrize(
    "line",
    [
        "X-Auth-Token: {}123456789",
        "api_token={}314159265",
        "# token: {}20240131",
        "to {}10.0.0.5-cp1",
        "node {}host-10.44.7.201-py3",
        "peer=={}10.44.7.201",
    ],
)
def test_numbers_and_addresses_that_look_like_counts_and_versions_are_replaced(line: str) -> None:
    secret = line.partition("{}")[2].removeprefix("host-").split("-")[0]
    assert secret not in redactor().text(line.replace("{}", ""))


def test_the_same_value_has_the_same_label_in_every_file() -> None:
    files = unpacked(archive_of({"a": f"x {lookalike.uuid(3)} y", "b": f"{lookalike.uuid(3)} {lookalike.uuid(4)}"}))
    label = files["report/a"].split()[1]
    assert files["report/b"].split()[0] == label != files["report/b"].split()[1]


@given(
    key=st.text(min_size=8, max_size=40).filter(lambda key: key.strip() == key and len(set(key)) > 4),
    before=st.text(max_size=20),
    after=st.text(max_size=20),
)
def test_any_key_is_found_raw_and_escaped(key: str, before: str, after: str) -> None:
    found = Redactor([("key", key)])
    for form in (key, json.dumps(key)[1:-1], json.dumps(key, ensure_ascii=False)[1:-1]):
        assert form not in found.text(before + form + after).replace("key-1", "")


@given(st.text(max_size=300))
def test_any_text_can_be_redacted_and_twice_changes_nothing(text: str) -> None:
    found = redactor()
    once = found.text(text)
    assert found.text(once) == once


@pytest.mark.slow
def test_redaction_stays_linear() -> None:
    import time

    for unit in ("a", "1.", "::", "/home/", "token=", "-----BEGIN ", "a@", "https://", "eyJ", '\\"', "00:"):
        started = time.monotonic()
        redactor().text(unit * (200_000 // len(unit)))
        assert time.monotonic() - started < 5, unit


def test_a_name_that_says_nothing_is_not_torn_out_of_words() -> None:
    report = probe(host(EIGHT_GPUS).with_file("/proc/sys/kernel/hostname", "vm\n"))
    assert Redactor(known_identities(report)).text("vm.nr_hugepages vmlinuz") == "vm.nr_hugepages vmlinuz"


def test_the_archive_is_the_same_for_the_same_files_and_lists_them() -> None:
    texts = {"logs/decode.log": LOG, "findings.json": "{}"}
    assert archive_of(texts) == archive_of(texts)
    readme = unpacked(archive_of(texts))["report/README.md"]
    assert "- logs/decode.log" in readme and "uuid" in readme


def test_an_archive_replaces_nothing_and_is_its_owners(tmp_path: Path) -> None:
    save(b"x", tmp_path / "a.tar.gz")
    assert (tmp_path / "a.tar.gz").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        save(b"y", tmp_path / "a.tar.gz")
    assert (tmp_path / "a.tar.gz").read_bytes() == b"x"


def test_only_the_end_of_a_log_is_kept() -> None:
    assert last_lines("1\n2\n3\n", 2) == "[1 earlier lines left out]\n2\n3\n"
    assert last_lines("1\n2\n", 2) == "1\n2\n"


def test_a_report_without_docker_says_what_is_missing(tmp_path: Path) -> None:
    seen = probe(host(EIGHT_GPUS).without("docker"))
    (tmp_path / "deploy.toml").write_text(f'[model]\npath = "{SECRETS["home"]}"\n')
    state = State(tmp_path / ".state")
    texts = collect(tmp_path, tmp_path / "deploy.toml", state, seen, Needs())
    assert "no engine answers" in texts["missing.txt"] and "(missing)  uv.lock" in texts["locks.txt"]
    assert {finding["id"] for finding in json.loads(texts["findings.json"])["findings"]} == {"docker.answers"}
    written = report(tmp_path, tmp_path / "deploy.toml", state, seen, Needs(), tmp_path / "out.tar.gz")
    text = "".join(unpacked(written.read_bytes()).values())
    assert "mallory" not in text and lookalike.uuid(0) not in text and "inference-17" not in text
    with pytest.raises(DeployError, match="there already"):
        report(tmp_path, tmp_path / "deploy.toml", state, seen, Needs(), tmp_path / "out.tar.gz")
