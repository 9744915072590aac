"""Find what no file system can take for a path before anything is read or written."""

from __future__ import annotations

import os
import re
import stat
from typing import IO, Any

ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}(?!/)([^/]*)")


KINDS = {stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}


def special_kind(path: str | os.PathLike[str]) -> str | None:
    """Name what lies at a path, behind links, if it is neither a file nor a folder: reading it may never end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    return next((name for matches, name in KINDS.items() if matches(mode)), None)


def open_no_link(path: str | os.PathLike[str], mode: str, **options: Any) -> IO[Any]:
    """Open a file; fails with ELOOP on a link, which somebody may have led out of the folder."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666), **options)


def path_problem(text: str) -> str | None:
    """Describe why a text is no path on this machine, with the remedy; None if it may be one."""
    if not text.strip():
        return f"{text!r:.20} names nothing, as an unset variable of a shell does; set a path"
    if match := ADDRESS.match(text):
        bucket = match[2] if match[1] == "gs" and match[2] else "BUCKET"
        mounted = f"gcsfuse --implicit-dirs {bucket} ~/{bucket}"
        remedy = f"mount the bucket ({mounted}) and set a path below ~/{bucket}"
        if match[1] in ("http", "https", "hf"):
            remedy = "download it and set its folder, or set its hub name"
        return f"{text:.100} is an address, and only paths are read and written here; {remedy}"
    if "\0" in text:
        return f"{text!r:.100} holds a NUL, which no path may; remove it"
    try:
        name = os.fsencode(os.path.expanduser(text))
    except UnicodeEncodeError:
        return f"{text!r:.100} holds a character that no file name can have; remove it"
    if len(name) > 4000 or max(map(len, name.split(b"/"))) > 255:
        return f"{text:.40}... is longer than a path may be (255 bytes a name, 4000 in all); set a shorter one"
    return None
