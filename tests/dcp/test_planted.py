"""The tests can fail: each bug planted here, one at a time, makes the named check fail.

A bug is a change of one function's source, in this process or on all ranks. The checks are the tests of the
other files; that they pass without the bug is what those files show.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import test_async
import test_distributed
import test_format
import test_matrix
import test_refusals
import test_sharing
from workers import Pool, Rank

from txstore import store, transaction
from txstore.dcp import attempts, boundary, carrier, items, objects, passing, reader, scatter, tensors, writer
from txstore.shards import layout, reading, slabs


@dataclass(frozen=True)
class Bug:
    """In the source of `owner.name`, `old` becomes `new`."""

    owner: Any
    name: str
    old: str
    new: str

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the function by its changed form until `patch` is undone."""
        function = inspect.unwrap(getattr(self.owner, self.name))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.old!r} occurs {source.count(self.old)} times in {self.name}"
        made: dict[str, Any] = {}
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(code, f"planted {self.name}", "exec"), function.__globals__, made)
        patch.setattr(self.owner, self.name, made[self.name])


@dataclass(frozen=True)
class Local:
    """A check in this process; `call` gets a root and an empty folder."""

    bug: Bug
    call: Callable[[str, Path], None]


@dataclass(frozen=True)
class Ranks:
    """A check on ranks: a task of another test file and its arguments after the root."""

    bug: Bug
    world: int
    task: Callable[..., Any]
    args: tuple[Any, ...] = ()


LOCAL: dict[str, Local] = {
    "checksums are not compared": Local(
        Bug(reading, "verify_blocks", "!= known[number]", "is None"),
        lambda root, _: test_format.test_a_damaged_shard_is_named("first-block", 0, _stored(root)),
    ),
    "the last block is not verified": Local(
        Bug(reading, "verify_blocks", "range(count)", "range(count - 1)"),
        lambda root, _: test_format.test_a_damaged_shard_is_named("last-byte", 0, _stored(root)),
    ),
    "a covering read ends one block early": Local(
        Bug(reading, "_coalesce", "-(-want.stop // BLOCK_BYTES) * BLOCK_BYTES", "-(-want.stop // BLOCK_BYTES - 1)"),
        lambda root, _: test_format.test_small_tensors_share_reads(root),
    ),
    "neighbouring reads are not joined": Local(
        Bug(reading, "_coalesce", "start <= last.stop", "start < 0"),
        lambda root, _: test_format.test_small_tensors_share_reads(root),
    ),
    "everything between two reads is read": Local(
        Bug(slabs, "cut", "gap < BLOCK_BYTES", "True"),
        lambda root, _: _cut_property(),
    ),
    "wrong strides in slabs": Local(
        Bug(scatter, "strides_of", "strides[dim + 1] * shape[dim + 1]", "strides[dim + 1] * shape[dim]"),
        lambda root, _: test_matrix.test_targets_of_any_layout("transposed", root),
    ),
    "a slab goes to the wrong place": Local(
        Bug(scatter._SlabCopy, "__call__", "part.narrow(dim, low, length)", "part.narrow(dim, 0, length)"),
        lambda root, _: (
            test_matrix.test_every_value_that_stock_saves("view-large-transposed", _tmp(root), root)
            or _big_transposed(root)
        ),
    ),
    "a non-contiguous target is read into directly": Local(
        Bug(scatter, "_is_memory", "and target.is_contiguous()", ""),
        lambda root, _: test_matrix.test_targets_of_any_layout("channels-last", root),
    ),
    "a conjugate view is stored as its memory": Local(
        Bug(tensors.TensorSource, "read", ".resolve_conj()", ""),
        lambda root, tmp: test_matrix.test_every_value_that_stock_saves("view-conjugate", tmp, root),
    ),
    "pieces of a strided tensor all begin at its start": Local(
        Bug(tensors.TensorSource, "_materialise", "tensor[first:last]", "tensor[: last - first]"),
        lambda root, _: test_matrix.test_a_strided_tensor_of_many_pieces(root),
    ),
    "wrappers without memory are not refused": Local(
        Bug(items, "check_storable", "tensor.data_ptr() == 0", "False"),
        lambda root, _: test_matrix.test_what_cannot_be_stored_is_named_before_any_upload("wrapper", root),
    ),
    "objects are unpickled without the gate": Local(
        Bug(scatter, "gate", "weights_only=True", "weights_only=False"),
        lambda root, tmp: test_refusals.test_code_in_an_object_is_not_run(root, tmp, _Caplog()),
    ),
    "targets are filled before objects are judged": Local(
        Bug(
            reader.StorageReader,
            "_begin",
            "blocks.read_all(scatter.payloads)",
            "blocks.read_all(scatter.tensors); blocks.read_all(scatter.payloads)",
        ),
        lambda root, tmp: test_refusals.test_code_in_an_object_is_not_run(root, tmp, _Caplog()),
    ),
    "unread keys are not noticed": Local(
        Bug(reader.StorageReader, "prepare_global_plan", "if self._strict:", "if False:"),
        lambda root, _: test_refusals.test_a_part_is_loaded_on_purpose_only(root),
    ),
    "headers are not padded": Local(
        Bug(layout, "_encode_header", "// align) * align", "// 8) * 8"),
        lambda root, _: test_format.test_headers_are_padded_and_aligned(root),
    ),
    "a failed attempt is left undecided": Local(
        Bug(attempts.Attempts, "_abort_unfinished", "self._settle(transaction)", "pass"),
        lambda root, _: test_async.test_an_error_reaches_the_future(root),
    ),
    "the ticket of a cached plan is used": Local(
        Bug(writer.StorageWriter, "write_data", "ticket = arrived.ticket", "ticket = plan.storage_data.ticket"),
        test_async.test_cached_plans,
    ),
    "what was sent is not looked at again": Local(
        Bug(store.ChecksummedSource, "_look_again", "self._check(start, data)", "pass"),
        lambda root, _: test_refusals.test_state_that_changes_between_checksum_and_write(1.0, root),
    ),
    "a state that changes is not noticed": Local(
        Bug(store.ChecksummedSource, "_check", "known is not None and known != value", "False"),
        lambda root, _: test_refusals.test_state_that_changes_while_it_is_written(root),
    ),
    "a removed checkpoint is called damaged": Local(
        Bug(reading, "gone", "if is_retired(store, decision):", "if False:"),
        lambda root, _: test_format.test_retired_between_index_and_blocks(root),
    ),
    "two saves of one name both win": Local(
        Bug(transaction, "claim", "slot = 0", "slot = id(build)"),
        lambda root, _: test_async.test_two_saves_of_one_name(True, root),
    ),
    "an object of the planner's own kind fails the save": Local(
        Bug(items, "is_safe", "except Exception", "except KeyError"),
        lambda root, _: test_refusals.test_a_planner_with_an_encoding_of_its_own(root),
    ),
}

RANKS: dict[str, Ranks] = {
    "an error of a helper thread is dropped": Ranks(
        Bug(
            writer,
            "write_files",
            "shards = side_by_side(write, range(len(laid.files)), at_once=threads)",
            """shards = []
    for number in range(len(laid.files)):
        try:
            shards.append(write(number))
        except Exception:
            shards.append(Shard("data/x", rank, 1 << 30, 0, ()))""",
        ),
        2,
        test_refusals.third_shard,
        (3, "rank-00001-00001"),
    ),
    "sizes of results are not checked": Ranks(
        Bug(writer, "match", "or at.length != report.size_in_bytes", ""), 3, test_refusals.tampered, ("size",)
    ),
    "it commits without looking at the shards": Ranks(
        Bug(transaction.Transaction, "commit", "self._look_at_all(shards, visibility or Visibility())", "pass"),
        3,
        test_refusals.tampered,
        ("removed",),
    ),
    "a truncated shard passes": Ranks(
        Bug(transaction, "_look_at", "info.size == shard.size and info.crc32c", "info.crc32c"),
        3,
        test_refusals.tampered,
        ("truncated",),
    ),
    "a copied old plan brings its old ticket": Ranks(
        Bug(carrier, "_deliver", "if arrived.ticket is None:", "if True:"), 2, test_async.brooding
    ),
    "a committed name is taken again": Ranks(
        Bug(transaction, "stood_before", "if stood and not overwrite:", "if False:"), 2, test_refusals.taken
    ),
    "a cast is silent": Ranks(
        Bug(scatter, "_check_target", "if target.dtype != dtype:", "if False:"), 2, test_refusals.misfit, ("dtype",)
    ),
    "ranks may load different checkpoints": Ranks(
        Bug(reader.StorageReader, "_begin", "choice != mine or ", ""), 3, test_refusals.disagree_on_load, ("name",)
    ),
    "what another rank sends is believed": Ranks(
        Bug(passing, "_verify", "blocks.verify(piece.run.file, piece.run.start, as_bytes(data))", "pass"),
        2,
        test_sharing.damaged_on_the_way,
    ),
    "a name holds for ever": Ranks(
        Bug(reader.StorageReader, "set_up_storage_reader", "load.name = load.refusal = None", "pass"),
        2,
        test_distributed.names,
    ),
    "two chunks of one name share a file": Ranks(
        Bug(items, "pack", "max(front, newest.get(extent.name, 0))", "front"), 1, test_format.tiles_for_others
    ),
    "ranks may save to different roots": Ranks(
        Bug(
            writer.StorageWriter,
            "write_data",
            "if (ticket.url, ticket.checkpoint) != (self.store.url, save.checkpoint):",
            "if False:",
        ),
        3,
        test_refusals.disagree,
        ("name",),
    ),
    "an error that cannot be pickled leaves its rank": Ranks(
        Bug(boundary, "_travels", "try:", "return True\n    try:"),
        2,
        test_refusals.store_fails,
        (1, "locked-store", "put", ".safetensors"),
    ),
    "a wrong name is refused outside the collectives": Ranks(
        Bug(writer.StorageWriter, "reset", "save.refusal = asked", "raise asked"),
        2,
        test_refusals.disagree,
        ("bad-name",),
    ),
}


class _Caplog:
    """Stands in where a check looks at the log: only what follows matters here."""

    text = "'o'"


def _stored(root: str) -> str:
    test_format.save(test_format.damaged_state(), root, shard_bytes=3_000_000)
    return root


def _tmp(root: str) -> Path:
    return Path(root.removeprefix("file://")).parent


def _big_transposed(root: str) -> None:
    import torch

    value = torch.arange(6 << 20, dtype=torch.int32).reshape(3, -1)
    test_format.save({"t": value}, root, "step-2")
    target = {"t": torch.zeros(value.shape[::-1], dtype=torch.int32).t()}
    test_matrix.dcp.load(target, storage_reader=reader.StorageReader(root), checkpoint_id="step-2", no_dist=True)
    assert torch.equal(target["t"], value)


def _cut_property() -> None:
    for slab in slabs.cut((4, 2 << 20), (0, 0), (4, 10), 1, 16 << 20):
        assert slab.stop - slab.start == 10


def noticed(check: Callable[[], Any]) -> BaseException | None:
    """What a check raised; a mistake in the planting itself does not count."""
    try:
        check()
    except (KeyboardInterrupt, SystemExit):
        raise
    except (NameError, SyntaxError, ImportError):
        raise
    except BaseException as error:
        return error
    return None


@pytest.mark.parametrize("bug", LOCAL)
def test_a_bug_in_one_process_is_noticed(bug: str, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = LOCAL[bug]
    planted.bug.plant(monkeypatch)
    assert noticed(lambda: planted.call(root, tmp_path)) is not None


def with_bug(me: Rank, bug: str, root: str) -> Any:
    planted = RANKS[bug]
    with pytest.MonkeyPatch.context() as patch:
        planted.bug.plant(patch)
        return planted.task(me, root, *planted.args)


@pytest.mark.parametrize("bug", RANKS)
def test_a_bug_on_ranks_is_noticed(bug: str, pool: Pool, root: str) -> None:
    outcome = pool.first_failure(RANKS[bug].world, with_bug, bug, root)
    assert outcome is not None, "no rank noticed"
    assert ", in plant\n" not in outcome.trace, outcome.trace
    assert "NameError" not in outcome.trace


def test_the_planter_refuses_what_it_cannot_find() -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        Bug(objects, "gate", "no such text", "").plant(patch)
    assert "planted" not in sys.modules
