"""A registry as the OCI distribution specification describes it: manifests, blobs, and who may see them.

Docker pushes the image itself; what Docker cannot do is here: read what the registry holds before anything of it is
run, and put documents beside an image.
"""

import base64
import hashlib
import ipaddress
import json
import os
import re
import subprocess
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deploy.errors import DeployError, WrongInput
from deploy.fetch import http_client
from deploy.image.inputs import IMAGE_NAME
from deploy.spec.model import REGISTRY

MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
# What an artifact has in the place of an image's configuration (opencontainers/image-spec, manifest.md).
EMPTY_TYPE, EMPTY = "application/vnd.oci.empty.v1+json", b"{}"
# Manifests are lists of a few layers; this is what the specification asks registries to accept.
LONGEST_MANIFEST = 4 << 20
PUT_SECONDS = 600


class NotInRegistry(DeployError):
    """The registry answers and has no such image."""


class RegistryUnreachable(DeployError):
    """The registry does not answer, or not as one."""


@dataclass(frozen=True)
class Descriptor:
    """A blob by its digest, `sha256:…`, with its size in bytes."""

    digest: str
    size: int
    media_type: str

    @property
    def sha256(self) -> str:
        return self.digest.removeprefix("sha256:")


@dataclass(frozen=True)
class Manifest:
    """An image as a registry lists it.

    Attributes:
        digest: of `content`.
        content: the manifest's own bytes.
        layers: from the lowest.
    """

    digest: str
    content: bytes
    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True)
class Registry:
    """Where an image lies in a registry.

    Attributes:
        host: as Docker names it, with its port.
        repository: path of the image in the registry.
        scheme: http or https.
    """

    host: str
    repository: str
    scheme: str

    @property
    def name(self) -> str:
        """What Docker calls the image there, without tag."""
        return f"{self.host}/{self.repository}"

    @property
    def base(self) -> str:
        return f"{self.scheme}://{self.host}/v2/{self.repository}"


class NoRegistry(WrongInput):
    """Neither the command line nor deploy.toml names a registry, or not in the form of one."""


def parse_registry(address: str) -> Registry:
    """Read `[http://]HOST[:PORT][/PATH]`. As with Docker, a loopback address is reached without TLS.

    Raises:
        NoRegistry: it is no such address.
    """
    match = re.fullmatch(REGISTRY, address)
    if match is None:
        raise NoRegistry(
            f"{address!r} names no registry", "it has the form HOST[:PORT][/PATH]", "for example registry.lan:5000/team"
        )
    scheme, host, port, path = match.groups()[:4]
    scheme = (scheme or "").removesuffix("://") or ("http" if _is_loopback(host) else "https")
    return Registry(f"{host}{port or ''}", f"{path.strip('/')}/{IMAGE_NAME}".lstrip("/"), scheme)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def parse_manifest(content: bytes, media_type: str = "") -> Manifest:
    """Read an image's manifest.

    Raises:
        ValueError: it is none.
    """
    try:
        document: Any = json.loads(content)
        layers = tuple(_descriptor(layer) for layer in document["layers"])
        manifest = Manifest(
            digest=digest_of(content),
            content=content,
            media_type=str(document.get("mediaType") or media_type),
            config=_descriptor(document["config"]),
            layers=layers,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an image's manifest: {type(error).__name__}: {error}") from error
    return manifest


def _descriptor(value: Any) -> Descriptor:
    digest, size = str(value["digest"]), int(value["size"])
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest) or size < 0:
        raise ValueError(f"{digest} of {size} bytes is no blob")
    return Descriptor(digest, size, str(value["mediaType"]))


def digest_of(content: bytes) -> str:
    """The address of some bytes: `sha256:` and 64 digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Client:
    """Talks to one image's place in a registry.

    Args:
        certificates: PEM file of the authorities to trust; this machine's if None.
    """

    def __init__(self, registry: Registry, certificates: Path | None = None) -> None:
        self.registry = registry
        self.http = http_client(certificates, RegistryAuth(registry))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def blob_address(self, digest: str) -> str:
        return f"{self.registry.base}/blobs/{digest}"

    def known(self, reference: str) -> Manifest | None:
        """As `manifest`, but None if there is none."""
        try:
            return self.manifest(reference)
        except NotInRegistry:
            return None

    def digest(self, tag: str) -> str | None:
        """Digest of what a tag points to, None if there is no such tag."""
        found = self.known(tag)
        return found and found.digest

    def manifest(self, reference: str) -> Manifest:
        """An image's manifest.

        Args:
            reference: a tag, or a digest, which its bytes must then have.

        Raises:
            NotInRegistry: there is none.
            RegistryUnreachable: no answer.
            DeployError: the registry sends something else than was asked for.
        """
        answer = self._ask("GET", f"manifests/{reference}", headers={"Accept": ", ".join(MANIFEST_TYPES)})
        if answer.status_code == 404:
            raise NotInRegistry(
                f"the registry has no image {reference}",
                f"{self.registry.name} answered 404",
                "deploy push on the host that built it, or deploy build here",
            )
        content = self._good(answer).content
        if reference.startswith("sha256:") and digest_of(content) != reference:
            raise DeployError(
                "the registry sent another manifest than it was asked for",
                f"expected {reference}, {self.registry.name} sent {digest_of(content)}",
                "do not use this registry before it is clear who changed it",
            )
        try:
            return parse_manifest(content, answer.headers.get("Content-Type", ""))
        except ValueError as error:
            raise RegistryUnreachable(
                f"{self.registry.name} does not answer as a registry", str(error), "check the address of the registry"
            ) from error

    def put_blob(self, content: bytes) -> None:
        """Upload a blob, unless it is there."""
        digest = digest_of(content)
        if self._ask("HEAD", f"blobs/{digest}").status_code == 200:
            return
        begun = self._good(self._ask("POST", "blobs/uploads/"))
        if "Location" not in begun.headers:
            raise RegistryUnreachable(
                f"{self.registry.name} does not answer as a registry",
                "it says nowhere where a blob would go",
                "check the address of the registry",
            )
        address = httpx.URL(f"{self.registry.base}/").join(begun.headers["Location"])
        address = address.copy_merge_params({"digest": digest})
        # A large one takes a registry a while to digest.
        self._good(self._send("PUT", str(address), content=content, timeout=PUT_SECONDS))

    def put_manifest(self, tag: str, content: bytes, media_type: str) -> None:
        """Put a manifest under a tag."""
        self._good(self._ask("PUT", f"manifests/{tag}", content=content, headers={"Content-Type": media_type}))

    def put_artifact(self, tag: str, media_type: str, content: bytes, subject: Manifest) -> Manifest:
        """Put a document beside an image, as an artifact that names the image as its subject; its manifest."""
        for blob in (EMPTY, content):
            self.put_blob(blob)
        document = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPES[0],
            "artifactType": media_type,
            "config": {"mediaType": EMPTY_TYPE, "digest": digest_of(EMPTY), "size": len(EMPTY)},
            "layers": [{"mediaType": media_type, "digest": digest_of(content), "size": len(content)}],
            "subject": {"mediaType": subject.media_type, "digest": subject.digest, "size": len(subject.content)},
        }
        manifest = json.dumps(document).encode()
        self.put_manifest(tag, manifest, MANIFEST_TYPES[0])
        return parse_manifest(manifest)

    def _ask(self, method: str, path: str, **named: Any) -> httpx.Response:
        return self._send(method, f"{self.registry.base}/{path}", **named)

    def _send(self, method: str, address: str, **named: Any) -> httpx.Response:
        try:
            with self.http.stream(method, address, **named) as answer:
                _read(answer)
                return answer
        # The last two: of an address that the registry sends us to.
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise RegistryUnreachable(
                f"the registry {self.registry.host} does not answer",
                f"{address}: {error or type(error).__name__}",
                "check the address and the network; without TLS write http:// before it",
            ) from error

    def _good(self, answer: httpx.Response) -> httpx.Response:
        if answer.is_success:
            return answer
        denied = answer.status_code in (401, 403)
        words = " ".join(answer.text.split())[:300]
        raise RegistryUnreachable(
            f"the registry {self.registry.host} {'lets us not in' if denied else 'refuses'}",
            f"{answer.request.method} {answer.request.url} answered {answer.status_code} {words}",
            f"docker login {self.registry.host}" if denied else "check the registry's own log",
        )


class _Bounded(httpx.SyncByteStream):
    """A body that ends in an error where no document of a registry is that long."""

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        left = LONGEST_MANIFEST
        for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                raise httpx.ReadError(f"more than {LONGEST_MANIFEST} bytes where a document was expected")
            yield chunk

    def close(self) -> None:
        if isinstance(self._stream, httpx.SyncByteStream):
            self._stream.close()


def _read(answer: httpx.Response) -> bytes:
    assert isinstance(answer.stream, httpx.SyncByteStream)
    answer.stream = _Bounded(answer.stream)
    return answer.read()


class RegistryAuth(httpx.Auth):
    """Answers a registry's challenge with what `docker login` stored, or as nobody in particular."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._header = ""

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        # Never to where a blob's address leads on another host.
        if request.url.netloc.decode() != self._registry.host:
            yield request
            return
        if self._header:
            request.headers["Authorization"] = self._header
        answer = yield request
        challenge = answer.headers.get("WWW-Authenticate", "")
        if answer.status_code != 401 or not challenge:
            return
        user = credentials(self._registry.host)
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "bearer":
            fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            if not re.match(r"https?://", fields.get("realm", "")):
                return
            parameters = {name: fields[name] for name in ("service", "scope") if name in fields}
            asking = httpx.Request("GET", fields["realm"], params=parameters)
            if user:
                asking.headers["Authorization"] = _basic(user)
            token = yield asking
            if not token.is_success:
                return
            try:
                document: Any = json.loads(_read(token))
                self._header = f"Bearer {document.get('token') or document.get('access_token')}"
            except (ValueError, AttributeError, RecursionError) as error:
                raise httpx.RemoteProtocolError(f"{fields['realm']} sent no token", request=asking) from error
        elif user:
            self._header = _basic(user)
        else:
            return
        request.headers["Authorization"] = self._header
        yield request


def credentials(host: str) -> tuple[str, str] | None:
    """User and password that `docker login` stored for a registry, from its file or the helper it names."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        config: Any = json.loads((folder / "config.json").read_text())
        helper = config.get("credHelpers", {}).get(host) or config.get("credsStore")
        stored = config.get("auths", {}).get(host, {}).get("auth", "")
        if helper:
            command = [f"docker-credential-{helper}", "get"]
            done = subprocess.run(command, input=host, capture_output=True, text=True, timeout=30, check=True)
            answer: Any = json.loads(done.stdout)
            return str(answer["Username"]), str(answer["Secret"])
        user, colon, password = base64.b64decode(stored).decode().partition(":")
        return (user, password) if colon else None
    except (OSError, ValueError, KeyError, AttributeError, subprocess.SubprocessError):
        return None


def _basic(user: tuple[str, str]) -> str:
    return "Basic " + base64.b64encode(":".join(user).encode()).decode()
