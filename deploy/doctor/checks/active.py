"""Checks of what `doctor --probe` measured. Without it they say nothing."""

from collections.abc import Iterator
from statistics import median

from deploy.doctor.check import check
from deploy.doctor.finding import Needs, Problem, error, note, warning
from deploy.host.report import AllReduceResult, HostReport

GROUP = "Active tests"
HANG_LINK = "https://github.com/local-inference-lab/rtx6kpro/issues/15"
OUTLIER = 0.7
"""Share of the median below which one GPU or pair stands out."""
SLOW_TRANSFER = 2e9
"""Bytes per second: TCP over loopback stays below it, shared memory and cuda_ipc do not."""


@check("probe.all_reduce", GROUP)
def all_reduce(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """A real all-reduce that hung, gave wrong values or failed; and peer-to-peer that does not pay."""
    results = report.active.all_reduces if report.active else []
    good: dict[bool, AllReduceResult] = {result.peer_to_peer: result for result in results if result.outcome == "ok"}
    for result in results:
        switch = "on" if result.peer_to_peer else "off"
        how = f"all-reduce over {result.ranks} {result.device} ranks with peer-to-peer {switch}"
        works_without = result.peer_to_peer and False in good
        fix = 'set NCCL_P2P_LEVEL = "LOC" under [variables] until the cause is found' if works_without else ""
        if result.outcome == "hang":
            yield error(
                f"{how} never completed",
                "the driver may call peer-to-peer OK while the fabric drops it; "
                + ("without it the same test passes" if works_without else "the engine would hang at its first step"),
                fix or "see the findings about ACS and IOMMU",
                look="sudo lspci -vvv | grep ACSCtl",
                link=HANG_LINK,
            )
        elif result.outcome == "wrong_values":
            yield error(
                f"{how} gave wrong values: {result.said}",
                "answers would be silently wrong",
                fix or "do not serve from this host; test GPUs and links one by one",
                link=HANG_LINK,
            )
        elif result.outcome == "failed":
            yield error(f"{how} failed: {result.said}", "the engine would fail the same way", fix)
    with_peer, without = good.get(True), good.get(False)
    if (
        with_peer
        and without
        and with_peer.bytes_per_second
        and without.bytes_per_second
        and with_peer.bytes_per_second < without.bytes_per_second
    ):
        yield warning(
            f"all-reduce is slower with peer-to-peer ({with_peer.bytes_per_second / 1e9:.1f} GB/s) than through host "
            f"memory ({without.bytes_per_second / 1e9:.1f} GB/s)",
            "something redirects transfers between GPUs",
            "see the findings about ACS and IOMMU",
        )


def _middle(speeds: list[float | None]) -> float:
    """Median of the measured speeds, 0 without any."""
    measured = [speed for speed in speeds if speed]
    return median(measured) if measured else 0.0


@check("probe.copies", GROUP)
def copies(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """GPUs that copy wrongly, or slower than the others."""
    results = report.active.copies if report.active else []
    middle = _middle([result.bytes_per_second for result in results])
    for result in results:
        speed = result.bytes_per_second
        if result.error or result.correct is False:
            yield error(
                f"GPU {result.gpu} fails a memory copy: {result.error or 'it read back other values than it wrote'}",
                "weights and KV cache on it would be wrong",
                "take it out of deploy.toml and test it alone",
                look=f"nvidia-smi -i {result.gpu} -q -d ECC,ROW_REMAPPER",
            )
        elif speed and speed < OUTLIER * middle:
            yield warning(
                f"GPU {result.gpu} copies {speed / 1e9:.0f} GB/s, the median GPU {middle / 1e9:.0f}",
                "decode is bound by memory bandwidth and waits for the slowest GPU",
                "check power limit, temperature and clocks",
                look=f"nvidia-smi -i {result.gpu} -q -d CLOCK,PERFORMANCE",
            )


@check("probe.peers", GROUP)
def peers(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Pairs of GPUs between which copies are wrong or slow."""
    results = report.active.peers if report.active else []
    bad = [result for result in results if result.error or result.correct is False]
    if bad:
        first = bad[0]
        yield error(
            f"copies between {len(bad)} pairs of GPUs fail (first: {first.source} → {first.target}: "
            f"{first.error or 'other values arrived than were sent'})",
            "the KV cache and all-reduce would carry wrong data",
            "see the findings about ACS and IOMMU",
            link=HANG_LINK,
        )
        return
    middle = _middle([result.bytes_per_second for result in results])
    slow = [(speed, result) for result in results if (speed := result.bytes_per_second) and speed < OUTLIER * middle]
    if slow:
        speed, worst = min(slow, key=lambda pair: pair[0])
        yield note(
            f"{len(slow)} of {len(results)} pairs are slower than the rest (slowest: {worst.source} → {worst.target}, "
            f"{speed / 1e9:.1f} GB/s; median {middle / 1e9:.1f} GB/s)",
            "pairs across sockets or with a worse link; roles should not contain them",
            "deploy init groups GPUs by these numbers",
        )


@check("probe.transfers", GROUP)
def transfers(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """KV transfers that hang, are wrong, or fell back to TCP."""
    for result in report.active.transfers if report.active else []:
        what = "GPU" if result.memory == "cuda" else "host"
        how = f"NIXL transfer of {what} memory the {result.transport} way"
        if result.outcome != "ok":
            said = {"hang": "never completed", "wrong_values": "delivered wrong values", "failed": "failed"}
            yield error(
                f"{how} {said[result.outcome]}{f': {result.said}' if result.said else ''}",
                "prefill could not hand the KV cache to decode this way",
                "choose the other transport in deploy.toml if it passes",
            )
        elif result.memory == "cuda" and result.bytes_per_second and result.bytes_per_second < SLOW_TRANSFER:
            used = ", ".join(result.used) or "transport unknown"
            yield warning(
                f"{how} moves {result.bytes_per_second / 1e9:.2f} GB/s ({used})",
                "UCX falls back to TCP silently when containers do not see each other's GPUs or process ids",
                'transport = "p2p" in deploy.toml shares both',
                link="https://github.com/vllm-project/vllm/issues/55906",
            )


@check("probe.not_run", GROUP)
def not_run(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Tests that could not run."""
    for test in report.active.not_run if report.active else []:
        yield note(f"{test.what} was not tested: {test.why}", "its findings are missing", test.how)
