"""Findings for the terminal, as JSON, and as a script."""

import json
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from deploy.command_line import printable
from deploy.doctor.finding import Finding, Severity
from deploy.host.report import HostReport, Unseen

JSON_VERSION = 1
_MARK = {Severity.ERROR: ("✗", "bold red"), Severity.WARNING: ("!", "bold yellow"), Severity.NOTE: ("i", "bold cyan")}


def headline(report: HostReport) -> str:
    """The host in one line."""
    models = sorted({gpu.name or "unknown GPU" for gpu in report.gpus})
    gpus = f"{len(report.gpus)}x {', '.join(models)}" if report.gpus else "no GPU"
    driver = f", driver {report.gpus[0].driver}" if report.gpus and report.gpus[0].driver else ""
    nodes = f"{len(report.numa)} NUMA node{'s' if len(report.numa) != 1 else ''}" if report.numa else "NUMA unknown"
    cpus = f"{len(report.cpu.online)} CPUs" if report.cpu.online else "CPUs unknown"
    memory = f"{report.memory.total / 1024**3:.0f} GiB" if report.memory.total else "memory unknown"
    return f"{report.system.hostname or 'unnamed host'}: {gpus}{driver}; {cpus}, {nodes}, {memory}"


def summary(findings: Sequence[Finding], checks: int) -> str:
    """Counts in one line."""
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in Severity}
    shown = [f"{number} {severity.value}{'s' if number != 1 else ''}" for severity, number in counts.items() if number]
    clean = checks - len({finding.id for finding in findings})
    return f"{', '.join(shown) or 'nothing found'}; {clean} of {checks} checks had nothing to say"


def to_text(
    report: HostReport, findings: Sequence[Finding], checks: int, least: Severity = Severity.NOTE
) -> RenderableType:
    """Findings under their headings; the heading with the worst finding comes first.

    Args:
        least: leave out what is less severe, and, unless it is the lowest, what could not be seen.
    """
    return text_of(headline(report), findings, report.unseen, checks, least)


def text_of(
    head: str, findings: Sequence[Finding], not_seen: Sequence[Unseen], checks: int, least: Severity
) -> RenderableType:
    """As `to_text`, of anything that was looked at.

    Args:
        head: what it is, in one line.
    """
    shown = [finding for finding in findings if finding.severity.rank <= least.rank]
    parts: list[RenderableType] = [Text(head, style="bold")]
    if shown:
        parts.append(Text())
    for group in dict.fromkeys(finding.group for finding in shown):
        parts.append(Text(group, style="underline"))
        for finding in shown:
            if finding.group == group:
                parts.append(Padding(_block(finding), (0, 0, 1, 2)))
    if not_seen and least == Severity.NOTE:
        parts.append(Text("Not seen", style="underline"))
        for unseen in not_seen:
            how = f" ({unseen.how})" if unseen.how else ""
            parts.append(Padding(Text(f"{unseen.what}: {unseen.why}{how}", style="dim"), (0, 0, 0, 2)))
        parts.append(Text())
    parts.append(Text(summary(findings, checks)))
    return Group(*parts)


def _block(finding: Finding) -> RenderableType:
    mark, style = _MARK[finding.severity]
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(style="dim", width=4)
    table.add_column(overflow="fold")
    table.add_row(Text(mark, style=style), Text(), Text(f"{finding.seen}  ", style="bold") + Text(finding.id, "dim"))
    table.add_row("", "why", Text(finding.why))
    if finding.fix:
        table.add_row("", "fix", Text(finding.fix))
    for command in finding.commands:
        table.add_row("", "" if finding.fix else "fix", Text(f"$ {command}", style="green"))
    if finding.look:
        table.add_row("", "look", Text(f"$ {finding.look}"))
    if finding.link:
        table.add_row("", "see", Text(finding.link))
    return table


def to_json(report: HostReport, findings: Sequence[Finding], checks: int) -> str:
    """Findings for programs; stable keys, `schema_version` changes when they do."""
    return json_of({"host": report.system.hostname}, report.taken_at, findings, report.unseen, checks)


def json_of(
    subject: dict[str, str], taken_at: str, findings: Sequence[Finding], not_seen: Sequence[Unseen], checks: int
) -> str:
    """As `to_json`, of anything that was looked at.

    Args:
        subject: what it is, by the key that says so.
    """
    document = {
        "schema_version": JSON_VERSION,
        **subject,
        "taken_at": taken_at,
        "checks": checks,
        "findings": [finding.model_dump(mode="json") for finding in findings],
        "unseen": [unseen.model_dump(mode="json") for unseen in not_seen],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def to_script(report: HostReport, findings: Sequence[Finding]) -> str:
    """A shell script of every command that mends something; a reboot stands at its end, commented out."""
    return script_of(report.system.hostname, report.taken_at, findings)


def script_of(subject: str, taken_at: str, findings: Sequence[Finding]) -> str:
    """As `to_script`, of anything that was looked at."""
    lines = [
        "#!/bin/sh",
        f"# Proposed by deploy doctor for {printable(subject)}, {taken_at}.",
        "# Read it before you run it.",
        "set -eu",
    ]
    reboot = False
    for finding in findings:
        commands = [command for command in finding.commands if command != "sudo systemctl reboot"]
        reboot |= len(commands) < len(finding.commands)
        if commands or finding.fix:
            lines += ["", f"# {finding.severity.value} {finding.id}: {printable(finding.seen)}"]
            lines += [f"# {printable(finding.fix)}"] if finding.fix else []
            lines += commands
    lines += ["", "# The above takes effect after a reboot:", "# sudo systemctl reboot"] if reboot else []
    return "\n".join(lines)
