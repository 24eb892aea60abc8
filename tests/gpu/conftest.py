"""These tests need an NVIDIA GPU of compute capability 8.0 or newer; without one they are skipped."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU of compute capability 8.0 or newer"))
