"""The judgement: any single difference blocks, is listed, and is allowed by exactly what the documents say."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace as with_fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from txstore.compat import (
    CHAT_TEMPLATE,
    CODE_VERSION,
    DATASET_MANIFEST,
    MODEL_CONFIG,
    RECOVERY_POINT,
    TOKENIZER,
    TRAINING_CONFIG,
    UNKNOWN,
    Judgement,
    OptimizerLayout,
    TensorFact,
    Topology,
    judge,
    parse_matrix,
)
from txstore.errors import ConfigError, Incompatible, LoadError
from txstore.manifest import Description, Progress

SAVED = Description(
    progress=Progress(100),
    topology=Topology(world=64, dp=8, tp=8, zero=1, fsdp="full_shard").as_dict(),
    fingerprints={name: f"sha256:{number:064x}" for number, name in enumerate(RECOVERY_POINT)},
    settings={"batch_size": 8, "seed": 1234, "shuffle": True, "lr": 0.1, "sampler": "random"},
)
KEYS = {
    "model.embed.weight": TensorFact("bfloat16", (32000, 64)),
    "model.layers.0.weight": TensorFact("bfloat16", (64, 64)),
    "optimizer.0.layers.0.weight.exp_avg": TensorFact("float32", (64, 64)),
}
LAYOUTS = (OptimizerLayout("AdamW", (("embed.weight", "a.weight", "b.weight"), ("bias",))),)
FP = "sha256:" + "f" * 64


def told(**changes) -> Judgement:
    """The judgement of the saved state against itself, with changes; `saved_...` changes the other side."""
    given = {"today": SAVED, "saved": SAVED, "saved_keys": KEYS, "today_keys": KEYS}
    given |= {"saved_layouts": LAYOUTS, "today_layouts": LAYOUTS, **changes}
    sides = [given.pop(name) for name in ("saved", "today", "saved_keys", "today_keys")]
    return judge(*sides, **given)


def topology(**changes: int | str) -> Description:
    return replace(SAVED, topology={**SAVED.topology, **changes})


def fingerprints(**changes: str) -> Description:
    return replace(SAVED, fingerprints={**SAVED.fingerprints, **changes})


def settings(**changes: object) -> Description:
    return replace(SAVED, settings={**SAVED.settings, **changes})


def without(field: str, name: str) -> Description:
    return replace(SAVED, **{field: {k: v for k, v in getattr(SAVED, field).items() if k != name}})


def keys(**changes: TensorFact | None) -> dict[str, TensorFact]:
    merged = {**KEYS, **{name.replace("__", "."): fact for name, fact in changes.items()}}
    return {name: fact for name, fact in merged.items() if fact is not None}


def groups(*names: tuple[str, ...]) -> tuple[OptimizerLayout, ...]:
    return (OptimizerLayout("AdamW", names),)


def test_no_difference_is_allowed_and_empty() -> None:
    judgement = told()
    assert judgement.allowed
    assert judgement == Judgement()
    judgement.raise_if_blocked()


# kind, class, what the message says of it, the change, the name that accepts it ("" if none does)
PLANTED = {
    "dp": ("topology", 1, "dp: saved 8, now 6", {"today": topology(dp=6, world=48)}, ""),
    "tp": ("topology", 2, "tp: saved 8, now 4", {"today": topology(tp=4, world=32)}, ""),
    "pp": ("topology", 2, "pp: saved 1, now 2", {"today": topology(pp=2, world=128)}, ""),
    "zero": ("topology", 2, "zero: saved 1, now 3", {"today": topology(zero=3)}, ""),
    "fsdp": ("topology", 2, 'fsdp: saved "full_shard", now "none"', {"today": topology(fsdp="none")}, ""),
    "world-alone": ("topology", 2, "world: saved not recorded, now 65", {"today": topology(world=65)}, "topology:world"),
    "unknown-zero": ("topology", 2, "zero: saved not recorded, now 1", {"saved": without("topology", "zero")}, "topology:zero"),
    "unknown-fsdp-today": ("topology", 2, 'fsdp: saved "full_shard", now not', {"today": without("topology", "fsdp")}, "topology:fsdp"),
    "new-field": ("topology", 2, "cp: saved not recorded, now 2", {"today": topology(cp=2)}, "topology:cp"),
    "setting": ("setting", None, "batch_size: saved 8, now 16", {"today": settings(batch_size=16)}, "batch_size"),
    "setting-text": ("setting", None, 'sampler: saved "random", now "sorted"', {"today": settings(sampler="sorted")}, "sampler"),
    "setting-float": ("setting", None, "lr: saved 0.1, now 0.10000000000000002", {"today": settings(lr=0.1 + 2e-17)}, "lr"),
    "setting-flag": ("setting", None, "shuffle: saved true, now 1", {"today": settings(shuffle=1)}, "shuffle"),
    "setting-new": ("setting", None, "workers: saved not recorded, now 4", {"today": settings(workers=4)}, "workers"),
    "setting-gone": ("setting", None, "seed: saved 1234, now not recorded", {"today": without("settings", "seed")}, "seed"),
    "training-config": ("fingerprint", None, "training_config: saved sha256:", {"today": fingerprints(training_config=FP)}, "fingerprint:training_config"),
    **{
        name: ("fingerprint", 3, f"{name}: saved sha256:", {"today": fingerprints(**{name: FP})}, "")
        for name in (MODEL_CONFIG, TOKENIZER, CHAT_TEMPLATE, DATASET_MANIFEST)
    },
    "fingerprint-unsaved": ("fingerprint", 3, "tokenizer: saved not recorded", {"saved": without("fingerprints", TOKENIZER)}, "fingerprint:tokenizer"),
    "fingerprint-gone": ("fingerprint", 3, "now not recorded", {"today": without("fingerprints", MODEL_CONFIG)}, "fingerprint:model_config"),
    "fingerprint-unknown-word": ("fingerprint", 3, "tokenizer: saved unknown, now unknown", {"saved": fingerprints(tokenizer=UNKNOWN), "today": fingerprints(tokenizer=UNKNOWN)}, "fingerprint:tokenizer"),
    "fingerprint-of-the-user": ("fingerprint", 3, "reward_model: saved not", {"today": fingerprints(reward_model=FP)}, "fingerprint:reward_model"),
    "required": ("fingerprint", 3, "reward_model: saved not recorded, now not", {"required": ["reward_model"]}, "fingerprint:reward_model"),
    "required-code": ("fingerprint", None, "code_version: saved", {"today": fingerprints(code_version=FP), "required": [CODE_VERSION]}, "fingerprint:code_version"),
    "missing-key": ("missing_key", 3, "model.head.weight: saved nothing, now float32 [2]", {"today_keys": keys(model__head__weight=TensorFact("float32", (2,)))}, ""),
    "unexpected-key": ("unexpected_key", 3, "model.embed.weight: saved bfloat16 [32000, 64], now nothing", {"today_keys": keys(model__embed__weight=None)}, ""),
    "dtype": ("dtype", 3, "model.embed.weight: saved bfloat16, now float32", {"today_keys": keys(model__embed__weight=TensorFact("float32", (32000, 64)))}, ""),
    "shape": ("shape", 3, "saved [32000, 64], now [32000, 65]", {"today_keys": keys(model__embed__weight=TensorFact("bfloat16", (32000, 65)))}, ""),
    "rank": ("shape", 3, "saved [32000, 64], now [32000, 64, 1]", {"today_keys": keys(model__embed__weight=TensorFact("bfloat16", (32000, 64, 1)))}, ""),
    "optimizer-class": ("optimizer", 3, "saved AdamW, now SGD", {"today_layouts": (OptimizerLayout("SGD", LAYOUTS[0].groups),)}, ""),
    "optimizer-count": ("optimizer", 3, "saved 1 optimizer, now 2 optimizers", {"today_layouts": LAYOUTS * 2}, ""),
    "optimizer-groups": ("optimizer", 3, "saved 2 groups, now 3 groups", {"today_layouts": groups(*LAYOUTS[0].groups, ())}, ""),
    "optimizer-unknown": ("optimizer", 3, "layout: saved not recorded, now 1 layout", {"saved_layouts": None}, "optimizer:layout"),
    "optimizer-unknown-today": ("optimizer", 3, "layout: saved 1 layout, now not", {"today_layouts": None}, "optimizer:layout"),
    "parameter-came": ("parameter", 3, "new: saved not in optimizer 0, now optimizer 0, group 1", {"today_layouts": groups(LAYOUTS[0].groups[0], ("bias", "new"))}, ""),
    "parameter-went": ("parameter", 3, "bias: saved optimizer 0, group 1, now not in", {"today_layouts": groups(LAYOUTS[0].groups[0], ())}, ""),
    "parameter-moved": ("parameter", 3, "bias: saved optimizer 0, group 1, now optimizer 0, group 0", {"today_layouts": groups((*LAYOUTS[0].groups[0], "bias"), ())}, ""),
    "parameters-swapped": ("parameter", 3, "a.weight: saved place 1 of optimizer 0, group 0, now b.weight is there", {"today_layouts": groups(("embed.weight", "b.weight", "a.weight"), ("bias",))}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_single_difference_blocks_and_is_told(name: str) -> None:
    kind, change_class, text, changes, accept_as = PLANTED[name]
    judgement = told(**changes)
    assert not judgement.allowed
    assert {one.kind for one in judgement.blocking} == {kind}
    assert {one.change_class for one in judgement.blocking} == {change_class}
    assert {one.accept_as for one in judgement.blocking} == {accept_as}
    assert text in "\n".join(map(str, judgement.blocking))
    with pytest.raises(Incompatible) as caught:
        judgement.raise_if_blocked()
    assert text in str(caught.value)
    assert all(one.next_step for one in judgement.blocking)
    assert all(one.next_step in str(caught.value) for one in judgement.blocking)
    assert judgement.record == ()


@pytest.mark.parametrize("name", PLANTED)
def test_only_the_right_name_accepts_it_and_the_next_manifest_says_so(name: str) -> None:
    _, _, text, changes, accept_as = PLANTED[name]
    others = {one for *_, one in PLANTED.values() if one and one != accept_as}
    bare = {"tokenizer", "model_config", "dp", "tp", "zero", "fsdp", "world", "*", "", "model.embed.weight"} - {
        accept_as
    }
    assert not told(**changes, accept=others | bare).allowed
    if accept_as:
        judgement = told(**changes, accept={accept_as})
        assert judgement.allowed
        assert [text in line for line in judgement.record] == [True]
        assert judgement.record == tuple(str(one) for one in judgement.accepted)
        judgement.raise_if_blocked()


PLACES = {"topology": "topology", "setting": "settings", "fingerprint": "fingerprints"}
GROUPS = {place: [name for name in PLANTED if PLANTED[name][0] == place] for place in PLACES} | {
    "layouts": [name for name in PLANTED if PLANTED[name][0] in {"optimizer", "parameter"}],
    "keys": [name for name in PLANTED if "today_keys" in PLANTED[name][3]],
}


@given(
    chosen=st.fixed_dictionaries({}, optional={place: st.sampled_from(names) for place, names in GROUPS.items()}),
    accepting=st.sets(st.sampled_from(sorted(GROUPS))),
)
def test_never_allowed_with_any_difference_that_nobody_allowed(chosen: dict[str, str], accepting: set[str]) -> None:
    """One difference in each of several places: each blocks for itself, and to accept some does not help the others."""
    changes: dict[str, object] = {"saved": SAVED, "today": SAVED}
    for place, name in chosen.items():
        for argument, value in PLANTED[name][3].items():
            merged = value
            if argument in {"saved", "today"}:
                field = PLACES[place]
                merged = replace(changes[argument], **{field: getattr(value, field)})
            changes[argument] = merged
    accept = {PLANTED[name][4] for place, name in chosen.items() if place in accepting} - {""}
    judgement = told(**changes, accept=accept)
    assert judgement.allowed == all(PLANTED[name][4] in accept for name in chosen.values())
    assert all(PLANTED[name][2] in "\n".join(judgement.lines()) for name in chosen.values())


facts = st.builds(TensorFact, st.sampled_from(["float32", "int8"]), st.lists(st.integers(0, 2), max_size=2))
tables = st.dictionaries(st.sampled_from([f"model.{one}" for one in "abcde"]), facts)


@given(tables, tables)
def test_tables_of_keys_are_allowed_only_if_equal(saved: dict, today: dict) -> None:
    judgement = judge(Description(), Description(), saved, today)
    assert judgement.allowed == (saved == today)
    named = {one.name for one in judgement.blocking}
    assert named == {name for name in saved.keys() | today.keys() if saved.get(name) != today.get(name)}


plain = st.dictionaries(
    st.sampled_from("abc"), st.one_of(st.integers(0, 2), st.booleans(), st.sampled_from(["", "x"]), st.floats(0, 1))
)


@given(plain, plain)
def test_settings_are_allowed_only_if_equal(saved: dict, today: dict) -> None:
    def typed(values: dict) -> dict:
        return {name: (isinstance(value, bool), value) for name, value in values.items()}

    judgement = judge(Description(settings=saved), Description(settings=today), {}, {})
    assert judgement.allowed == (typed(saved) == typed(today))


layouts = st.lists(st.sampled_from("abcd"), unique=True).map(lambda names: groups(tuple(names[:2]), tuple(names[2:])))


@given(layouts, layouts)
def test_layouts_are_allowed_only_if_equal(saved: tuple, today: tuple) -> None:
    assert told(saved_layouts=saved, today_layouts=today).allowed == (saved == today)


@pytest.mark.parametrize(
    "change", [fingerprints(code_version=FP), without("fingerprints", CODE_VERSION), fingerprints(packages=FP)]
)
def test_code_and_packages_are_reported_and_do_not_block(change: Description) -> None:
    judgement = told(today=change)
    assert judgement.allowed
    assert [one.verdict for one in judgement.differences] == ["noted"]
    assert judgement.notes == tuple(str(one) for one in judgement.differences)


def test_what_nobody_records_is_noted() -> None:
    judgement = judge(Description(), Description(), {}, {})
    assert judgement.allowed
    assert any("fingerprint" in note and "tokenizer" in note for note in judgement.notes)
    assert any("topology dp, tp, pp, zero, fsdp, world" in note for note in judgement.notes)
    for where in ("fingerprints", "topology"):
        assert any(note.endswith(f"; Description({where}=...) records it") for note in judgement.notes)
    assert any("layouts" in note for note in judgement.notes)


def test_a_setting_cannot_be_called_like_another_kind() -> None:
    change = replace(without("fingerprints", TOKENIZER), settings={**SAVED.settings, "fingerprint:tokenizer": 1})
    judgement = told(today=change, accept={"fingerprint:tokenizer"})
    assert [one.kind for one in judgement.blocking] == ["setting"]
    assert told(today=change, accept={"fingerprint:tokenizer", "setting:fingerprint:tokenizer"}).allowed


def test_what_was_accepted_before_stays_recorded_once() -> None:
    saved = replace(SAVED, accepted=("setting batch_size: saved 4, now 8", "migration old"))
    judgement = told(saved=saved, today=settings(batch_size=16), accept={"batch_size"})
    assert judgement.record == (*saved.accepted, "setting batch_size: saved 8, now 16")
    again = told(saved=replace(saved, accepted=judgement.record), today=settings(batch_size=16), accept=["batch_size"])
    assert again.record == judgement.record
    assert told(saved=saved).record == saved.accepted


def test_an_accept_that_is_used_up_is_noted_and_harmless() -> None:
    assert told(accept={"batch_size"}).notes == ("accept='batch_size' had nothing to accept",)


@pytest.mark.parametrize("argument", ["accept", "required", "migrations"])
def test_a_string_is_not_taken_for_its_letters(argument: str) -> None:
    with pytest.raises(ConfigError, match="not the string 'batch_size'"):
        told(**{argument: "batch_size"})


def test_an_older_world_follows_from_its_factors() -> None:
    assert told(saved=without("topology", "world")).allowed


# -- the matrix --------------------------------------------------------------------------------------

MATRIX = parse_matrix("""
resume_compatibility:
  - from: {dp: 8, tp: 8, pp: 1, zero: 1}
    to:   {dp: 6, tp: 8, pp: 1, zero: 1}
    status: verified
  - from: {dp: 8, tp: 8, pp: 1, zero: 1}
    to:   {dp: 8, tp: 4, pp: 2, zero: 1}
    status: blocked_until_drill_passes
  - from: {dp: 8, tp: 8}
    to:   {dp: 4, tp: 16}
    status: verified
""")


@pytest.mark.parametrize(
    ("today", "allowed"),
    [
        (topology(dp=6, world=48), True),
        (topology(dp=4, tp=16), True),
        (topology(tp=4, pp=2), False),
        (topology(dp=7, world=56), False),
        (topology(dp=6, world=48, fsdp="none"), False),
        (topology(dp=6, world=48, zero=2), False),
        (topology(dp=4, tp=16, zero=2), False),
        (topology(dp=6, world=47), False),
        (topology(dp=6, world=48, cp=2), False),
    ],
)
def test_the_matrix_allows_exactly_what_is_verified(today: Description, allowed: bool) -> None:
    judgement = told(today=today, matrix=MATRIX)
    assert judgement.allowed == allowed
    assert judgement.record == ()
    if allowed:
        assert {one.verdict for one in judgement.differences} == {"allowed"}
        assert all(one.by.endswith(": verified") for one in judgement.differences)


def test_the_class_is_that_of_the_whole_change() -> None:
    judgement = told(today=topology(dp=6, tp=16, world=96))
    assert [(one.name, one.change_class) for one in judgement.blocking] == [("dp", 2), ("tp", 2)]


def test_an_entry_is_about_both_sides() -> None:
    assert not told(saved=topology(dp=7, world=56), today=topology(dp=6, world=48), matrix=MATRIX).allowed


def test_the_matrix_has_a_direction() -> None:
    assert not told(saved=topology(dp=6, world=48), today=SAVED, matrix=MATRIX).allowed


def test_a_listed_pair_without_a_drill_names_its_entry() -> None:
    judgement = told(today=topology(tp=4, pp=2), matrix=MATRIX)
    assert {one.next_step for one in judgement.blocking} == {
        "matrix entry 2 says blocked_until_drill_passes: run the drill, then set it to verified"
    }
    assert judgement.matrix_entry == ""


def test_the_strictest_of_several_entries_counts() -> None:
    both = parse_matrix("""
resume_compatibility:
  - {from: {dp: 8}, to: {dp: 6}, status: verified}
  - {from: {dp: 8, tp: 8}, to: {dp: 6, tp: 8}, status: blocked_until_drill_passes}
""")
    assert not told(today=topology(dp=6, world=48), matrix=both).allowed


@pytest.mark.parametrize("today", [topology(dp=7, world=56), topology(tp=2, pp=4, zero=3, fsdp="a: b, {c}'\"é")])
def test_the_entry_to_paste_fits_once_it_is_verified(today: Description) -> None:
    judgement = told(today=today, matrix=MATRIX)
    assert "blocked_until_drill_passes" in judgement.matrix_entry
    text = "resume_compatibility:\n" + judgement.matrix_entry
    pasted = parse_matrix(text)
    assert not told(today=today, matrix=pasted).allowed
    assert told(today=today, matrix=pasted).matrix_entry == ""
    assert told(today=today, matrix=parse_matrix(text.replace("blocked_until_drill_passes", "verified"))).allowed


def test_no_entry_is_offered_where_none_can_help() -> None:
    judgement = told(saved=topology(cp=1), today=topology(cp=2))
    assert judgement.matrix_entry == ""
    assert "the matrix has no field cp" in judgement.blocking[0].next_step


def test_an_accepted_unknown_field_does_not_close_the_matrix() -> None:
    saved, today = without("topology", "fsdp"), topology(dp=6, world=48)
    assert not told(saved=saved, today=today, matrix=MATRIX).allowed
    assert told(saved=saved, today=today, matrix=MATRIX, accept={"topology:fsdp"}).allowed
    assert not told(saved=saved, today=today, accept={"topology:fsdp"}).allowed


def test_the_matrix_settles_nothing_but_the_parallelism() -> None:
    today = replace(topology(dp=6, world=48), settings={**SAVED.settings, "batch_size": 16})
    assert [one.kind for one in told(today=today, matrix=MATRIX).blocking] == ["setting"]


# -- what is told ------------------------------------------------------------------------------------


def test_every_difference_is_listed_never_only_the_first() -> None:
    saved = {f"model.{n}.weight": TensorFact("float32", (n, n)) for n in range(300)}
    today = {name: TensorFact("bfloat16", (*fact.shape, 1)) for name, fact in saved.items()} | {
        "more": TensorFact("int8", ())
    }
    judgement = told(saved_keys=saved, today_keys=today, today=settings(batch_size=16))
    assert len(judgement.blocking) == 602
    with pytest.raises(Incompatible) as caught:
        judgement.raise_if_blocked()
    message = str(caught.value)
    assert message.startswith("602 differences")
    assert all(message.count(f"{kind} {name}: ") == 1 for name in saved for kind in ("dtype", "shape"))
    assert message.count("a migration") == 1
    assert "resume(ResumeOptions(accept={...}))" in message
    assert "for these 601, next: a migration" in message


def test_the_error_travels_between_ranks_with_all_it_knows() -> None:
    with pytest.raises(LoadError) as caught:
        told(today=topology(dp=6, world=48)).raise_if_blocked()
    error = pickle.loads(pickle.dumps(caught.value.at_rank(3)))
    assert isinstance(error, Incompatible)
    assert str(error) == str(caught.value)
    assert error.judgement == caught.value.judgement
    assert error.judgement["differences"][0]["name"] == "dp"
    assert "from: {dp: 8, tp: 8, pp: 1, zero: 1" in str(error)


@pytest.mark.parametrize("name", PLANTED)
def test_json_form(name: str) -> None:
    judgement = told(**PLANTED[name][3])
    document = json.loads(json.dumps(judgement.to_dict()))
    assert document["allowed"] is False
    assert [one["verdict"] for one in document["differences"]] == ["blocked"] * len(judgement.blocking)
    assert document["differences"][0].keys() == {
        "kind", "name", "saved", "now", "change_class", "verdict", "by", "accept_as", "next_step"
    }  # fmt: skip
    assert document.keys() == {"allowed", "differences", "hints", "notes", "record", "matrix_entry"}


def test_a_verdict_that_nobody_knows_blocks() -> None:
    judgement = told(today=topology(dp=6, world=48))
    odd = with_fields(judgement, differences=tuple(with_fields(one, verdict="fine") for one in judgement.differences))
    assert not odd.allowed


def test_rendering_shows_everything_and_escapes_names() -> None:
    from rich.console import Console

    from txstore.compat.report import render

    evil = "\x1b[2J[red]evil"
    judgement = told(
        today=replace(topology(dp=6, world=48), settings={**SAVED.settings, "batch_size": 16}),
        today_keys={**KEYS, f"model.{evil}": TensorFact("int8", ())},
        accept={"batch_size", evil},
    )
    out = io.StringIO()
    render(judgement, Console(file=out, width=200, color_system=None, markup=False, highlight=False, emoji=False))
    text = out.getvalue()
    assert "resume blocked by 2 differences" in text
    for part in ("topology dp", "setting batch_size", "accept batch_size", "[red]evil", "- from: {dp: 8", "note: "):
        assert part in text
    assert "\x1b" not in text
    out = io.StringIO()
    render(told(), Console(file=out, width=200, color_system=None))
    assert out.getvalue() == "resume allowed\n"


def test_dtypes_are_compared_by_their_name() -> None:
    class Fake:
        dtype = "torch.float32"
        shape = (2, 3)

    assert TensorFact.of(Fake()) == TensorFact("float32", (2, 3)) == TensorFact("torch.float32", [2, 3])


def test_training_config_is_the_only_digest_of_meaning_that_a_name_accepts() -> None:
    acceptable = [n for n in RECOVERY_POINT if told(today=fingerprints(**{n: FP}), accept={f"fingerprint:{n}"}).allowed]
    assert acceptable == [TRAINING_CONFIG, CODE_VERSION]
