"""`copy_regions`: the same bytes, whoever copies (ADR 0015)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from txstore.dcp import SnapshotBuffers, host_memory

MIB = 1 << 20


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads that torch has; its own number again afterwards."""
    before = torch.get_num_threads()
    number: int = request.param
    torch.set_num_threads(number)
    yield number
    torch.set_num_threads(before)


def large_state() -> dict[str, torch.Tensor]:
    """More than two threads' worth, of every kind that is copied in a way of its own."""
    numbers = torch.randn(2, 9 * MIB)
    complex_numbers = torch.randn(MIB, dtype=torch.complex64)
    return {
        "one run": numbers,
        "transposed": torch.randn(1024, 1024).t(),
        "channels last": torch.randn(4, 8, 256, 256).to(memory_format=torch.channels_last),
        "with holes": torch.randn(2 * MIB)[::2],
        "conjugated": complex_numbers.conj(),
        "negated": complex_numbers.conj().imag,
        "float8": torch.randn(2 * MIB).to(torch.float8_e4m3fn),
        "nan": torch.full((MIB,), float("nan")),
        "small": torch.arange(5),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "bool": torch.arange(2 * MIB) % 3 == 0,
    }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def test_every_kind_arrives_whole(threads: int) -> None:
    state = large_state()
    assert threads == torch.get_num_threads()
    assert sum(tensor.nbytes for tensor in state.values()) > 2 * host_memory.THREAD_BYTES
    buffers = SnapshotBuffers()
    for _ in range(2):  # the second time into memory that was used
        with buffers.stage(state) as snapshot:
            for name, tensor in state.items():
                assert torch.equal(as_bytes(snapshot.state_dict[name]), as_bytes(tensor)), name


def test_our_threads_do_not_compete_with_those_of_torch(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    drain = host_memory._drain

    def watched(pieces: host_memory.queue.SimpleQueue[tuple[host_memory.Bytes, host_memory.Bytes]]) -> None:
        copied.append(pieces.qsize())
        drain(pieces)

    monkeypatch.setattr(host_memory, "_drain", watched)
    SnapshotBuffers().stage({"w": torch.ones(20 * MIB)}).release()
    assert any(copied) == (threads == 1)
