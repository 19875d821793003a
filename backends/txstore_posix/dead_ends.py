"""Refuses paths that lead nowhere: a disk that is not mounted must never look like an empty store."""

from __future__ import annotations

import os
import stat

from txstore.errors import ConfigError


def refuse_dead_end(path: str, root: str, key: str) -> None:
    """Check the part of `path` that exists, after the kernel said that there is no such directory.

    A directory that is merely not there yet passes. So does a file below the root: no key can be under
    an object, and that is an answer.

    Args:
        path: The directory that was looked for: the root, or one below it.
        root: The store's root.
        key: For the message.

    Raises:
        ConfigError: The path goes through a dangling symbolic link, or the root is no directory.
    """
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        if not os.path.islink(path):
            return  # removed meanwhile
        raise ConfigError(
            f"the store root {root} cannot be used: {path} is a symbolic link to something that is not there",
            key=key,
            next_step="is the disk mounted? mount it, or correct the link",
        ) from error
    except OSError:
        return  # the caller's own error says what is wrong
    if not stat.S_ISDIR(mode) and len(path) <= len(root):
        raise ConfigError(
            f"the store root {root} cannot be used: {path} is no directory",
            key=key,
            next_step="is the disk mounted, and the URL right? name a directory",
        )
