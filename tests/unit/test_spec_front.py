"""`[router]` and `[metrics]` of deploy.toml, and what follows from them."""

from pathlib import Path

import pytest

from deploy.spec.load import SpecError, parse
from deploy.stack.compose import stack_of
from deploy.stack.environment import Facts, variables

ROOT = Path(__file__).parents[2]
KEYED = '[router]\napi_key_file = "keys"\n'
DIGEST = "sha256:" + "0" * 64


def files(text: str) -> list[str]:
    return [file.name for file in stack_of(ROOT, Path("e"), parse(text, Path("deploy.toml")).spec).files]


def values(text: str) -> dict[str, str]:
    facts = Facts(
        "i", Path("/m"), Path("/keys"), {}, tls=(Path("/c"), Path("/k")), secrets_changed="7", metrics=Path("/metrics")
    )
    return {line.name: line.value for line in variables(parse(text, Path("deploy.toml")), facts)}


def test_keys_bring_the_front_and_a_port_brings_the_page_of_metrics() -> None:
    assert files("") == ["compose.yaml"]
    assert files(KEYED) == ["compose.yaml", "compose.front.yaml"]
    assert files('profile = "cpu"\n' + KEYED + "[metrics]\nport = 9400\n") == [
        "compose.yaml",
        "compose.cpu.yaml",
        "compose.front.yaml",
        "compose.metrics.yaml",
    ]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('[router]\nbind = "0.0.0.0"\n', 2, "no API key"),
        ("[router]\nrequests_per_minute = 5\n", 2, "requests_per_minute without API keys"),
        ("[router]\nconcurrent_requests = 5\n", 2, "concurrent_requests without API keys"),
        ('[router]\ntls_certificate = "c"\ntls_key = "k"\n', 2, "tls_certificate without API keys"),
        (KEYED + 'tls_certificate = "c"\n', 1, "no tls_key"),
        (KEYED + 'tls_key = "k"\n', 1, "no tls_certificate"),
        (KEYED + "requests_per_minute = -1\n", 3, "requests_per_minute"),
        (f'[metrics]\nprometheus_image = "p@{DIGEST}"\n', 2, "Prometheus without a page"),
        ('[metrics]\nport = 9400\nprometheus_image = "prom/prometheus:latest"\n', 3, "prometheus_image"),
    ],
)
def test_what_would_leave_a_door_open_is_refused_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        parse(text, Path("deploy.toml"))
    assert caught.value.problems[0].position.line == line


def test_limits_and_certificate_reach_the_compose_file() -> None:
    given = values(KEYED + 'requests_per_minute = 60\nconcurrent_requests = 8\ntls_certificate = "c"\ntls_key = "k"\n')
    assert given["API_KEY_FILE"] == "/keys"
    assert (given["REQUESTS_PER_MINUTE"], given["CONCURRENT_REQUESTS"]) == ("60", "8")
    assert (given["TLS_CERTIFICATE_FILE"], given["TLS_KEY_FILE"], given["SECRETS_CHANGED"]) == ("/c", "/k", "7")


def test_the_page_asks_every_role_that_there_is() -> None:
    page = "[metrics]\nport = 9400\n"
    assert values(page)["METRICS_TARGETS"].split() == [
        "prefill=http://prefill:30000/metrics",
        "prefill=http://prefill:19090/metrics",
        "decode=http://decode:30000/metrics",
        "decode=http://decode:19090/metrics",
        "router=http://router:29000/metrics",
    ]
    replicas = 'profile = "replicas"\n' + "".join(
        f"[[replica]]\ngpus = [{2 * k}, {2 * k + 1}]\nnuma_node = 0\n" for k in range(2)
    )
    asked = values(replicas + KEYED + page)["METRICS_TARGETS"].split()
    assert [word.partition("=")[0] for word in asked] == ["engine", "engine-2", "router", "front"]


def test_prometheus_and_several_engines_share_the_one_variable_of_compose_profiles() -> None:
    page = f'[metrics]\nport = 9400\nprometheus_image = "p@{DIGEST}"\n'
    assert values(page)["COMPOSE_PROFILES"] == "prometheus"
    replicas = 'profile = "replicas"\n' + "".join(
        f"[[replica]]\ngpus = [{2 * k}, {2 * k + 1}]\nnuma_node = 0\n" for k in range(2)
    )
    assert values(replicas + page)["COMPOSE_PROFILES"] == "2-engines,prometheus"


def test_the_largest_request_follows_from_the_longest_context() -> None:
    assert values("[engine]\ncontext_length = 1000\n")["MAX_REQUEST_BYTES"] == "16000"
