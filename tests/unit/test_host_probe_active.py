"""Active tests: what is started, what comes of their output, and that nothing stays behind."""

import json
from dataclasses import dataclass, field

import lookalike
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookalike import EIGHT_GPUS, host

from deploy.host.machine import Ran
from deploy.host.parsers.active import parse_all_reduce, parse_copies, parse_transfer
from deploy.host.probe_active import ActiveProbe, container, has_image
from deploy.host.probe_host import probe
from deploy.host.report import Gpu

GPUS = probe(host(EIGHT_GPUS)).gpus
UCX_LOG = """\
[1.0] [a:1 :0]   +--------------------------------+----------------------------------------------------+
[1.0] [a:1 :0]   | ucp_context_0 intra-node cfg#1 |                                                    |
[1.0] [a:1 :0]   | remote memory write by ucp_put*(multi) from cuda/GPU0 memory to cuda |
[1.0] [a:1 :0]   | 0..inf | zero-copy | cuda_ipc/cuda |
"""


def line(**values: object) -> str:
    return json.dumps(values) + "\n"


def reduced(**values: object) -> str:
    return line(probe="all_reduce", device="cuda", ranks=8, **values)


def moved(speed: float) -> str:
    return line(probe="nixl_transfer", memory="cuda:0", outcome="ok", bytes_per_second=speed)


@dataclass
class Scripted:
    """A machine that answers each docker command by the first word that fits, and remembers all."""

    answers: dict[str, Ran] = field(default_factory=dict[str, Ran])
    commands: list[list[str]] = field(default_factory=list[list[str]])
    interrupt_at: str = ""

    def run(self, *command: str) -> Ran:
        self.commands.append(list(command))
        if self.interrupt_at and any(word.split(".")[-1] == self.interrupt_at for word in command):
            raise KeyboardInterrupt
        known = [answer for word, answer in self.answers.items() if word in " ".join(command)]
        return known[0] if known else Ran("ok")

    def read(self, path: str) -> str | None:
        return None

    def entries(self, path: str) -> list[str]:
        return []

    def target(self, path: str) -> str | None:
        return None

    def left_behind(self) -> set[str]:
        """Names of containers and networks that were made and never removed."""
        made = {word.partition("=")[2] for command in self.commands for word in command if word.startswith("--name=")}
        made |= {command[-1] for command in self.commands if command[1:3] == ["network", "create"]}
        gone = {command[-1] for command in self.commands if "rm" in command[1:3]}
        return made - gone


def run(machine: Scripted, gpus: list[Gpu], pair: list[Gpu]) -> ActiveProbe:
    return ActiveProbe(machine, "image:1", gpus, pair, lambda _: None)


def test_probes_run_with_the_restrictions_of_the_roles() -> None:
    command = container("n", "image:1", ["all_reduce", "--device=cuda"], GPUS[:2], "none")
    for flag in ("--user=65532:65532", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges:true"):
        assert flag in command
    assert [word for word in command if word.startswith("--device=nvidia")] == [
        f"--device=nvidia.com/gpu={lookalike.uuid(0)}",
        f"--device=nvidia.com/gpu={lookalike.uuid(1)}",
    ]
    assert command[-3:] == ["-m", "engine_runtime.probes.all_reduce", "--device=cuda"]
    assert not any("privileged" in word and "no-new" not in word for word in command)


def test_all_results_come_together() -> None:
    copy = line(probe="memory_copy", kind="copy", gpu=0, bytes_per_second=1e12, correct=True)
    peer = line(probe="memory_copy", kind="peer", source=0, target=1, bytes_per_second=5e10, correct=True)
    machine = Scripted(
        {
            "probes.memory_copy": Ran("ok", copy + peer),
            "--peer-to-peer=on": Ran("failed", reduced(peer_to_peer=True, outcome="hang", said="first")),
            "--peer-to-peer=off": Ran("ok", reduced(peer_to_peer=False, outcome="ok", seconds=0.1)),
            "nixl_transfer pair": Ran("ok", moved(4e10), UCX_LOG),
            "nixl_transfer initiator": Ran("ok", moved(3e9)),
        }
    )
    tests = run(machine, GPUS, [GPUS[0], GPUS[4]]).run()
    assert [(copy.gpu, copy.correct) for copy in tests.copies] == [(0, True)]
    assert [(peer.source, peer.target, peer.correct) for peer in tests.peers] == [(0, 1, True)]
    assert [(result.peer_to_peer, result.outcome) for result in tests.all_reduces] == [(True, "hang"), (False, "ok")]
    speeds = {result.transport: (result.bytes_per_second, result.used) for result in tests.transfers}
    assert speeds == {"p2p": (4e10, ["cuda_ipc"]), "isolated": (3e9, [])}
    assert tests.not_run == []
    assert machine.left_behind() == set()


def test_between_two_containers_each_sees_its_own_gpu_only() -> None:
    machine = Scripted()
    run(machine, GPUS, [GPUS[0], GPUS[4]]).run()

    def gpus_of(side: str) -> list[str]:
        command = next(command for command in machine.commands if side in command)
        return [word.rpartition("=")[2] for word in command if word.startswith("--device=")]

    assert gpus_of("target") == [lookalike.uuid(4)] and gpus_of("initiator") == [lookalike.uuid(0)]
    assert gpus_of("pair") == [lookalike.uuid(0), lookalike.uuid(4)]


def test_without_gpus_host_memory_is_tested() -> None:
    machine = Scripted()
    tests = run(machine, [], []).run()
    words = [word for command in machine.commands for word in command]
    assert "--device=cpu" in words and "--memory=cpu" in words and "engine_runtime.probes.memory_copy" not in words
    assert not any(word.startswith("--device=nvidia") for word in words)
    # Programs that said nothing are named.
    assert len(tests.not_run) == 3


def test_one_gpu_alone_has_nobody_to_talk_to() -> None:
    machine = Scripted()
    run(machine, GPUS[:1], GPUS[:1]).run()
    assert [command for command in machine.commands if "nixl_transfer" in " ".join(command)] == []


@pytest.mark.parametrize("moment", ["memory_copy", "all_reduce", "pair", "initiator", "target"])
def test_ctrl_c_leaves_no_container_and_no_network(moment: str) -> None:
    machine = Scripted(interrupt_at=moment)
    with pytest.raises(KeyboardInterrupt):
        run(machine, GPUS, [GPUS[0], GPUS[4]]).run()
    assert machine.left_behind() == set()


def test_a_container_that_never_ends_is_named_and_removed() -> None:
    machine = Scripted({"docker run": Ran("slow")})
    tests = run(machine, GPUS, [GPUS[0], GPUS[4]]).run()
    assert {note.why for note in tests.not_run} == {"no result in time"}
    assert machine.left_behind() == set()


def test_a_copy_that_hung_is_blamed_on_its_pair() -> None:
    text = line(probe="memory_copy", kind="copy", gpu=0, bytes_per_second=1e12, correct=True)
    place = {"source": 0, "target": 3}
    text += line(probe="memory_copy", kind="ended", outcome="hang", said="copies: not done", at=place)
    copies, peers = parse_copies(text)
    assert len(copies) == 1
    assert [(peer.source, peer.target, peer.error) for peer in peers] == [(0, 3, "copies: not done")]


def test_the_transport_comes_from_ucx_own_words() -> None:
    text = line(probe="nixl_transfer", outcome="ok", bytes_per_second=1.0)
    result = parse_transfer(text, UCX_LOG, "p2p", "cuda")
    assert result and (result.transport, result.outcome, result.used) == ("p2p", "ok", ["cuda_ipc"])


STARTED = st.text().map(lambda text: '{"probe": "all_reduce", ' + text)


@given(st.text() | STARTED | st.sampled_from(["{" * 9999, "[]", "{}"]))
def test_any_output_is_parsed(text: str) -> None:
    for probe_name in ("all_reduce", "memory_copy", "nixl_transfer"):
        damaged = text + "\n" + line(probe=probe_name, gpu=text, outcome=text, at=text, kind="ended")
        parse_all_reduce(damaged)
        parse_copies(damaged)
        parse_transfer(damaged, damaged, "p2p", "cpu")


def test_an_image_is_there_or_not() -> None:
    assert has_image(Scripted(), "x")
    assert not has_image(Scripted({"inspect": Ran("failed", "", "No such image")}), "x")
