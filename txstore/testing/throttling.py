"""A proxy in front of a real server that refuses what is too much at once, as stores do: 503, or 429.

::

    with ThrottlingProxy("http://127.0.0.1:8333", at_once=4, hold_s=0.01) as proxy:
        store = open_store("s3://bucket/run", endpoint_url=proxy.url)
        ...
        assert proxy.refused < proxy.served
"""

from __future__ import annotations

import threading
import time

from txstore.testing.proxy import Answer, Loss, LostReplyProxy, Request, _Reply


class ThrottlingProxy(LostReplyProxy):
    """Serves so many requests at once and refuses the others, which have no effect. Rules hold for those it serves.

    Args:
        upstream: The real server.
        at_once: How many it serves at once; may be set anew at any time.
        hold_s: How long each takes besides, so that they meet.
        refusal: What the others get.

    Attributes:
        served: Requests that reached the server.
        refused: Requests that did not.
    """

    def __init__(self, upstream: str, *, at_once: int, hold_s: float = 0.0, refusal: Answer | None = None) -> None:
        self.at_once = at_once
        self.served = self.refused = 0
        self._hold_s = hold_s
        self._refusal = refusal or Answer(503)
        self._under_way = 0
        self._counting = threading.Lock()
        super().__init__(upstream)

    def _receive(self, request: Request) -> tuple[_Reply | None, Loss | Answer]:
        with self._counting:
            if self._under_way >= self.at_once:
                self.refused += 1
                return None, self._refusal
            self._under_way += 1
            self.served += 1
        try:
            time.sleep(self._hold_s)
            return super()._receive(request)
        finally:
            with self._counting:
                self._under_way -= 1
