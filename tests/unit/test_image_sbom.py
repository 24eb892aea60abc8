import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from hypothesis import given, settings

from deploy.image.sbom import make_sbom
from deploy.lock.model import EngineLock, Lock, LockedPatch, LockedWheel, read_lock
from tests.unit.locks import locks

ROOT = Path(__file__).parents[2]


@settings(max_examples=30)
@given(locks)
def test_every_package_and_wheel_of_a_lock_is_listed_with_its_hash_once(lock: Lock) -> None:
    components: Any = json.loads(make_sbom(lock)).get("components", [])
    hashes = sorted(entry["hashes"][0]["content"] for entry in components if "hashes" in entry)
    packages = lock.rootfs.package if lock.rootfs else ()
    # Two packages of one name, version, architecture and hash are one.
    wanted = {(p.name, p.version, p.architecture, p.sha256) for p in packages}
    assert hashes == sorted([*(item[-1] for item in wanted), *(wheel.sha256 for wheel in lock.wheels.values())])


def test_the_repositorys_own_is_valid_lists_all_and_is_the_same_in_another_process_and_place() -> None:
    lock = read_lock(ROOT)
    text = make_sbom(lock)
    document = json.loads(text)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert lock.rootfs and lock.image
    assert len([entry for entry in document["components"] if entry.get("purl", "").startswith("pkg:deb/")]) == len(
        lock.rootfs.package
    )
    assert document["metadata"]["component"]["hashes"][0]["content"] == lock.image.id.removeprefix("sha256:")
    code = (
        "import sys, pathlib; from deploy.image.sbom import *; from deploy.lock.model import read_lock;"
        "sys.stdout.write(make_sbom(read_lock(pathlib.Path(sys.argv[1]))))"
    )
    own = {"TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], env=os.environ | own, capture_output=True, text=True)
    assert done.stdout == text


def test_another_lock_gives_another_serial_number() -> None:
    serials = {json.loads(make_sbom(lock))["serialNumber"] for lock in (Lock(), Lock(compose={"a": "0" * 64}))}
    assert len(serials) == 2


def test_patches_are_told_with_the_package_that_they_change() -> None:
    patch = LockedPatch(name="1.patch", title="Mend it", sha256="1" * 64, files=("sglang/a.py",))
    engine = EngineLock(wheel="0" * 64, tree="0" * 64, patched_tree="0" * 64, patch=(patch,))
    wheel = LockedWheel(file="sglang-1-py3-none-any.whl", sha256="0" * 64)
    (component,) = json.loads(make_sbom(Lock(engine=engine, wheels={"sglang": wheel})))["components"]
    assert "1.patch: Mend it" in component["pedigree"]["notes"]
