"""From read items to bytes wanted, and from bytes to tensors and objects of the target state."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from txstore.dcp.objects import gate
from txstore.dcp.saved import Stored
from txstore.dcp.shared_targets import SharedTargets, Target
from txstore.dcp.tensors import as_bytes, dtype_name_of_layout, dtype_of, is_plain
from txstore.errors import FormatError, StateMismatch
from txstore.index import ChunkRecord, ObjectRecord, SavedTensor
from txstore.shards.reading import WINDOW_BYTES, Wanted
from txstore.shards.slabs import Slab, cut, is_contiguous, strides_of


class Scatter:
    """The requests of one rank's load plan, and where their bytes go.

    Building it compares every target with what was saved; nothing is changed until bytes arrive.

    Attributes:
        payloads: What to read first: objects, and tensors that are more than their memory.
        tensors: What to read into the targets, once the payloads have been accepted.

    Raises:
        StateMismatch: A target has another dtype or shape than was saved.
    """

    def __init__(
        self,
        items: Sequence[ReadItem],
        planner: LoadPlanner,
        stored: Mapping[MetadataIndex, Stored],
        *,
        trust_objects: bool,
    ) -> None:
        self.payloads: list[Wanted] = []
        self.tensors: list[Wanted] = []
        self._planner = planner
        self._trust_objects = trust_objects
        self._targets: list[tuple[ReadItem, torch.Tensor]] = []
        self._objects: list[tuple[ReadItem, bytearray]] = []
        self._serialised: list[tuple[ReadItem, torch.Tensor, bytearray]] = []
        self._opened: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        wanted: list[tuple[ReadItem, SavedTensor, ChunkRecord, Target]] = []
        for item in items:
            at = stored.get(item.storage_index)
            if at is None:
                raise StateMismatch(f"the checkpoint has no {item.storage_index.fqn!r}", key=item.storage_index.fqn)
            if item.type == LoadItemType.BYTE_IO:
                _refuse_tensor_target(planner, item)
                self._objects.append((item, self._want_all(at.where)))
            elif isinstance(at.item, SavedTensor) and isinstance(at.where, ChunkRecord):
                target = Target(item.dest_index.fqn, planner.resolve_tensor(item).detach())
                _check_target(item, at.item, target.tensor)
                wanted.append((item, at.item, at.where, target))
            else:
                name = item.storage_index.fqn
                raise StateMismatch(f"{name!r} was saved as an object, the target is a tensor", key=name)
        self._shared = SharedTargets([target for *_, target in wanted])
        for item, saved, chunk, target in wanted:
            self._want_tensor(item, saved, chunk, target)

    def _want_all(self, where: ChunkRecord | ObjectRecord) -> bytearray:
        payload = bytearray(where.length)
        if payload:
            self.payloads.append(Wanted(where.file, where.start, where.start + where.length, into=memoryview(payload)))
        return payload

    def _want_tensor(self, item: ReadItem, saved: SavedTensor, chunk: ChunkRecord, into: Target) -> None:
        self._targets.append((item, into.tensor))
        if chunk.encoding == 1:
            self._serialised.append((item, into.tensor, self._want_all(chunk)))
            return
        target = self._shared.destination(into)
        run = _one_run(item, saved, chunk)
        if run is not None and _is_memory(target):
            if target.numel():
                self.tensors.append(Wanted(chunk.file, *run, into=as_bytes(target)))
            return
        for slab in _slabs(item, saved, chunk):
            self.tensors.append(
                Wanted(
                    chunk.file,
                    chunk.start + slab.start,
                    chunk.start + slab.stop,
                    deliver=_SlabCopy(slab, target, chunk.sizes),
                )
            )

    def open_payloads(self) -> None:
        """Judge all payloads, once they have arrived; no target has been changed yet.

        Raises:
            UnsafeObject: One needs code outside the allow-list.
            StateMismatch: A quantized target would give the stored integers another meaning.
        """
        for item, payload in self._objects:
            if not self._trust_objects:
                gate(item.storage_index.fqn, bytes(payload))
        for item, target, payload in self._serialised:
            self._opened.append((item.dest_index.fqn, target, self._open_tensor(item, target, payload)))

    def _open_tensor(self, item: ReadItem, target: torch.Tensor, payload: bytearray) -> torch.Tensor:
        name = item.dest_index.fqn
        if self._trust_objects:
            tensor = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=False)
        else:
            tensor = gate(name, bytes(payload))
        if not isinstance(tensor, torch.Tensor):
            raise FormatError(f"the payload of {name!r} is no tensor", key=name)
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        if tensor.is_quantized:
            # copy_ keeps the target's quantizer: the stored integers would mean other values.
            trial = target.clone()
            trial.copy_(tensor)
            if not torch.equal(trial.dequantize(), tensor.dequantize()):
                raise StateMismatch(f"{name!r} was saved with another quantizer than the target has", key=name)
        return tensor

    def finish(self) -> None:
        """Hand tensors and objects to the planner, in plan order, once all bytes have arrived.

        Raises:
            StateMismatch: Targets share memory, and what was saved for them differs.
        """
        for _, target, tensor in self._opened:
            target.copy_(tensor)
        for name, target, tensor in self._opened:
            if tensor.is_quantized and not torch.equal(target.dequantize(), tensor.dequantize()):
                raise StateMismatch(f"{name!r} shares memory with another target, and has another value", key=name)
        self._shared.settle()
        for item, target in self._targets:
            self._planner.commit_tensor(item, target)
        for item, payload in self._objects:
            self._planner.load_bytes(item, io.BytesIO(payload))


def ranges(items: Iterable[ReadItem], stored: Mapping[MetadataIndex, Stored]) -> Iterator[tuple[int, int, int]]:
    """File, start and stop of the bytes that `Scatter.tensors` will ask for, from the plan alone.

    Items that are wrong in any way are passed over: `Scatter` refuses them.
    """
    for item in items:
        at = stored.get(item.storage_index)
        if at is None or not isinstance(at.item, SavedTensor) or not isinstance(at.where, ChunkRecord):
            continue
        if item.type == LoadItemType.BYTE_IO or at.where.encoding == 1:
            continue
        if len(item.storage_offsets) != len(at.where.sizes) or len(item.lengths) != len(at.where.sizes):
            continue
        if (run := _one_run(item, at.item, at.where)) is not None:
            yield at.where.file, *run
            continue
        for slab in _slabs(item, at.item, at.where):
            yield at.where.file, at.where.start + slab.start, at.where.start + slab.stop


def _one_run(item: ReadItem, saved: SavedTensor, chunk: ChunkRecord) -> tuple[int, int] | None:
    """Start and stop in the file of what an item asks of a chunk, if that is one run of bytes."""
    lengths = tuple(item.lengths)
    if not is_contiguous(chunk.sizes, lengths):
        return None
    first = sum(o * s for o, s in zip(item.storage_offsets, strides_of(chunk.sizes), strict=True)) * saved.itemsize
    return chunk.start + first, chunk.start + first + math.prod(lengths) * saved.itemsize


def _slabs(item: ReadItem, saved: SavedTensor, chunk: ChunkRecord) -> Iterator[Slab]:
    return cut(chunk.sizes, tuple(item.storage_offsets), tuple(item.lengths), saved.itemsize, WINDOW_BYTES)


class _SlabCopy:
    """Copies one slab from its covering bytes into its part of the target."""

    def __init__(self, slab: Slab, target: torch.Tensor, shape: tuple[int, ...]) -> None:
        self._slab = slab
        self._target = target
        self._strides = strides_of(shape)

    def __call__(self, data: memoryview) -> None:
        part = self._target
        for dim, (low, length) in enumerate(zip(self._slab.lower, self._slab.lengths, strict=True)):
            part = part.narrow(dim, low, length)
        # A fresh tensor, since a block's bytes need not be aligned to the dtype.
        raw = torch.empty(data.nbytes, dtype=torch.uint8, device="cpu")
        as_bytes(raw)[:] = data
        part.copy_(raw.view(part.dtype).as_strided(self._slab.lengths, self._strides))


def _refuse_tensor_target(planner: LoadPlanner, item: ReadItem) -> None:
    """An object that DCP's planner would put in a tensor's place: the model keeps its old values, silently."""
    name = item.dest_index.fqn
    state = getattr(planner, "state_dict", None)
    if isinstance(state, dict) and isinstance(state.get(name), torch.Tensor):
        raise StateMismatch(f"{name!r} was saved as an object, the target is a tensor", key=name)


def _is_memory(target: torch.Tensor) -> bool:
    """Whether bytes may be read straight into the target."""
    return (
        target.device.type == "cpu"
        and target.is_contiguous()
        and is_plain(target)
        and not target.is_conj()
        and not target.is_neg()
    )


def _check_target(item: ReadItem, saved: SavedTensor, target: torch.Tensor) -> None:
    name = item.dest_index.fqn
    if target.layout != torch.strided:
        layout = dtype_name_of_layout(target.layout)
        raise StateMismatch(f"the target {name!r} is of layout {layout}, dense values were saved", key=name)
    dtype = dtype_of(saved.dtype, name)
    if target.dtype != dtype:
        raise StateMismatch(
            f"{name!r} was saved as {dtype}, the target is {target.dtype}: loading would cast silently",
            key=name,
            next_step="give the target the saved dtype, load, then convert",
        )
    if target.shape != item.lengths:
        raise StateMismatch(
            f"{name!r}: the plan asks for {tuple(item.lengths)}, the target has {tuple(target.shape)}", key=name
        )
    if len(item.storage_offsets) != len(saved.shape) or math.prod(item.lengths) > math.prod(saved.shape):
        raise FormatError(f"{name!r}: the plan asks for more than was saved", key=name)
