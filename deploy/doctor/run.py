"""Run the checks on a report."""

from deploy.doctor.check import CHECKS, Check
from deploy.doctor.checks import AREAS
from deploy.doctor.finding import Finding, Needs
from deploy.host.report import HostReport


def all_checks() -> list[Check]:
    """Every check, by area."""
    return [entry for area in AREAS for entry in CHECKS if entry.function.__module__ == area.__name__]


def run_checks(report: HostReport, needs: Needs) -> list[Finding]:
    """Findings of every check, the worst first; equal ones in the order of the checks."""
    findings = [
        Finding(id=entry.id, group=entry.group, **problem.model_dump())
        for entry in all_checks()
        for problem in entry.function(report, needs)
    ]
    return sorted(findings, key=lambda finding: finding.severity.rank)
