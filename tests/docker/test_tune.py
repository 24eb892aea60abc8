"""`deploy tune` on the real CPU stack: a setting that was planted to be slow is found, and nothing else is left."""

import json
import os
import subprocess
import uuid
from pathlib import Path

from conftest import docker, free_port
from second_host import clone_to, deploy

PLANTED = "16"
"""Tokens of a prompt in a chunk: a prompt of 256 takes sixteen passes."""


def test_a_setting_that_was_planted_to_be_slow_is_found_and_signed_off(image: str, tmp_path: Path) -> None:
    assert image
    clone = clone_to(tmp_path / "clone")
    spec = clone / "deploy.toml"
    spec.write_text(
        f'# a comment that stays\nprofile = "cpu"\n[router]\nport = {free_port()}\n'
        f'[variables]\nCHUNKED_PREFILL_SIZE = "{PLANTED}"  # planted\n'
    )
    name, state = f"dsv4-test-{uuid.uuid4().hex[:8]}", tmp_path / "state"
    own = {"COMPOSE_PROJECT_NAME": name, "DEPLOY_STATE": str(state), "DEPLOY_SPEC": str(spec)}
    arguments = (
        "tune",
        "--only",
        "CHUNKED_PREFILL_SIZE",
        "--lengths",
        "256/16",
        # A shorter window is often not steady on a shared machine, and three of those end a comparison.
        "--duration",
        "10",
        "--pairs",
        "6",
        "--json",
    )
    done = subprocess.run(
        deploy(clone, *arguments), env=os.environ | own, cwd=clone, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr
    winners = json.loads(done.stdout)["winners"]
    assert len(winners) == 1, done.stdout + done.stderr
    winner = winners[0]
    assert winner["setting"] == "variables.CHUNKED_PREFILL_SIZE"
    assert (winner["was"], winner["answers"]) == (PLANTED, 1.0)
    assert winner["ratio"] > winner["at_least"] > 1
    text = spec.read_text()
    assert "# a comment that stays" in text
    assert f'CHUNKED_PREFILL_SIZE = "{winner["now"]}"  # planted' in text
    assert "[[tuned.winner]]" in text
    assert "CHUNKED_PREFILL_SIZE" in (clone / "deploy.lock").read_text()
    assert docker("ps", "--quiet", "--filter", f"label=com.docker.compose.project={name}") == ""
