"""Whether an optimizer gives or takes its state in a way of its own, which nobody sees who reads `optimizer.state`."""

from __future__ import annotations

import torch

_HOOKED = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


def own_way(optimizer: torch.optim.Optimizer) -> str:
    """A method, or a hook around one, that adds to the state or makes something of it; "" if there is none."""
    for name in ("state_dict", "load_state_dict"):
        if not _is_torchs(optimizer, name):
            return f"a {name}"
    hooked = [name for name in _HOOKED if getattr(optimizer, f"_optimizer_{name}_hooks", None)]
    return f"a {hooked[0].replace('_dict_', '_dict ')} hook" if hooked else ""


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a class, or somebody in place of it, tells the state in its own way."""
    return not _is_torchs(optimizer, "state_dict")


def _is_torchs(optimizer: torch.optim.Optimizer, name: str) -> bool:
    method = getattr(optimizer, name)
    defined = getattr(method, "__func__", method)
    # That of bitsandbytes keeps its states from being cast, and nothing is cast here.
    is_harmless = name == "load_state_dict" and str(getattr(defined, "__module__", "")).startswith("bitsandbytes.")
    return is_harmless or defined is getattr(torch.optim.Optimizer, name)
