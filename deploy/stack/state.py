"""The state folder: the lock that keeps two controllers apart, and the files that `up` writes for Compose."""

import fcntl
import json
import os
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from deploy.errors import DeployError, WrongInput

OWN = {
    *("caches.json", "candidate", "current", "docker", "failed", "generations", "incidents", "journal.json"),
    *("lock", "metrics", "model", "models.json", "secrets", "tune"),
}
"""What a state folder holds, besides hidden files on their way to their places."""


class NoStateFolder(WrongInput):
    """The folder named as the state folder is somebody else's."""


class LockHeld(DeployError):
    """Another controller is changing the same stack."""

    exit_code = 5


class NothingRuns(DeployError):
    """A command needs the running stack, and there is none, or not yet."""

    exit_code = 4


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
    def secrets(self) -> Path:
        """Copies of the secret files that the containers' user can read: the folder keeps other users out."""
        return self.folder / "secrets"

    @property
    def api_key(self) -> Path:
        """The API keys."""
        return self.secrets / "api_key"

    @property
    def tls(self) -> tuple[Path, Path]:
        """The certificate with its chain, and its private key."""
        return self.secrets / "tls_certificate", self.secrets / "tls_key"

    @property
    def metrics(self) -> Path:
        """Folder of the controller's own metrics; a container reads it."""
        return self.folder / "metrics"

    @property
    def engine(self) -> Path:
        """Files of a Docker engine that the controller started by hand."""
        return self.folder / "docker"

    def nothing_runs(self, why: str) -> NothingRuns:
        """The error for a command that needs what does not run; another command may be about to start it.

        Args:
            why: what is missing.
        """
        holder = _holder(self.folder / "lock")
        if holder and holder[1] != os.getpid() and psutil.pid_exists(holder[1]):
            return NothingRuns("nothing runs yet", f"{why}; {holder[0]} is at work", "deploy status --watch, and wait")
        return NothingRuns("nothing runs", why, "deploy up")

    @contextmanager
    def lock(self, verb: str) -> Generator[None]:
        """Hold the stack for one command; the lock goes with the process, however it ends.

        Args:
            verb: what holds it, for the message that the other command shows.

        Raises:
            LockHeld: names the verb and process id that hold it.
            NoStateFolder: it is no folder, or other things lie in it; its `current` or `secrets` would be taken for
                ours.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise _no_state_folder(self.folder, "it, or what it should lie in, is a file or a dangling link") from error
        held = self.folder / "lock"
        if not held.exists():
            self._require_own()
        with held.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _held(held) from error
            # Only for whoever is refused: `watch` must go on when the disk is full.
            with suppress(OSError):
                held.write_text(json.dumps({"verb": verb, "pid": os.getpid(), "since": _now()}))
            try:
                yield
            finally:
                file.truncate(0)

    def _require_own(self) -> None:
        foreign = sorted(path.name for path in self.folder.iterdir() if path.name not in OWN and path.name[0] != ".")
        if foreign:
            raise _no_state_folder(
                self.folder, f"it holds {', '.join(foreign[:3])}{' and more' if foreign[3:] else ''}"
            )


def _no_state_folder(folder: Path, why: str) -> NoStateFolder:
    fix = "name an empty or a new folder: --state FOLDER, or DEPLOY_STATE"
    return NoStateFolder(f"{folder} is no state folder", why, fix)


def _holder(file: Path) -> tuple[str, int] | None:
    """Who wrote itself into the lock's file, in words, and its process id."""
    try:
        holder = json.loads(file.read_text())
        pid = int(holder["pid"])
        return f"`deploy {holder['verb']}` (pid {pid}, since {holder['since']})", pid
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _held(file: Path) -> LockHeld:
    who, pid = _holder(file) or ("another deploy command", "PID")
    return LockHeld(
        f"{who} is running", "two commands must not change one stack", f"wait for it, or stop it: kill {pid}"
    )


def _now() -> str:
    return datetime.now(UTC).strftime("%H:%M:%S UTC")


def write(file: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Replace a file in one step, so that a reader or a crash never sees half of it."""
    write_all({file: (content, mode)})


def write_all(files: Mapping[Path, tuple[str | bytes, int]]) -> None:
    """Replace files, each in one step, and none before the disk has the content of all.

    Should one refuse to be replaced after others were, they get back what they held. Owners stay.

    Args:
        files: content and mode of each.
    """
    temporary: dict[Path, Path] = {}
    try:
        for file, (content, mode) in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with _errors_name(file):
                descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
                temporary[file] = Path(name)
                with os.fdopen(descriptor, "wb") as stream:
                    stream.write(content.encode() if isinstance(content, str) else content)
                    stream.flush()
                    os.fsync(stream.fileno())
                temporary[file].chmod(mode)
                with suppress(FileNotFoundError, PermissionError):
                    owner = file.stat()
                    os.chown(name, owner.st_uid, owner.st_gid)
        _replace_all(temporary)
    finally:
        for written in temporary.values():
            written.unlink(missing_ok=True)


def _replace_all(temporary: Mapping[Path, Path]) -> None:
    held = {file: file.read_bytes() if file.exists() else None for file in list(temporary)[:-1]}
    replaced: list[Path] = []
    try:
        for file, written in temporary.items():
            with _errors_name(file):
                written.replace(file)
            replaced.append(file)
    except BaseException:
        for file in replaced:
            content = held[file]
            if content is None:
                file.unlink()
            else:
                write(file, content, file.stat().st_mode & 0o777)
        raise


@contextmanager
def _errors_name(file: Path) -> Generator[None]:
    """The system says of a failure a temporary file's name or, of a write, none."""
    try:
        yield
    except OSError as error:
        error.filename = str(file)
        raise


def sync_folder(folder: Path) -> None:
    """Make what was renamed or removed in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_keys(file: Path) -> list[str]:
    """The API keys in a file: the first word of each line that is not empty and no comment.

    Raises:
        DeployError: there is no such file, it holds no key, or a line has more than a key and a name.
    """
    fix = f"openssl rand -hex 32 > {file} && chmod 600 {file}"
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DeployError(f"the API key file {file} cannot be read", str(error), f"create it: {fix}") from error
    for number, words in enumerate(lines, 1):
        if words and not words[0].startswith("#") and len(words) > 2:
            raise DeployError(
                f"line {number} of the API key file {file} has {len(words)} words", "a line is KEY, or KEY NAME", fix
            )
    keys = [words[0] for words in lines if words and not words[0].startswith("#")]
    if not keys:
        raise DeployError(f"the API key file {file} holds no key", "a line is KEY, or KEY NAME", fix)
    return keys


def copy_secret(source: Path, target: Path) -> None:
    """Copy a secret file to where only root and, through its mount, the container can read it.

    A copy that says the same already is left alone, so that its time is that of the last change.

    Raises:
        DeployError: the file cannot be read.
    """
    try:
        text = source.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DeployError(
            f"the secret file {source} cannot be read", str(error), "name another one under [router] in deploy.toml"
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    target.parent.chmod(0o700)
    if not target.exists() or target.read_text() != text:
        write(target, text, 0o444)
