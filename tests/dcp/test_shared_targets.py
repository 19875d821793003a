"""A load into tensors that share memory: each holds what was saved for it, or the load says that it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import bits
from test_sharing import shared
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from workers import Pool, Rank

from txstore.dcp import StorageReader, StorageWriter, StrictLoadPlanner
from txstore.errors import StateMismatch

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor:UserWarning", "ignore:TypedStorage:UserWarning"
)
PLANNERS = (DefaultLoadPlanner, StrictLoadPlanner)
LARGE = (3 << 20) + 5  # of several blocks


def save(state: dict[str, Any], root: str) -> None:
    dcp.save(state, storage_writer=StorageWriter(root), checkpoint_id="step-1", no_dist=True)


def load(state: dict[str, Any], root: str, planner: type[DefaultLoadPlanner] = DefaultLoadPlanner) -> None:
    dcp.load(state, storage_reader=StorageReader(root), planner=planner(), no_dist=True)


def refusal(state: dict[str, Any], root: str, planner: type[DefaultLoadPlanner] = DefaultLoadPlanner) -> StateMismatch:
    with pytest.raises(CheckpointException) as caught:
        load(state, root, planner)
    error, _ = caught.value.failures[0]
    assert isinstance(error, StateMismatch), error
    return error


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("size", [3, LARGE])
def test_two_values_for_one_tensor_are_refused(size: int, planner: type[DefaultLoadPlanner], root: str) -> None:
    save({"a": torch.zeros(size), "b": {"c": torch.ones(size)}}, root)
    tensor = torch.full((size,), 7.0)
    error = refusal({"a": tensor, "b": {"c": tensor.detach()}}, root, planner)
    assert "'b.c' and 'a' share memory in the target: other values were saved" in str(error)
    assert "clone()" in error.next_step


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_tied_tensor_is_loaded(planner: type[DefaultLoadPlanner], root: str) -> None:
    tied = torch.randn(LARGE)
    tied[0], tied[1] = float("nan"), -0.0
    save({"embedding": tied, "head": tied, "other": torch.ones(3)}, root)
    target = torch.zeros(LARGE)
    state = {"embedding": target, "head": target, "other": torch.zeros(3)}
    load(state, root, planner)
    assert bits(target) == bits(tied)
    assert state["other"].tolist() == [1, 1, 1]


def test_bits_are_compared_and_not_numbers(root: str) -> None:
    save({"a": torch.tensor([0.0]), "b": torch.tensor([-0.0])}, root)
    target = torch.ones(1)
    assert refusal({"a": target, "b": target}, root).key == "b"


def test_interleaved_tensors_that_share_no_element_are_loaded(root: str) -> None:
    saved = torch.arange(24.0).reshape(4, 6)
    save({"even": saved[:, ::2], "odd": saved[:, 1::2]}, root)
    target = torch.zeros(4, 6)
    load({"even": target[:, ::2], "odd": target[:, 1::2]}, root)
    assert torch.equal(target, saved)


def test_tensors_that_overlap_in_part_are_loaded_if_they_agree(root: str) -> None:
    saved = torch.arange(8.0)
    save({"low": saved[:5], "high": saved[3:], "turned": saved.view(2, 4).t()}, root)
    target = torch.zeros(8)
    state = {"low": target[:5], "high": target[3:], "turned": target.view(2, 4).t()}
    load(state, root)
    assert torch.equal(target, saved)
    save_two = {"low": saved[:5], "high": saved[3:] + 1, "turned": saved.view(2, 4).t()}
    dcp.save(save_two, storage_writer=StorageWriter(root), checkpoint_id="step-2", no_dist=True)
    assert "share memory" in str(refusal(state, root))


def test_a_tensor_that_overlaps_itself(root: str) -> None:
    save({"x": torch.arange(3.0).as_strided((2, 2), (1, 1))}, root)
    target = torch.zeros(3).as_strided((2, 2), (1, 1))
    load({"x": target}, root)
    assert target.tolist() == [[0, 1], [1, 2]]
    dcp.save({"x": torch.arange(4.0).view(2, 2)}, storage_writer=StorageWriter(root), checkpoint_id="step-2")
    assert "elements of 'x' share memory in the target" in str(refusal({"x": target}, root))
    apart = torch.zeros(11).as_strided((3, 2), (3, 4))  # no element twice, though its strides do not show it
    dcp.save({"x": torch.arange(6.0).view(3, 2)}, storage_writer=StorageWriter(root), checkpoint_id="step-3")
    load({"x": apart}, root)
    assert apart.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_an_expanded_target_is_refused_by_name(root: str) -> None:
    save({"x": torch.ones(3, 3)}, root)
    error = refusal({"x": torch.zeros(1).expand(3, 3)}, root)
    assert error.key == "x"
    assert "elements of 'x' share memory" in str(error)


def test_a_quantized_tensor_under_two_names(root: str) -> None:
    one, other = (torch.quantize_per_tensor(torch.tensor([value, 2.0]), 0.5, 3, torch.quint8) for value in (1.0, 1.5))
    save({"a": one, "b": one}, root)
    target = torch.quantize_per_tensor(torch.zeros(2), 0.5, 3, torch.quint8)
    load({"a": target, "b": target}, root)
    assert torch.equal(target.dequantize(), one.dequantize())
    dcp.save({"a": one, "b": other}, storage_writer=StorageWriter(root), checkpoint_id="step-2", no_dist=True)
    assert "shares memory" in str(refusal({"a": target, "b": target}, root))


def test_parts_of_one_tensor_are_no_shared_memory(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks by columns lie between one another; nothing is read apart for them, nor for neighbours in one storage."""
    from txstore.dcp import shared_targets

    saved = torch.arange(20.0).reshape(4, 5)
    save({"x": saved, "y": saved + 1, "none": torch.empty(0)}, root)
    monkeypatch.setattr(shared_targets.torch, "empty", None)
    storage = torch.zeros(40)
    parts = [shared_targets.Target("x", saved[:, :2]), shared_targets.Target("x", saved[:, 2:])]
    both = shared_targets.SharedTargets(parts)
    assert [both.destination(part) is part.tensor for part in parts] == [True, True]
    load({"x": storage[:20].view(4, 5), "y": storage[20:].view(4, 5), "none": storage[:0]}, root)
    assert storage.tolist() == [*range(20), *range(1, 21)]


def tie(me: Rank, root: str, are_equal: bool) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    def state(one: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
        return {
            name: distribute_tensor(tensor, me.mesh, [Shard(0)], src_data_rank=None)
            for name, tensor in (("a", one), ("b", other))
        }

    saved = torch.arange(float(LARGE))
    value = state(saved, saved if are_equal else saved.flip(0))
    dcp.save(value, checkpoint_id="step-1", storage_writer=StorageWriter(root), process_group=me.group)
    target = distribute_tensor(torch.zeros(LARGE), me.mesh, [Shard(0)], src_data_rank=None)
    reader, _ = shared(me, root)
    if are_equal:
        dcp.load({"a": target, "b": target}, storage_reader=reader, process_group=me.group)
        assert torch.equal(target.to_local(), value["a"].to_local())
        return
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"a": target, "b": target}, storage_reader=reader, process_group=me.group)
    assert {type(error) for error, _ in caught.value.failures.values()} == {StateMismatch}


@pytest.mark.parametrize("are_equal", [True, False])
def test_ranks_that_share_their_reads(are_equal: bool, pool: Pool, root: str) -> None:
    pool.run(2, tie, root, are_equal)
