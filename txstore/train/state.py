"""`TrainState`: all that training needs to go on, under fixed keys, captured at one instant.

Everything is one flat DCP state dict of tensors (ADR 0006)::

    model.<fqn>                     parameters; rank 0's plain buffers
    buffers.rank-<r>.<fqn>          plain buffers of the other ranks
    optimizer.<i>.state.<fqn>.<..>  moments and steps
    gradients.<fqn>                 unfinished gradients, sharded like their parameters
    gradients.rank-<r>.<fqn>        unfinished gradients that are not reduced yet
    python.shared                   msgpack: what is equal on all ranks; its tensors as python.shared.<path>
    python.rank-<r>                 msgpack: what is of rank r alone

`capture` gives the state dict to save. `target` gives the one to load into, `apply` restores what was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from txstore.compat.key_tables import TensorFact
from txstore.compat.load_plan import LoadPlan
from txstore.errors import ConfigError, UnsupportedValue
from txstore.field_types import check
from txstore.train.attributes import PlainAttributes
from txstore.train.captured import Applied, Captured, Compared, add_tensors, refuse_unfit, shared_of
from txstore.train.comm_hooks import refuse_hooks_with_state
from txstore.train.cursor import CursorPiece, ElasticBatchSampler
from txstore.train.extras import ExtrasPiece
from txstore.train.gradients import GradientsPiece
from txstore.train.hidden import HiddenState
from txstore.train.history import History
from txstore.train.model_state import ModelPiece
from txstore.train.names import Models
from txstore.train.old_loops import OldLoops
from txstore.train.optimizer_state import OptimizerPiece, optimizers_in, with_moments
from txstore.train.piece import NO_PLAN, Loaded, OnWorldSizeChange, Piece, Place, SavedKeys, fresh_of, hint, keys_of
from txstore.train.progress import ProgressPiece, TrainProgress, bound_to_counters
from txstore.train.proof import Check, Start
from txstore.train.proof_piece import Facts, ProofPiece
from txstore.train.proof_watch import ProofWatch
from txstore.train.python_blobs import SHARED, blob, digest_of, like, own_key, pack, saved_keys, unpack
from txstore.train.rng import Generator, RandomStreams, capture_streams, with_loaders, with_modules
from txstore.train.scaler import ScalerPiece
from txstore.train.schedule import Schedule
from txstore.train.stateful import SchedulerPiece, scoped

_OF_A_RANK = re.compile(r"python\.rank-(0|[1-9][0-9]*)(?:\Z|[.\[])")


class TrainState:
    """Everything that the next training step depends on.

    Args:
        model: A module, or modules by name. After wrapping (DDP, ``fully_shard``, tensor parallel, compile).
        optimizers: One or several, over the parameters of `model`.
        schedulers: One or several learning rate schedulers.
        scaler: A ``torch.amp.GradScaler``.
        data: A data loader or sampler with a state dict, or several by name. Each rank's own, unless marked `shared`.
        extras: Objects with state dicts by name (EMA, callbacks). Equal on all ranks, unless marked `per_rank`.
        progress: The loop's counters; a new one if none is given, to be moved as `progress`.
        rng: Whether to save the random streams.
        generators: Generators of your own by name (numpy, torch, `random.Random`); those of loaders are found, and so
            are attributes of modules.

    Attributes:
        pieces: Every piece of state by name, in the order of a restore.
        progress: The counters that the training loop moves.
        accepted: What resumes of this state have accepted and left fresh, for the next manifests.
        loops: Those that a restore has left behind.
        watch: The proof of the last restore, by whichever checkpointer: the steps that follow prove no other.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] = (),
        *,
        schedulers: Any = None,
        scaler: Any = None,
        data: Any = None,
        extras: Mapping[str, Any] | None = None,
        progress: TrainProgress | None = None,
        rng: bool = True,
        generators: Mapping[str, Generator] | None = None,
    ) -> None:
        check("progress", progress, TrainProgress | None, "pass a TrainProgress, or move state.progress")
        check("rng", rng, bool)
        self.progress = progress or TrainProgress()
        self._models = Models(model)
        several = optimizers_in(optimizers)
        self._model = ModelPiece(self._models)
        self._optimizers = OptimizerPiece(several, self._models)
        others = scoped(extras, "extra", is_shared=True)
        self._gradients = GradientsPiece(self._models, self.progress, several)
        self._extras = ExtrasPiece(others)
        self._others = [one.item for one in others.values()]
        refuse_hooks_with_state(self._models, self._others)
        sources = {name: one.item for name, one in scoped(data, "data", is_shared=False).items()}
        self._cursors = [name for name, one in sources.items() if isinstance(one, ElasticBatchSampler)]
        if generators and not rng:
            raise ConfigError("generators are given, and rng=False saves none", next_step="leave one of the two out")
        generators = with_modules(with_loaders(generators, sources.values()), self._models.named_modules())
        self.pieces: dict[str, Piece] = {
            "model": self._model,
            "optimizer": self._optimizers,
            "scheduler": SchedulerPiece(schedulers, several, [*self._others, self.progress]),
            "scaler": ScalerPiece(scaler),
            "gradients": self._gradients,
            "extras": self._extras,
            "progress": ProgressPiece(self.progress),
            "data": CursorPiece(data, generators.values() if rng else (), self.progress),
        }
        # The streams come last: what is restored before them may draw from them.
        if rng:
            self.pieces["rng"] = RandomStreams(generators)
        moving = {name: one.item for name, one in scoped(schedulers, "scheduler", is_shared=True).items()}
        self._attributes = PlainAttributes(self._models, several, moving, self._others)
        self._hidden = HiddenState(self._models, several, self._others)
        self.history = History()
        self.loops = OldLoops(sources, self.progress)
        self._schedule = Schedule(moving, several)
        facts = Facts(
            self._models,
            self.progress,
            several,
            schedulers=list(moving.values()),
            scalers=[one.item for one in scoped(scaler, "scaler", is_shared=True).values()],
            data=sources,
            temporary=self._model.temporary,
            streams=(lambda: capture_streams(generators)) if rng else None,
        )
        self._proof = ProofPiece(facts, self.history)
        self.pieces["proof"] = self._proof
        self.watch: ProofWatch | None = None
        self.accepted: tuple[str, ...] | None = None

    def key_table(self) -> dict[str, TensorFact]:
        """Dtype and global shape of this rank's model tensors, to be judged before a load."""
        return {key: TensorFact.of(tensor) for key, tensor in self._model.table().items()}

    def validate(self, *, fresh: Collection[str] = ()) -> list[Check]:
        """Compare the live objects with what the checkpoint says of them, after `apply`."""
        return [*self._proof.checks(fresh), *self._extras.checks()]

    @property
    def start(self) -> Start:
        """Where training goes on after a resume."""
        return self._proof.start

    def capture(self, rank: int = 0, world_size: int = 1) -> Captured:
        """The state now, all of one instant.

        Raises:
            UnsupportedValue: Something could not be restored exactly; names its path.
            ConfigError: A hook that keeps state was registered since.
            NotProved: A loop from before the last restore goes on.
        """
        refuse_hooks_with_state(self._models, self._others)
        self.loops.refuse()
        self._attributes.tell()
        self._hidden.refuse_moved()
        states = {name: piece.capture(Place(rank, world_size)) for name, piece in self.pieces.items()}
        state: dict[str, Any] = {}
        for name, piece in states.items():
            add_tensors(state, piece.tensors, name)
        shared, lifted = pack(SHARED, {name: shared_of(piece) for name, piece in states.items()}, world_size)
        own, own_lifted = pack(own_key(rank), {name: piece.own for name, piece in states.items()}, world_size)
        for key, tensor in own_lifted.items():
            if isinstance(tensor, DTensor):
                raise UnsupportedValue(f"{key!r} is sharded and yet of one rank", key=key, next_step="mark it shared()")
        # What all ranks have alike is written by one: DCP would keep one of them, but plan by another's sizes.
        everywhere = {key: tensor for key, tensor in lifted.items() if isinstance(tensor, DTensor)}
        add_tensors(state, lifted if rank == 0 else everywhere, "python")
        if rank == 0:
            add_tensors(state, {SHARED: blob(shared)}, "python")
        add_tensors(state, {own_key(rank): blob(own), **own_lifted}, "python")
        digests = {name: digest_of(piece.shared) for name, piece in states.items()}
        digests |= {name: digest_of(value) for piece in states.values() for name, value in piece.replicated.items()}
        return Captured(state, self.progress.recorded(), tuple(states), digests)

    def python_target(self, metadata: Metadata, rank: int = 0, world_size: int = 1) -> dict[str, torch.Tensor]:
        """The part of `target` that holds the Python state: load it first, and `check` it, at little cost."""
        saved = saved_keys(metadata)
        live = self._live(saved, Place(rank, world_size))
        own = own_key(rank if world_size == saved.world_size else 0)
        target = {}
        for key, found in saved.tensors.items():
            if key in {SHARED, own} or key.startswith((f"{own}.", f"{SHARED}.")):
                target[key] = like(live.get(key), found)
        return target

    def _live(self, saved: SavedKeys, place: Place) -> dict[str, torch.Tensor]:
        """Tensors of the shared Python state as they are now: a sharded EMA is loaded into shards."""
        prefixes = {name: (f"{SHARED}.{name}.", f"{SHARED}.{name}[") for name in self.pieces}
        held = [name for name, prefix in prefixes.items() if any(key.startswith(prefix) for key in saved.tensors)]
        return pack(SHARED, {name: self.pieces[name].capture(place).shared for name in held}, 1)[1]

    def target(
        self,
        metadata: Metadata,
        rank: int = 0,
        world_size: int = 1,
        *,
        fresh: Collection[str] = (),
        plan: LoadPlan = NO_PLAN,
    ) -> dict[str, torch.Tensor]:
        """The state dict to hand to ``dcp.load`` with ``StorageReader(..., strict=False)``.

        Tensors of models are the live ones, so that no second copy is needed: a model whose load has failed is
        part old, part new, and must not be trained.

        Args:
            metadata: Of the checkpoint.
            rank: This rank.
            world_size: How many ranks there are now.
            fresh: Pieces that are not restored, on purpose.
            plan: What migrations do; `metadata` has the keys that it makes.

        Raises:
            StateMismatch: Lists what does not fit: keys that were not saved, shapes, dtypes.
            FormatError: The checkpoint is none of a `TrainState`.
        """
        saved = saved_keys(metadata, plan)
        target: dict[str, torch.Tensor] = dict(self.python_target(metadata, rank, world_size))
        problems: list[str] = []
        for name, piece in self.pieces.items():
            if name in fresh:
                continue
            asked = piece.targets(saved, Place(rank, world_size))
            left = keys_of(fresh)
            target.update({key: one for key, one in asked.tensors.items() if not key.startswith(left)})
            problems += asked.problems
        refuse_unfit(problems)
        target.update(self._schedule.targets(saved, fresh))
        return target

    def expected_keys(
        self,
        metadata: Metadata,
        rank: int = 0,
        world_size: int = 1,
        *,
        fresh: Collection[str] = (),
        plan: LoadPlan = NO_PLAN,
    ) -> frozenset[str]:
        """The saved keys that this rank accounts for: those it loads, and those it knows to be other ranks' own.

        What no rank accounts for would be left behind silently: compare the union over all ranks with the saved
        keys, by `unaccounted`.
        """
        saved = saved_keys(metadata, plan)
        place = Place(rank, world_size)
        keys = set(self.python_target(metadata, rank, world_size))
        keys |= {key for key in saved.tensors if _OF_A_RANK.match(key)}
        keys |= {key for key in saved.tensors if key.startswith(keys_of(fresh))}
        for piece in self.pieces.values():
            asked = piece.targets(saved, place)
            keys |= asked.tensors.keys() | asked.others
        return frozenset(keys)

    def compare(
        self,
        loaded: Mapping[str, Any],
        rank: int = 0,
        world_size: int = 1,
        *,
        on_world_size_change: OnWorldSizeChange = "error",
        fresh: Collection[str] = (),
    ) -> Compared:
        """What a loaded Python state shows of the checkpoint, for the judgement; changes nothing."""
        given, _ = self._given(loaded, Place(rank, world_size), on_world_size_change, fresh)
        differences = [one for name, piece in given.items() for one in self.pieces[name].differences(piece)]
        entries = unpack(SHARED, loaded)["pieces"].get("optimizer", ())
        differences += self._optimizers.following(entries, self._schedule.follows(fresh))
        one = given.get("optimizer")
        return Compared(differences, *((*self._optimizers.compared(one), with_moments(one)) if one else ()))

    def check(
        self,
        loaded: Mapping[str, Any],
        rank: int = 0,
        world_size: int = 1,
        *,
        on_world_size_change: OnWorldSizeChange = "error",
        fresh: Collection[str] = (),
        accept: Collection[str] = (),
        plan: LoadPlan = NO_PLAN,
    ) -> None:
        """Compare a loaded Python state with this one; changes nothing.

        Raises:
            StateMismatch: Lists all that does not fit.
        """
        place = Place(rank, world_size)
        self._judge(loaded, place, on_world_size_change, fresh, accept=accept, plan=plan, is_complete=False)

    def apply(
        self,
        loaded: Mapping[str, Any],
        rank: int = 0,
        world_size: int = 1,
        *,
        on_world_size_change: OnWorldSizeChange = "error",
        fresh: Collection[str] = (),
        accept: Collection[str] = (),
        plan: LoadPlan = NO_PLAN,
    ) -> Applied:
        """Restore what ``dcp.load`` has loaded into `target`. Nothing is restored before every check has passed.

        Args:
            loaded: The target, loaded.
            rank: This rank.
            world_size: How many ranks there are now.
            on_world_size_change: Refuse random streams of another number of ranks, or derive new ones from them.
            fresh: Pieces, and objects of pieces, that are not restored, on purpose.
            accept: Names of differences that are meant.
            plan: What migrations do.

        Raises:
            StateMismatch: Lists all that does not fit, or names a piece that did not take its state.
        """
        place = Place(rank, world_size)
        pieces = self._judge(loaded, place, on_world_size_change, fresh, accept=accept, plan=plan, is_complete=True)
        self.watch = None  # from here on the state is no longer what an earlier resume made of it
        optimizers = unpack(SHARED, loaded)["pieces"].get("optimizer", ())
        made = self._schedule.now(optimizers, fresh)
        self.loops.leave()
        window = self.history.state_dict()
        restored = {name: self.pieces[name].restore(given) for name, given in pieces.items()}
        if "gradients" in fresh:
            restored["gradients"] = self._gradients.begin_anew()
        if "progress" in fresh:
            self.history.load_state_dict(window)
        self._schedule.restore(optimizers, loaded, fresh, made)
        self._optimizers.follow(optimizers, self._schedule.follows(fresh))
        self.loops.left()
        return Applied(self.progress.recorded(), restored, next(iter(pieces.values())).saved_world_size)

    def _judge(
        self,
        loaded: Mapping[str, Any],
        place: Place,
        policy: OnWorldSizeChange,
        fresh: Collection[str],
        *,
        accept: Collection[str],
        plan: LoadPlan,
        is_complete: bool,
    ) -> dict[str, Loaded]:
        given, problems = self._given(loaded, place, policy, fresh, plan, is_complete=is_complete)
        for name, one in given.items():
            problems += self.pieces[name].problems(one)
            blocking = [found for found in self.pieces[name].differences(one) if found.verdict == "blocked"]
            problems += [f"{found} ({found.next_step})" for found in blocking if found.accept_as not in accept]
        refuse_unfit(problems)
        return given

    def _given(
        self,
        loaded: Mapping[str, Any],
        place: Place,
        policy: OnWorldSizeChange,
        fresh: Collection[str],
        plan: LoadPlan = NO_PLAN,
        *,
        is_complete: bool = False,
    ) -> tuple[dict[str, Loaded], list[str]]:
        """What was loaded for each piece, and which pieces only one side has."""
        shared = unpack(SHARED, loaded)
        schedule = self._schedule.problems(shared["pieces"].get("optimizer", ()), fresh)
        own = unpack(own_key(place.rank if place.world_size == shared["world_size"] else 0), loaded)
        missing = [name for name in self.pieces if name not in shared["pieces"] and name not in fresh]
        surplus = [name for name in shared["pieces"] if name not in self.pieces and name not in fresh]
        counts = bound_to_counters(shared["pieces"].get("progress", {}), self._cursors, fresh)
        problems = [*schedule, *counts, *(f"{name!r} was not saved{hint(name)}" for name in missing)]
        problems += [f"{name!r} was saved, and there is none here{hint(name)}" for name in surplus]
        given = {
            name: Loaded(
                shared["pieces"][name],
                own["pieces"][name],
                loaded,
                is_complete,
                place,
                shared["world_size"],
                policy,
                fresh_of(fresh, name),
                plan,
                self._schedule.begins(fresh),
            )
            for name in self.pieces
            if name in shared["pieces"] and name not in fresh
        }
        return given, problems
