"""What a load gives back when readers are shared, strides are odd, or the target is of another kind."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from txstore.checksum import BLOCK_BYTES
from txstore.dcp import StorageReader, StorageWriter
from txstore.errors import ConfigError, StateMismatch
from txstore.manifest import Description, Progress
from txstore.memory import MemoryStore


def test_threads_that_share_a_reader_load_what_each_asked_for(store_url):
    """A load's state is its thread's: with one for all, another checkpoint's values came back, silently."""
    for step in (1, 2):
        dcp.save(
            {"w": torch.full((64,), float(step))}, storage_writer=StorageWriter(store_url), checkpoint_id=f"step-{step}"
        )
    reader = StorageReader(store_url)
    wrong = []

    def work(step):
        for _ in range(40):
            target = {"w": torch.zeros(64)}
            try:
                dcp.load(target, storage_reader=reader, checkpoint_id=f"step-{step}")
                if not torch.equal(target["w"], torch.full((64,), float(step))) or reader.decision.step != step:
                    wrong.append(step)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 2, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("where", [(slice(2, 3), 1), (slice(1, 2), slice(2, 3)), (slice(0, 1), slice(3, 4))])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_element_with_an_odd_stride_is_saved_and_loaded_into(store_url, where, transposed):
    value, target = torch.rand(8, 4)[where], torch.zeros(8, 4)[where]
    if transposed:
        value, target = value.t(), target.t()
    dcp.save({"w": value}, storage_writer=StorageWriter(store_url), checkpoint_id="step-1")
    dcp.load({"w": target}, storage_reader=StorageReader(store_url))
    assert torch.equal(value, target)


def test_a_saved_object_does_not_pass_for_a_loaded_tensor(store_url):
    dcp.save({"w": 77}, storage_writer=StorageWriter(store_url), checkpoint_id="step-1")
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.tensor(0)}, storage_reader=StorageReader(store_url))
    error = caught.value.failures[0][0]
    assert isinstance(error, StateMismatch)
    assert error.key == "w"


def test_a_description_is_refused_before_anything_is_written(store_url):
    with pytest.raises(ConfigError, match="not a description"):
        StorageWriter(store_url, description=Description(Progress(global_step=1.0)))
    with pytest.raises(ConfigError, match="not a RetryPolicy"):
        StorageWriter(store_url, retry=5)


def test_a_load_has_as_many_reads_in_flight_as_the_store_says():
    together, lengths = threading.Barrier(5), []

    class Wide(MemoryStore):
        streams = 5
        read_bytes = BLOCK_BYTES

        def read_into(self, key, start, buffer):
            lengths.append(len(buffer))
            if len(lengths) <= 5:
                together.wait(20)
            return super().read_into(key, start, buffer)

    store = Wide()
    value = torch.arange(6 * BLOCK_BYTES, dtype=torch.uint8)
    dcp.save({"x": value}, storage_writer=StorageWriter(store), checkpoint_id="step-1")
    target = {"x": torch.zeros_like(value)}
    dcp.load(target, storage_reader=StorageReader(store), checkpoint_id="step-1")
    assert torch.equal(target["x"], value)
    assert max(lengths) <= 2 * BLOCK_BYTES


@pytest.mark.parametrize("convert", ["to_sparse", "to_mkldnn"])
def test_a_target_of_another_layout_is_refused_by_name(convert, store_url):
    dcp.save(
        {"a": torch.ones(2), "w": torch.ones(3, 3)}, storage_writer=StorageWriter(store_url), checkpoint_id="step-1"
    )
    before = torch.zeros(2)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"a": before, "w": getattr(torch.zeros(3, 3), convert)()}, storage_reader=StorageReader(store_url))
    error, _ = caught.value.failures[0]
    assert type(error) is StateMismatch
    assert error.key == "w"
    assert "layout" in str(error)
    assert before.tolist() == [0, 0]
