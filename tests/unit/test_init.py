"""What `deploy init` proposes for each look-alike host, and what it writes."""

import fcntl
import os
import shlex
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import lookalike
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookalike import EIGHT_GPUS, GIB, LAYOUTS, Layout, RecordedHost, Slot, host
from pydantic import BaseModel
from rich.console import Console
from typer.testing import CliRunner

from deploy.cli import app
from deploy.errors import DeployError
from deploy.host.errors import HostError
from deploy.host.parsers.cpu_list import format_cpu_list
from deploy.host.probe_host import probe
from deploy.host.report import ActiveTests, AllReduceResult, HostReport, PeerResult, TransferResult, save
from deploy.init.drawing import draw
from deploy.init.propose import assign_cpus, cost, divide, propose
from deploy.init.render import to_toml
from deploy.init.verb import init, write
from deploy.spec.load import load, parse
from deploy.spec.model import Engine, Image, Model, Router, Spec, Tuned
from deploy.stack.memory import plan_on
from deploy.stack.state import State
from deploy.stack.up import plan
from deploy.tune.signed import signed

ROOT = Path(__file__).parents[2]
DEPLOY = str(Path(sys.executable).parent / "deploy")


def measured(report: HostReport, **results: object) -> HostReport:
    return report.model_copy(update={"active": ActiveTests.model_validate({"image": "x", **results})})


def run_init(report: HostReport, folder: Path, env_file: Path | None = None) -> None:
    init(
        report,
        folder / "deploy.toml",
        state=State(folder / ".state"),
        env_file=env_file,
        image="img:1",
        dry_run=False,
        yes=True,
        as_json=False,
    )


def saved(folder: Path) -> Path:
    """A host without GPUs as `deploy doctor --save` writes it."""
    save(probe(lookalike.no_gpu()), folder / "host.json")
    return folder / "host.json"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_roles_have_disjoint_gpus_and_cpus_of_their_own_node(layout: Layout) -> None:
    report = probe(host(layout))
    proposal = propose(report)
    gpus = [gpu.index for role in proposal.roles for gpu in role.gpus]
    assert len(gpus) == len(set(gpus)) == {2: 2, 4: 4, 8: 8}[len(layout.slots)]
    cpus = [cpu for role in proposal.roles for cpu in role.cpus]
    assert len(cpus) == len(set(cpus))
    assert set(cpus) | set(proposal.system_cpus) == set(report.cpu.online)
    assert set(cpus).isdisjoint(proposal.system_cpus)
    nodes = {node.node: set(node.cpus) for node in report.numa or []}
    for role in proposal.roles:
        assert role.cpus and set(role.cpus) <= nodes[role.numa_node]
        # A core's threads stay together.
        for group in report.cpu.thread_siblings:
            assert len(set(group) & set(role.cpus)) in {0, len(group)}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (EIGHT_GPUS, [([0, 1, 2, 3], 0, "2-47,98-143"), ([4, 5, 6, 7], 1, "50-95,146-191")]),
        (lookalike.SINGLE_SOCKET, [([0, 1, 2, 3], 0, "2-32,66-96"), ([4, 5, 6, 7], 0, "33-63,97-127")]),
        (lookalike.MISSING_CPU, [([0, 1, 2, 3], 0, "2-22,24-47,98-143"), ([4, 5, 6, 7], 1, "50-95,146-191")]),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_eight_gpus_become_prefill_and_decode(layout: Layout, expected: list[tuple[list[int], int, str]]) -> None:
    proposal = propose(probe(host(layout)))
    assert (proposal.profile, proposal.obstacles) == ("pd", ())
    assert [
        ([gpu.index for gpu in role.gpus], role.numa_node, format_cpu_list(list(role.cpus))) for role in proposal.roles
    ] == expected


def test_gpus_under_one_switch_stay_together_whatever_their_numbers() -> None:
    """Indices alternate between the nodes: the groups follow the nodes, not the numbers."""
    report = probe(host(EIGHT_GPUS))
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    assert report.topology
    links = {
        f"GPU{row}": {
            f"GPU{column}": report.topology.links[f"GPU{order[row]}"][f"GPU{order[column]}"] for column in range(8)
        }
        for row in range(8)
    }
    gpus = [report.gpus[old].model_copy(update={"index": new}) for new, old in enumerate(order)]
    mixed = report.model_copy(update={"gpus": gpus, "topology": report.topology.model_copy(update={"links": links})})
    assert [[gpu.index for gpu in part] for part in divide(mixed, gpus, 2, 4)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_measured_bandwidth_counts_more_than_the_named_distance() -> None:
    """On one node, GPUs 0, 2, 4 and 6 are measured to be near each other."""
    report = probe(host(lookalike.SINGLE_SOCKET))
    peers = [
        PeerResult(source=one, target=other, bytes_per_second=50e9 if one % 2 == other % 2 else 5e9)
        for one in range(8)
        for other in range(8)
        if one != other
    ]
    proposal = propose(measured(report, peers=peers))
    assert [[gpu.index for gpu in role.gpus] for role in proposal.roles] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@given(st.lists(st.tuples(st.sampled_from([0x20, 0x40, 0x60, 0x80]), st.integers(0, 1)), min_size=4, max_size=8))
@settings(max_examples=40)
def test_no_other_pair_of_groups_is_nearer(places: list[tuple[int, int]]) -> None:
    """Against a plain search over every assignment."""
    from itertools import combinations

    slots = tuple(Slot(root, node) for root, node in places)
    report = probe(host(EIGHT_GPUS))
    gpus = [gpu.model_copy(update={"numa_node": slot.node}) for gpu, slot in zip(report.gpus, slots, strict=False)]
    found = divide(report, gpus, 2, 2)

    def total(parts: list[tuple[object, ...]]) -> tuple[float, float, float]:
        costs = [cost(report, part) for part in parts]  # type: ignore[arg-type]
        return sum(item[0] for item in costs), max(item[1] for item in costs), sum(item[2] for item in costs)

    every = [
        [one, other]
        for one in combinations(gpus, 2)
        for other in combinations(gpus, 2)
        if not set(map(id, one)) & set(map(id, other))
    ]
    assert total(list(found)) == min(total(list(parts)) for parts in every)


@pytest.mark.parametrize("layout", [lookalike.NPS4, lookalike.FIVE_AND_THREE], ids=lambda layout: layout.name)
def test_a_host_without_two_groups_of_four_is_refused_with_the_reason(layout: Layout, tmp_path: Path) -> None:
    report = probe(host(layout))
    assert "would span nodes" in propose(report).obstacles[0]
    with pytest.raises(HostError, match="would span nodes"):
        run_init(report, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("layout", "engines"), [(lookalike.TWO_GPUS, 1), (lookalike.FOUR_GPUS, 2)])
def test_two_and_four_gpus_are_planned_as_replicas(layout: Layout, engines: int, tmp_path: Path) -> None:
    report = probe(host(layout))
    proposal = propose(report)
    assert (proposal.profile, len(proposal.roles)) == ("replicas", engines)
    assert all(len(role.gpus) == 2 for role in proposal.roles)
    run_init(report, tmp_path)
    spec_file = load(tmp_path / "deploy.toml")
    assert spec_file.spec.profile == "replicas"
    uuids = [lookalike.uuid(gpu.index) for role in proposal.roles for gpu in role.gpus]
    assert [gpu for role in spec_file.spec.replica for gpu in role.gpus] == uuids
    assert [role.numa_node for role in spec_file.spec.replica] == [role.numa_node for role in proposal.roles]
    # What `deploy config` does, as far as no Docker is needed: nothing is refused.
    stack, _ = plan(ROOT, spec_file, State(tmp_path / "state"), "image:tag")
    assert [file.name for file in stack.files] == ["compose.replicas.yaml"]
    planned = plan_on(spec_file.spec, report.gpus)
    assert planned and planned[0].fits and "as the driver says" in planned[1]


def test_on_eight_gpus_a_spec_with_replicas_stays_one() -> None:
    keep = parse(
        'profile = "replicas"\n[[replica]]\ngpus = [0, 1]\nnuma_node = 0\nextra_arguments = "--kept"\n'
        '[engine]\nspeculation = "eagle"\nnccl = "ll_ring"\n[model]\nrepo = "a/b"\nrevision = "' + "0" * 40 + '"\n',
        Path("deploy.toml"),
    ).spec
    proposal = propose(probe(host(EIGHT_GPUS)), keep)
    assert [[gpu.index for gpu in role.gpus] for role in proposal.roles] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [role.numa_node for role in proposal.roles] == [0, 0, 1, 1]
    spec = parse(to_toml(proposal, keep, True), Path("deploy.toml")).spec
    assert [role.extra_arguments for role in spec.replica] == ["--kept", "", "", ""]
    assert spec.model == keep.model
    assert spec.engine == keep.engine.model_copy(update={"memory_fraction": 0.9})


def test_one_gpu_is_refused_because_the_weights_do_not_fit() -> None:
    report = probe(host(lookalike.TWO_GPUS))
    proposal = propose(report.model_copy(update={"gpus": report.gpus[:1]}))
    assert proposal.roles == () and "one GPU does not hold the weights" in proposal.obstacles[0]


def test_without_gpus_the_cpu_profile_is_proposed() -> None:
    proposal = propose(probe(lookalike.no_gpu()))
    assert (proposal.profile, proposal.roles, proposal.obstacles) == ("cpu", (), ())


@pytest.mark.parametrize("machine", [lookalike.gpu_lost(), host(EIGHT_GPUS).without("nvidia-smi")])
def test_gpus_that_are_there_and_do_not_answer_are_no_reason_for_the_cpu_profile(machine: RecordedHost) -> None:
    assert propose(probe(machine)).obstacles


def test_a_gpu_with_mig_is_left_out() -> None:
    proposal = propose(probe(lookalike.mig_on()))
    assert 2 not in [gpu.index for role in proposal.roles for gpu in role.gpus]
    assert "GPU 2 is left out: MIG is on" in proposal.remarks


def test_transport_follows_the_measurement() -> None:
    def transfer(transport: str, speed: float) -> TransferResult:
        return TransferResult.model_validate(
            {"transport": transport, "memory": "cuda", "outcome": "ok", "bytes_per_second": speed}
        )

    report = probe(host(EIGHT_GPUS))
    assert propose(report).transport == "isolated"
    faster = measured(report, transfers=[transfer("isolated", 6e9), transfer("p2p", 40e9)])
    assert propose(faster).transport == "p2p" and "40.0 GB/s" in propose(faster).transport_reason
    assert (
        propose(measured(report, transfers=[transfer("isolated", 6e9), transfer("p2p", 6e9)])).transport == "isolated"
    )


def test_peer_to_peer_is_switched_off_where_it_was_seen_to_fail() -> None:
    report = probe(host(EIGHT_GPUS))

    def level(changed: HostReport) -> object:
        return {setting.name: setting.value for setting in propose(changed).settings}["NCCL_P2P_LEVEL"]

    assert level(report) == "PHB"
    hang = AllReduceResult(device="cuda", ranks=8, peer_to_peer=True, outcome="hang")
    assert level(measured(report, all_reduces=[hang])) == "LOC"
    refused = host(EIGHT_GPUS).answering("nvidia-smi topo -p2p r", " \tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX\n")
    assert level(probe(refused)) == "LOC"


def test_every_setting_is_a_variable_of_the_compose_file() -> None:
    compose = (Path(__file__).parents[2] / "compose.yaml").read_text()
    limited = (
        host(EIGHT_GPUS)
        .with_file("/proc/1402/status", "CapEff:\t0000000000000000\n")
        .with_file("/proc/1402/limits", "Max locked memory  8192  8192  bytes\nMax open files  1024  1024  files\n")
    )
    proposed = propose(probe(limited)).settings
    assert {setting.name for setting in proposed} == {"NCCL_P2P_LEVEL", "MEMLOCK", "NOFILE"}
    for setting in proposed:
        assert f"${{{setting.name}:-" in compose and setting.reason


@pytest.mark.parametrize("uuids", [True, False])
def test_the_proposal_is_a_valid_spec_that_says_the_same(uuids: bool) -> None:
    report = probe(host(EIGHT_GPUS))
    keep = Spec(
        model=Model(path="elsewhere", repo="owner/name", revision="a" * 40),
        image=Image(registry="registry.example:5000/team", public_key="cosign.pub"),
        router=Router(port=31000, extra_arguments='--x "a\\b"\tü'),
        variables={"NCCL_DEBUG": "INFO"},
    )
    spec = parse(to_toml(propose(report), keep, uuids), Path("deploy.toml")).spec
    assert spec.prefill.gpus == (tuple(lookalike.uuid(index) for index in range(4)) if uuids else (0, 1, 2, 3))
    assert (spec.decode.numa_node, spec.decode.cpus) == (1, "50-95,146-191")
    assert (spec.model, spec.image, spec.router) == (keep.model, keep.image, keep.router)
    assert spec.variables == {"NCCL_DEBUG": "INFO", "NCCL_P2P_LEVEL": "PHB"}


def comments(text: str) -> dict[str, str]:
    """The comment right above each key, as one line, by `table.key`, and above each table by `.table`."""
    found: dict[str, str] = {}
    table, above = "", list[str]()
    for line in text.splitlines():
        if line.startswith("#"):
            above.append(line.removeprefix("#").strip())
            continue
        if line.startswith("["):
            table = line.strip("[]")
            found[f".{table}"] = " ".join(above)
        elif " = " in line and not line.startswith(" "):
            found[f"{table}.{line.partition(' = ')[0]}"] = " ".join(above)
        above = []
    return found


def test_each_key_is_explained_as_in_the_repositorys_deploy_toml() -> None:
    """Which leaves out what [decode] has in common with [prefill]."""
    shipped = comments((ROOT / "deploy.toml").read_text())
    spec = Spec()
    for key, text in shipped.items():
        table, _, name = key.partition(".")
        section: BaseModel = getattr(spec, table) if table else spec
        described = type(section).model_fields[name].description or ""
        assert text == described or (not text and table == "decode"), key
    keep = Spec(engine=Engine(speculation_steps=5))
    written = comments(to_toml(propose(probe(host(EIGHT_GPUS))), keep, True))
    assert {key for key in written if not key.startswith("variables.")} == {*shipped}
    assert all(text in written[key] for key, text in shipped.items())
    text = to_toml(propose(probe(host(EIGHT_GPUS))), keep, True)
    assert parse(text, Path("deploy.toml")).spec.engine.speculation_steps == 5
    assert all(len(line) <= 120 for line in text.splitlines())


def test_a_key_without_an_explanation_shares_that_of_the_key_before() -> None:
    shared = {
        *("model.revision", "router.concurrent_requests", "router.tls_key", "metrics.prometheus_port"),
        *("decode.gpus", "decode.numa_node", "decode.cpus", "decode.extra_arguments"),
    }
    shipped = comments((ROOT / "deploy.toml").read_text())
    assert {key for key, text in shipped.items() if not text and key[0] != "."} == shared


def test_what_tune_signed_off_stays() -> None:
    winner = {"setting": "engine.nccl", "was": "auto", "now": "ll_ring", "ratio": 1.1, "at_least": 1.05, "pairs": 3}
    text = {name: "a" for name in ("by", "at", "host", "gpu", "image", "workload", "results")}
    tuned = Tuned.model_validate({**text, "results_sha256": "0" * 64, "winner": [{**winner, "answers": 1.0}]})
    keep = Spec(engine=Engine(nccl="ll_ring"), tuned=tuned)
    text = to_toml(propose(probe(host(EIGHT_GPUS))), keep, True)
    assert parse(text, Path("deploy.toml")).spec.tuned == tuned
    assert signed(text, {}, tuned) == text


CPU_PROPOSAL = propose(probe(lookalike.no_gpu()))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_a_person_wrote_survives(argument: str) -> None:
    keep = Spec(router=Router(extra_arguments=argument))
    text = to_toml(CPU_PROPOSAL, keep, False)
    assert parse(text, Path("deploy.toml")).spec.router.extra_arguments == argument


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_drawing_shows_every_gpu_with_its_role(layout: Layout) -> None:
    report = probe(host(layout))
    proposal = propose(report)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(draw(report, proposal))
    text = console.export_text()
    for role in proposal.roles:
        for rank, gpu in enumerate(role.gpus):
            assert f"GPU {gpu.index} {gpu.pci_address}" in text and f"{role.name} rank {rank}" in text
    for node in layout.nodes:
        assert f"NUMA node {node}" in text


def test_tiny_and_unknown_processors_leave_the_choice_open() -> None:
    report = probe(RecordedHost())
    assert assign_cpus(report, [0, 0]) == ([(), ()], ())
    one_core = probe(host(Layout("two-gpus", lookalike.TWO_GPUS.slots, {0: ("0-1", GIB)}, sockets=1)))
    sets, system = assign_cpus(one_core, [0])
    assert sets == [()] and system == (0, 1)


def test_writing_needs_a_yes_and_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deploy.toml"
    write({path: "a = 1\n"}, dry_run=False, yes=False)
    assert path.read_text() == "a = 1\n"
    write({path: "a = 1\n"}, dry_run=False, yes=False)
    write({path: "a = 2\n"}, dry_run=True, yes=True)
    with pytest.raises(DeployError, match="differs"):
        write({path: "a = 2\n"}, dry_run=False, yes=False)
    assert path.read_text() == "a = 1\n"
    path.chmod(0o600)
    write({path: "a = 2\n"}, dry_run=False, yes=True)
    assert path.read_text() == "a = 2\n" and path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["deploy.toml"]


@pytest.mark.parametrize("place", ["", "absent folder/deeper"])
def test_an_env_file_that_cannot_be_written_is_refused_before_deploy_toml_is(tmp_path: Path, place: str) -> None:
    folder = tmp_path / place
    if not place:
        (folder / ".env").write_text("MINE=1\n")
    command = ["init", "--spec", str(tmp_path / "deploy.toml"), "--env-file", str(folder / ".env")]
    done = CliRunner().invoke(app, [*command, "--host-report", str(saved(tmp_path))])
    error = done.exception
    assert isinstance(error, DeployError)
    if place:
        assert (error.exit_code, error.message) == (2, f"the folder {folder} does not exist")
        assert error.fix == f"mkdir -p '{folder}'"
    else:
        assert (error.exit_code, error.message) == (1, f"{folder / '.env'} is there and differs")
        assert (folder / ".env").read_text() == "MINE=1\n"
    assert not (tmp_path / "deploy.toml").exists()


def test_an_env_file_in_the_place_of_a_folder_or_below_a_file_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for wrong in (tmp_path, file / ".env"):
        command = ["init", "--spec", str(tmp_path / "deploy.toml"), "--env-file", str(wrong)]
        done = CliRunner().invoke(app, [*command, "--host-report", str(saved(tmp_path))])
        assert 2 in (done.exit_code, getattr(done.exception, "exit_code", None))
    assert not (tmp_path / "deploy.toml").exists()


def refusal(folder: Path, spec: Path, env_file: Path) -> DeployError:
    """What `deploy init` says of two files that it cannot write; it leaves nothing of its own behind."""
    report = saved(folder)
    before = {*folder.rglob("*")}
    command = ["init", "--spec", str(spec), "--env-file", str(env_file), "--host-report", str(report)]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, DeployError), done.output
    assert {*folder.rglob("*")} == before
    return done.exception


@pytest.mark.parametrize("link", [False, True])
def test_spec_and_env_file_cannot_be_one_file(tmp_path: Path, link: bool) -> None:
    (spec := tmp_path / "deploy.toml").write_text('profile = "cpu"\n')
    if link:
        (tmp_path / "link").symlink_to(spec)
    error = refusal(tmp_path, spec, tmp_path / ("link" if link else "../" + tmp_path.name + "/deploy.toml"))
    assert (error.exit_code, "cannot be both" in error.message) == (2, True)
    assert spec.read_text() == 'profile = "cpu"\n'


def test_neither_file_is_written_where_one_cannot_be(tmp_path: Path) -> None:
    command = ["init", "--spec", str(tmp_path / "deploy.toml"), "--env-file", "/proc/x.env"]
    done = CliRunner().invoke(app, [*command, "--host-report", str(saved(tmp_path))])
    assert isinstance(done.exception, OSError) and done.exception.filename == "/proc/x.env"
    assert [file.name for file in tmp_path.iterdir()] == ["host.json"]


def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "circle").symlink_to("circle")
    for wrong in (tmp_path / "fifo", tmp_path / "circle", Path("/dev/null")):
        for spec, env_file in ((wrong, tmp_path / ".env"), (tmp_path / "deploy.toml", wrong)):
            error = refusal(tmp_path, spec, env_file)
            assert (error.exit_code, error.message) == (2, f"{wrong} is no regular file")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe")
    error = refusal(tmp_path, tmp_path / "deploy.toml", tmp_path / ".env")
    assert (error.exit_code, error.message) == (2, f"{tmp_path / '.env'} is no text in UTF-8")
    assert (tmp_path / ".env").read_bytes() == b"\xff\xfe"


def test_a_link_stays_and_the_file_behind_it_is_written(tmp_path: Path) -> None:
    (folder := tmp_path / "elsewhere").mkdir()
    (tmp_path / ".env").symlink_to(folder / "mine.env")
    for _ in range(2):
        run_init(probe(lookalike.no_gpu()), tmp_path, tmp_path / ".env")
        assert (tmp_path / ".env").is_symlink()
        assert "IMAGE=img:1" in (folder / "mine.env").read_text().splitlines()
        (folder / "mine.env").write_text("IMAGE=old\n")


def test_the_command_that_replaces_without_asking_has_the_same_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spec := tmp_path / "my spec.toml").write_text('profile = "cpu"\n')
    command = ["init", "--spec", str(spec), "--host-report", str(saved(tmp_path))]
    monkeypatch.setattr(sys, "argv", ["deploy", *command])
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, DeployError)
    words = shlex.split(done.exception.fix)
    assert words == ["deploy", "init", "--yes", *command[1:]]
    assert CliRunner().invoke(app, words[1:]).exit_code == 0
    assert spec.read_text() != 'profile = "cpu"\n'


def test_the_command_that_replaces_names_the_spec_that_the_shell_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spec := tmp_path / "my spec.toml").write_text('profile = "cpu"\n')
    monkeypatch.setenv("DEPLOY_SPEC", str(spec))
    command = ["init", "--host-report", str(saved(tmp_path)), "--"]
    monkeypatch.setattr(sys, "argv", ["deploy", *command])
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, DeployError)
    first, *words = shlex.split(done.exception.fix)
    assert (first, words) == (f"DEPLOY_SPEC={spec}", ["deploy", "init", "--yes", *command[1:]])


def test_what_a_person_saved_while_being_asked_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "deploy.toml").write_text("shown\n")

    def answer() -> str:
        file.write_text("saved meanwhile\n")
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(DeployError, match="has changed since it was shown"):
        write({file: "new\n"}, dry_run=False, yes=False)
    assert file.read_text() == "saved meanwhile\n"


@pytest.mark.parametrize(
    ("typed", "code", "replaced"),
    [
        ("\x03", 130, False),
        ("\x04", 1, False),
        ("\n", 0, False),
        ("n\n", 0, False),
        ("\udcff\n", 0, False),
        ("Yes\n", 0, True),
    ],
)
def test_a_file_is_replaced_only_after_a_yes(tmp_path: Path, typed: str, code: int, replaced: bool) -> None:
    (spec := tmp_path / "deploy.toml").write_text('profile = "cpu"\n')
    command = [DEPLOY, "init", "--spec", str(spec), "--host-report", str(saved(tmp_path))]
    ours, theirs = os.openpty()
    said = ""
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as begun:
        assert begun.stderr
        while "[y/N]" not in said:
            said += begun.stderr.read(1)
        os.write(ours, typed.encode(errors="surrogateescape"))
        if typed == "\x03":
            # Python can miss a signal right before it begins to wait for the answer; a person presses the keys again.
            with suppress(subprocess.TimeoutExpired):
                begun.wait(10)
            if begun.poll() is None:
                os.write(ours, typed.encode())
        said += begun.stderr.read()
    for end in (ours, theirs):
        os.close(end)
    assert begun.returncode == code, said
    assert "Traceback" not in said
    assert (spec.read_text() != 'profile = "cpu"\n') == replaced


@pytest.mark.parametrize(
    ("machine", "profile", "lines"),
    [
        (
            host(EIGHT_GPUS),
            "pd",
            [
                "IMAGE=img:1",
                f"DECODE_GPU_3=nvidia.com/gpu={lookalike.uuid(7)}",
                "PREFILL_NUMA_NODE=0",
                "NCCL_P2P_LEVEL=PHB",
                "COMPOSE_FILE=compose.yaml",
            ],
        ),
        (lookalike.no_gpu(), "cpu", ["MODEL_PATH={}/.state/model/tiny", "COMPOSE_FILE=compose.yaml:compose.cpu.yaml"]),
    ],
)
def test_init_writes_spec_and_env_file(
    tmp_path: Path, machine: lookalike.RecordedHost, profile: str, lines: list[str]
) -> None:
    run_init(probe(machine), tmp_path, tmp_path / ".env")
    assert parse((tmp_path / "deploy.toml").read_text(), Path("deploy.toml")).spec.profile == profile
    assert {line.format(tmp_path) for line in lines} <= set((tmp_path / ".env").read_text().splitlines())
