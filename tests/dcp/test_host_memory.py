"""`copy_regions`: the same bytes, whoever copies (ADR 0015)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.autograd import forward_ad

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
        "half complex": torch.randn(MIB, dtype=torch.complex64).to(torch.complex32).conj(),
    }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_kind_arrives_whole(threads: int) -> None:
    state = large_state()
    assert threads == torch.get_num_threads()
    assert sum(tensor.nbytes for tensor in state.values()) > 2 * host_memory.THREAD_BYTES
    buffers = SnapshotBuffers()
    for _ in range(2):  # the second time into memory that was used
        with buffers.stage(state) as snapshot:
            for name, tensor in state.items():
                assert torch.equal(as_bytes(snapshot.state_dict[name]), as_bytes(tensor)), name


ODD = [torch.bool, torch.int4, torch.uint7, torch.int1, torch.bits8, torch.bits16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", ODD, ids=str)
def test_bits_that_are_no_number_of_torch_arrive_too(dtype: torch.dtype, threads: int) -> None:
    """A bool may be any byte but zero, a NaN has a payload, and torch copies no int4."""
    assert threads == torch.get_num_threads()
    raw = torch.randint(0, 256, (2 * MIB,), dtype=torch.uint8)
    small = torch.tensor([0, 1, 2, 127, 128, 254, 255, 64], dtype=torch.uint8)
    size = dtype.itemsize
    state = {"large": raw.view(dtype), "small": small.view(dtype), "holes": raw.view(dtype)[::2]}
    wanted = {name: tensor.view({1: torch.uint8, 2: torch.int16}[size]).clone() for name, tensor in state.items()}
    with SnapshotBuffers().stage(state) as snapshot:
        raw.zero_()
        small.zero_()
        for name, numbers in wanted.items():
            taken = snapshot.state_dict[name]
            assert taken.dtype == dtype
            assert torch.equal(taken.view(numbers.dtype), numbers), name


def test_a_tangent_is_no_part_of_a_tensor(threads: int) -> None:
    assert threads == torch.get_num_threads()
    primal = torch.arange(MIB, dtype=torch.float32)
    with forward_ad.dual_level():
        state = {"plain": torch.ones(3), "dual": forward_ad.make_dual(primal, torch.ones(MIB))}
        snapshot = SnapshotBuffers().stage(state)
        assert forward_ad.unpack_dual(snapshot.state_dict["dual"]).tangent is None
    with snapshot:
        assert snapshot.state_dict["plain"].tolist() == [1, 1, 1]
        assert torch.equal(snapshot.state_dict["dual"], torch.arange(MIB, dtype=torch.float32))


def test_our_threads_do_not_compete_with_those_of_torch(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    drain = host_memory._drain

    def watched(pieces: host_memory.queue.SimpleQueue[tuple[host_memory.Bytes, host_memory.Bytes]]) -> None:
        copied.append(pieces.qsize())
        drain(pieces)

    monkeypatch.setattr(host_memory, "_drain", watched)
    SnapshotBuffers().stage({"w": torch.ones(20 * MIB)}).release()
    assert any(copied) == (threads == 1)
