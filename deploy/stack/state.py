"""The state folder: the lock that keeps two controllers apart, and the files that `up` writes for Compose."""

import fcntl
import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from deploy.errors import DeployError


class LockHeld(DeployError):
    """Another controller is changing the same stack."""

    exit_code = 5


@dataclass(frozen=True)
class State:
    """Paths inside the state folder (`.state` in the repository unless told otherwise)."""

    folder: Path

    @property
    def generations(self) -> Path:
        """Folder of the accepted stacks, one folder each."""
        return self.folder / "generations"

    @property
    def current(self) -> Path:
        """Link to the generation that the containers should be."""
        return self.folder / "current"

    @property
    def candidate(self) -> Path:
        """What `up` is starting and has not accepted yet."""
        return self.folder / "candidate"

    @property
    def journal(self) -> Path:
        """Exists while a command changes the stack."""
        return self.folder / "journal.json"

    @property
    def incidents(self) -> Path:
        """What `watch` has seen and done."""
        return self.folder / "incidents"

    @property
    def environment(self) -> Path:
        """Env file of the stack that was started last."""
        return (self.candidate if self.candidate.exists() else self.current) / "stack.env"

    @property
    def tiny_model(self) -> Path:
        """The cpu profile's generated model."""
        return self.folder / "model" / "tiny"

    @property
    def seen_models(self) -> Path:
        """When files of models were last hashed in full, and had changed before."""
        return self.folder / "models.json"

    @property
    def api_key(self) -> Path:
        """Copy of the API key that the container's user can read: its own folder keeps other users out."""
        return self.folder / "secrets" / "api_key"

    @property
    def engine(self) -> Path:
        """Files of a Docker engine that the controller started by hand."""
        return self.folder / "docker"

    @contextmanager
    def lock(self, verb: str) -> Generator[None]:
        """Hold the stack for one command; the lock goes with the process, however it ends.

        Args:
            verb: what holds it, for the message that the other command shows.

        Raises:
            LockHeld: names the verb and process id that hold it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _held(file.name) from error
            file.truncate(0)
            file.write(json.dumps({"verb": verb, "pid": os.getpid(), "since": _now()}))
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)


def _held(file: str) -> LockHeld:
    try:
        holder = json.loads(Path(file).read_text())
        who, pid = f"`deploy {holder['verb']}` (pid {holder['pid']}, since {holder['since']})", holder["pid"]
    except (ValueError, KeyError, TypeError):
        who, pid = "another deploy command", "PID"
    return LockHeld(
        f"{who} is running", "two commands must not change one stack", f"wait for it, or stop it: kill {pid}"
    )


def _now() -> str:
    return datetime.now(UTC).strftime("%H:%M:%S UTC")


def write(file: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Replace a file in one step, so that a reader or a crash never sees half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(mode)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make what was renamed or removed in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_api_key(source: Path, target: Path) -> None:
    """Copy an API key to where only root and, through its mount, the container can read it.

    Raises:
        DeployError: there is no such file, or it does not hold exactly one word.
    """
    try:
        words = source.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise DeployError(
            f"the API key file {source} cannot be read",
            str(error),
            f"create it: openssl rand -hex 32 > {source} && chmod 600 {source}",
        ) from error
    if len(words) != 1:
        raise DeployError(
            f"the API key file {source} must hold one word",
            f"it holds {len(words)}",
            f"openssl rand -hex 32 > {source} && chmod 600 {source}",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.parent.chmod(0o700)
    write(target, words[0], 0o444)
