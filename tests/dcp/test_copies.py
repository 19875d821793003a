"""Tensors of a snapshot that were made ahead, in the thread of the save before: the same values, one holder at a time."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import _views, everything, same

from txstore.dcp import SnapshotBuffers, snapshot
from txstore.dcp.copies import Copies
from txstore.errors import SnapshotInUse, UnsupportedValue

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Copies]:
    """Sets of tensors as they are made."""
    sets: list[Copies] = []

    class Watched(Copies):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            sets.append(self)

    monkeypatch.setattr(snapshot, "Copies", Watched)
    return sets


def save(buffers: SnapshotBuffers, state: dict[str, Any]) -> None:
    """A snapshot that is read, as a save reads it, and released."""
    with buffers.stage(state) as taken:
        taken.state_dict.items()


def test_a_snapshot_takes_what_the_save_before_it_made(made: list[Copies]) -> None:
    buffers = SnapshotBuffers()
    state = {"large": torch.zeros(1 << 19), "small": torch.zeros(3)}
    save(buffers, state)
    assert len(made) == 2
    state["small"] += 1
    with buffers.stage(state) as taken:
        assert len(made) == 2
        assert taken.state_dict["small"].tolist() == [1, 1, 1]
        taken.state_dict.items()
        taken.state_dict.items()
        assert len(made) == 3, "once for each snapshot"


def test_every_kind_of_value_through_tensors_made_ahead(made: list[Copies]) -> None:
    buffers = SnapshotBuffers()
    save(buffers, everything())
    state = everything()
    for tensor in state.values():
        if type(tensor) is torch.Tensor and tensor.is_floating_point() and tensor.is_contiguous():
            tensor.detach().copy_(torch.randn(tensor.shape).to(tensor.dtype))
    with buffers.stage(state) as taken:
        assert len(made) == 2
        same(dict(taken.state_dict), state)


@pytest.mark.parametrize("name", sorted(_views()))
def test_views_through_tensors_made_ahead(name: str, made: list[Copies]) -> None:
    buffers = SnapshotBuffers()
    tensor = _views()[name]
    save(buffers, {"t": torch.zeros_like(tensor) if tensor.numel() else tensor})
    with buffers.stage({"t": tensor}) as taken:
        same(taken.state_dict["t"], tensor)
        assert taken.state_dict["t"].requires_grad == tensor.requires_grad
    assert made


def test_tensors_that_show_one_memory_are_two_objects_on_it() -> None:
    """One of them asks for a gradient: it must not be the other."""
    buffers = SnapshotBuffers()
    weight = torch.nn.Parameter(torch.ones(4))
    state = {"weight": weight, "shown": weight.detach(), "again": weight.detach()}
    for value in (2, 3):
        with torch.no_grad():
            weight.fill_(value)
        with buffers.stage(state) as taken:
            weights, shown, again = (taken.state_dict[key] for key in state)
            taken.state_dict.items()
            assert (weights.requires_grad, shown.requires_grad, again.requires_grad) == (True, False, False)
            assert weights.data_ptr() == shown.data_ptr() == again.data_ptr()
            assert shown is not again
            assert shown.tolist() == [value] * 4


@pytest.mark.parametrize(
    "other",
    [torch.ones(6, dtype=torch.int32), torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(7), None],
    ids=["dtype", "shape", "strides", "size", "nothing"],
)
def test_a_changed_state_makes_its_own(other: torch.Tensor | None, made: list[Copies]) -> None:
    buffers = SnapshotBuffers(timeout_s=0.05)
    save(buffers, {"t": torch.zeros(6)})
    made.clear()
    state = {} if other is None else {"t": other}
    with buffers.stage(state) as taken:
        assert len(made) == 1
        gc.collect()
        same(dict(taken.state_dict), state)
        # The end of those that were made for nothing is not the end of this snapshot.
        assert buffers.in_use
        with pytest.raises(SnapshotInUse):
            buffers.stage(state)
    assert not buffers.in_use


def test_after_close_nothing_keeps_the_memory() -> None:
    buffers = SnapshotBuffers()
    taken = buffers.stage({"t": torch.ones(1 << 19)})
    block = weakref.ref(buffers._memory.arrangement.blocks[0])
    buffers.close()
    taken.state_dict.items()  # the save begins after that
    assert taken.state_dict["t"].sum() == 1 << 19
    taken.release()
    del taken
    gc.collect()
    assert block() is None
    save(buffers, {"t": torch.ones(1 << 19)})
    block = weakref.ref(buffers._memory.arrangement.blocks[0])
    buffers.close()
    gc.collect()
    assert block() is None


def test_tensors_of_memory_that_is_gone_are_left() -> None:
    """`close` may come between the making of them and the look whether it came."""
    buffers = SnapshotBuffers()
    save(buffers, {"t": torch.ones(1 << 19)})
    of_old_memory = buffers._ahead
    buffers.close()
    buffers._ahead = of_old_memory
    with buffers.stage({"t": torch.ones(1 << 19)}) as taken:
        assert taken.state_dict["t"].data_ptr() == buffers._memory.arrangement.blocks[0].data_ptr()


def test_a_save_that_reads_late_disturbs_nobody() -> None:
    """Its snapshot was released, and another state is in the memory by now."""
    buffers = SnapshotBuffers()
    late = buffers.stage({"t": torch.ones(4), "u": torch.ones(1 << 18)})
    late.release()
    with buffers.stage({"t": torch.full((5,), 2.0), "u": torch.ones(1 << 18)}) as second:
        late.state_dict.items()
        assert second.state_dict["t"].tolist() == [2.0] * 5
        assert buffers.in_use
    with buffers.stage({"t": torch.full((5,), 3.0), "u": torch.ones(1 << 18)}) as third:
        assert third.state_dict["t"].tolist() == [3.0] * 5
        del late
        gc.collect()
        assert buffers.in_use


def test_a_failure_takes_nothing_with_it(made: list[Copies]) -> None:
    class Stubborn:
        def __deepcopy__(self, memo: object) -> Any:
            raise ValueError("no")

    buffers = SnapshotBuffers(timeout_s=0.05)
    save(buffers, {"t": torch.zeros(3)})
    with pytest.raises(UnsupportedValue):
        buffers.stage({"t": torch.ones(3), "object": Stubborn()})
    assert not buffers.in_use
    with buffers.stage({"t": torch.full((3,), 2.0)}) as taken:
        made.clear()
        gc.collect()
        assert buffers.in_use
        assert taken.state_dict["t"].tolist() == [2.0] * 3


STATES = {
    "one": lambda value: {"t": torch.full((1 << 18,), float(value)), "n": [torch.tensor(value)]},
    "same sizes": lambda value: {"t": torch.full((1 << 18,), value, dtype=torch.int32), "n": [torch.tensor(value)]},
    "smaller": lambda value: {"n": [torch.tensor(value), torch.full((2, 2), value)]},
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(STATES)), st.booleans(), st.sampled_from(["release", "drop", "keep"])),
        min_size=2,
        max_size=8,
    ),
    st.sets(st.integers(0, 7), max_size=2),
)
def test_any_order_of_snapshots_reads_and_closes(steps: list[tuple[str, bool, str]], closes: set[int]) -> None:
    """Each snapshot has the values of its call while it is held, and one is held at a time."""
    buffers = SnapshotBuffers(timeout_s=0)
    unread = []
    for number, (kind, is_read, end) in enumerate(steps):
        state = STATES[kind](number)
        wanted = copy.deepcopy(state)
        taken = buffers.stage(state)
        state["n"][0].fill_(99)
        if number in closes:
            buffers.close()
        if is_read:
            taken.state_dict.items()
        for late in unread:
            late.items()
        unread.clear()
        same(dict(taken.state_dict), wanted)
        with pytest.raises(SnapshotInUse):
            buffers.stage(state)
        if end != "drop":
            if end == "keep":
                unread.append(taken.state_dict)
            taken.release()
        del taken
        gc.collect()
        assert not buffers.in_use
