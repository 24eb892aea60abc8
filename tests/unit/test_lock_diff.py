import json

import pytest
from hypothesis import given

from deploy.lock.diff import Change, Transfer, diff, transfer
from deploy.lock.model import EngineLock, Lock, LockedPatch, LockedRole, LockedWheel
from deploy.render import changes, short, transferred
from tests.unit.locks import image, layer, package, pairs, root_file_system


@given(pairs)
def test_a_difference_is_empty_exactly_if_the_locks_are_equal(pair: tuple[Lock, Lock]) -> None:
    one, two = pair
    assert (diff(one, two).changes == ()) == (one == two)
    assert diff(one, one).changes == ()


@given(pairs)
def test_the_other_way_round_before_and_after_change_places(pair: tuple[Lock, Lock]) -> None:
    one, two = pair
    back = {Change(change.section, change.name, change.after, change.before) for change in diff(two, one).changes}
    assert set(diff(one, two).changes) == back


@given(pairs)
def test_what_is_shown_of_a_change_differs(pair: tuple[Lock, Lock]) -> None:
    one, two = pair
    for change in diff(one, two).changes:
        assert change.before != change.after, change


@given(pairs)
def test_a_difference_can_be_written_as_json_and_shown(pair: tuple[Lock, Lock]) -> None:
    one, two = pair
    found = diff(one, two)
    assert len(json.loads(json.dumps(found.as_dict()))["changes"]) == len(found.changes)
    assert (changes(found.changes) == "") == (not found.changes)


def test_packages_are_told_by_version_and_by_hash_where_the_version_is_the_same() -> None:
    before = Lock(rootfs=root_file_system(package("a", "1"), package("b", "1"), package("c", "1"), package("d", "1")))
    after = Lock(
        rootfs=root_file_system(package("b", "2"), package("c", "1", "1"), package("d", "1"), package("e", "1"))
    )
    assert diff(before, after).changes == (
        Change("package", "a", "1", None),
        Change("package", "b", "1", "2"),
        Change("package", "c", f"1 {'0' * 12}", f"1 {'1' * 12}"),
        Change("package", "e", None, "1"),
    )


def test_wheels_are_told_by_version() -> None:
    def lock(version: str) -> Lock:
        return Lock(wheels={"torch": LockedWheel(file=f"torch-{version}-py3-none-any.whl", sha256="0" * 64)})

    assert diff(lock("1"), lock("2")).changes == (Change("wheel", "torch", "1", "2"),)


def test_patches_are_told_by_title() -> None:
    def lock(*patches: LockedPatch) -> Lock:
        return Lock(engine=EngineLock(wheel="0" * 64, tree="0" * 64, patched_tree="0" * 64, patch=patches))

    one = LockedPatch(name="1.patch", title="Mend the queue", sha256="0" * 64, files=("sglang/a.py",))
    two = LockedPatch(name="2.patch", title="Mend the cache", sha256="0" * 64, files=("sglang/b.py",))
    assert diff(lock(one), lock(one, two)).changes == (Change("patch", "2.patch", None, "Mend the cache"),)
    assert [change.name for change in diff(lock(one, two), lock(two, one)).changes] == ["1.patch", "2.patch"]


def role(*arguments: str, **environment: str) -> LockedRole:
    return LockedRole(sha256="0" * 64, arguments=arguments, environment=environment)


def test_arguments_are_told_one_by_one() -> None:
    before = Lock(roles={"cpu": {"prefill": role("prefill", "--page-size=1", "--quiet", "--numa", "0", "0")}})
    after = Lock(roles={"cpu": {"prefill": role("prefill", "--page-size=64", "--numa", "0", "1", X="1")}})
    assert diff(before, after).changes == (
        Change("argument", "cpu prefill --numa", "0 0", "0 1"),
        Change("argument", "cpu prefill --page-size", "1", "64"),
        Change("argument", "cpu prefill --quiet", "set", None),
        Change("environment", "cpu prefill $X", None, "1"),
    )


def test_arguments_in_another_order_are_a_change_of_the_role() -> None:
    before = Lock(roles={"cpu": {"prefill": role("prefill", "--a=1", "--b=2")}})
    after = Lock(roles={"cpu": {"prefill": role("prefill", "--b=2", "--a=1")}})
    (change,) = diff(before, after).changes
    assert (change.section, change.name) == ("role", "cpu prefill")


def test_only_layers_that_are_missing_are_fetched() -> None:
    base, old, new = layer("1", 5_000_000), layer("2", 10), layer("3", 20)
    assert transfer(image("a", base, old), image("b", base, new)) == Transfer(1, 20, compressed=False)
    assert transfer(image("a", base, old), image("a", base, old)) == Transfer(0, 0, compressed=True)


def test_bytes_to_fetch_are_the_registrys_where_it_has_been_pushed() -> None:
    found = transfer(image("a", layer("1", 100, 50)), image("b", layer("1", 100, 50), layer("3", 2_000_000, 900_000)))
    assert found == Transfer(1, 900_000, compressed=True)
    assert found is not None and transferred(found) == "To fetch: 1 layers, 0.9 MB"


def test_nothing_is_said_of_bytes_before_both_images_were_built() -> None:
    assert transfer(None, image("a", layer("1", 1))) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0123456789abcdef" * 4, "0123456789ab"),
        (f"sha256:{'0123456789abcdef' * 4} 5 bytes", "sha256:0123456789ab 5 bytes"),
        ("0123456789" * 4, "012345678901"),
        ("2.36-9+deb12u10", "2.36-9+deb12u10"),
        ("deadbeef", "deadbeef"),
    ],
)
def test_hashes_are_shown_short_and_nothing_else_is_cut(text: str, shown: str) -> None:
    assert short(text) == shown
