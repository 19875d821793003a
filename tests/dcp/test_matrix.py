"""Whatever stock DCP round-trips, txstore round-trips: one process, compared with what stock loaded, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import CASES, DTYPES, bits, everything, of_dtype, same, target_of
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from txstore.dcp import StorageReader, StorageWriter
from txstore.errors import TxStoreError, UnsafeObject, UnsupportedValue

NAME = "step-1"

pytestmark = pytest.mark.filterwarnings(
    # torch about its own dtypes and layouts
    "ignore:B?Complex(Half|32) support:UserWarning",
    "ignore:torch.quantize_per_tensor:UserWarning",
    "ignore:Sparse CSR tensor support:UserWarning",
    "ignore:TypedStorage:UserWarning",
)


def stock(state: dict[str, Any], target: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`state` through stock DCP."""
    dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    dcp.load(target, storage_reader=FileSystemReader(folder), no_dist=True)
    return target


def save(state: dict[str, Any], root: str, **options: Any) -> None:
    dcp.save(state, checkpoint_id=NAME, storage_writer=StorageWriter(root, **options), no_dist=True)


def load(target: dict[str, Any], root: str, **options: Any) -> dict[str, Any]:
    dcp.load(target, checkpoint_id=NAME, storage_reader=StorageReader(root, **options), no_dist=True)
    return target


def ours(state: dict[str, Any], target: dict[str, Any], root: str) -> dict[str, Any]:
    save(state, root)
    return load(target, root)


def failure(error: CheckpointException, rank: int = 0) -> BaseException:
    return error.failures[rank][0]


def objects_under(root: str, ending: str = "") -> list[Path]:
    folder = Path(root.removeprefix("file://"))
    return sorted(path for path in folder.rglob(f"*{ending}") if path.is_file())


BEYOND_STOCK = {
    value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and name.rstrip("x248").rstrip("12345678") in {"bits", "int", "uint", "quint"}
}
"""Sub-byte and raw-bit dtypes, which torch can neither describe in a plan nor copy."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (), (0,), (2, 0)], ids=str)
def test_every_dtype_that_stock_saves(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path, root: str) -> None:
    def build(seed: int) -> dict[str, Any]:
        return {"t": of_dtype(dtype, shape, seed=seed)}

    try:
        wanted = stock(build(1), build(0), tmp_path / "stock")
        known = bits(wanted["t"])
    except (CheckpointException, RuntimeError, TypeError, NotImplementedError):
        assert dtype in BEYOND_STOCK
        return
    assert known == bits(build(1)["t"])
    same(ours(build(1), build(0), root), wanted)


def test_the_matrix_has_the_dtypes_that_people_use() -> None:
    names = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    assert names >= {
        "uint16",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2fnuz",
        "complex32",
        "complex128",
        "quint8",
        "bool",
    }


@pytest.mark.parametrize("case", CASES)
def test_every_value_that_stock_saves(case: str, tmp_path: Path, root: str) -> None:
    state = CASES[case]()
    wanted = stock(CASES[case](), target_of(state), tmp_path / "stock")
    same(wanted, state)  # stock itself is right, else this says nothing
    same(ours(state, target_of(state), root), wanted)


def test_everything_at_once_in_small_files(tmp_path: Path, root: str) -> None:
    state = everything()
    wanted = stock(everything(), target_of(state), tmp_path / "stock")
    save(state, root, shard_bytes=1 << 20, threads=3)
    assert len(objects_under(root, ".safetensors")) >= 4
    same(load(target_of(state), root, threads=3), wanted)
    same(load(target_of(state), root, threads=1), wanted)


def test_a_strided_tensor_of_many_pieces(root: str) -> None:
    """Larger than what is copied at once, and than what the store asks for at once."""
    value = (torch.arange(40 << 20, dtype=torch.int32) * 7 >> 5).to(torch.uint8).reshape(1 << 10, -1).t()
    save({"t": value, "u": value[::2, 3:]}, root)
    same(
        load({"t": torch.zeros_like(value), "u": torch.zeros_like(value[::2, 3:])}, root),
        {"t": value, "u": value[::2, 3:]},
    )


@pytest.mark.parametrize("layout", ["transposed", "channels-last", "column", "flipped-storage", "byte-offset"])
def test_targets_of_any_layout(layout: str, root: str) -> None:
    value = torch.arange(2 * 3 * 40 * 50, dtype=torch.float64).reshape(2, 3, 40, 50)
    save({"t": value}, root)
    target = {
        "transposed": lambda: torch.zeros(50, 40, 3, 2, dtype=torch.float64).permute(3, 2, 1, 0),
        "channels-last": lambda: torch.zeros_like(value).to(memory_format=torch.channels_last),
        "column": lambda: torch.zeros(2, 3, 40, 150, dtype=torch.float64)[..., 50:100],
        "flipped-storage": lambda: torch.zeros(40, 2, 3, 50, dtype=torch.float64).permute(1, 2, 0, 3),
        "byte-offset": lambda: torch.zeros(value.numel() + 1, dtype=torch.float64)[1:].view(value.shape),
    }[layout]()
    around = target.storage_offset()
    load({"t": target}, root)
    assert torch.equal(target, value)
    assert target.storage_offset() == around


def test_conjugate_and_negative_targets(root: str) -> None:
    value = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1)
    save({"c": value, "n": value.imag.clone()}, root)
    target = {"c": torch.zeros(6, dtype=torch.complex64).conj(), "n": torch.zeros(6, dtype=torch.complex64).conj().imag}
    load(target, root)
    same(target, {"c": value, "n": value.imag})


def test_a_parameter_stays_the_same_object(root: str) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save(model.state_dict(), root)
    before = other.weight
    load(other.state_dict(), root)
    assert other.weight is before
    assert torch.equal(other.weight, model.weight)
    assert other.weight.requires_grad


def test_tied_weights(tmp_path: Path, root: str) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"a": weight, "b": weight, "c": weight.t()}
    target = torch.zeros(3, 4)
    tied = load_tied = {"a": target, "b": target, "c": target.t()}
    wanted = stock(state, {"a": torch.zeros(3, 4), "b": torch.zeros(3, 4), "c": torch.zeros(4, 3)}, tmp_path / "stock")
    same(ours(state, load_tied, root), wanted)
    assert tied["a"] is tied["b"]


def test_state_built_from_metadata_alone(root: str) -> None:
    state = {"a": {"b": torch.arange(4.0)}, "list": [torch.ones(2), {"x": 1}], "step": 3}
    save(state, root)
    target: dict[str, Any] = {}
    _load_state_dict(target, storage_reader=StorageReader(root), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    same(target, state)
    part: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner(keys={"a.b"})
    _load_state_dict(part, storage_reader=StorageReader(root, strict=False), planner=planner, no_dist=True)
    same(part, {"a": {"b": torch.arange(4.0)}})


class HalfPlanner(dcp.DefaultSavePlanner):
    """The transforming planner of torch's documentation."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        item = super().resolve_data(write_item)
        return item.to(torch.float16) if isinstance(item, torch.Tensor) else item


class RenamingPlanner(dcp.DefaultLoadPlanner):
    """Loads ``model.x`` into ``x``, as torch's documentation shows."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.original = state_dict
        super().set_up_planner({f"model.{key}": value for key, value in state_dict.items()}, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original[read_item.dest_index.fqn.removeprefix("model.")] = torch.load(value, weights_only=True)


def test_a_planner_that_transforms(tmp_path: Path, root: str) -> None:
    state = {"w": torch.linspace(0, 1, 7), "n": 3}
    target = {"w": torch.zeros(7, dtype=torch.float16), "n": 0}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "stock"), planner=HalfPlanner(), no_dist=True)
    wanted = dict(target, w=target["w"].clone())
    dcp.load(wanted, storage_reader=FileSystemReader(tmp_path / "stock"), no_dist=True)
    dcp.save(state, checkpoint_id=NAME, storage_writer=StorageWriter(root), planner=HalfPlanner(), no_dist=True)
    same(load(target, root), wanted)


def test_a_planner_that_renames(root: str) -> None:
    save({"model.w": torch.arange(3.0), "model.n": 5}, root)
    target = {"w": torch.zeros(3), "n": 0}
    dcp.load(target, storage_reader=StorageReader(root), planner=RenamingPlanner(), no_dist=True)
    same(target, {"w": torch.arange(3.0), "n": 5})


def test_a_planner_without_flattening(tmp_path: Path, root: str) -> None:
    state = {"w": torch.arange(3.0), "o": {"deep": [1, 2]}}
    seen = []
    for writer, reader in (
        (FileSystemWriter(tmp_path / "stock"), FileSystemReader(tmp_path / "stock")),
        (StorageWriter(root), StorageReader(root)),
    ):
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(state, checkpoint_id=None, storage_writer=_named(writer), planner=planner, no_dist=True)
        target: dict[str, Any] = {"w": torch.zeros(3), "o": None}
        loader = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(target, storage_reader=reader, planner=loader, no_dist=True)
        seen.append({**loader.state_dict})  # DCP leaves objects in the planner's copy
    same(seen[1], seen[0])
    same({key: seen[1][key] for key in state}, state)


def _named(writer: Any) -> Any:
    if isinstance(writer, StorageWriter):
        writer.reset(NAME)
    return writer


def test_wrapper_subclasses_as_stock_does(tmp_path: Path, root: str, caplog: pytest.LogCaptureFixture) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def build(fill: float) -> dict[str, Any]:
        return {"t": TwoTensor(torch.full((3, 4), fill), torch.full((3, 4), -fill)), "w": torch.full((5,), fill)}

    with torch.serialization.safe_globals([TwoTensor]):
        wanted = stock(build(2), build(0), tmp_path / "stock")
        assert torch.equal(wanted["t"].b, torch.full((3, 4), -2.0))
        save(build(2), root)
        assert "'t'" not in caplog.text
        found = load(build(0), root)
        for half in ("a", "b"):
            assert bits(getattr(found["t"], half)) == bits(getattr(wanted["t"], half))
    # Outside the allow-list it is refused before anything is changed, by key; trust opens it.
    target = build(0)
    with pytest.raises(CheckpointException) as caught:
        load(target, root)
    error = failure(caught.value)
    assert isinstance(error, UnsafeObject)
    assert error.key == "t"
    assert float(target["w"].sum()) == 0
    assert torch.equal(load(target, root, trust_objects=True)["t"].b, torch.full((3, 4), -2.0))
    save(build(2), f"{root}-2")
    assert "'t'" in caplog.text


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_changes_nothing(device: str, root: str) -> None:
    """Models are often built and loaded under ``with torch.device(...)``."""
    value = torch.arange(60.0).reshape(3, 4, 5)
    quantized = of_dtype(torch.quint8)
    state = {"t": value.transpose(0, 2), "q": quantized, "o": {"x": [1]}}
    target = {"t": torch.zeros(3, 5, 4).permute(1, 2, 0), "q": of_dtype(torch.quint8, seed=0), "o": {"x": None}}
    with torch.device(device):
        save(state, root)
        load(target, root, threads=1)
    same(target, {**state, "t": value.transpose(0, 2)})


class Wrapper(torch.Tensor):
    """A wrapper subclass without memory of its own and without the protocol that says what is inside."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(str(func))


UNSUPPORTED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse-csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "wrapper": lambda: Wrapper(torch.ones(3)),
}


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3)


UNSUPPORTED["fake"] = _fake


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_cannot_be_stored_is_named_before_any_upload(kind: str, root: str) -> None:
    state = {"a": torch.ones(1 << 19), "bad": {"one": UNSUPPORTED[kind]()}, "z": torch.ones(4)}
    with pytest.raises(CheckpointException) as caught:
        save(state, root, shard_bytes=1 << 20)
    error = failure(caught.value)
    assert isinstance(error, UnsupportedValue), error
    assert error.key == "bad.one"
    assert "bad.one" in str(error)
    assert objects_under(root, ".safetensors") == []


@pytest.mark.parametrize("state", [{"a": {"b": 1}, "a.b": 2}, {"d": {1: 1, "1": 2}}], ids=["dots", "types"])
def test_duplicated_flat_keys_are_refused_before_any_upload(state: dict[str, Any], root: str) -> None:
    with pytest.raises(CheckpointException, match="duplicated flatten key"):
        save(state, root)
    assert objects_under(root) == []


def test_errors_are_typed(root: str) -> None:
    with pytest.raises(CheckpointException) as caught:
        load({"a": torch.ones(2)}, root)
    assert isinstance(failure(caught.value), TxStoreError)
