"""The version of the code: the commit, and a digest of what differs from it."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess

from txstore.compat.canonical import canonical_json
from txstore.compat.names import UNKNOWN
from txstore.errors import ConfigError, describe

_TIMEOUT_S = 60.0
MAX_CHANGED_BYTES = 1 << 30
"""Changed and untracked files beyond this are no code: hashing checkpoints that nobody ignored would take hours."""

# They would make git look at another repository than the one that is asked for.
_REDIRECTS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE")


def code_version(folder: str | os.PathLike[str], *, unknown_ok: bool = False) -> str:
    """The git version of the repository that holds `folder`.

    ``git:<commit>`` for a clean one. ``git:<commit>+sha256:<digest>`` if files differ from the commit or are untracked
    and not ignored: the digest is over their names and contents, so it does not depend on anybody's diff settings.

    Args:
        folder: Any folder of the repository.
        unknown_ok: Return ``unknown``, which equals nothing, where there is no git or no commit.

    Raises:
        ConfigError: No git, no repository, no commit, or more changed bytes than `MAX_CHANGED_BYTES`.
    """
    try:
        return _version(os.fspath(folder))
    except _NoVersion as error:
        if unknown_ok:
            return UNKNOWN
        raise ConfigError(
            f"no code version: {error}", key=os.fspath(folder), next_step="unknown_ok=True records that it is unknown"
        ) from error


class _NoVersion(Exception):
    """Git has no answer."""


def _version(folder: str) -> str:
    top = _git(folder, "rev-parse", "--show-toplevel").decode(errors="surrogateescape").rstrip("\n")
    commit = _git(top, "rev-parse", "--verify", "HEAD^{commit}").decode().strip()
    changed = _git(
        top, "diff", "HEAD", "--name-only", "-z", "--no-renames", "--ignore-submodules=none", "--no-ext-diff"
    )
    untracked = _git(top, "ls-files", "--others", "--exclude-standard", "-z")
    names = sorted({os.fsdecode(name) for name in (changed + untracked).split(b"\0") if name})
    if not names:
        return f"git:{commit}"
    size = sum(_size(os.path.join(top, name)) for name in names)
    if size > MAX_CHANGED_BYTES:
        raise ConfigError(
            f"files that differ from the commit, or are untracked, hold {size} bytes: that is no code",
            key=top,
            next_step="name data and checkpoints in .gitignore",
        )
    contents = {name: _content(os.path.join(top, name)) for name in names}
    return f"git:{commit}+sha256:{hashlib.sha256(canonical_json(contents)).hexdigest()}"


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _content(path: str) -> list[str]:
    """Kind and content of one changed file, as git would see it."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return ["link", os.readlink(path)]
        if stat.S_ISDIR(mode):
            return ["repository", _version(path)]  # a submodule, or a clone inside the clone
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, hashlib.sha256).hexdigest()
    except FileNotFoundError:
        return ["deleted"]
    except OSError as error:
        raise ConfigError(f"cannot read a changed file: {describe(error)}", key=path) from error
    return ["executable" if mode & stat.S_IXUSR else "file", digest]


def _git(folder: str, *arguments: str) -> bytes:
    environment = {name: value for name, value in os.environ.items() if name not in _REDIRECTS}
    # Nothing may be written, not even a refreshed index: several ranks may ask at once, on a read-only file system.
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(  # noqa: S603 - fixed arguments, no shell
            ["git", "-c", "diff.autoRefreshIndex=true", "-c", "core.fsmonitor=false", *arguments],  # noqa: S607
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NoVersion(describe(error)) from error
    if done.returncode != 0:
        raise _NoVersion(" ".join(done.stderr.decode(errors="replace").split())[:300] or f"git exits {done.returncode}")
    return done.stdout
