"""Every object of every overlay against the schemas of those who define it."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import kubernetes_validate.utils
import pytest
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor
from lws import LeaderWorkerSet
from pydantic import ValidationError
from rendering import overlays, rendered, templates

LATEST = [*dict.fromkeys(kubernetes_validate.utils.all_versions())][-3:]
# Each check would read megabytes of definitions anew.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
CUSTOM = {"LeaderWorkerSet": LeaderWorkerSet, "ScaledObject": ScaledObject, "ServiceMonitor": ServiceMonitor}


def check(item: dict[str, Any], version: str) -> None:
    """Hold an object against its schema; unknown fields are faults too.

    Raises:
        kubernetes_validate.ValidationError, ValidationError, AssertionError: it does not fit.
    """
    if model := CUSTOM.get(item["kind"]):
        read = model.model_validate(item)
        # These models pass over what they do not know: it is missing then.
        assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == item
        for template in templates(item).values():
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "PodTemplate", "template": template}, version, strict=True
            )
    else:
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("version", LATEST)
@pytest.mark.parametrize(("name", "overlay"), overlays())
def test_every_object_fits_its_schema(exports: dict[str, Path], name: str, overlay: str, version: str) -> None:
    found = rendered(exports, name, overlay)
    assert found
    for item in found:
        check(item, version)


def mistakes() -> list[tuple[str, tuple[str | int, ...], Any]]:
    pod = ("spec", "leaderWorkerTemplate", "workerTemplate", "spec")
    return [
        ("LeaderWorkerSet", ("spec", "replica"), 2),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "restartPolicy"), "Never"),
        ("LeaderWorkerSet", (*pod, "containers", 0, "readinessProb"), {}),
        ("LeaderWorkerSet", (*pod, "terminationGracePeriodSeconds"), "70"),
        ("ScaledObject", ("spec", "triggers", 0, "metadata", "threshold"), 3),
        ("ScaledObject", ("spec", "minReplicas"), 3),
        ("ServiceMonitor", ("spec", "endpoints", 0, "scrape"), "15s"),
        ("NetworkPolicy", ("spec", "ingres"), []),
        ("Deployment", ("spec", "replicas"), "two"),
    ]


@pytest.mark.parametrize(("kind", "path", "value"), mistakes())
def test_a_mistake_would_be_seen(exports: dict[str, Path], kind: str, path: tuple[Any, ...], value: Any) -> None:
    item = next(item for item in rendered(exports, "pd", "autoscaled") if item["kind"] == kind)
    item = copy.deepcopy(item)
    check(item, LATEST[-1])
    place: Any = item
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises((kubernetes_validate.ValidationError, ValidationError, AssertionError)):
        check(item, LATEST[-1])
