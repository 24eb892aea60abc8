"""The kernel's socket tables: /proc/net/tcp and /proc/net/tcp6."""

import ipaddress
import re

from deploy.host.parsers.text import lines

_ROW = re.compile(r"\s*\d{1,9}: ([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4}) [0-9A-F]{8,32}:[0-9A-F]{4} 0A (.*)")


def _address(hexadecimal: str) -> str:
    """The kernel prints each 32-bit word in host order, which is little-endian on x86-64."""
    words = [bytes.fromhex(hexadecimal[start : start + 8])[::-1] for start in range(0, len(hexadecimal), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def parse_listening_sockets(text: str) -> list[tuple[str, int, int]]:
    """Sockets in state LISTEN: address, port and inode."""
    sockets: list[tuple[str, int, int]] = []
    for line in lines(text):
        found = _ROW.match(line)
        if found is None:
            continue
        rest = found[3].split()
        # tx:rx queue, timer, retransmits, user, timeout, inode
        if len(rest) > 5 and rest[5].isascii() and rest[5].isdigit():
            sockets.append((_address(found[1]), int(found[2], 16), int(rest[5][:18])))
    return sockets
