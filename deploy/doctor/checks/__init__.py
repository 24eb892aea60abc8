"""The checks, by area."""

from deploy.doctor.checks import active, docker, gpu, memory, network, numa, pcie, storage, system

AREAS = (gpu, pcie, numa, memory, docker, storage, network, system, active)
"""In the order their findings are shown."""
