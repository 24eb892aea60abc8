"""What must hold inside every running container, whatever runs in it."""

from conftest import Project, docker

SYS_NICE = 1 << 23
ENGINES = ("prefill", "decode")
SERVICES = (*ENGINES, "router")


def check_confinement(project: Project, service: str) -> None:
    """User, capabilities, system-call filter and file systems, read inside the container."""
    status = dict(
        line.split(":\t", 1) for line in project.execute(service, "cat", "/proc/1/status").splitlines() if ":\t" in line
    )
    assert status["Uid"].split() == ["65532"] * 4
    assert status["Gid"].split() == ["65532"] * 4
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert int(status["CapBnd"], 16) & ~SYS_NICE == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    for path in ("/", "/opt/venv", "/etc", "/model", "/run/secrets"):
        assert not writable(project, service, path), path
    assert writable(project, service, "/tmp")


def writable(project: Project, service: str, folder: str) -> bool:
    """Whether a file can be made in `folder` by the user of the container and by none other."""
    script = f"touch {folder}/.write-test 2>/dev/null && rm {folder}/.write-test && echo yes || echo no"
    return project.execute(service, "sh", "-c", script).strip() == "yes"


def check_reach(project: Project, engines: tuple[str, ...] = ENGINES) -> None:
    """Who can connect to whom, tried with real connections."""
    for service in (*engines, "router"):
        assert not connects(project, service, "192.0.2.1", 443), f"{service} reaches another network"
    published = docker("port", project.container("router")).split()
    assert published == ["30000/tcp", "->", f"127.0.0.1:{project.variables['PORT']}"]
    for engine in engines:
        assert docker("port", project.container(engine)) == ""
        networks = project.inspect(engine)["NetworkSettings"]["Networks"]
        assert list(networks) == [f"{project.name}_engines"]


def connects(project: Project, service: str, host: str, port: int) -> bool:
    script = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 3); print('yes')\n"
        "except OSError: print('no')"
    )
    return project.execute(service, "python", "-c", script, host, str(port)).strip() == "yes"
