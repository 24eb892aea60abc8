"""What a check is."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from deploy.doctor.finding import Needs, Problem
from deploy.host.report import HostReport

CheckFunction = Callable[[HostReport, Needs], Iterable[Problem]]


class Check(NamedTuple):
    """A check: `id` is `<area>.<name>`, `group` the heading its findings stand under."""

    id: str
    group: str
    function: CheckFunction


CHECKS: list[Check] = []
"""Every check whose module was imported."""


def check(id: str, group: str) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function that yields the problems of one kind."""

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS.append(Check(id, group, function))
        return function

    return register
