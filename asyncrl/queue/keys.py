"""Key files of processes that speak CURVE.

    DIR/NAME.secret     one line, 40 characters of Z85, mode 600: stays with the process
    DIR/NAME.public     one line, 40 characters of Z85: given to whoever speaks with it
    DIR/allowed/*.public    who is let in by a server that reads DIR; a file's name is the name of its holder

Consumes and produces files alone; waits for nothing. Loads without zmq.

Source: design note, section 4.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import ConfigError

__all__ = ["make_keys", "public_keys", "read_public", "read_secret"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_LONGEST_FILE_BYTES = 4096
SERVER_NAME = "queue"


def make_keys(folder: Path, names: Sequence[str]) -> list[Path]:
    """Makes one key pair a name in ``folder`` and allows it there; returns the files written.

    Raises:
        ConfigError: a name that is no file name, or one that has a key already; then nothing was written.

    Example:
        >>> [path.name for path in make_keys(Path("keys"), ["queue"])]  # doctest: +SKIP
        ['queue.secret', 'queue.public', 'queue.public']
    """
    import zmq

    if len(set(names)) != len(names):
        raise ConfigError(f"each name gets one key; met a name twice in {' '.join(names)}")
    for name in names:
        taken = [path for path in (folder / f"{_checked(name)}.secret", folder / f"{name}.public") if path.exists()]
        if taken:
            raise ConfigError(f"a key is never overwritten; {taken[0]} is there: remove it if {name} shall have another key")
    allowed = folder / "allowed"
    for part in (folder, allowed):
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
    written: list[Path] = []
    for name in names:
        public, secret = zmq.curve_keypair()
        files = {folder / f"{name}.secret": (secret, 0o600), folder / f"{name}.public": (public, 0o644)}
        files[allowed / f"{name}.public"] = (public, 0o644)
        for path, (key, mode) in files.items():
            _write_new(path, key, mode)
        written.extend(files)
    return written


def read_secret(folder: Path, name: str) -> bytes:
    """The secret key of ``name`` as 40 bytes of Z85.

    Raises:
        ConfigError: no such file, no key in it, or others may read it.
    """
    path = folder / f"{_checked(name)}.secret"
    return _read(path, f"make it with `asyncrl keys {folder} {name}`", private=True)


def read_public(folder: Path, name: str) -> bytes:
    """The public key of ``name`` as 40 bytes of Z85.

    Raises:
        ConfigError: no such file, or no key in it.
    """
    path = folder / f"{_checked(name)}.public"
    return _read(path, f"copy it from where {name} runs, or make it with `asyncrl keys {folder} {name}`")


def public_keys(folder: Path) -> tuple[dict[bytes, str], list[str]]:
    """Names by allowed public key (Z85), and what is wrong with files of ``folder`` that were left out.

    Raises:
        ConfigError: the folder is missing, or others may write to it.
    """
    try:
        mode = folder.stat().st_mode
        files = sorted(folder.glob("*.public"))
    except OSError as error:
        raise ConfigError(
            f"a server's list of allowed keys is the folder {folder}; met {error.strerror}: `asyncrl keys` makes it"
        ) from error
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"the allowed keys are in a folder; {folder} is none: `asyncrl keys` makes it")
    if mode & 0o022:
        raise ConfigError(f"whoever may write to {folder} may let anyone in; its mode is {stat.S_IMODE(mode):03o}: chmod go-w {folder}")
    names: dict[bytes, str] = {}
    problems = []
    for path in files:
        try:
            names[_read(path, "copy it again")] = _checked(path.stem)
        except ConfigError as error:
            problems.append(str(error))
    return names, problems


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"the name of a key has 1 to 64 letters, digits, '_', '.' or '-' and begins with no sign; met {name[:80]!r}")
    return name


def _write_new(path: Path, key: bytes, mode: int) -> None:
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(handle, "wb") as file:
        file.write(key + b"\n")


def _read(path: Path, fix: str, *, private: bool = False) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            key = file.read(_LONGEST_FILE_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"{path} holds a key; it cannot be read ({error.strerror}): {fix}") from error
    if private and mode & 0o077:
        raise ConfigError(
            f"a secret key is for its owner alone (mode 600); {path} has mode {mode:03o}: chmod 600 {path}, "
            "or make another key if someone may have read it"
        )
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{path} holds one key of 40 characters (Z85); met {len(key)} bytes that are none: {fix}")
    return key
