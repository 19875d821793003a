"""The benchmark of record: txstore and its peers in turn, on the same server, in one run. ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine, peers, places, report
from benchmarks.cases import BACKENDS, IN_PEERS_ENVIRONMENT, NAMES, Case, cases, smoke
from benchmarks.counting import CountingProxy
from benchmarks.hosts import Group, Host, Measured, watch
from benchmarks.places import Place

Record = dict[str, Any]
"""One contender's save or load in one case: names, measurements of all rounds, and what the counting run counted."""


class Run:
    """One run: its hosts, and where its files go."""

    def __init__(self, stack: ExitStack, *, disk: str, tmpfs: str) -> None:
        self._stack = stack
        self._hosts: dict[str, Host] = {}
        self._places: dict[str, Callable[[], AbstractContextManager[Place]]] = {
            "disk": lambda: places.folder(disk),
            "tmpfs": lambda: places.folder(tmpfs),
            "s3": places.s3,
            "gcs": places.gcs,
            "azure": places.azure,
        }

    def host(self, environment: str) -> Host:
        """The host of an environment, started when it is first asked for."""
        if environment not in self._hosts:
            python = peers.python() if environment == "peers" else Path(sys.executable)
            self._hosts[environment] = self._stack.enter_context(Host(python))
        return self._hosts[environment]

    def _group(self, case: Case, contender: str, place: dict[str, Any], *, world: int, warm: bool = True) -> Group:
        host = self.host("peers" if contender in IN_PEERS_ENVIRONMENT else "ours")
        return Group(host, contender, place, world=world, kind=case.kind, mib=case.mib, warm=warm)

    def measure(self, case: Case) -> list[Record]:
        """All rounds of a case, then the run that counts."""
        with self._places[case.backend]() as place, ExitStack() as groups:
            if isinstance(place, places.Folder):
                place.touch(case.mib << 20)
            savers: dict[str, Group] = {}
            readers: dict[str, Group] = {}
            for contender in case.contenders:
                with watch(f"{contender}: start"):
                    savers[contender] = groups.enter_context(
                        _running(self._group(case, contender, place.of(contender), world=case.world))
                    )
                    readers[contender] = savers[contender]
                    if case.readers != case.world:
                        readers[contender] = groups.enter_context(
                            _running(self._group(case, contender, place.of(contender), world=case.readers))
                        )
            records: dict[tuple[str, str], Record] = {}
            for number in range(case.rounds):
                turn = number % len(case.contenders)
                for contender in case.contenders[turn:] + case.contenders[:turn]:
                    name = f"step-{1000 + number}"
                    with watch(f"round {number + 1}: {contender}"):
                        found = _save_and_load(case, savers[contender], readers[contender], name)
                    for operation, measured in found.items():
                        record = records.setdefault((contender, operation), _record(case, contender, operation))
                        record["rounds"].append(asdict(measured))
                    # At once: the next one writes to the memory that this one's pages lay in. In a virtual machine
                    # memory that was not used before costs ten times the write, and would cost whoever comes last.
                    place.clear()
            self._count(case, place, records)
        return list(records.values())

    def profile(self, case: Case) -> dict[str, tuple[Measured, dict[str, list[tuple[str, float]]]]]:
        """One save and one load of a case's first contender, sampled; by operation."""
        (contender,) = case.contenders
        with self._places[case.backend]() as place, ExitStack() as groups:
            saver = groups.enter_context(_running(self._group(case, contender, place.of(contender), world=case.world)))
            reader = saver
            if case.readers != case.world:
                at = place.of(contender)
                reader = groups.enter_context(_running(self._group(case, contender, at, world=case.readers)))
            saved = saver.run("save", "step-1000", profile=True), saver.profile
            return {"save": saved, "load": (reader.run("load", "step-1000", profile=True), reader.profile)}

    def _count(self, case: Case, place: Place, records: dict[tuple[str, str], Record]) -> None:
        """Requests and bytes, seen by a proxy. Nothing of it is timed: the proxy is slow."""
        for contender in case.contenders:
            with place.proxy() or ExitStack() as proxy, watch(f"count: {contender}"), ExitStack() as groups:
                if not isinstance(proxy, CountingProxy):
                    _count_calls(records)
                    return
                at = place.of(contender, proxy.url)
                saver = reader = groups.enter_context(_running(self._group(case, contender, at, world=case.world)))
                if case.readers != case.world:
                    reader = groups.enter_context(_running(self._group(case, contender, at, world=case.readers)))
                proxy.reset()
                _save_and_load(case, saver, reader, "step-2000", partial(_note, records, contender, proxy))
            place.clear()


def _note(records: dict[tuple[str, str], Record], contender: str, proxy: CountingProxy, operation: str) -> None:
    """Take over what the proxy has counted, and begin anew."""
    if (record := records.get((contender, operation))) is not None:
        record["requests"] = dict(proxy.methods)
        record["moved_bytes"] = proxy.sent_bytes if operation == "save" else proxy.received_bytes
    proxy.reset()


def _count_calls(records: dict[tuple[str, str], Record]) -> None:
    """On a file system the kernel has counted already."""
    for record in records.values():
        if record["world"] == record["readers"] == 1:
            record["requests"] = {"calls": record["rounds"][-1]["calls"]}
        if record["operation"] != "save" and record["rounds"][-1]["read_bytes"] is not None:
            record["moved_bytes"] = record["rounds"][-1]["read_bytes"]


@contextmanager
def _running(group: Group) -> Iterator[Group]:
    group.ready()
    yield group
    group.stop()


def _record(case: Case, contender: str, operation: str) -> Record:
    return {
        "backend": case.backend,
        "kind": case.kind,
        "mib": case.mib,
        "world": case.world,
        "readers": case.readers,
        "case": case.title,
        "contender": contender,
        "operation": operation,
        "rounds": [],
    }


def _save_and_load(
    case: Case, saver: Group, reader: Group, name: str, told: Callable[[str], None] = lambda _: None
) -> dict[str, Measured]:
    found: dict[str, Measured] = {}

    def run(group: Group, operation: str, only: list[str] | None = None) -> None:
        found[operation] = group.run("save" if operation == "save" else "load", name, only)
        told(operation)

    if case.backend == "disk":
        os.sync()  # nobody's save has to write what another one left
    run(saver, "save")
    if case.readers != case.world:
        run(reader, "reshard")
        del found["save"]  # measured where as many ranks load
        return found
    run(reader, "load")
    if case.partial:
        run(reader, "load model only", ["model"])
    return found


def main(arguments: Sequence[str]) -> None:
    """Run the cases, print the tables, write JSON and plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small states and few rounds: minutes")
    parser.add_argument("--smoke", action="store_true", help="tiny, one round, no server and no peers' environment")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--kinds", nargs="+", choices=("large", "llama"), help="only these states")
    parser.add_argument("--mib", type=int, help="size of every state, instead of each case's own")
    parser.add_argument("--rounds", type=int, help="rounds of every case")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder on the disk to be measured")
    parser.add_argument("--tmpfs", default="/dev/shm")
    parser.add_argument("--out", type=Path, help="where the JSON goes; default benchmarks/results/")
    parser.add_argument(
        "--go-on", action="store_true", help="keep the cases that the result file has, measure the others"
    )
    parser.add_argument("--from", dest="source", type=Path, help="measure nothing: show this result file")
    parser.add_argument("--docs", action="store_true", help="put tables and plot into docs/performance.md")
    options = parser.parse_args(arguments)
    if options.source is not None:
        results = json.loads(options.source.read_text())
        report.show(results)
        _publish(results, options.source, docs=options.docs)
        return
    chosen = cases(quick=options.quick, backends=options.backends, mib=options.mib, rounds=options.rounds)
    if options.smoke:
        chosen = smoke(options.mib or 8)
    if options.kinds:
        chosen = [case for case in chosen if case.kind in options.kinds]
    results: dict[str, Any] = {
        "machine": {},
        "mode": "smoke" if options.smoke else "quick" if options.quick else "full",
        "seconds": 0,
        "records": [],
    }
    path = report.path_of(results["mode"], options.out)
    if options.go_on and path.is_file():
        results = json.loads(path.read_text())
        done = {(record["backend"], record["case"]) for record in results["records"]}
        chosen = [case for case in chosen if (case.backend, case.title) not in done]
    began = time.monotonic() - results["seconds"]
    with ExitStack() as stack:
        run = Run(stack, disk=options.disk, tmpfs=options.tmpfs)
        for case in chosen:
            print(f"{NAMES[case.backend]}: {case.title}", file=sys.stderr)
            results["records"] += run.measure(case)
            # After each case: what an hour has measured is not lost with the last server.
            results["machine"] = machine.describe(options.disk, options.tmpfs)
            results["seconds"] = round(time.monotonic() - began)
            report.write(results, path)
    report.show(results)
    _publish(results, path, docs=options.docs)


def _publish(results: dict[str, Any], path: Path, *, docs: bool) -> None:
    if docs:
        report.document(results)
        report.plot(path, peers.python())
