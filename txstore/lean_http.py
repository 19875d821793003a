"""What the cloud backends do themselves where the HTTP libraries below their SDKs are slow.

All three read through urllib3, and two of them through requests. Nothing here imports either.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from txstore.checksum import Buffer

_ALONE_BYTES = 64 << 10


def sendable(data: Sequence[Buffer], piece_bytes: int) -> Iterator[Buffer]:
    """What to hand to a socket, one after the other: none above `piece_bytes`, and not one for each small tensor."""
    small: list[memoryview] = []
    size = 0
    for buffer in data:
        view = memoryview(buffer).cast("B")
        if small and (size + view.nbytes > piece_bytes or view.nbytes >= _ALONE_BYTES):
            yield b"".join(small)
            small, size = [], 0
        if view.nbytes >= _ALONE_BYTES:
            for start in range(0, view.nbytes, piece_bytes):
                yield view[start : start + piece_bytes]
        elif view.nbytes:
            small.append(view)
            size += view.nbytes
    if small:
        yield b"".join(small)


def read_into(response: Any, view: memoryview) -> int:
    """Fill `view` with the next bytes of the body, as they come over the wire: nothing is decoded.

    urllib3's own `readinto` makes bytes of what it reads and copies them: a third of the CPU time of a load.

    Args:
        response: A ``urllib3.HTTPResponse`` that was not read yet, or by this function only.
        view: Where they go.

    Returns:
        How many there were; fewer than fit only at the body's end.

    Raises:
        OSError: The connection broke, or was silent for too long; what `view` holds then is undefined.
        Exception: urllib3's errors, where the body has no known length.
    """
    # The one private name: urllib3 has no public way to its source. Without it, or where the end of the body is not
    # known by its length, the slow way is right.
    source = getattr(response, "_fp", None)
    if isinstance(source, http.client.HTTPResponse) and source.length is not None:
        return source.readinto(view)
    return int(response.readinto(view))


class SettledEnvironment:
    """Put before a ``requests.Session``: it looks for proxies and CA bundles once for each server.

    A plain session walks through the whole environment, and looks for the bundle on the disk, at every request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settled: dict[object, dict[str, Any]] = {}
        self._settling = threading.Lock()

    def merge_environment_settings(self, url: str, proxies: Any, stream: Any, verify: Any, cert: Any) -> dict[str, Any]:
        """As the session does it, from memory."""
        parts = urlsplit(url)
        server = (parts.scheme, parts.netloc, tuple(sorted((proxies or {}).items())), verify, cert)
        found = self._settled.get(server)
        if found is None:
            with self._settling:
                base: Any = super()
                found = self._settled[server] = base.merge_environment_settings(url, proxies, stream, verify, cert)
        return {**found, "stream": stream}
