"""What to do about a failure of the operating system: for each kind that a command can meet, the way out of it.

Loads nothing, because a process that has run out of files or memory must still be able to say so.
"""

import errno
import os
import shlex

OUTPUT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Of a failure without a file's name: it is the output that could not be written."""


def cure(error: OSError) -> str:
    """The way out, preferably the exact command; never empty."""
    given: str | bytes | int = error.filename or "."
    name = str(given) if isinstance(given, int) else os.fsdecode(given)
    place, folder = shlex.quote(name), shlex.quote(os.path.dirname(name) or ".")  # noqa: PTH120
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            # The file itself may not be there yet, its folder is.
            return f"free some: df -h {folder}"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"have it readable and writable for this user, or name another place: namei -l {place}"
        case errno.ENOTDIR | errno.EISDIR | errno.ENAMETOOLONG | errno.ELOOP | errno.ENOENT | errno.EEXIST:
            return "name another place"
        case errno.EFBIG:
            return "allow larger files (ulimit -f unlimited), or name a place on another file system"
        case errno.EIO:
            return f"the disk or the network behind it fails: dmesg | tail, findmnt --target {folder}"
        case errno.EMFILE:
            return "allow this shell more open files: ulimit -n 65536"
        case errno.ENFILE:
            return "the whole machine has too many files open: sysctl fs.file-nr fs.file-max"
        case errno.ENOMEM:
            return "free memory: ps aux --sort=-rss | head"
        case errno.EAGAIN:
            return "try again; if it stays, too many processes run (ulimit -u), or the reader of the output is too slow"
        case errno.ETXTBSY:
            return f"wait until nothing writes or runs it: fuser -v {place}"
        case errno.EBUSY:
            return f"see what uses it, and stop that: fuser -vm {place}; findmnt {place}"
        case errno.EXDEV:
            return f"have it on one file system, not behind a link or a mount of its own: findmnt --target {place}"
        case errno.ESTALE:
            return f"mount that network folder again: findmnt --target {folder}"
        case errno.ENOLCK | errno.EOPNOTSUPP | errno.ENOSYS:
            return f"this file system cannot do that; name a folder on a local disk: findmnt --target {folder}"
        case errno.ENOEXEC:
            return f"it is no program of this machine: file {place}; uname -m"
        case errno.ETIMEDOUT | errno.ECONNREFUSED | errno.ECONNRESET | errno.EHOSTUNREACH | errno.ENETUNREACH:
            return "see that the server is up and reachable from here, and try again"
        case _:
            seen = f"namei -l {place}, findmnt --target {folder} and " if error.filename else ""
            return f"try again; if it stays, {seen}dmesg | tail say more"
