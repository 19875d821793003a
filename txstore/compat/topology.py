"""The parallelism of a run, as plain numbers: what may be resharded when a checkpoint is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from txstore.errors import ConfigError

SIZES = ("world", "dp", "tp", "pp")
FIELDS = ("dp", "tp", "pp", "zero", "fsdp", "world")
"""The fields of a topology, in the order in which the matrix names them."""

ZERO_STAGES = range(4)

ROLES: Mapping[str, str] = {
    "dp": "dp",
    "data": "dp",
    "dp_replicate": "dp",
    "dp_shard": "dp",
    "replicate": "dp",
    "shard": "dp",
    "tp": "tp",
    "pp": "pp",
}
"""Usual names of mesh dimensions, and what each is a part of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes of the parallelism of one run.

    Raises:
        ConfigError: A size is not positive, the stage is none of 0 to 3, or dp x tp x pp is not `world`.
    """

    world: int
    """Ranks."""

    dp: int = 1
    """Data-parallel ranks, replicas and shards together."""

    tp: int = 1
    """Tensor-parallel ranks."""

    pp: int = 1
    """Pipeline stages."""

    zero: int = 0
    """ZeRO stage: 0 for none."""

    fsdp: str = "none"
    """FSDP strategy in the user's words, such as ``full_shard``."""

    def __post_init__(self) -> None:
        for name in FIELDS:
            check_field(name, getattr(self, name), "the topology")
        if self.dp * self.tp * self.pp != self.world:
            raise ConfigError(
                f"dp x tp x pp = {self.dp} x {self.tp} x {self.pp} is not the world of {self.world} ranks",
                next_step="count ranks of other kinds, such as context-parallel ones, in one of the three",
            )

    def as_dict(self) -> dict[str, int | str]:
        """For `Description.topology`."""
        return asdict(self)

    @classmethod
    def from_mesh(
        cls,
        names: Sequence[str],
        sizes: Sequence[int],
        *,
        zero: int = 0,
        fsdp: str = "none",
        roles: Mapping[str, str] = ROLES,
    ) -> Topology:
        """The topology of a device mesh, given as its dimensions' names and sizes.

        Several dimensions of data parallelism (replicas and shards) are multiplied into `dp`, and named in `fsdp`:
        2 replicas of 4 shards are not laid out like 8 shards.

        Args:
            names: ``mesh.mesh_dim_names``.
            sizes: ``mesh.shape``.
            zero: ZeRO stage.
            fsdp: FSDP strategy.
            roles: What each name is a part of: ``dp``, ``tp`` or ``pp``.

        Raises:
            ConfigError: A name has no role, or one is given twice.
        """
        if len(names) != len(sizes) or len(set(names)) != len(names):
            raise ConfigError(f"a mesh of dimensions {list(names)} and sizes {list(sizes)}: one size for each name")
        products = {"dp": 1, "tp": 1, "pp": 1}
        data: list[str] = []
        for name, size in zip(names, sizes, strict=True):
            role = roles.get(name)
            if role not in products:
                raise ConfigError(
                    f"mesh dimension {name!r} is no known part of dp, tp or pp",
                    key=name,
                    next_step=f"say what it belongs to: roles={{**ROLES, {name!r}: 'dp'}}",
                )
            check_field(role, size, f"mesh dimension {name!r}")
            products[role] *= size
            if role == "dp" and size > 1:
                data.append(f"{name}={size}")
        if len(data) > 1:
            fsdp = f"{fsdp} ({', '.join(data)})"
        return cls(world=products["dp"] * products["tp"] * products["pp"], zero=zero, fsdp=fsdp, **products)


def check_field(name: str, value: object, where: str) -> int | str:
    """Return `value` if the topology field `name` can have it.

    Raises:
        ConfigError: Unknown field, wrong type or range.
    """
    if name not in FIELDS:
        raise ConfigError(f"{where}: unknown field {name!r}", key=name, next_step=f"one of {', '.join(FIELDS)}")
    if name == "fsdp":
        if isinstance(value, str) and value:
            return value
        raise ConfigError(f"{where}: fsdp must be a text, not {value!r}", key=name, next_step="quote it")
    low, high = (ZERO_STAGES[0], ZERO_STAGES[-1]) if name == "zero" else (1, (1 << 31) - 1)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        expected = f"an integer from {low} to {high}" if name == "zero" else "a positive integer"
        raise ConfigError(f"{where}: {name} must be {expected}, not {value!r}", key=name)
    return value


def without_derived_world(topology: Mapping[str, int | str]) -> dict[str, int | str]:
    """The topology without `world` where that is dp x tp x pp: it then changes with them, and says nothing more."""
    sizes = [topology.get(name) for name in ("dp", "tp", "pp")]
    product = 1
    for size in sizes:
        if not isinstance(size, int):
            return dict(topology)
        product *= size
    if topology.get("world", product) != product:
        return dict(topology)
    return {name: value for name, value in topology.items() if name != "world"}


def with_world(topology: Mapping[str, int | str]) -> dict[str, int | str]:
    """The topology with `world`, if it is said or follows from dp, tp and pp."""
    known = without_derived_world(topology)
    if "world" in known or not all(isinstance(known.get(name), int) for name in ("dp", "tp", "pp")):
        return dict(topology)
    return {**known, "world": int(known["dp"]) * int(known["tp"]) * int(known["pp"])}
