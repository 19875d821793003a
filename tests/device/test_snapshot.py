"""Snapshots of device tensors: pinned memory, non-blocking copies, and the event that ends them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from txstore.dcp import SnapshotBuffers, StorageReader, StorageWriter, estimate_bytes

MIB = 1 << 20


@pytest.fixture
def device() -> torch.device:
    return torch.accelerator.current_accelerator()


def state_on(device: torch.device, number: float) -> dict[str, Any]:
    return {
        "large": torch.full((8 * MIB,), number, device=device),
        "small": [torch.full((3,), number, device=device), torch.tensor(number, device=device)],
        "turned": torch.full((1024, 1025), number, device=device).t(),
        "holes": torch.full((1024, 1024), number, device=device)[:, ::2],
        "host": torch.full((MIB,), number),
    }


def values(state: Any) -> set[float]:
    if isinstance(state, torch.Tensor):
        return {float(state.min()), float(state.max())}
    return set().union(*(values(one) for one in (state.values() if isinstance(state, dict) else state)))


def test_copies_lie_in_pinned_host_memory_that_is_used_again(device: torch.device) -> None:
    buffers = SnapshotBuffers()
    seen = []
    for number in range(3):
        with buffers.stage(state_on(device, number)) as snapshot:
            taken = snapshot.state_dict
            assert {taken[key].device.type for key in ("large", "turned", "holes", "host")} == {"cpu"}
            assert taken["large"].is_pinned()
            assert all(block.is_pinned() for block in buffers._memory._blocks)
            assert values(dict(taken)) == {number}
            assert buffers.nbytes == estimate_bytes(state_on(device, number))
            seen.append((taken["large"].data_ptr(), taken["small"][0].data_ptr(), taken["turned"].data_ptr()))
    assert seen[0] == seen[1] == seen[2]


def test_what_was_queued_before_is_in_the_copy_and_what_comes_after_is_not(device: torch.device) -> None:
    buffers = SnapshotBuffers()
    tensor = torch.zeros(16 * MIB, device=device)
    busy = torch.randn(4096, 4096, device=device)
    for turn in range(1, 6):
        for _ in range(20):  # the device is far behind when the copy is asked for
            busy = (busy @ busy).clamp(-1, 1)
        tensor.fill_(turn)
        with buffers.stage({"t": tensor}) as snapshot:
            tensor.fill_(-1)
            assert values(dict(snapshot.state_dict)) == {turn}


def test_another_stream(device: torch.device) -> None:
    """The copy is queued on the stream that training runs on."""
    buffers = SnapshotBuffers()
    tensor = torch.zeros(16 * MIB, device=device)
    torch.accelerator.synchronize()
    with torch.Stream(device):
        busy = torch.randn(4096, 4096, device=device)
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        tensor.fill_(7)
        with buffers.stage({"t": tensor}) as snapshot:
            assert values(dict(snapshot.state_dict)) == {7}


def test_a_save_in_the_background(device: torch.device, store_url: str) -> None:
    writer = StorageWriter(store_url)
    for number in (1, 2, 3):
        state = state_on(device, number)
        future = dcp.async_save(state, checkpoint_id=f"step-{number}", storage_writer=writer, no_dist=True)
        for key in ("large", "turned", "holes", "host"):
            state[key].fill_(-1)
        future.result(60)
        target = state_on(device, 0)
        dcp.load(target, storage_reader=StorageReader(store_url), no_dist=True)
        assert values(target) == {number}
