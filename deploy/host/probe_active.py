"""Run the probe programs in the engine's image, with the same restrictions as the roles, and collect what they find.

Nothing here waits for ever: each program has its own limits, the container around it a longer one, and every
container and network is removed again, also after Ctrl-C.
"""

import os
from collections.abc import Callable, Sequence
from typing import Literal

from deploy.host.machine import Machine, Ran
from deploy.host.parsers.active import parse_all_reduce, parse_copies, parse_transfer
from deploy.host.report import ActiveTests, AllReduceResult, CopyResult, Gpu, PeerResult, TransferResult, Unseen
from deploy.spec.model import CDI_KIND

CONTAINER_SECONDS = 240.0
"""For one container; the programs inside end themselves sooner."""
PORT = 31999
_CPU_BYTES = 32 * 1024**2
Device = Literal["cuda", "cpu"]


def container(
    name: str, image: str, program: Sequence[str], gpus: Sequence[Gpu], network: str, flags: Sequence[str] = ()
) -> list[str]:
    """The `docker run` command of one probe: no root, no capabilities, nothing writable but /tmp.

    Args:
        name: of the container.
        image: the engine's image.
        program: module of engine_runtime.probes with its arguments.
        gpus: what it sees, by UUID where the driver gives one.
        network: Docker network, "none" for the loopback device only.
        flags: further flags of `docker run`.
    """
    devices = [f"--device={CDI_KIND}={gpu.uuid or gpu.index}" for gpu in gpus]
    return [
        *("docker", "run", "--rm", f"--name={name}", f"--network={network}", *flags),
        *("--user=65532:65532", "--read-only", "--tmpfs=/tmp:mode=1777,exec,size=1g", "--shm-size=4g"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges:true", "--pull=never"),
        *("--env=HOME=/tmp", "--env=CUDA_DEVICE_ORDER=PCI_BUS_ID", "--env=NCCL_IB_DISABLE=1"),
        "--env=UCX_PROTO_INFO=*remote memory write*",
        *devices,
        *("--entrypoint=python", image, "-m", f"engine_runtime.probes.{program[0]}", *program[1:]),
    ]


class ActiveProbe:
    """The active tests of one host.

    Args:
        machine: the host; its limit should be CONTAINER_SECONDS.
        image: the engine's image.
        gpus: the GPUs to test; none tests host memory only.
        pair: two GPUs between which the KV cache would travel, one of each role.
        say: called with a line before each test.
    """

    def __init__(
        self, machine: Machine, image: str, gpus: Sequence[Gpu], pair: Sequence[Gpu], say: Callable[[str], None]
    ) -> None:
        self._machine = machine
        self._image = image
        self._gpus = gpus
        self._pair = pair
        self._say = say
        self._device: Device = "cuda" if gpus else "cpu"
        self._prefix = f"deploy-probe-{os.getpid()}"
        self._not_run: list[Unseen] = []

    def run(self) -> ActiveTests:
        """All tests, one after another."""
        copies: list[CopyResult] = []
        peers: list[PeerResult] = []
        if self._gpus:
            copies, peers = self._copies()
        reduces = [self._all_reduce(peer_to_peer) for peer_to_peer in ((True, False) if self._gpus else (True,))]
        transfers = [self._transfer_in_one(), self._transfer_between_two()] if len(self._pair) != 1 else []
        return ActiveTests(
            image=self._image,
            copies=copies,
            peers=peers,
            all_reduces=[result for result in reduces if result],
            transfers=[result for result in transfers if result],
            not_run=self._not_run,
        )

    def _start(self, name: str, program: Sequence[str], gpus: Sequence[Gpu], network: str = "none") -> Ran:
        full = f"{self._prefix}-{name}"
        try:
            return self._machine.run(*container(full, self._image, program, gpus, network))
        finally:
            # Nothing to remove after an orderly end.
            self._machine.run("docker", "rm", "--force", full)

    def _missing(self, what: str, ran: Ran) -> None:
        """Note a test that gave no result."""
        words = [line.strip() for line in ran.text.splitlines() if line.strip()]
        why = "no result in time" if ran.end == "slow" else (words[-1][:300] if words else f"docker run {ran.end}")
        self._not_run.append(Unseen(what=what, why=why))

    def _copies(self) -> tuple[list[CopyResult], list[PeerResult]]:
        self._say(f"memory copies on {len(self._gpus)} GPUs and between each two")
        ran = self._start("copy", ["memory_copy", "--device=cuda"], self._gpus)
        copies, peers = parse_copies(ran.out)
        if not copies and not peers:
            self._missing("memory copy", ran)
        return copies, peers

    def _all_reduce(self, peer_to_peer: bool) -> AllReduceResult | None:
        if len(self._gpus) == 1:
            return None
        switch = "on" if peer_to_peer else "off"
        self._say(f"all-reduce with peer-to-peer {switch}")
        program = ["all_reduce", f"--device={self._device}", f"--peer-to-peer={switch}"]
        program += [] if self._gpus else [f"--bytes={_CPU_BYTES}"]
        ran = self._start("all-reduce", program, self._gpus)
        result = parse_all_reduce(ran.out)
        if result is None:
            self._missing(f"all-reduce with peer-to-peer {switch}", ran)
        return result

    def _transfer_in_one(self) -> TransferResult | None:
        """Both processes in one container: they see each other's GPU and process, as with transport p2p."""
        self._say("NIXL transfer inside one container")
        memory = ["--memory=cuda:0", "--to=cuda:1"] if self._pair else ["--memory=cpu", f"--bytes={_CPU_BYTES}"]
        ran = self._start("pair", ["nixl_transfer", "pair", *memory], self._pair)
        result = parse_transfer(ran.out, ran.err, "p2p", self._device)
        if result is None:
            self._missing("NIXL transfer inside one container", ran)
        return result

    def _transfer_between_two(self) -> TransferResult | None:
        """A container a process, each with its own GPU, as with transport isolated."""
        self._say("NIXL transfer between two containers")
        network, target = f"{self._prefix}-net", f"{self._prefix}-target"
        memory = ["--memory=cuda:0"] if self._pair else ["--memory=cpu", f"--bytes={_CPU_BYTES}"]
        try:
            made = self._machine.run("docker", "network", "create", "--internal", network)
            offer = ["nixl_transfer", "target", f"--address=0.0.0.0:{PORT}", *memory]
            offered = self._machine.run(
                *container(target, self._image, offer, self._pair[1:2], network, flags=["--detach"])
            )
            if made.end != "ok" or offered.end != "ok":
                self._missing("NIXL transfer between two containers", made if made.end != "ok" else offered)
                return None
            program = ["nixl_transfer", "initiator", f"--address={target}:{PORT}", *memory]
            ran = self._start("initiator", program, self._pair[:1], network)
            result = parse_transfer(ran.out, f"{ran.out}\n{ran.err}", "isolated", self._device)
            if result is None:
                self._missing("NIXL transfer between two containers", ran)
            return result
        finally:
            self._machine.run("docker", "rm", "--force", target)
            self._machine.run("docker", "network", "rm", network)


def has_image(machine: Machine, image: str) -> bool:
    """Whether the engine has the image."""
    return machine.run("docker", "image", "inspect", "--format={{.Id}}", image).end == "ok"
