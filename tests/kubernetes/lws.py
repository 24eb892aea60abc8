"""What LeaderWorkerSet takes, as its API reference has it (leaderworkerset.x-k8s.io/v1, lws.sigs.k8s.io).

Its CRD is in no package that could be locked, so these are the fields of the reference that an export may use, with
their types and allowed values; anything else is refused. They were held against the Go types that the CRD is generated
from (kubernetes-sigs/lws, api/leaderworkerset/v1, commit 024af08) on 2026-11-30. The pods inside are held against
Kubernetes' own schemas.
"""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RollingUpdate(Strict):
    partition: int = Field(default=0, ge=0)
    maxUnavailable: int | str = 1
    maxSurge: int | str = 0

    @model_validator(mode="after")
    def _moves(self) -> Self:
        if self.maxUnavailable in (0, "0%") and self.maxSurge in (0, "0%"):
            raise ValueError("maxUnavailable and maxSurge cannot both be 0")
        return self


class Rollout(Strict):
    type: Literal["RollingUpdate"]
    rollingUpdateConfiguration: RollingUpdate | None = None


class Group(Strict):
    size: int = Field(default=1, ge=1)
    restartPolicy: Literal["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"] | None = None
    leaderTemplate: dict[str, Any] | None = None
    workerTemplate: dict[str, Any]


class Network(Strict):
    subdomainPolicy: Literal["Shared", "UniquePerReplica"]


class Spec(Strict):
    replicas: int = Field(default=1, ge=0)
    startupPolicy: Literal["LeaderCreated", "LeaderReady"] = "LeaderCreated"
    rolloutStrategy: Rollout | None = None
    networkConfig: Network | None = None
    leaderWorkerTemplate: Group


class LeaderWorkerSet(Strict):
    apiVersion: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: dict[str, Any]
    spec: Spec
