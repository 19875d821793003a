"""Random streams continue exactly where they were saved, or the resume is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from txstore.errors import ConfigError, StateMismatch
from txstore.train.piece import Place
from txstore.train.python_state import flatten, unflatten
from txstore.train.rng import _device, capture_streams, reseed_streams, restore_streams


@pytest.fixture(autouse=True)
def _own_streams() -> Iterator[None]:
    """The other tests of this process keep their streams."""
    before = capture_streams()
    yield
    restore_streams(before)


def own() -> dict[str, Any]:
    return {
        "pcg": np.random.default_rng(1),
        "philox": np.random.Generator(np.random.Philox(2)),
        "mt": np.random.Generator(np.random.MT19937(3)),
        "torch": torch.Generator().manual_seed(4),
        "python": random.Random(5),
        "legacy": np.random.RandomState(6),
    }


def draw(generators: dict[str, Any]) -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        torch.rand(1).item(),
        torch.randn(3).tolist(),
        generators["pcg"].integers(1 << 60),
        generators["philox"].random(),
        generators["mt"].random(dtype=np.float32),
        torch.rand(1, generator=generators["torch"]).item(),
        generators["python"].random(),
        generators["legacy"].standard_normal(),
    ]


def test_every_stream_goes_on_where_it_was_saved() -> None:
    generators = own()
    draw(generators)  # an odd number of gaussians: python and numpy keep the second one of a pair
    data, tensors = flatten(capture_streams(generators))
    assert not tensors, "plain data"
    wanted = [draw(generators) for _ in range(3)]
    fresh = own()
    draw(fresh)
    draw(fresh)
    names = restore_streams(unflatten(data, {}), fresh)
    assert set(names) >= {"python", "numpy", "torch", *(f"generator.{name}" for name in generators)}
    assert [draw(fresh) for _ in range(3)] == wanted


@pytest.mark.parametrize(
    "name", ["python", "numpy", "torch", "generator.pcg", "generator.torch", "generator.python", "generator.legacy"]
)
@pytest.mark.parametrize("damage", ["missing", "truncated", "wrong"])
def test_a_stream_that_cannot_be_restored_is_refused_and_nothing_is_changed(name: str, damage: str) -> None:
    generators = own()
    saved = capture_streams(generators)
    if damage == "missing":
        del saved[name]
    elif damage == "wrong":
        saved[name] = {"bit_generator": "SFC64"}
    elif isinstance(saved[name], bytes):
        saved[name] = saved[name][:-1]
    elif isinstance(saved[name], tuple):
        saved[name] = (saved[name][0], saved[name][1][:-2], saved[name][2])
    elif name in {"numpy", "generator.legacy"}:
        saved[name]["state"]["key"] = saved[name]["state"]["key"][:-1]
    else:
        del saved[name]["state"]["inc"]
    draw(generators)
    before = flatten(capture_streams(generators))[0]
    with pytest.raises(StateMismatch, match=name):
        restore_streams(saved, generators)
    assert flatten(capture_streams(generators))[0] == before


def test_a_stream_of_a_device_that_is_not_here_is_refused() -> None:
    saved = capture_streams()
    saved["cuda:7"] = saved["torch"]
    with pytest.raises(StateMismatch, match="'cuda:7' was saved, and there is none here"):
        restore_streams(saved)
    with pytest.raises(StateMismatch, match="no random streams"):
        restore_streams(None)


class FakeDevices:
    """An accelerator's module: what `torch.get_device_module` gives."""

    def __init__(self, count: int) -> None:
        self.generators = [torch.Generator().manual_seed(at) for at in range(count)]

    def get_rng_state(self, at: int) -> torch.Tensor:
        return self.generators[at].get_state()

    def set_rng_state(self, state: torch.Tensor, at: int) -> None:
        self.generators[at].set_state(state)


def test_every_device_of_the_accelerator_has_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = FakeDevices(3)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(devices.generators))
    monkeypatch.setattr(torch, "get_device_module", lambda _: devices)
    saved = capture_streams()
    assert {"cuda:0", "cuda:1", "cuda:2"} <= saved.keys()
    wanted = [torch.rand(2, generator=one).tolist() for one in devices.generators]
    restore_streams(saved)
    assert [torch.rand(2, generator=one).tolist() for one in devices.generators] == wanted
    devices.generators.pop()
    with pytest.raises(StateMismatch, match="cuda:2"):
        restore_streams(saved)


def test_reseeding_depends_on_the_saved_streams_the_rank_and_the_world_and_on_nothing_else() -> None:
    saved = capture_streams(own())
    random.random()
    other = capture_streams(own())

    def after(state: Any, rank: int, world: int) -> list[Any]:
        fresh = own()
        reseed_streams(state, Place(rank, world), fresh)
        return draw(fresh)

    places = [(saved, 0, 3), (saved, 1, 3), (saved, 2, 3), (saved, 0, 2), (other, 0, 3)]
    drawn = [after(*place) for place in places]
    assert after(saved, 1, 3) == drawn[1]
    for column in zip(*drawn, strict=True):
        assert len({str(value) for value in column}) == len(places), "two ranks draw the same"


def test_a_wrong_generator_is_refused() -> None:
    with pytest.raises(ConfigError, match="MT19937"):
        capture_streams({"bits": np.random.MT19937(1)})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="name"):
        capture_streams({"a.b": np.random.default_rng(1)})


def test_seeding_a_device_does_not_make_it_the_current_one() -> None:
    """A stand-in for ``torch.cuda`` on a host of two devices: there it would make a context on each."""

    class Device:
        default_generators = (torch.Generator(), torch.Generator())

        def get_rng_state(self, at: int) -> torch.Tensor:
            return self.default_generators[at].get_state()

    module = Device()
    stream = _device(module, 1)
    before = module.get_rng_state(0), stream.get()
    stream.seed(7)
    assert module.default_generators[1].initial_seed() == 7
    assert torch.equal(module.get_rng_state(0), before[0])
    assert stream.get() != before[1]
