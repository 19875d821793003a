"""An explorer that runs the real protocol code through every order of its store operations.

The store is simulated: a request is sent, applied and answered at three different moments, and each of them can be
where things go wrong. The code under test is not rewritten as a model. An *actor* is any function of a `Store`; it
must be deterministic given the replies it gets. So what an actor is about to do depends only on the replies so far:
to step it, it is run again from its start against a `ReplayStore` that answers from that history and raises
`Pending` at the first question that has no answer yet. What comes out is remembered per history, so that each one
is run once, and a global state is a few small integers: the store's content, the requests in flight, the history of
each actor and the faults that are left.

What counts as one event, and why that loses nothing:

* *Send, apply, successful reply* of one request are one event. Between apply and reply only the sender differs, and
  it is waiting; a step of another actor in between is the same as one just after the reply.
* *Lost reply* (``lost``): the request is applied, the sender is told "outcome unknown".
* *Delayed request* (``late``): the sender is told "outcome unknown", the request stays in flight and may be applied at
  any later moment, after the sender has moved on. A *dropped* request is one that never is.
* *Early reply* (``early``): the sender is told "done", the object appears later or never: a peer's write that is not
  visible yet.
* *Definite refusal* (``denied``), *brief outage* (``down``): not applied, and the sender is told so.
* *A crash* needs no event. An actor that crashed is one that takes no further step, and the invariants, the promises
  to a later resolver and sweep among them, are checked in every state, not only in those where everybody has ended.

Two reductions, both sound: a read that no other actor can change the answer of (the object exists and is never
changed or deleted: `World.frozen`) is taken at once and alone, since it commutes with every other event; and a
create in flight towards an occupied key of that kind is forgotten, since it can never do anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from txstore.errors import AccessDeniedError, OutcomeUnknownError, StoreError, TransientError
from txstore.testing.model import (
    FAULTS,
    UNSEEN,
    Broken,
    Content,
    Outcome,
    Pending,
    ReplayStore,
    Reply,
    Request,
    Violation,
    World,
)


class _Node(NamedTuple):
    """An actor's history: either it wants `request`, or it ended with `outcome`."""

    request: Request | None
    outcome: Outcome | None
    ghost: Hashable
    replies: tuple[Reply, ...]


class _State(NamedTuple):
    content: int
    flying: tuple[int, ...]
    nodes: tuple[int, ...]
    left: tuple[int, ...]


class _Interned:
    """Equal values get one small integer."""

    def __init__(self) -> None:
        self.values: list[object] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable, value: object) -> int:
        found = self._numbers.setdefault(key, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


@dataclass(frozen=True)
class Explored:
    """What an exploration saw: distinct states, events, store contents, actor histories, and outcomes by actor."""

    states: int
    events: int
    contents: int
    histories: int
    outcomes: Mapping[str, frozenset[Outcome]]


class Explorer:
    """Breadth-first search over every order of events, so that a violation comes with a shortest trace."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._contents = _Interned()
        self._requests = _Interned()
        self._nodes = _Interned()
        self._applied: dict[tuple[int, int], tuple[Reply, int]] = {}
        self._advanced: dict[tuple[int, Hashable, Reply], int] = {}
        self._outcome_ok: set[tuple[int, int, int]] = set()
        self._rest_ok: set[Hashable] = set()

    def run(self) -> Explored:
        """Explore everything.

        Raises:
            Violation: Some invariant does not hold.
        """
        world = self._world
        self._parents: dict[_State, tuple[_State, str] | None] = {}
        nodes = tuple(self._start(number) for number in range(len(world.actors)))
        kinds = tuple(world.faults.get(kind, 0) for kind in FAULTS)
        first = _State(self._content(world.content), (), nodes, kinds)
        self._parents[first] = None
        queue = deque([first])
        events = 0
        while queue:
            state = queue.popleft()
            try:
                self._check(state)
                for label, following in self._successors(state):
                    events += 1
                    if following not in self._parents:
                        self._parents[following] = (state, label)
                        queue.append(following)
            except Broken as broken:
                self._fail(state, str(broken))
            if len(self._parents) > world.most_states:
                raise RuntimeError(f"more than {world.most_states} states")
        outcomes: dict[str, set[Outcome]] = {actor.name: set() for actor in world.actors}
        for state in self._parents:
            for number, actor in enumerate(world.actors):
                outcome = self._node(state.nodes[number]).outcome
                if outcome is not None:
                    outcomes[actor.name].add(outcome)
        return Explored(
            len(self._parents),
            events,
            len(self._contents.values),
            len(self._nodes.values),
            {name: frozenset(found) for name, found in outcomes.items()},
        )

    # Interning

    def _content(self, content: Content) -> int:
        return self._contents.number(frozenset(content.items()), content)

    def _content_of(self, number: int) -> Content:
        content = self._contents.values[number]
        assert isinstance(content, dict)
        return content

    def _node(self, number: int) -> _Node:
        node = self._nodes.values[number]
        assert isinstance(node, _Node)
        return node

    def _request(self, number: int) -> Request:
        request = self._requests.values[number]
        assert isinstance(request, Request)
        return request

    # Actors

    def _start(self, actor: int) -> int:
        return self._replay(actor, UNSEEN, ())

    def _replay(self, actor: int, ghost: Hashable, replies: tuple[Reply, ...]) -> int:
        try:
            outcome = self._world.actors[actor].run(ReplayStore(replies))
        except Pending as pending:
            node = _Node(pending.request, None, ghost, replies)
            return self._nodes.number((actor, ghost, replies), node)
        # How an actor came to its end no longer matters: histories with one outcome are one node.
        return self._nodes.number((actor, ghost, outcome), _Node(None, outcome, ghost, ()))

    def _advance(self, state: _State, actor: int, reply: Reply) -> int:
        node = self._node(state.nodes[actor])
        name = self._world.actors[actor].name
        ghost = node.ghost
        if ghost is UNSEEN and node.request is not None and not self._alone(state, actor, node.request):
            ghost = self._world.watch(name, self._content_of(state.content))
        key = (state.nodes[actor], ghost, reply)
        found = self._advanced.get(key)
        if found is None:
            if len(node.replies) >= self._world.longest:
                self._fail(state, f"{name} sent more than {self._world.longest} requests")
            found = self._advanced[key] = self._replay(actor, ghost, (*node.replies, reply))
        return found

    # Events

    def _apply(self, content: int, request: Request) -> tuple[Reply, int]:
        key = (content, self._requests.number(request, request))
        found = self._applied.get(key)
        if found is None:
            before = self._content_of(content)
            reply, after = self._world.apply(before, request)
            found = self._applied[key] = (reply, content if after is before else self._content(after))
        return found

    def _successors(self, state: _State) -> Iterator[tuple[str, _State]]:
        wanted = [(number, request) for number, node in enumerate(state.nodes) if (request := self._node(node).request)]
        for actor, request in wanted:
            if self._alone(state, actor, request):
                yield self._answered(state, actor, request)
                return
        for actor, request in wanted:
            yield self._answered(state, actor, request)
            name = self._world.actors[actor].name
            for kind in self._world.faulty(name, request):
                if state.left[FAULTS.index(kind)]:
                    yield self._faulted(state, actor, request, kind)
        for position, number in enumerate(state.flying):
            request = self._request(number)
            content = self._apply(state.content, request)[1]
            flying = state.flying[:position] + state.flying[position + 1 :]
            yield f"{request} lands late", self._tidy(state._replace(content=content, flying=flying))

    def _alone(self, state: _State, actor: int, request: Request) -> bool:
        if request.verb == "read" and request.key in self._content_of(state.content):
            return self._world.frozen(request.key)
        return self._world.hidden(self._world.actors[actor].name, request)

    def _answered(self, state: _State, actor: int, request: Request) -> tuple[str, _State]:
        reply, content = self._apply(state.content, request)
        label = f"{self._world.actors[actor].name}: {request}{f' -> {reply.error.__name__}' if reply.error else ''}"
        nodes = self._with(state, actor, reply)
        return label, self._tidy(state._replace(content=content, nodes=nodes))

    def _faulted(self, state: _State, actor: int, request: Request, kind: str) -> tuple[str, _State]:
        content, flying = state.content, state.flying
        error: type[StoreError] | None = OutcomeUnknownError
        if kind == "lost":
            content = self._apply(content, request)[1]
        elif kind in {"denied", "down"}:
            error = AccessDeniedError if kind == "denied" else TransientError
        else:
            flying = tuple(sorted((*flying, self._requests.number(request, request))))
            error = None if kind == "early" else error
        where = FAULTS.index(kind)
        left = (*state.left[:where], state.left[where] - 1, *state.left[where + 1 :])
        nodes = self._with(state, actor, Reply(error))
        label = f"{self._world.actors[actor].name}: {request} [{kind}]"
        return label, self._tidy(_State(content, flying, nodes, left))

    def _with(self, state: _State, actor: int, reply: Reply) -> tuple[int, ...]:
        return (*state.nodes[:actor], self._advance(state, actor, reply), *state.nodes[actor + 1 :])

    def _tidy(self, state: _State) -> _State:
        if not state.flying:
            return state
        flying = tuple(number for number in state.flying if not self._spent(state.content, self._request(number)))
        return state if flying == state.flying else state._replace(flying=flying)

    def _spent(self, content: int, request: Request) -> bool:
        if request.verb != "create" or request.key not in self._content_of(content):
            return False
        return self._world.frozen(request.key) and self._apply(content, request)[1] == content

    # Checks

    def _check(self, state: _State) -> None:
        world = self._world
        content = self._content_of(state.content)
        ended = {
            actor.name: outcome
            for number, actor in enumerate(world.actors)
            if (outcome := self._node(state.nodes[number]).outcome) is not None
        }
        if (state.content, -1, -1) not in self._outcome_ok:
            world.check_content(content)
            self._outcome_ok.add((state.content, -1, -1))
        for number, actor in enumerate(world.actors):
            key = (state.content, number, state.nodes[number])
            if actor.name in ended and key not in self._outcome_ok:
                world.check_outcome(actor.name, ended[actor.name], self._node(state.nodes[number]).ghost, content)
                self._outcome_ok.add(key)
        rest = (state.content, state.flying, tuple(sorted(ended.items(), key=lambda item: item[0])))
        if rest not in self._rest_ok:
            world.check_rest(content, [self._request(number) for number in state.flying], ended)
            self._rest_ok.add(rest)

    def _fail(self, state: _State, what: str) -> NoReturn:
        trace: list[str] = []
        step = self._parents[state]
        while step is not None:
            trace.append(step[1])
            step = self._parents[step[0]]
        raise Violation(what, trace[::-1])


def explore(world: World) -> Explored:
    """Explore `world`; see `Explorer.run`."""
    return Explorer(world).run()
