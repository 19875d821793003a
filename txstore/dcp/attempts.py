"""The attempts of one writer: which transactions it has begun, and how to stop them from any thread."""

from __future__ import annotations

import logging
import threading

from txstore.errors import SaveError, TransactionStateError, TxStoreError
from txstore.manifest import Decision
from txstore.root import KnownStore
from txstore.store import Store
from txstore.transaction import Transaction, begin

log = logging.getLogger(__name__)


class Attempts:
    """The transactions that one writer has begun and that are not accounted for. Thread-safe.

    Args:
        store: The store.
        known: What the writer has seen of it.
    """

    def __init__(self, store: Store, known: KnownStore) -> None:
        self._store = store
        self._known = known
        self._lock = threading.Lock()
        self._begun: list[tuple[threading.Thread, Transaction]] = []
        self._given_up = False

    def begin(self, checkpoint: str, world_size: int, *, overwrite: bool) -> Transaction:
        """Begin an attempt on this thread, after those whose save ended without a decision are aborted.

        Raises:
            SaveError: One of those may have been committed, and the store does not tell.
            StoreReplaced: The store is not the one that was seen.
            TransactionStateError: This writer was given up; the attempt is aborted.
            TxStoreError: As `transaction.begin`.
        """
        self._abort_unfinished(checkpoint)
        transaction = begin(self._store, checkpoint, world_size=world_size, overwrite=overwrite, known=self._known)
        with self._lock:
            given_up = self._given_up
            if not given_up:
                self._begun.append((threading.current_thread(), transaction))
        if given_up:
            self._settle(transaction)
            raise TransactionStateError("this writer was abandoned", key=checkpoint)
        return transaction

    def forget_decided(self) -> None:
        """Before the next save of this thread: its last one is history."""
        here = threading.current_thread()
        with self._lock:
            self._begun = [(at, one) for at, one in self._begun if at is not here or one.decision is None]

    def _abort_unfinished(self, checkpoint: str) -> None:
        """Settle attempts whose save ended without a decision, so that they can never commit.

        Only attempts whose thread is this one or has ended: another thread's save may be in progress. An attempt that
        provably never commits does not stop `checkpoint`: its abort record is for a sweep, and is tried again later.
        """
        with self._lock:
            mine = [one for at, one in self._begun if at is threading.current_thread() or not at.is_alive()]
        for transaction in mine:
            try:
                self._settle(transaction)
            except TxStoreError as error:
                if transaction.give_up():
                    log.debug("no abort record for %s: %s", transaction.ticket.checkpoint, error)
                    return  # each one could take a request's whole deadline
                raise SaveError(
                    f"{checkpoint} was not begun, because of an earlier save: {error.message}",
                    key=error.key,
                    next_step=error.next_step,
                ) from error
            self._forget(transaction)

    def _settle(self, transaction: Transaction) -> Decision:
        if transaction.decision is not None:
            return transaction.decision
        self._known.check(self._store)  # an abort record would make a store that is gone anew
        return transaction.abort()

    def hand_over(self) -> None:
        """A rank's shards are written, and it is about to say so. After this, only the coordinator can stop the commit.

        Raises:
            TransactionStateError: This writer was given up on this rank.
        """
        with self._lock:
            if self._given_up:
                raise TransactionStateError("this writer was abandoned")

    def give_up(self) -> dict[str, Decision | None]:
        """Stop everything that has not been decided, at once and without a request to the store.

        Returns:
            By checkpoint, the attempts whose decision was sent already: the decision, or None if its fate is not known.
            No other attempt commits any more.
        """
        with self._lock:
            self._given_up = True
            begun = [one for _, one in self._begun]
        return {one.ticket.checkpoint: one.decision for one in begun if not one.give_up()}

    def abandon(self) -> list[Decision]:
        """As `give_up`, and settle in the store all that was begun. See `StorageWriter.abandon`."""
        self.give_up()
        with self._lock:
            begun = [one for _, one in self._begun]
        settled = [self._settle(one) for one in begun]
        for transaction in begun:
            self._forget(transaction)
        return settled

    def _forget(self, transaction: Transaction) -> None:
        with self._lock:
            self._begun = [(at, one) for at, one in self._begun if one is not transaction]
