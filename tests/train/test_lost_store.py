"""A store whose path leads nowhere in the middle of a run: an answer of the store, which a run may outlive."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, FaultyStore
from workers import Pool, Rank

from tests.train.runs import Run
from txstore.errors import ConfigError, StoreError, UnusableStoreError
from txstore.train.checkpointer import Checkpointer

WORLD = 4


def file_for_root(root: Path) -> None:
    root.write_bytes(b"")


def file_on_the_way(root: Path) -> None:
    root.parent.rename(root.parent.with_name("aside-2"))
    root.parent.write_bytes(b"")


def loop(root: Path) -> None:
    root.symlink_to(root)


def unmounted(root: Path) -> None:
    root.symlink_to(root.with_name("not-mounted"))


HARMS = [file_for_root, file_on_the_way, loop, unmounted]


def mend(root: Path) -> None:
    if root.parent.is_file():
        root.parent.unlink()
        root.parent.with_name("aside-2").rename(root.parent)
    if os.path.lexists(root):
        root.unlink()
    root.with_name("aside").rename(root)


@pytest.mark.parametrize("harm", HARMS)
def test_it_is_a_store_error_with_a_next_step_and_saves_go_on_when_it_is_back(harm: Any, store_url: str) -> None:
    root = Path(store_url.removeprefix("file://")) / "deeper" / "root"
    run = Run()
    with Checkpointer(f"file://{root}", run.state) as saves:
        saves.save()
        saves.wait()
        root.rename(root.with_name("aside"))
        harm(root)
        for step in (1, 2):  # a loop with `except StoreError`, as the guide has it
            run.state.progress.global_step = step
            handle = saves.save()
            with pytest.raises(StoreError) as raised:
                saves.wait()
            assert raised.value.next_step
            assert str(root.parent) in raised.value.message
            assert isinstance(handle.committed.exception(), UnusableStoreError)
        mend(root)
        saves.save()
        assert [one.checkpoint for one in saves.wait()] == ["step-2"]


@pytest.mark.parametrize("harm", HARMS)
def test_a_resume_from_nowhere_is_no_fresh_start(harm: Any, store_url: str) -> None:
    root = Path(store_url.removeprefix("file://")) / "deeper" / "root"
    root.parent.mkdir(parents=True)
    harm(root)
    with Checkpointer(f"file://{root}", Run().state) as saves:
        with pytest.raises(ConfigError) as raised:  # what it was before, too
            saves.resume()
        assert isinstance(raised.value, StoreError)
        assert raised.value.next_step


def gone_on_one_rank(me: Rank, url: str) -> Any:
    def gone(store: Any, key: str, call: Any) -> Any:
        raise ConfigError("no such bucket", key=key, next_step="make it")

    run = Run()
    faults = [Fault(gone, "put", ".safetensors")] if me.rank == 2 else []
    with Checkpointer(FaultyStore(url, *faults), run.state) as saves:
        saves.save()
        with pytest.raises(StoreError) as raised:
            saves.wait()
        run.state.progress.global_step = 1
        saves.save()
        saves.wait()
    return type(raised.value).__name__, str(raised.value), raised.value.rank


def test_a_store_that_one_rank_has_lost_is_the_same_error_on_all(pool: Pool, store_url: str) -> None:
    found = pool.run(WORLD, gone_on_one_rank, store_url)
    assert found == [found[0]] * WORLD
    assert found[0][0] == "UnusableStoreError"
    assert found[0][2] == 2
