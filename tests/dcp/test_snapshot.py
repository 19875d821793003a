"""`SnapshotBuffers`, alone and as the stager of `dcp.async_save`: copies that training cannot reach, buffers used again."""

from __future__ import annotations

import collections
import copy
import gc
import pickle
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults import Fault, FaultyStore, Raise
from states import _views, everything, of_dtype, same
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from workers import Pool, Rank

from txstore.catalog import entries, find, newest
from txstore.dcp import SnapshotBuffers, StorageReader, StorageWriter, estimate_bytes, host_memory
from txstore.dcp.leaves import Form, Region
from txstore.dcp.staged import Staged
from txstore.errors import SnapshotInUse, SnapshotTooLarge, StoreFullError, UnsupportedValue
from txstore.registry import open_store

WAIT_S = 20

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
MIB = 1 << 20


def large_and_small(number: float) -> dict[str, Any]:
    """Buffers of their own, the shared block, and nothing at all."""
    return {
        "large": torch.full((MIB // 2,), number),
        "other": {"large": [torch.full((1, MIB), number)], "small": torch.full((7,), number)},
        "scalar": torch.tensor(number),
        "none": torch.empty(0, 3),
        "step": number,
    }


def pointers(state: Any) -> list[int]:
    if isinstance(state, torch.Tensor):
        return [state.data_ptr()]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [at for value in values for at in pointers(value)]


def blocks(buffers: SnapshotBuffers) -> set[tuple[int, int]]:
    """Addresses and sizes: malloc may give a larger block where a smaller one was."""
    return {(block.data_ptr(), block.nbytes) for block in buffers._memory.arrangement.blocks}


def fill(state: Any, value: int) -> None:
    """Training goes on: every tensor in place, every container too."""
    if isinstance(state, torch.Tensor):
        if not state.is_quantized and not any(state.stride(d) == 0 for d in range(state.dim())):
            state.detach().resolve_conj().resolve_neg().fill_(value)
    elif isinstance(state, dict):
        for one in state.values():
            fill(one, value)
        state["late"] = value
    elif isinstance(state, list):
        for one in state:
            fill(one, value)
        state.append(value)
    elif isinstance(state, set):
        state.add(value)


# --- values


def test_every_kind_of_value_is_copied_and_nothing_of_the_original_is_left() -> None:
    state = everything()
    wanted = copy.deepcopy({key: value for key, value in state.items() if key != "views"})
    wanted["views"] = {name: view.detach().clone() for name, view in _views().items()}
    order = list(wanted)
    snapshot = SnapshotBuffers().stage(state)
    fill(state, 1)
    same(dict(snapshot.state_dict), {key: wanted[key] for key in state if key in order})
    assert set(pointers(dict(snapshot.state_dict))) & set(pointers(state)) <= {0}


@pytest.mark.parametrize("name", sorted(_views()))
def test_a_second_snapshot_holds_the_new_values(name: str) -> None:
    buffers = SnapshotBuffers()
    with buffers.stage({"t": torch.zeros_like(_views()[name])}):
        pass
    tensor = _views()[name]
    with buffers.stage({"t": tensor}) as snapshot:
        taken = snapshot.state_dict["t"]
        same(taken, tensor)
        assert taken.requires_grad == tensor.requires_grad
        assert type(taken) in {torch.Tensor, type(tensor)}


def test_dense_layouts_are_kept_and_others_become_row_major() -> None:
    views = _views()
    taken = SnapshotBuffers().stage(views).state_dict
    for name in ("channels-last", "channels-last-3d", "transposed", "large-transposed"):
        assert taken[name].stride() == views[name].stride()
    for name in ("strided", "expanded", "large-column"):
        assert taken[name].is_contiguous()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool, torch.quint8, torch.qint32]
)
@pytest.mark.parametrize("rows", [3, 200_000])
def test_dtypes(dtype: torch.dtype, rows: int) -> None:
    state = {"t": of_dtype(dtype, (rows, 4))}
    same(dict(SnapshotBuffers().stage(state).state_dict), state)


@pytest.mark.parametrize("view", ["conj", "imag"])
def test_large_views_that_change_the_value_of_memory(view: str) -> None:
    values = torch.complex(torch.full((MIB,), 1.0), torch.full((MIB,), 2.0))
    state = {"t": values.conj() if view == "conj" else values.conj().imag}
    same(dict(SnapshotBuffers().stage(state).state_dict), state)


def test_tied_tensors_are_copied_once_and_stay_tied() -> None:
    weight = torch.randn(MIB)
    turned = weight.reshape(1024, 1024).t()
    state = {"embedding": weight, "head": weight, "alias": weight.detach(), "turned": turned, "again": turned.detach()}
    buffers = SnapshotBuffers()
    taken = buffers.stage(state).state_dict
    assert taken["embedding"] is taken["head"]
    assert taken["alias"].data_ptr() == taken["head"].data_ptr()
    assert taken["turned"].data_ptr() != taken["head"].data_ptr()
    assert taken["turned"].data_ptr() == taken["again"].data_ptr()
    assert buffers.nbytes == estimate_bytes(state) == 2 * weight.nbytes


class Pair(NamedTuple):
    a: torch.Tensor
    b: list[int]


def test_containers_keep_their_classes_and_shared_objects_stay_shared() -> None:
    shared = [1, 2]
    state: dict[str, Any] = {
        "pair": Pair(torch.ones(2), shared),
        "default": collections.defaultdict(list, x=[torch.ones(1)]),
        "one": shared,
        "loop": [],
    }
    state["loop"].append(state["loop"])
    taken = SnapshotBuffers().stage(state).state_dict
    assert type(taken["pair"]) is Pair
    assert type(taken["default"]) is collections.defaultdict
    assert taken["pair"].b is taken["one"] is not shared
    assert taken["loop"][0] is taken["loop"] is not state["loop"]


def test_a_tensor_in_a_tuple_has_memory_of_its_own(root: str) -> None:
    """DCP pickles a tuple whole, with the whole storage of its tensors: not with everybody else's."""
    state = {
        "many": [torch.ones(50_000) for _ in range(10)],
        "pair": (torch.arange(3.0), torch.arange(4)),
        "deep": [({"x": torch.ones(2)},)],
    }
    taken = SnapshotBuffers().stage(state).state_dict
    for tensor in (*taken["pair"], taken["deep"][0][0]["x"]):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    dcp.save(dict(taken), checkpoint_id="step-1", storage_writer=StorageWriter(root), no_dist=True)
    target = {"pair": None, "deep": None}
    dcp.load(target, storage_reader=StorageReader(root, strict=False), no_dist=True)
    same(target["pair"], state["pair"])


class Tiles(torch.Tensor):
    """A class with a say in how DCP saves it."""

    tiles: list[int]


def test_classes_and_attributes_of_tensors_are_kept() -> None:
    tensor = torch.arange(4.0).as_subclass(Tiles)
    tensor.tiles = [1, 2]
    taken = SnapshotBuffers().stage({"t": tensor}).state_dict["t"]
    tensor.tiles.append(3)
    tensor.fill_(0)
    assert type(taken) is Tiles
    assert taken.tiles == [1, 2]
    assert taken.tolist() == [0, 1, 2, 3]


class TwoParts(torch.Tensor):
    """A wrapper without memory of its own, as FP8 tensors are (failure case F7)."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_part, self.scale_part = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_part", "scale_part"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> TwoParts:
        return cls(inner["data_part"], inner["scale_part"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(func))


class Opaque(torch.Tensor):
    """A wrapper that does not say what is inside."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor) -> None:
        self.data_part = data

    __torch_dispatch__ = TwoParts.__torch_dispatch__


class Broken(TwoParts):
    """A wrapper whose own methods fail."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        raise RuntimeError("planted")


def test_a_wrapper_is_copied_by_its_parts() -> None:
    data, scale = torch.arange(6, dtype=torch.int8), torch.tensor(0.5)
    taken = SnapshotBuffers().stage({"w": TwoParts(data, scale)}).state_dict["w"]
    data.fill_(0)
    scale.fill_(0)
    assert type(taken) is TwoParts
    assert taken.data_part.tolist() == list(range(6))
    assert float(taken.scale_part) == 0.5


def unsupported() -> dict[str, torch.Tensor]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    return {
        "Opaque": Opaque(torch.arange(3)),
        "Broken": Broken(torch.arange(3), torch.ones(())),
        "sparse_coo": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "FakeTensor": fake,
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        # Memory that a view shows as quantized has no scale, and torch dies where it looks for one.
        "qint8": torch.zeros(MIB, dtype=torch.int8).view(torch.qint8),
        "quint8": torch.zeros(3, dtype=torch.uint8).view(torch.quint8),
        "qint32": torch.zeros(MIB, dtype=torch.int32).view(torch.qint32),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "kind",
    ["Opaque", "Broken", "sparse_coo", "meta", "FakeTensor", "nested", "jagged", "qint8", "quint8", "qint32"],
)
def test_what_cannot_be_copied_is_refused_before_anything_is(kind: str, root: str) -> None:
    state = {"good": torch.ones(MIB), "optimizer": {"state": [unsupported()[kind]]}}
    buffers = SnapshotBuffers()
    for call in (buffers.stage, buffers.check, estimate_bytes):
        with pytest.raises(UnsupportedValue, match=kind) as caught:
            call(state)
        assert caught.value.key == "optimizer.state.0"
    assert buffers.nbytes == 0
    assert not buffers.in_use
    # Through async_save the same error comes from the save, and nothing is committed.
    future = dcp.async_save(state, checkpoint_id="step-1", storage_writer=StorageWriter(root), no_dist=True)
    error = future.exception(WAIT_S)
    assert isinstance(error, CheckpointException)
    failure = error.failures[0][0]
    assert isinstance(failure, UnsupportedValue)
    assert (failure.key, failure.rank) == ("optimizer.state.0", 0)
    assert kind in str(failure)
    assert entries(open_store(root)) == []


class Cloning(dict[str, torch.Tensor]):
    """Clones what it is given, also while a copy of it is made."""

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        super().__setitem__(key, value.detach().clone())


class Summed:
    """Computes from a tensor of the state when it is copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__setstate__({"tensor": tensor})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]
        self.sum = float(self.tensor.sum())


def test_what_reads_tensors_while_it_is_copied_reads_this_snapshot() -> None:
    buffers = SnapshotBuffers()
    for value in (1.0, 2.0, 3.0):
        tensor = torch.full((MIB,), value)
        cloning = Cloning()
        cloning["w"] = tensor
        with buffers.stage({"cloning": cloning, "w": tensor, "summed": Summed(tensor)}) as snapshot:
            tensor.zero_()
            assert float(snapshot.state_dict["cloning"]["w"].sum()) == value * MIB
            assert snapshot.state_dict["summed"].sum == value * MIB


def test_an_object_that_cannot_be_copied_is_named() -> None:
    buffers = SnapshotBuffers(timeout_s=1)
    with pytest.raises(UnsupportedValue, match="lock") as caught:
        buffers.stage({"w": torch.ones(3), "trainer": [threading.Lock()]})
    assert caught.value.key == "trainer"
    with buffers.stage({"w": torch.ones(3)}) as snapshot:
        assert snapshot.waited_s == 0


# --- memory


def test_the_second_snapshot_allocates_nothing() -> None:
    buffers = SnapshotBuffers()
    seen = []
    for step in range(3):
        with buffers.stage(large_and_small(step)) as snapshot:
            seen.append((pointers(snapshot.state_dict), blocks(buffers)))
            assert float(snapshot.state_dict["scalar"]) == step
            assert buffers.nbytes == estimate_bytes(large_and_small(step)) == snapshot.nbytes
    assert seen[0] == seen[1] == seen[2]


def test_a_changed_layout_allocates_only_what_changed() -> None:
    buffers = SnapshotBuffers()
    state = {"a": torch.ones(MIB), "b": torch.ones(2 * MIB), "c": torch.ones(3)}
    with buffers.stage(state):
        before = blocks(buffers)
    state["b"] = torch.full((3 * MIB,), 5.0)
    with buffers.stage(state) as snapshot:
        after = blocks(buffers)
        same(dict(snapshot.state_dict), state)
    assert len(before) == len(after) == 3
    assert len(before & after) == 2
    assert buffers.nbytes == estimate_bytes(state)
    with buffers.stage({"c": torch.ones(3)}):
        assert buffers.nbytes == host_memory.PAGE_BYTES
    buffers.close()
    assert buffers.nbytes == 0


def test_too_large_a_state_is_refused_with_all_figures() -> None:
    state = large_and_small(1)
    needed = estimate_bytes(state)
    assert SnapshotBuffers(max_bytes=needed).stage(state).nbytes == needed
    buffers = SnapshotBuffers(max_bytes=needed - 1)
    for call in (buffers.check, buffers.stage):
        with pytest.raises(SnapshotTooLarge, match=rf"{needed} bytes .*{needed - 1} are allowed; \d+ bytes are free"):
            call(state)
    assert buffers.nbytes == 0
    assert not buffers.in_use


def test_a_machine_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(nbytes: int) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    buffers = SnapshotBuffers(timeout_s=1)
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "_block", no_memory)
        with pytest.raises(SnapshotTooLarge, match="can't allocate"):
            buffers.stage({"w": torch.ones(3)})
    same(dict(buffers.stage({"w": torch.ones(3)}).state_dict), {"w": torch.ones(3)})


# --- who holds the buffers


def test_copies_of_devices_are_waited_for_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would arrive in memory that the next snapshot already holds."""
    waited: list[torch.device] = []
    monkeypatch.setattr(host_memory, "_wait_for_devices", waited.extend)
    on_device = Region(torch.ones(2, device="meta"), Form(torch.float32, (2,), (1,)), dense=True, nbytes=8)
    with pytest.raises(NotImplementedError):  # nothing can be copied out of a meta tensor
        host_memory.copy_regions([torch.ones(2)], [on_device])
    assert waited == [torch.device("meta")]


def test_a_busy_set_waits_and_then_says_so() -> None:
    buffers = SnapshotBuffers(timeout_s=0.05)
    snapshot = buffers.stage(large_and_small(1))
    with pytest.raises(SnapshotInUse, match=r"0\.05 s"):
        buffers.stage(large_and_small(2))
    same(dict(snapshot.state_dict), large_and_small(1))
    buffers.timeout_s = WAIT_S
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(buffers.stage, large_and_small(2))
        time.sleep(0.1)
        assert not later.done()
        same(dict(snapshot.state_dict), large_and_small(1))
        snapshot.release()
        snapshot.release()
        second = later.result(WAIT_S)
    assert second.waited_s > 0.05
    same(dict(second.state_dict), large_and_small(2))
    # The first one's second release was not the second one's.
    assert buffers.in_use


@pytest.mark.parametrize("kept", ["state", "tensor", "view", "detached", "numpy", "storage", "small"])
def test_buffers_are_in_use_while_anything_shows_their_memory(kept: str) -> None:
    buffers = SnapshotBuffers()
    state: Any = buffers.stage(large_and_small(1)).state_dict
    large = state["large"]
    holder = {
        "state": state,
        "tensor": large,
        "view": large[5:9],
        "detached": large.detach().reshape(2, -1)[1],
        "numpy": large.numpy(),
        "storage": large.untyped_storage(),
        "small": state["scalar"],
    }[kept]
    del state, large
    gc.collect()
    assert buffers.in_use
    del holder
    assert not buffers.in_use


def test_several_threads_share_one_set() -> None:
    buffers = SnapshotBuffers(timeout_s=WAIT_S)

    def go(number: int) -> None:
        for turn in range(20):
            with buffers.stage(large_and_small(number * 100 + turn)) as snapshot:
                same(dict(snapshot.state_dict), large_and_small(number * 100 + turn))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(go, range(3)))


# --- as the stager of async_save


def gated(root: str, part: str = ".safetensors") -> tuple[FaultyStore, threading.Event, threading.Event]:
    """A store whose put waits: (store, it waits, let it go)."""
    reached, go = threading.Event(), threading.Event()

    def action(store: Any, key: str, call: Any) -> Any:
        reached.set()
        assert go.wait(WAIT_S)
        return call()

    return FaultyStore(root, Fault(action, "put", part, forever=True)), reached, go


def load(root: str, name: str | None = None) -> dict[str, Any]:
    target = large_and_small(-1)
    dcp.load(target, checkpoint_id=name, storage_reader=StorageReader(root), no_dist=True)
    return target


def test_the_writer_is_a_stager(root: str) -> None:
    writer = StorageWriter(root)
    assert isinstance(writer, AsyncStager)
    assert not writer.should_synchronize_after_execute
    writer.synchronize_staging()
    dcp.save(large_and_small(1), checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    assert writer.buffers.nbytes == 0  # a save in the foreground copies nothing
    writer.close()


def test_a_second_save_waits_for_the_first_and_reuses_its_buffers(root: str) -> None:
    store, reached, go = gated(root)
    writer = StorageWriter(store)
    first = dcp.async_save(large_and_small(1), checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    assert reached.wait(WAIT_S)
    before = blocks(writer.buffers)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(
            dcp.async_save, large_and_small(2), checkpoint_id="step-2", storage_writer=writer, no_dist=True
        )
        time.sleep(0.1)
        assert not call.done()
        go.set()
        call.result(WAIT_S).result(WAIT_S)
    first.result(WAIT_S)
    assert blocks(writer.buffers) == before
    for number in (1, 2):
        same(load(root, f"step-{number}"), large_and_small(number))


def test_writers_of_one_run_may_share_buffers(root: str) -> None:
    buffers = SnapshotBuffers()
    seen = []
    for number in range(3):
        writer = StorageWriter(root, buffers=buffers)
        dcp.async_save(
            large_and_small(number), checkpoint_id=f"step-{number}", storage_writer=writer, no_dist=True
        ).result(WAIT_S)
        seen.append(blocks(buffers))
        same(load(root), large_and_small(number))
    assert seen[0] == seen[1] == seen[2]


def test_a_failed_save_frees_the_buffers_though_its_future_is_kept(root: str) -> None:
    writer = StorageWriter(FaultyStore(root, Fault(Raise("full"), "put", ".safetensors")))
    writer.buffers.timeout_s = 5
    future = dcp.async_save(large_and_small(1), checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    error = future.exception(WAIT_S)
    assert isinstance(error, CheckpointException)
    assert isinstance(error.failures[0][0], StoreFullError)
    dcp.async_save(large_and_small(2), checkpoint_id="step-2", storage_writer=writer, no_dist=True).result(WAIT_S)
    same(load(root), large_and_small(2))


def test_a_kept_planner_does_not_keep_the_buffers(root: str) -> None:
    writer = StorageWriter(root)
    writer.buffers.timeout_s = 5
    planners = [dcp.DefaultSavePlanner() for _ in range(2)]
    for number, planner in enumerate(planners):
        dcp.async_save(
            large_and_small(number),
            checkpoint_id=f"step-{number}",
            storage_writer=writer,
            planner=planner,
            no_dist=True,
        ).result(WAIT_S)
    same(load(root), large_and_small(1))


def test_a_foreground_save_through_the_same_writer_frees_nothing(root: str) -> None:
    """Another thread resets and uses the writer, and ends, while the snapshot is being written."""
    store, reached, go = gated(root, "/step-1/")
    writer = StorageWriter(store)
    writer.buffers.timeout_s = 0.1
    first = dcp.async_save(large_and_small(1), checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    assert reached.wait(WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dcp.save, large_and_small(2), checkpoint_id="step-2", storage_writer=writer, no_dist=True).result(
            WAIT_S
        )
    assert writer.buffers.in_use
    third = dcp.async_save(large_and_small(3), checkpoint_id="step-3", storage_writer=writer, no_dist=True)
    busy = third.exception(WAIT_S)
    assert isinstance(busy, CheckpointException)
    assert isinstance(busy.failures[0][0], SnapshotInUse)
    go.set()
    first.result(WAIT_S)
    same(load(root, "step-1"), large_and_small(1))
    assert [entry.decision.checkpoint for entry in entries(open_store(root))] == ["step-1", "step-2"]


def test_the_snapshot_of_one_step_in_a_training_loop(root: str) -> None:
    """Failure case C2: every tensor of the state tells the step, and training never pauses."""
    writer = StorageWriter(root)
    parameters = [torch.zeros(size) for size in (3, 1000, MIB // 2)] * 3
    parameters = [parameter.clone() for parameter in parameters]
    future = None
    saved = []
    step = 0
    while len(saved) < 5:
        step += 1
        for parameter in parameters:
            parameter.add_(1)
        if future is None or future.done():
            state = {str(number): parameter for number, parameter in enumerate(parameters)} | {"step": step}
            future = dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True)
            saved.append(step)
    for parameter in parameters:
        parameter.add_(1)
    future.result(WAIT_S)
    for step in saved:
        target = {str(number): torch.zeros_like(parameter) for number, parameter in enumerate(parameters)} | {"step": 0}
        dcp.load(target, checkpoint_id=f"step-{step}", storage_reader=StorageReader(root), no_dist=True)
        assert target.pop("step") == step
        assert {float(value) for tensor in target.values() for value in (tensor.min(), tensor.max())} == {step}


def test_a_stock_stager_still_works(root: str) -> None:
    writer = StorageWriter(root)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    dcp.async_save(
        large_and_small(1), checkpoint_id="step-1", storage_writer=writer, async_stager=stager, no_dist=True
    ).result(WAIT_S)
    stager.close()
    assert writer.buffers.nbytes == 0
    same(load(root), large_and_small(1))


def test_our_stager_with_a_stock_writer(root: str, tmp_path: Path) -> None:
    stager = StorageWriter(root)
    for number in (1, 2):
        folder = tmp_path / str(number)
        dcp.async_save(
            large_and_small(number), storage_writer=FileSystemWriter(folder), async_stager=stager, no_dist=True
        ).result(WAIT_S)
        target = large_and_small(-1)
        dcp.load(target, storage_reader=FileSystemReader(folder), no_dist=True)
        same(target, large_and_small(number))
    # A refusal does not become an empty checkpoint of a writer that knows nothing of it.
    stager.buffers.max_bytes = 1
    refused = dcp.async_save(
        large_and_small(3), storage_writer=FileSystemWriter(tmp_path / "3"), async_stager=stager, no_dist=True
    )
    assert refused.exception(WAIT_S) is not None
    assert not (tmp_path / "3" / ".metadata").exists()


def test_a_refusal_is_not_taken_by_the_next_save_of_the_thread(root: str, tmp_path: Path) -> None:
    writer = StorageWriter(root)
    writer.buffers.max_bytes = 1
    refusal = writer.stage(large_and_small(1))
    with pytest.raises(CheckpointException):
        dcp.save(refusal, storage_writer=FileSystemWriter(tmp_path / "stock"), no_dist=True)
    dcp.save(large_and_small(2), checkpoint_id="step-2", storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException, match="are allowed"):
        dcp.save(refusal, checkpoint_id="step-3", storage_writer=writer, no_dist=True)
    assert newest(open_store(root)).checkpoint == "step-2"


def test_no_buffer_travels_with_a_pickled_writer(root: str) -> None:
    writer = StorageWriter(root)
    staged = writer.stage(large_and_small(1))
    assert len(pickle.dumps(writer)) < 10_000
    copied = pickle.loads(pickle.dumps(writer))
    assert copied.buffers.nbytes == 0
    assert not copied.buffers.in_use
    assert writer.buffers.in_use
    # Nor does a lease with a pickled state: what arrives is a copy, and frees nothing when it goes.
    arrived = pickle.loads(pickle.dumps(staged))
    assert type(arrived) is Staged
    same(dict(arrived), dict(staged))
    del arrived
    assert writer.buffers.in_use
    writer_ref = weakref.ref(writer)
    del writer
    gc.collect()
    assert writer_ref() is None
    same(dict(staged), large_and_small(1))


# --- ranks


def sharded_state(me: Rank, number: float) -> dict[str, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.full((7, MIB // 4), number)
    return {
        "d": distribute_tensor(whole, me.mesh, [Shard(0)], src_data_rank=None),
        "w": torch.full((MIB // 2,), number),
        f"own{me.rank}": torch.tensor([number]),
        "list": [number],
    }


class Failing(dcp.DefaultSavePlanner):
    """Fails in one phase of the save."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def _reach(self, phase: str) -> None:
        if phase == self.phase:
            raise ValueError(f"planted in {phase}")

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._reach("set_up")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> Any:
        self._reach("local")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self._reach("global")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self._reach("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._reach("resolve")
        return super().resolve_data(write_item)


def failing_phases(me: Rank, root: str, broken: int) -> list[str]:
    """A save fails on rank `broken`, in each phase in turn; the next one goes through, on warm buffers, on all ranks."""
    buffers = SnapshotBuffers(timeout_s=5)
    kept, told, warm = [], [], None
    faults = {"put": ("put", ".safetensors"), "commit": ("create", "commits/")}
    for number, phase in enumerate(["set_up", "local", "global", "finish_plan", "resolve", "put", "commit", "stage"]):
        store = FaultyStore(root, *([Fault(Raise("full"), *faults[phase])] if phase in faults else []))
        mine = me.rank == broken
        writer = StorageWriter(store if mine else root, buffers=buffers)
        planner = Failing(phase if mine else "")
        state = sharded_state(me, number)
        if phase == "stage" and mine:
            state["bad"] = torch.eye(3).to_sparse()
        future = dcp.async_save(
            state, checkpoint_id=f"bad-{number}", storage_writer=writer, planner=planner, process_group=me.group
        )
        error = future.exception(WAIT_S)
        kept.append((future, error, planner))  # a trainer may well log them at its end
        told.append(f"{phase}: {error}")
        del writer, planner
        writer = StorageWriter(root, buffers=buffers)
        state = sharded_state(me, number)
        future = dcp.async_save(state, checkpoint_id=f"good-{number}", storage_writer=writer, process_group=me.group)
        for tensor in (state["d"].to_local(), state["w"]):
            tensor.fill_(99)
        future.result(WAIT_S)
        warm = warm or blocks(buffers)
        assert blocks(buffers) == warm, phase
        target = sharded_state(me, -1)
        dcp.load(target, checkpoint_id=f"good-{number}", storage_reader=StorageReader(root), process_group=me.group)
        assert torch.equal(target["d"].full_tensor(), torch.full((7, MIB // 4), float(number)))
        assert float(target["w"].max()) == number
    return told


@pytest.mark.parametrize("broken", [0, 1])
def test_buffers_are_free_after_a_failure_in_any_phase_on_any_rank(broken: int, pool: Pool, root: str) -> None:
    told = pool.run(2, failing_phases, root, broken, deadline_s=60)
    # The coordinator alone plans for all, and commits: on the other rank those two cannot fail.
    fine = {"global", "commit"} if broken else set()
    for lines in told:
        assert {line.partition(":")[0] for line in lines if line.endswith(": None")} == fine
    assert any("sparse_coo" in line for line in told[1 - broken])
    committed = {entry.decision.checkpoint for entry in entries(open_store(root)) if entry.state == "committed"}
    assert {name for name in committed if name.startswith("good")} == {f"good-{number}" for number in range(8)}
    assert len(committed) == 8 + len(fine)


def fsdp(me: Rank, root: str, mode: str) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 7))
    fully_shard(model, mesh=me.mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    writer = StorageWriter(root)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 64)).square().sum().backward()
        optimizer.step()

    def state() -> dict[str, Any]:
        parts = get_state_dict(model, optimizer)
        return {"model": parts[0], "optimizer": parts[1]}

    seen = []
    for step in (1, 2, 3):
        train()
        wanted = copy.deepcopy(state())
        future = dcp.async_save(
            state(),
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            process_group=me.group,
            async_checkpointer_type=AsyncCheckpointerType[mode],
        )
        train()
        future.result(WAIT_S)
        seen.append(blocks(writer.buffers))
        target = copy.deepcopy(state())
        dcp.load(target, storage_reader=StorageReader(root), process_group=me.group)
        for key, value in target["model"].items():
            assert torch.equal(value.full_tensor(), wanted["model"][key].full_tensor()), key
        for key, moments in target["optimizer"]["state"].items():
            for name, value in moments.items():
                other = wanted["optimizer"]["state"][key][name]
                assert torch.equal(
                    *(one.full_tensor() if hasattr(one, "full_tensor") else one for one in (value, other))
                )
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 0


@pytest.mark.parametrize("mode", ["THREAD", "PROCESS"])
def test_fsdp2_state(mode: str, pool: Pool, root: str) -> None:
    pool.run(2, fsdp, root, mode, deadline_s=90)


def unfinished_collective(me: Rank) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    buffers = SnapshotBuffers()
    for turn in range(5):
        reduced = all_reduce(torch.full((8 * MIB,), float(turn)), "sum", me.group)
        assert type(reduced) is AsyncCollectiveTensor
        with buffers.stage({"t": reduced}) as snapshot:
            taken = snapshot.state_dict["t"]
            assert type(taken) is torch.Tensor
            assert float(taken.min()) == float(taken.max()) == turn * me.world


def test_a_collective_that_is_still_on_its_way_is_waited_for(pool: Pool) -> None:
    pool.run(2, unfinished_collective)


def process_mode(me: Rank, root: str) -> None:
    writer = StorageWriter(root)
    writer.buffers.timeout_s = WAIT_S
    options: dict[str, Any] = {"process_group": me.group, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    kept = []
    for step in (1, 2, 3):
        state = sharded_state(me, step)
        kept.append(dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer, **options))
        # At once the next one: it must wait, and not write over what the other process is still to get.
        state["w"].fill_(99)
    for future in kept:
        future.result(WAIT_S)
    for step in (1, 2, 3):
        target = sharded_state(me, -1)
        dcp.load(target, checkpoint_id=f"step-{step}", storage_reader=StorageReader(root), process_group=me.group)
        assert float(target["w"].min()) == float(target["w"].max()) == step
    # A refusal on one rank reaches all ranks from there too, and frees the buffers.
    bad = {"bad": unsupported()["Opaque"]} if me.rank == 1 else {}
    error = dcp.async_save(
        sharded_state(me, 4) | bad, checkpoint_id="step-4", storage_writer=writer, **options
    ).exception(WAIT_S)
    assert isinstance(error, CheckpointException)
    assert {rank: type(failure[0]) for rank, failure in error.failures.items()} == {1: UnsupportedValue}
    dcp.async_save(sharded_state(me, 5), checkpoint_id="step-5", storage_writer=writer, **options).result(WAIT_S)


def test_process_mode(pool: Pool, root: str) -> None:
    pool.run(2, process_mode, root, deadline_s=90)
    assert find(open_store(root), "step-5").checkpoint == "step-5"


def legacy_sharded(me: Rank, root: str) -> None:
    from test_distributed import sharded_tensor, value

    tensor = sharded_tensor(me, True)
    future = dcp.async_save(
        {"emb": tensor}, checkpoint_id="step-1", storage_writer=StorageWriter(root), process_group=me.group
    )
    for shard in tensor.local_shards():
        shard.tensor.fill_(99)
    future.result(WAIT_S)
    target = sharded_tensor(me, False)
    dcp.load({"emb": target}, storage_reader=StorageReader(root), process_group=me.group)
    for shard in target.local_shards():
        row = shard.metadata.shard_offsets[0]
        assert torch.equal(shard.tensor, value((4 * me.world, 6))[row : row + 1])


def test_a_sharded_tensor_of_the_old_kind(pool: Pool, root: str) -> None:
    pool.run(2, legacy_sharded, root)


# --- many saves


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as line:
        return int(line.read().split()[1]) * host_memory.PAGE_BYTES


def flat_memory(root: str, saves: int, mib: int) -> None:
    """Failure case C8: after the second save the process grows no more."""
    writer = StorageWriter(root, overwrite=True)
    state = {f"layer.{number}": torch.ones(mib * MIB // 16) for number in range(4)} | {"norm": torch.ones(77)}
    seen, kept = [], []
    for _ in range(saves):
        kept.append(dcp.async_save(state, checkpoint_id="step-1", storage_writer=writer, no_dist=True))
        kept[-1].result(WAIT_S)
        seen.append(resident_bytes())
        for path in Path(root.removeprefix("file://")).glob("data/*/*/*.safetensors"):
            path.unlink()  # a store of hundreds of MB is not what is looked at here
    # Less than one snapshot in all. Saves in new threads move it by 32 MiB up and down, also without any staging.
    assert max(seen[2:]) - seen[1] < mib * MIB, [round((one - seen[0]) / MIB) for one in seen]


def test_memory_stays_flat(root: str) -> None:
    flat_memory(root, 15, 48)


@pytest.mark.soak
def test_memory_stays_flat_over_fifty_saves_of_100_mb(root: str) -> None:
    flat_memory(root, 50, 100)
