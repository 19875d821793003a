"""Saves that a signal has put into the middle of a step or of another save: refused at once, with real signals."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch

from tests.train.runs import Run
from txstore.catalog import entries
from txstore.dcp import SnapshotBuffers
from txstore.errors import TransactionStateError
from txstore.registry import open_store
from txstore.train.checkpointer import Checkpointer
from txstore.train.state import TrainState


@pytest.fixture
def run():
    return Run()


@pytest.fixture
def saves(run, tmp_path):
    with Checkpointer(tmp_path.as_uri(), run.state) as saves:
        saves.resume()
        yield saves


@pytest.fixture
def handle():
    """Installs a handler of SIGUSR1 for one test; SIGINT has Python's own, whatever other tests have left."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield functools.partial(signal.signal, signal.SIGUSR1)
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(number=signal.SIGUSR1):
    """The handler runs before this returns: in the main thread, and within a few instructions."""
    os.kill(os.getpid(), number)


def committed(saves):
    with open_store(saves.store.url) as store:
        return [entry.decision.checkpoint for entry in entries(store) if entry.state == "committed"]


class Preempted(Exception):
    """What a handler may raise to leave the loop."""


def preempt(number, frame):
    raise Preempted


class Saver:
    """A handler that saves, of each kind that people write."""

    def __init__(self, saves):
        self.saves = saves
        self.handle = None

    def method(self, number, frame):
        self.handle = self.saves.save()

    def __call__(self, *arguments):
        self.handle = self.saves.save()

    def with_settings(self, settings, number, frame):
        self.handle = self.saves.save()


@pytest.mark.parametrize("kind", ["function", "method", "object", "partial", "lambda", "called by the handler"])
def test_a_handler_may_not_save(kind, run, saves, handle):
    saver = Saver(saves)

    def function(number, frame):
        saver.handle = saves.save()

    handle(
        {
            "function": function,
            "method": saver.method,
            "object": saver,
            "partial": functools.partial(saver.with_settings, {}),
            "lambda": lambda *_: saves.save(),
            "called by the handler": lambda number, _: function(number, None),
        }[kind]
    )
    run.step()
    with pytest.raises(TransactionStateError, match=r"save\(\) in a signal handler.*set a flag"):
        interrupt()
    saves.save()
    saves.wait()
    assert committed(saves) == ["step-1"]


def test_the_loop_may_call_its_handler_itself(run, saves, handle):
    saver = Saver(saves)
    handle(saver.method)
    run.step()
    saver.method(signal.SIGUSR1, None)
    assert saver.handle.committed.result(30).checkpoint == "step-1"


def test_a_handler_that_sets_a_flag(run, saves, handle):
    wanted = []
    handle(lambda *_: wanted.append(True))
    for _ in range(3):
        run.step()
        if run.state.progress.global_step == 2:
            interrupt()
        if wanted:
            saves.save()
            break
    saves.wait()
    assert committed(saves) == ["step-2"]


def test_nor_what_handles_an_exception_that_came_with_a_signal(run, saves, handle):
    handle(preempt)
    run.step()
    with pytest.raises(TransactionStateError, match="an exception that a signal has raised"):
        try:
            interrupt()
        except Preempted:
            saves.save()
    with pytest.raises(TransactionStateError, match="an exception that a signal has raised"):
        try:
            interrupt(signal.SIGINT)
            pytest.fail("no KeyboardInterrupt")
        except KeyboardInterrupt:
            saves.save()
    with pytest.raises(TransactionStateError, match="an exception that a signal has raised"):
        try:
            interrupt()
        finally:
            saves.save()


def test_nor_what_handles_an_exception_that_was_raised_for_such_a_one(run, saves, handle):
    handle(preempt)
    run.step()
    with pytest.raises(TransactionStateError, match="an exception that a signal has raised"):
        try:
            try:
                interrupt()
            except Preempted as error:
                raise RuntimeError("the loader's worker died") from error
        except RuntimeError:
            saves.save()


def test_other_exceptions_and_those_that_were_handled_before_do_not_matter(run, saves, handle):
    handle(preempt)
    try:
        interrupt()
    except Preempted:
        pass
    run.step()
    try:
        raise Preempted  # by the loop itself, between two steps
    except Preempted:
        saves.save()
    saves.wait()
    assert committed(saves) == ["step-1"]


@pytest.mark.parametrize("call", ["save", "wait", "close", "resume"])
def test_no_call_begins_inside_a_save_of_the_same_thread(call, tmp_path, handle):
    """Else it would wait for the buffers that the interrupted save holds."""

    class Sender:
        sends = True

        def state_dict(self):
            if self.sends:
                interrupt()
            return {"n": 1}

        def load_state_dict(self, state):
            pass

    sender = Sender()
    run = Run()
    run.state = TrainState(run.model, run.optimizer, extras={"sender": sender})
    with Checkpointer(tmp_path.as_uri(), run.state) as saves:
        saves.resume()
        handle(lambda *_: getattr(saves, call)())
        run.step()
        with pytest.raises(TransactionStateError, match=rf"{call}\(\) inside another call of the same Checkpointer"):
            saves.save()
        sender.sends = False
        saves.save()
        saves.wait()
        assert committed(saves) == ["step-1"]


def test_no_snapshot_begins_inside_a_snapshot_of_the_same_thread(handle):
    buffers = SnapshotBuffers(timeout_s=1)
    state = {"weights": torch.ones(3)}

    class Sender:
        def __deepcopy__(self, memo):
            interrupt()
            return self

    handle(lambda *_: buffers.stage(state))
    with pytest.raises(TransactionStateError, match=r"stage\(\) inside another call of the same SnapshotBuffers"):
        buffers.stage(state | {"sender": Sender()})
    assert not buffers.in_use
    with buffers.stage(state) as snapshot:
        assert torch.equal(snapshot.state_dict["weights"], torch.ones(3))
