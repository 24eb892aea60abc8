"""Replace what identifies a person, a machine or a key, the same way everywhere.

A value becomes a label such as `uuid-3`; the same value has the same label in every text, so that a reader can still
tell which GPU is meant. What diagnosis needs (PCI addresses, versions, CPU lists, loopback addresses) stays.
"""

import ipaddress
import json
import re
import urllib.parse
from collections.abc import Iterable

PUBLIC_HOSTS = (
    "github.com",
    "githubusercontent.com",
    "huggingface.co",
    "docker.com",
    "nvidia.com",
)
"""Sites whose names say nothing about the host."""
SHORTEST_SECRET = 4
"""Shorter "secrets" (an empty key file, a user called `a`) would tear other words apart."""

_UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,60}-----.*?(?:-----END [A-Z0-9 ]{0,60}-----|\Z)", re.DOTALL)
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|xox[abprs]-[\w-]{8,}|AKIA[A-Z0-9]{12,}|nvapi-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_NAMED = re.compile(
    r"(?i)(#(?:[a-z][\w -]{0,15})?)?(?<!tik)"
    r"((?:api[-_ ]?key|access[-_ ]?key|token|password|passwd|secret|authorization|cookie)"
    r"\\{0,8}[\"']?\s{0,4}[:=]\s{0,4}\\{0,8}[\"']?(?:bearer\s+|basic\s+)?)([^\s\"'\\,;)}\]]+)"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+|basic\s+)([A-Za-z0-9+/=._~-]{8,})")
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{1,20}://)(?:([^\s/@\"']{1,200})@)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)")
_EMAIL = re.compile(r"[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})+")
_HOME = re.compile(r"(?<![\w.])(?:/home/[^/\s\"'\\:,;]+|/root|/Users/[^/\s\"'\\:,;]+)(?:/[^\s\"'\\:,;)\]}]*)?(?![\w-])")
_GPU = re.compile(rf"(?:GPU|MIG)-{_UUID}|(?<![0-9a-fA-F-]){_UUID}(?![0-9a-fA-F-])")
_SERIAL = re.compile(
    r"(?i)(serial(?:[ _-]?(?:number|no))?\\{0,8}[\"']?\s{0,40}[:=#]\s{0,4}\\{0,8}[\"']?)([A-Za-z0-9][\w-]{3,})"
)
_MAC = re.compile(r"(?<![0-9a-fA-F:-])(?:[0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}(?![0-9a-fA-F:-])")
_IPV4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)")
# A version of four parts is no address: cudnn-9.10.2.21-py3-none-any.whl, version = "9.10.2.21".
_WHEEL_BEFORE, _WHEEL_AFTER = re.compile(r"\w-\Z"), re.compile(r"[.\w]{0,32}-(?:py|cp)\d[\w.]{0,32}-\w+-")
_VERSION_BEFORE = re.compile(r"(?i)version\\{0,8}[\"']?\s{0,4}[:=]\s{0,4}\\{0,8}[\"']?\Z")
_IPV6 = re.compile(r"(?<![\w:.])(?=[0-9a-fA-F]*:)[0-9a-fA-F:]{2,39}(?:\.\d{1,3}){0,3}(?:%\w{1,16})?(?![\w:])")
_NOTHING = {"none", "null", "true", "false", "", "***", "redacted", "key"}
_COUNT = re.compile(r"\d{1,9}(?!\w)")
"""What SGLang counts of tokens, after a `#`: `#token: 351`, `#new-token: 12`."""


class Redactor:
    """Replaces identities in texts; keeps the labels it gave.

    Args:
        known: (kind, value) pairs that the caller knows to be private: host names, serials, keys, user names. They
            are found in any text, also escaped as in JSON or in a URL.
    """

    def __init__(self, known: Iterable[tuple[str, str]] = ()) -> None:
        self.labels: dict[tuple[str, str], str] = {}
        self._count: dict[str, int] = {}
        self._known: list[tuple[re.Pattern[str], str]] = []
        pairs = sorted({(kind, value) for kind, value in known if len(value) >= 1}, key=lambda pair: -len(pair[1]))
        for kind, value in pairs:
            if len(value) < SHORTEST_SECRET and kind != "host":
                continue
            label = self.label(kind, value)
            for form in {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], _quoted(value)}:
                self._known.append((_whole(form, kind), label))

    def label(self, kind: str, value: str) -> str:
        """The label of a value; a new one the first time. A replaced value is never replaced again."""
        if value in self.labels.values():
            return value
        key = (kind, value)
        if key not in self.labels:
            self._count[kind] = self._count.get(kind, 0) + 1
            self.labels[key] = f"{kind}-{self._count[kind]}"
        return self.labels[key]

    def counts(self) -> dict[str, int]:
        """How many different values of each kind were replaced."""
        return dict(sorted(self._count.items()))

    def text(self, text: str) -> str:
        """The text without identities."""
        for pattern, label in self._known:
            text = pattern.sub(lambda _, label=label: label, text)
        text = _PEM.sub(lambda found: self.label("key", found[0]), text)
        text = _URL.sub(self._url, text)
        text = _TOKEN.sub(lambda found: self.label("key", found[0]), text)
        text = _NAMED.sub(self._named, text)
        text = _BEARER.sub(lambda found: found[1] + self.label("key", found[2]), text)
        text = _EMAIL.sub(lambda found: self.label("email", found[0]), text)
        text = _HOME.sub(lambda found: self.label("home-path", found[0]), text)
        text = _GPU.sub(lambda found: self.label("uuid", found[0]), text)
        text = _SERIAL.sub(lambda found: found[1] + self.label("serial", found[2]), text)
        text = _MAC.sub(lambda found: self.label("mac", found[0].lower()), text)
        text = _IPV4.sub(self._address, text)
        return _IPV6.sub(self._address, text)

    def _named(self, found: re.Match[str]) -> str:
        counted, name, value = found[1] or "", found[2], found[3]
        if value.lower() in _NOTHING or (counted and _COUNT.match(value)):
            return found[0]
        return counted + name + self.label("key", value)

    def _url(self, found: re.Match[str]) -> str:
        scheme, credentials, host = found[1], found[2], found[3]
        shown = f"{self.label('key', credentials)}@" if credentials else ""
        bare = host.strip("[]").lower().rstrip(".")
        if _is_address(bare) or bare == "localhost" or "." not in bare:
            return scheme + shown + host
        public = any(bare == site or bare.endswith("." + site) for site in PUBLIC_HOSTS)
        return scheme + shown + (host if public else self.label("host", bare))

    def _address(self, found: re.Match[str]) -> str:
        if _is_version(found):
            return found[0]
        try:
            address = ipaddress.ip_address(found[0].partition("%")[0])
        except ValueError:
            return found[0]
        if address.is_loopback or address.is_unspecified or (found[0].count(":") == 2 and found[0].endswith("::")):
            return found[0]
        return self.label("address", str(address))


def _is_version(found: re.Match[str]) -> bool:
    before, after = found.string[max(0, found.start() - 64) : found.start()], found.string[found.end() :][:80]
    return bool((_WHEEL_BEFORE.search(before) and _WHEEL_AFTER.match(after)) or _VERSION_BEFORE.search(before))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _quoted(value: str) -> str:
    return urllib.parse.quote(value, safe="")


def _whole(value: str, kind: str) -> re.Pattern[str]:
    """A secret is found anywhere; a name only as a whole word, and whatever its case."""
    escaped = re.escape(value)
    if kind in {"key", "serial"}:
        return re.compile(escaped)
    return re.compile(rf"(?i)(?<![A-Za-z0-9_]){escaped}(?![A-Za-z0-9_])")
