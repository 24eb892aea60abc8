"""Nothing that takes a host report fails on one, however strange the host."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from deploy.doctor.finding import Needs, RoleNeeds
from deploy.doctor.render import to_json, to_script, to_text
from deploy.doctor.run import run_checks
from deploy.host.report import Fact, HostReport, UnreadableReport, load
from deploy.init.drawing import draw
from deploy.init.propose import propose
from deploy.init.render import to_toml
from deploy.report.archive import known_identities
from deploy.report.redact import Redactor
from deploy.spec.model import Spec

pytestmark = pytest.mark.slow

# JSON has no infinity, and a report refuses it.
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))


def _whole(kind: type[Fact]) -> st.SearchStrategy[Fact]:
    """Every field filled from its type, also those with a default."""
    return st.deferred(lambda: st.builds(kind, **dict.fromkeys(kind.model_fields, ...)))


for _kind in Fact.__subclasses__():
    st.register_type_strategy(_kind, _whole(_kind))
REPORTS = st.from_type(HostReport)
ROLES = st.lists(
    st.builds(
        RoleNeeds,
        name=st.sampled_from(["prefill", "decode"]),
        gpus=st.lists(st.integers(0, 9) | st.text(max_size=9), max_size=4).map(tuple),
        numa_node=st.integers(0, 3),
        cpus=st.sampled_from(["", "0-3", "4,9"]),
    ),
    max_size=2,
).map(tuple)
NEEDS = st.builds(Needs, roles=ROLES, bind=st.sampled_from(["127.0.0.1", "0.0.0.0", "::1"]))
SLOW = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@SLOW
@given(REPORTS, NEEDS)
def test_any_report_is_checked_and_shown(report: HostReport, needs: Needs) -> None:
    findings = run_checks(report, needs)
    with Console(width=80).capture():
        Console(width=80).print(to_text(report, findings, 50))
    assert to_json(report, findings, 50) and to_script(report, findings)


@SLOW
@given(REPORTS)
def test_any_report_gets_a_proposal(report: HostReport) -> None:
    proposal = propose(report)
    with Console(width=80).capture():
        Console(width=80).print(draw(report, proposal))
    if proposal.profile != "pd" or len(proposal.roles) == 2:
        assert to_toml(proposal, Spec(), uuids=True)


@SLOW
@given(REPORTS)
def test_any_report_survives_json_and_redaction(report: HostReport) -> None:
    text = report.model_dump_json()
    assert HostReport.model_validate_json(text) == report
    Redactor(known_identities(report)).text(text)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | st.just(b"[" * 100_000) | st.just(b'{"schema_version": 1, "gpus": ' + b'{"a":' * 50_000))
def test_any_file_is_a_report_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "host.json"
    path.write_bytes(data)
    with pytest.raises(UnreadableReport):
        load(path)
