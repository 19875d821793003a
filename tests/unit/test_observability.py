"""The dashboard, the alert rules and their page speak of metrics that exist, and say what to do about each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml

from txstore.events import Event, RestoreReason, SavePhase, SkipReason
from txstore.metrics import Metrics

FOLDER = Path(__file__).parents[2] / "docs" / "observability"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))

FUNCTIONS = {"time", "rate", "increase", "histogram_quantile", "abs"}
AGGREGATIONS = {"max", "min", "sum", "avg", "count"}
OPERATORS = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset"}
LABELS = {"job", "run", "rank", "instance", "reason", "phase", "le"}
DURATION = re.compile(r"(?:\d+(?:ms|[smhdwy]))+")
TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"""
    r"""|(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)|(?P<op>=~|!~|==|!=|<=|>=|[-+*/%^<>=,(){}])"""
)


def exported() -> dict[str, str]:
    """The name and type of every series that `Metrics` has, `_bucket` and its kin included."""
    families = list(Metrics().registry.collect())
    return {sample.name: family.type for family in families for sample in family.samples}


SERIES = exported()
NAMES = {re.sub(r"_(bucket|sum|count)$", "", name) if kind == "histogram" else name for name, kind in SERIES.items()}


class Wrong(Exception):
    """An expression that Prometheus would refuse, or that asks for what nobody exports."""


def names_in(expression: str, known: set[str]) -> set[str]:
    """The series that an expression asks for, all of them in `known`; as far as a tokenizer can tell, it is PromQL."""
    opened: list[str] = []
    found: set[str] = set()
    tokens = list(tokens_of(expression))
    for number, (kind, text) in enumerate(tokens):
        following = tokens[number + 1][1] if number + 1 < len(tokens) else ""
        if text in {"(", "{"}:
            labels = text == "{" or (number > 0 and tokens[number - 1][1] in {"by", "without", "on", "ignoring"})
            opened.append("{" if text == "{" else "labels" if labels else "(")
        elif text in {")", "}"}:
            if not opened or (opened.pop() == "{") != (text == "}"):
                raise Wrong(f"unbalanced {text}")
        elif kind == "range":
            if not (DURATION.fullmatch(text[1:-1]) or text == "[$__rate_interval]"):
                raise Wrong(f"not a duration: {text}")
        elif kind == "name" and opened and opened[-1] in {"{", "labels"}:
            if text not in LABELS:
                raise Wrong(f"no such label: {text}")
        elif kind == "name" and text not in OPERATORS:
            if text in AGGREGATIONS or text in FUNCTIONS:
                if following not in {"(", "by", "without"}:
                    raise Wrong(f"{text} of what?")
            elif following == "(":
                raise Wrong(f"no such function: {text}")
            elif text not in known:
                raise Wrong(f"nobody exports {text}")
            else:
                found.add(text)
    if opened:
        raise Wrong(f"unbalanced {opened[-1]}")
    return found


def tokens_of(expression: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(expression):
        token = TOKEN.match(expression, at)
        if not token:
            raise Wrong(f"no token: {expression[at:]!r}")
        at = token.end()
        if token.lastgroup != "space":
            yield str(token.lastgroup), token[0]


def all_rules() -> list[dict]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


ALERTS = [rule for rule in all_rules() if "alert" in rule]
RECORDS = [rule for rule in all_rules() if "record" in rule]
TARGETS = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize(
    "expression",
    [
        "checkpoint_last_comitted_step",
        "max by (job) (training_step",
        "max by (job} (training_step)",
        "training_step)",
        "rates(checkpoint_bytes_total[5m])",
        "rate(checkpoint_bytes_total[5 minutes])",
        'training_step{host="a"}',
        "max by (node) (training_step)",
        "training_step & 1",
        "rate + 1",
        "checkpoint_bytes_bucket",
        "checkpoint_commit_lag_seconds > 5",
    ],
)
def test_the_check_of_expressions_refuses(expression: str) -> None:
    with pytest.raises(Wrong):
        names_in(expression, set(SERIES))


def test_the_rules_have_the_shape_that_prometheus_wants() -> None:
    assert RULES.keys() == {"groups"}
    names = [group["name"] for group in RULES["groups"]]
    assert len(set(names)) == len(names)
    assert all(group.keys() == {"name", "rules"} for group in RULES["groups"])
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    assert len(ALERTS) + len(RECORDS) == len(all_rules())


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_is_whole(rule: dict) -> None:
    assert (
        {"alert", "expr", "labels", "annotations"} <= rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    )
    assert re.fullmatch(r"[A-Z][A-Za-z]+", rule["alert"])
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert rule["annotations"].keys() == {"summary", "action"}
    assert "{{ $labels.run }}" in rule["annotations"]["summary"]
    assert DURATION.fullmatch(rule.get("for", "0s"))
    assert re.search(r"[<>!=]", rule["expr"]), "it fires always"
    assert f"### {rule['alert']}\n" in PAGE


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_for_what_is_exported(rule: dict) -> None:
    recorded = {one["record"] for one in RECORDS}
    assert names_in(rule["expr"], set(SERIES) | recorded)
    assert all(re.fullmatch(r"[a-z_]+:[a-z_]+", name) for name in recorded)


@pytest.mark.parametrize(("title", "expression"), TARGETS)
def test_a_panel_asks_for_what_is_exported(title: str, expression: str) -> None:
    assert names_in(expression, set(SERIES))
    assert 'job=~"$job"' in expression
    assert 'run=~"$run"' in expression


def test_the_recovery_point_comes_first() -> None:
    assert ALERTS[0]["alert"] == "CheckpointVerifiedPointTooOld"
    assert "verified" in DASHBOARD["panels"][0]["title"]
    first = min(DASHBOARD["panels"], key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"]))
    assert first is DASHBOARD["panels"][0]
    assert PAGE.index("CheckpointVerifiedPointTooOld") < min(
        PAGE.index(f"### {rule['alert']}\n") for rule in ALERTS[1:]
    )


def test_the_dashboard_shows_every_metric() -> None:
    shown = set().union(*(names_in(expression, set(SERIES)) for _, expression in TARGETS))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) if name not in NAMES else name for name in shown} == NAMES


def test_the_dashboard_can_be_drawn() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["description"]
        assert panel["type"] in {"stat", "timeseries"}
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == ["datasource", "job", "run"]


def test_the_page_explains_every_metric_and_no_other() -> None:
    described = set(re.findall(r"^\| `(\w+)` \| (?:gauge|counter|histogram) \|", PAGE, re.MULTILINE))
    assert described == NAMES


def test_the_page_explains_every_reason_and_phase() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert {*get_args(RestoreReason), *get_args(SkipReason)} <= rows
    assert all(f"`{phase}`" in PAGE for phase in get_args(SavePhase))


def test_the_page_names_every_event_with_all_its_fields() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE))
    common = {"at_s", "rank", "world_size", "checkpoint", "step"}
    for kind in get_args(Event):
        named = re.findall(r"`(\w+)`", table[str(kind.__struct_config__.tag)])
        assert named == [field for field in kind.__struct_fields__ if field not in common]


def test_no_alert_is_explained_that_does_not_exist() -> None:
    assert set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == {rule["alert"] for rule in ALERTS}
