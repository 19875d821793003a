"""Near misses are recognised and counted; they never allow anything."""

from __future__ import annotations

import pytest

from txstore.compat import TensorFact, judge
from txstore.manifest import Description

NAMES = [f"layers.{n}.{kind}.{leaf}" for n in range(37) for kind in ("attn", "mlp") for leaf in ("weight", "bias")]
FACT = TensorFact("float32", (4, 4))


def hints(saved: list[str], today: list[str]) -> tuple[str, ...]:
    judgement = judge(Description(), Description(), dict.fromkeys(saved, FACT), dict.fromkeys(today, FACT))
    assert not judgement.allowed
    assert len(judgement.blocking) == len(set(saved) ^ set(today))
    return judgement.hints


def inside(prefix: str, at: int = 0) -> list[str]:
    parts = [name.split(".") for name in NAMES]
    return [".".join([*name[:at], prefix, *name[at:]]) for name in parts]


WRAPPED = {
    "compile": ("_orig_mod", "torch.compile"),
    "ddp": ("module", "DDP"),
    "fsdp1": ("_fsdp_wrapped_module", "FSDP1"),
    "recompute": ("_checkpoint_wrapped_module", "activation checkpointing"),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("at", [0, 2])
def test_a_wrapper_is_named_on_whichever_side_it_is(name: str, at: int) -> None:
    prefix, whose = WRAPPED[name]
    (hint,) = hints(inside(prefix, at), NAMES)
    assert hint.startswith(f"all 148 missing keys exist in the checkpoint with `{prefix}.` ({whose}")
    assert "save and load the unwrapped module" in hint
    (hint,) = hints(NAMES, inside(prefix, at))
    assert hint.startswith(f"all 148 missing keys exist in the checkpoint without `{prefix}.`")


def test_two_wrappers_at_once() -> None:
    (hint,) = hints([f"module._orig_mod.{name}" for name in NAMES], NAMES)
    assert "`module.`" in hint
    assert "`_orig_mod.`" in hint
    (hint,) = hints([f"module.{name}" for name in NAMES], [f"_orig_mod.{name}" for name in NAMES])
    assert "with `module.`" in hint
    assert "without `_orig_mod.`" in hint


def test_what_is_really_missing_is_not_counted() -> None:
    (hint,) = hints(inside("_orig_mod"), [*NAMES, "head.weight"])
    assert hint.startswith("148 of 149 missing keys exist")


@pytest.mark.parametrize("prefix", ["wrapped", "base_model.inner", "transformer"])
@pytest.mark.parametrize("component", ["", "model.", "optimizer.0."])
def test_another_prefix(prefix: str, component: str) -> None:
    long, short = [f"{component}{prefix}.{name}" for name in NAMES], [component + name for name in NAMES]
    (hint,) = hints(long, short)
    assert hint.startswith(f"all 148 missing keys exist in the checkpoint with the prefix `{prefix}.`")
    (hint,) = hints(short, long)
    assert hint.startswith(f"all 148 missing keys exist in the checkpoint without the prefix `{prefix}.`")


def test_many_keys_take_no_minute() -> None:
    names = [f"model.layers.{n}.attn.weight.{n % 7}" for n in range(20_000)]
    (hint,) = hints([name.replace("model.", "model.base.inner.") for name in names], names)
    assert hint.startswith("all 20000 missing keys exist in the checkpoint with the prefix `base.inner.`")


def test_no_hint_is_made_up() -> None:
    assert hints([f"old.{n}.a" for n in range(9)], [f"new.{n}.b" for n in range(9)]) == ()
    assert hints(NAMES, [*NAMES, "head.weight"]) == ()
    assert hints(["x.weight"], ["weight", "other"]) == ()  # one of two is chance
    assert hints([*NAMES, "_orig_mod.x"], NAMES) == ()


def test_of_two_twins_neither_is_the_one() -> None:
    # Both could be it: then no wrapper is blamed, only the prefixes that exist are named.
    assert not any("unwrapped" in hint for hint in hints(["_orig_mod.a", "module.a"], ["a"]))


def test_a_vocabulary_that_grew() -> None:
    saved = {
        "model.embed_tokens.weight": TensorFact("float32", (32000, 64)),
        "model.lm_head.weight": TensorFact("float32", (32000, 64)),
    }
    today = {name: TensorFact("float32", (32128, 64)) for name in saved}
    judgement = judge(Description(), Description(), saved, today)
    assert not judgement.allowed
    assert len(judgement.blocking) == 2
    assert judgement.hints == (
        "dimension 0 of 2 embedding-like tensors went from 32000 to 32128: the vocabulary changed, which needs a migration",
    )


@pytest.mark.parametrize(
    ("name", "saved", "today"),
    [
        ("model.mlp.weight", (32000, 64), (32128, 64)),
        ("model.embed.weight", (32000, 64), (32000, 65)),
        ("model.embed.weight", (32000, 64), (32128, 65)),
        ("model.embed.weight", (32000,), (32000, 1)),
        ("model.embed.weight", (), (1,)),
    ],
)
def test_other_shapes_are_no_vocabulary(name: str, saved: tuple, today: tuple) -> None:
    judgement = judge(
        Description(), Description(), {name: TensorFact("int8", saved)}, {name: TensorFact("int8", today)}
    )
    assert not judgement.allowed
    assert judgement.hints == ()
