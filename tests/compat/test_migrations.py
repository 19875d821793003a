"""A migration allows exactly what it covers, is recorded, and says what the load does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txstore.compat import KeyPlan, OptimizerLayout, TensorFact, judge, migration, migrations
from txstore.errors import ConfigError, Incompatible
from txstore.manifest import Description

OLD, NEW = TensorFact("float32", (32000, 8)), TensorFact("float32", (32128, 8))
SAME = TensorFact("float32", (8, 8))
SAVED = {"model.embed.weight": OLD, "model.mlp.weight": SAME, "optimizer.0.embed.weight.exp_avg": OLD}
TODAY = {name: NEW if fact == OLD else fact for name, fact in SAVED.items()}
SAVED_DESCRIPTION = Description(fingerprints={"tokenizer": "sha256:1", "model_config": "sha256:2"})
TODAY_DESCRIPTION = Description(fingerprints={"tokenizer": "sha256:3", "model_config": "sha256:4"})


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_registered", {})


def pad(saved: object, fresh: object) -> object:
    return [*saved, *fresh[len(saved) :]]


def grow(saved, today) -> KeyPlan:
    return KeyPlan(transform={name: pad for name, fact in today.items() if saved.get(name, fact) != fact})


def register(name: str = "m", planner=None, **covers):
    """Each planner is a function of its own, as in a user's module."""
    covers = covers or {"keys": ["*"]}
    plan = planner if callable(planner) else (lambda saved, today: planner or KeyPlan())
    return migration(name, **covers)(plan)


GROW = {"fingerprints": ["tokenizer", "model_config"], "keys": ["model.embed.*", "optimizer.*.embed.*"]}


def judged(*names: str, saved=SAVED, today=TODAY, descriptions=(SAVED_DESCRIPTION, TODAY_DESCRIPTION), **more):
    return judge(*descriptions, saved, today, migrations=names, **more)


def test_a_vocabulary_grows() -> None:
    register("grow-vocab-v2", grow, **GROW)
    assert not judged().allowed
    judgement = judged("grow-vocab-v2")
    assert judgement.allowed
    assert judgement.record == ("migration grow-vocab-v2",)
    assert {one.by for one in judgement.differences} == {"migration grow-vocab-v2"}
    assert {one.name for one in judgement.accepted} == {"tokenizer", "model_config", "model.embed.weight", "optimizer.0.embed.weight.exp_avg"}  # fmt: skip
    assert judgement.plan.transforms.keys() == {"model.embed.weight", "optimizer.0.embed.weight.exp_avg"}
    assert judgement.plan.transforms["model.embed.weight"]([1, 2], [0, 0, 7]) == [1, 2, 7]
    assert judgement.plan.source("model.embed.weight") == "model.embed.weight"


EXTRA = {
    "fingerprint": {"descriptions": (SAVED_DESCRIPTION, Description(fingerprints={**TODAY_DESCRIPTION.fingerprints, "dataset_manifest": "sha256:5"}))},
    "setting": {"descriptions": (SAVED_DESCRIPTION, Description(fingerprints=TODAY_DESCRIPTION.fingerprints, settings={"batch_size": 8}))},
    "topology": {"descriptions": (SAVED_DESCRIPTION, Description(fingerprints=TODAY_DESCRIPTION.fingerprints, topology={"dp": 8}))},
    "missing": {"today": {**TODAY, "model.head.weight": SAME}},
    "missing-in-its-range": {"today": {**TODAY, "model.embed.bias": SAME}},
    "unexpected": {"saved": {**SAVED, "model.head.weight": SAME}},
    "unexpected-in-its-range": {"saved": {**SAVED, "model.embed.bias": SAME}},
    "layout": {"saved_layouts": (OptimizerLayout("A", (("a", "b"),)),), "today_layouts": (OptimizerLayout("A", (("b", "a"),)),)},
    "layout-unknown": {"saved_layouts": None, "today_layouts": (OptimizerLayout("A", ()),)},
}  # fmt: skip


@pytest.mark.parametrize("name", EXTRA)
def test_nothing_else_is_allowed_with_it(name: str) -> None:
    register("grow-vocab-v2", grow, **GROW)
    judgement = judged("grow-vocab-v2", **EXTRA[name])
    assert not judgement.allowed
    assert not {one.name for one in judgement.blocking} & {"tokenizer", "model_config", "model.embed.weight"}


def test_other_keys_that_changed_shape_are_touched_by_nobody() -> None:
    register("grow-vocab-v2", grow, **GROW)
    with pytest.raises(ConfigError, match=r"touches keys that it does not cover: model\.mlp\.weight"):
        judged("grow-vocab-v2", today={**TODAY, "model.mlp.weight": NEW})


def test_a_covered_fingerprint_that_is_unknown_is_allowed_too() -> None:
    register(fingerprints=["tokenizer"])
    judgement = judge(Description(), Description(fingerprints={"tokenizer": "sha256:1"}), {}, {}, migrations=["m"])
    assert judgement.allowed
    assert judgement.record == ("migration m",)


def test_rename_drop_and_fresh() -> None:
    saved = {"model.a": SAME, "model.b": OLD, "model.gone": SAME, "model.kept": SAME}
    today = {"model.b": SAME, "model.a": OLD, "model.new": NEW, "model.kept": SAME}
    plan = KeyPlan(rename={"model.a": "model.b", "model.b": "model.a"}, drop=["model.gone"], fresh=["model.new"])
    register("swap", plan)
    judgement = judge(Description(), Description(), saved, today, migrations=["swap"])
    assert judgement.allowed
    assert judgement.plan.renamed == {"model.a": "model.b", "model.b": "model.a"}
    assert (judgement.plan.dropped, judgement.plan.fresh) == (("model.gone",), ("model.new",))
    assert [judgement.plan.source(key) for key in today] == ["model.a", "model.b", None, "model.kept"]
    lines = "\n".join(map(str, judgement.accepted))
    assert "model.a: saved float32 [8, 8], now loaded as model.b" in lines
    assert "model.gone: saved float32 [8, 8], now nothing" in lines
    assert "model.new: saved nothing, now fresh float32 [32128, 8]" in lines


def test_a_rename_still_has_to_fit() -> None:
    register("rename", KeyPlan(rename={"a": "b"}))
    judgement = judge(Description(), Description(), {"a": OLD}, {"b": NEW}, migrations=["rename"])
    assert [(one.kind, one.name) for one in judgement.blocking] == [("shape", "b")]


def test_migrations_are_applied_in_order() -> None:
    register("one", KeyPlan(rename={"v1": "v2"}))
    register("two", lambda saved, today: KeyPlan(transform={"v2": pad}) if "v2" in saved else KeyPlan())
    judgement = judge(Description(), Description(), {"v1": OLD}, {"v2": NEW}, migrations=["one", "two"])
    assert judgement.allowed
    assert judgement.record == ("migration one", "migration two")
    assert judgement.plan.renamed == {"v2": "v1"}
    assert judgement.plan.transforms == {"v2": pad}
    assert not judge(Description(), Description(), {"v1": OLD}, {"v2": NEW}, migrations=["two", "one"]).allowed


def test_a_migration_that_is_used_up_is_not_asked_and_not_recorded() -> None:
    register("once", KeyPlan(rename={"a": "b"}))
    judgement = judge(
        Description(accepted=("migration once",)), Description(), {"b": SAME}, {"b": SAME}, migrations=["once"]
    )
    assert judgement.allowed
    assert judgement.record == ("migration once",)
    assert judgement.plan.renamed == {}
    assert "migration 'once' had nothing to migrate" in judgement.notes


def test_what_is_accepted_by_name_needs_no_migration() -> None:
    register(fingerprints=["training_config"])
    sides = [Description(fingerprints={"training_config": value}) for value in ("sha256:1", "sha256:2")]
    assert judge(*sides, {}, {}, migrations=["m"]).record == ("migration m",)
    judgement = judge(*sides, {}, {}, migrations=["m"], accept={"fingerprint:training_config"})
    assert judgement.record == ("fingerprint training_config: saved sha256:1, now sha256:2",)


BROKEN = {
    "raises": (lambda saved, today: 1 / 0, "failed: ZeroDivisionError"),
    "returns-nothing": (lambda saved, today: None, "returned NoneType"),
    "rename-unsaved": (KeyPlan(rename={"x": "new"}), "not saved: x"),
    "drop-unsaved": (KeyPlan(drop=["x"]), "not saved: x"),
    "rename-and-drop": (KeyPlan(rename={"old": "new"}, drop=["old"]), "renames and drops the same keys: old"),
    "two-to-one": (KeyPlan(rename={"old": "new", "kept": "new"}), "renames two keys to one: new"),
    "onto-a-saved-one": (KeyPlan(rename={"old": "kept"}), "that were saved, too: kept"),
    "rename-to-nowhere": (KeyPlan(rename={"old": "x"}), "does not have: x"),
    "fresh-nowhere": (KeyPlan(fresh=["x"]), "does not have: x"),
    "fresh-and-loaded": (KeyPlan(fresh=["kept"]), "fresh and loads them, too; drop the saved ones: kept"),
    "fresh-and-renamed": (KeyPlan(rename={"old": "new"}, fresh=["new"]), "fresh and loads them"),
    "transform-nowhere": (KeyPlan(transform={"x": pad}), "does not have: x"),
    "transform-of-nothing": (KeyPlan(transform={"new": pad}), "that are not loaded: new"),
    "transform-dropped": (KeyPlan(transform={"kept": pad}, drop=["kept"]), "that are not loaded: kept"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_migration_is_refused_by_its_name(name: str) -> None:
    plan, message = BROKEN[name]
    register("broken", plan)
    with pytest.raises(ConfigError, match=message) as caught:
        judge(
            Description(),
            Description(),
            {"old": SAME, "kept": SAME},
            {"new": SAME, "kept": SAME},
            migrations=["broken"],
        )
    assert "migration 'broken'" in str(caught.value)


def test_two_migrations_do_not_transform_one_key() -> None:
    register("one", KeyPlan(transform={"a": pad}), keys=["a"])
    register("two", KeyPlan(transform={"a": pad}), keys=["a"], fingerprints=["tokenizer"])
    saved, today = SAVED_DESCRIPTION, TODAY_DESCRIPTION
    with pytest.raises(ConfigError, match="another migration has transformed: a"):
        judge(saved, today, {"a": OLD}, {"a": NEW}, migrations=["one", "two"])


def test_unknown_migrations_name_the_registered_ones() -> None:
    with pytest.raises(ConfigError, match="'nope'; registered: none"):
        judged("nope")
    register("grow", grow, **GROW)
    register("other")
    with pytest.raises(ConfigError, match="'nope', 'no'; registered: grow, other"):
        judged("grow", "nope", "no")


@pytest.mark.parametrize(
    ("name", "covers"),
    [
        ("", {"keys": ["a"]}),
        ("Grow", {"keys": ["a"]}),
        ("a b", {"keys": ["a"]}),
        ("empty", {}),
        ("text", {"keys": "a*"}),
    ],
)
def test_registrations_that_are_refused(name: str, covers: dict) -> None:
    with pytest.raises(ConfigError):
        migration(name, **covers)


def test_two_functions_of_one_name_are_refused_and_a_reload_is_not() -> None:
    migration("same", keys=["a"])(grow)
    migration("same", keys=["a"])(grow)
    with pytest.raises(ConfigError, match="two migrations are called 'same'"):
        migration("same", keys=["a"])(pad)


def test_a_plan_takes_no_bare_string() -> None:
    with pytest.raises(ConfigError, match="not the string 'model'"):
        KeyPlan(drop="model")


LAYOUT = (OptimizerLayout("AdamW", (("a", "b", "head"), ("bias",))),)


@pytest.mark.parametrize(
    ("today", "allowed"),
    [
        ((("a", "b"), ("bias",)), True),
        ((("head", "a", "b"), ("bias",)), True),
        ((("a", "b"), ("bias", "head")), True),
        ((("b", "a", "head"), ("bias",)), False),
        ((("b", "a"), ("bias",)), False),
        ((("a",), ("bias", "b")), False),
        ((("a", "b", "head"), ("bias",), ()), False),
    ],
)
def test_covered_parameters_may_come_go_and_move_and_no_others(today: tuple, allowed: bool) -> None:
    register(parameters=["head"])
    layout = (OptimizerLayout("AdamW", today),)
    judgement = judge(
        Description(), Description(), {}, {}, migrations=["m"], saved_layouts=LAYOUT, today_layouts=layout
    )
    assert judgement.allowed == allowed
    assert "head" not in {one.name for one in judgement.blocking}
    other = (OptimizerLayout("SGD", today),)
    assert not judge(
        Description(), Description(), {}, {}, migrations=["m"], saved_layouts=LAYOUT, today_layouts=other
    ).allowed


def test_no_migration_makes_state_of_another_class_or_number_of_groups() -> None:
    register(keys=["*"], parameters=["*"])
    for other in (OptimizerLayout("SGD", LAYOUT[0].groups), OptimizerLayout("AdamW", LAYOUT[0].groups[:1])):
        with pytest.raises(Incompatible, match=r"begin it anew: fresh=\{'optimizer'"):
            judge(
                Description(), Description(), {}, {}, migrations=["m"], saved_layouts=LAYOUT, today_layouts=(other,)
            ).raise_if_blocked()


def test_a_layout_names_each_parameter_once() -> None:
    with pytest.raises(ConfigError, match="twice: a"):
        OptimizerLayout("AdamW", (("a", "b"), ("a",)))


names = st.sampled_from(["a", "b", "c", "d"])
tables = st.dictionaries(names, st.sampled_from([OLD, NEW, SAME]))


@given(
    saved=tables,
    today=tables,
    rename=st.dictionaries(names, names),
    drop=st.sets(names),
    fresh=st.sets(names),
    transform=st.sets(names),
)
def test_whatever_a_migration_says_an_allowed_load_is_complete_and_exact(
    saved, today, rename, drop, fresh, transform
) -> None:
    """Every key of today has one source of its own dtype and shape, or is transformed, or was declared fresh; every
    saved key is used once or was declared dropped."""
    plan = KeyPlan(rename=rename, drop=sorted(drop), fresh=sorted(fresh), transform=dict.fromkeys(transform, pad))
    migrations._registered.clear()
    register("any", plan)
    try:
        judgement = judge(Description(), Description(), saved, today, migrations=["any"])
    except ConfigError:
        return
    if not judgement.allowed:
        return
    sources = {key: judgement.plan.source(key) for key in today}
    for key, source in sources.items():
        if source is None:
            assert key in fresh
        else:
            assert saved[source] == today[key] or key in transform
    used = [source for source in sources.values() if source is not None]
    assert len(used) == len(set(used))
    assert saved.keys() - set(used) == set(judgement.plan.dropped)
    assert set(judgement.plan.dropped) <= drop
