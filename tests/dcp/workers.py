"""Rank processes for the DCP tests: real processes, one real gloo group, functions run on all of them.

Processes come from a fork server that has imported torch once, so that a pool starts in a fraction of a
second and tests that kill ranks can afford pools of their own. A task is a module-level function of a file;
it is sent by file and name and gets the worker's `Rank` as its first argument. A task that misses its
deadline makes every worker print its stacks, and the pool is killed: a hang is a failure, not a wait.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

WORLD = 4
GLOO_TIMEOUT_S = 20
DEADLINE_S = 30.0
START_S = 150.0  # the first pool waits for the fork server to import torch
PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",  # the first DTensor, or optimizer, of a process imports it: seconds for each rank of each pool
    "torchdata.stateful_dataloader",
    "txstore.train.checkpointer",
    "txstore_posix",
    "txstore_s3",
    "txstore_gcs",
    "txstore_azure",
]


@dataclass(frozen=True)
class Outcome:
    """What a task did on one rank: returned `value`, raised `error`, or the process was `lost`."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    lost: bool = False


class RankFailed(Exception):
    """A task raised on some rank; the text holds all traces."""


class Pool:
    """`world` ranks that share a gloo group."""

    def __init__(self, world: int, folder: Path, *, gloo_timeout_s: int = GLOO_TIMEOUT_S) -> None:
        self.world = world
        self.broken = False
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._folder = folder
        self.pids: list[int] = []
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, world, str(folder), gloo_timeout_s, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self.pids.append(process.pid or 0)
        self._collect(range(world), START_S)

    def outcomes(
        self, world: int, task: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S
    ) -> list[Outcome]:
        """Run `task(rank, *args)` on the first `world` ranks and wait for all of them."""
        self.start(world, task, *args)
        return self._collect(range(world), deadline_s)

    def run(self, world: int, task: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> list[Any]:
        """The values that the ranks returned.

        Raises:
            RankFailed: Some rank raised.
        """
        outcomes = self.outcomes(world, task, *args, deadline_s=deadline_s)
        failed = [outcome for outcome in outcomes if outcome.error is not None or outcome.lost]
        if failed:
            raise RankFailed("\n".join(f"rank {one.rank}: {one.trace or 'lost'}" for one in failed))
        return [outcome.value for outcome in outcomes]

    def first_failure(
        self, world: int, task: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S
    ) -> Outcome | None:
        """Run a task that ought to fail: the first outcome that is an error, or None if there is none.

        The pool is closed then, since other ranks may be waiting for the one that failed.
        """
        self.start(world, task, *args)
        waiting = set(range(world))
        while waiting:
            ready = wait([self._pipes[rank] for rank in waiting], timeout=deadline_s)
            for rank in [rank for rank in waiting if self._pipes[rank] in ready]:
                waiting.discard(rank)
                outcome = self._receive(rank, self._pipes[rank])
                if outcome.error is not None or outcome.lost:
                    self.close()
                    return outcome
            if not ready:
                self.close()
                raise TimeoutError(f"no answer from ranks {sorted(waiting)} in {deadline_s} s")
        return None

    def start(self, world: int, task: Callable[..., Any], *args: Any) -> None:
        """Send a task without waiting; `collect` later."""
        for pipe in self._pipes[:world]:
            pipe.send((task.__code__.co_filename, task.__qualname__, world, args))

    def collect(self, ranks: Sequence[int], deadline_s: float = DEADLINE_S) -> list[Outcome]:
        """Wait for the outcomes of a started task on some ranks."""
        return self._collect(ranks, deadline_s)

    def _collect(self, ranks: Sequence[int], deadline_s: float) -> list[Outcome]:
        waiting = {self._pipes[rank]: rank for rank in ranks}
        found: dict[int, Outcome] = {}
        give_up = time.monotonic() + deadline_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, give_up - time.monotonic()))
            if not ready:
                self._dump(list(waiting.values()))
                self.close()
                raise TimeoutError(
                    f"ranks {sorted(waiting.values())} did not answer in {deadline_s} s: stacks on stderr"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                found[rank] = self._receive(rank, pipe)  # type: ignore[arg-type]
        return [found[rank] for rank in ranks]

    def _receive(self, rank: int, pipe: Connection) -> Outcome:
        try:
            outcome = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.broken = True
            return Outcome(rank, lost=True)
        assert isinstance(outcome, Outcome)
        return outcome

    def _dump(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            try:
                os.kill(self.pids[rank], signal.SIGUSR1)
            except ProcessLookupError:
                continue
        time.sleep(0.5)  # nobody tells when the stacks are out

    def kill(self, rank: int) -> None:
        """SIGKILL one rank."""
        self.broken = True
        os.kill(self.pids[rank], signal.SIGKILL)

    def close(self) -> None:
        """Kill every worker by its process id."""
        self.broken = True
        for process in self._processes:
            process.kill()  # nothing if it has ended: that may become known between a look and a kill
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pools:
    """The shared pool, made again if a test broke it, and throw-away ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._shared: Pool | None = None

    def fresh(self, world: int, *, gloo_timeout_s: int = 10) -> Pool:
        """A pool of its own, for tests that kill ranks; the caller closes it."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        return Pool(world, folder, gloo_timeout_s=gloo_timeout_s)

    def shared(self) -> Pool:
        """The pool of the session."""
        if self._shared is None or self._shared.broken:
            if self._shared is not None:
                self._shared.close()
            self._shared = self.fresh(WORLD, gloo_timeout_s=GLOO_TIMEOUT_S)
        return self._shared

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shared is not None:
            self._shared.close()


class Rank:
    """What a task knows of its process: groups and meshes were made up front, in one order on all ranks.

    Attributes:
        rank: Global rank.
        world: How many ranks run this task.
        scratch: Kept between tasks of this process.
    """

    def __init__(self, rank: int, size: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        self.rank = rank
        self.world = size
        self.scratch: dict[str, Any] = {}
        self._groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
        self._meshes = {count: DeviceMesh("cpu", torch.arange(count)) for count in range(1, size + 1)}
        self.tail = dist.new_group([size - 2, size - 1]) if size > 2 else None
        self.grid = DeviceMesh("cpu", torch.arange(4).reshape(2, 2)) if size == 4 else None

    @property
    def group(self) -> Any:
        """The group of the ranks that run this task."""
        return self._groups[self.world]

    @property
    def mesh(self) -> Any:
        """One-dimensional mesh of the ranks that run this task."""
        return self._meshes[self.world]


def _serve(rank: int, size: int, folder: str, gloo_timeout_s: int, pipe: Connection) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/rendezvous", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=gloo_timeout_s),
    )
    me = Rank(rank, size)
    pipe.send_bytes(pickle.dumps(Outcome(rank)))
    while True:
        try:
            file, name, world, args = pipe.recv()
        except EOFError:
            os._exit(0)
        me.world = world
        _forget_plans()
        pipe.send_bytes(_run(me, file, name, args))


def _run(me: Rank, file: str, name: str, args: tuple[Any, ...]) -> bytes:
    try:
        task = getattr(_module(file), name)
        return pickle.dumps(Outcome(me.rank, value=task(me, *args)))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            blob = pickle.dumps(Outcome(me.rank, error=error, trace=trace))
            pickle.loads(blob)
        except BaseException:
            return pickle.dumps(Outcome(me.rank, error=RuntimeError(f"cannot be pickled: {error!r}"), trace=trace))
        return blob


def _module(file: str) -> ModuleType:
    """A test module by its file, under one name in all workers, so that its classes can travel between them."""
    name = f"task_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _forget_plans() -> None:
    """DCP keeps cached plans on the class, for the whole process."""
    from torch.distributed.checkpoint.planner import SavePlanner

    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached"):
            cache.clear()
