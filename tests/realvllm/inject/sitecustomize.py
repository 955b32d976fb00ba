"""Makes a real vLLM run out of memory at a step of more than so many tokens, or at a phase of its start.

Python reads this file in every process that has its folder on ``PYTHONPATH``. ``OOM_PHASE`` says where
(mlp, load, kvcache; nothing without it), ``OOM_ABOVE_TOKENS`` from which step on (mlp). The exception
comes from a frame that reads like torch's own, so that the traceback is as long as a real one and ends
as it does.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

PHASE = os.environ.get("OOM_PHASE", "")
ABOVE = int(os.environ.get("OOM_ABOVE_TOKENS", "0"))
MESSAGE = (
    "CUDA out of memory. Tried to allocate 3.83 GiB. GPU 0 has a total capacity of 79.15 GiB of which 2.11 GiB is "
    "free. Process 4242 has 77.03 GiB memory in use. Of the allocated memory 75.50 GiB is allocated by PyTorch, and "
    "512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management"
    "  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
_FRAME = """
def {name}(*args, **kwargs):
    if hit(args): raise error()
    return original(*args, **kwargs)
"""


def frame(original: Any, hit: Callable[[Sequence[Any]], bool], like: Any) -> Any:
    """A function in front of ``original`` that fails where ``hit``, in a frame that reads like that of ``like``."""
    import torch

    file, line = inspect.getsourcefile(like), inspect.getsourcelines(like)[1]
    code = "\n" * (line - 2) + _FRAME.format(name=like.__name__)
    known: dict[str, Any] = {
        "hit": hit, "original": original, "error": lambda: torch.OutOfMemoryError(MESSAGE)
    }  # fmt: skip
    exec(compile(code, str(file), "exec"), known)  # noqa: S102 - our own text
    return known[like.__name__]


def instead_of(module: Any, **replaced: Any) -> Any:
    """``module`` as one of its users sees it, with some functions replaced."""
    return types.SimpleNamespace(**{**vars(module), **replaced})


def in_mlp(module: Any) -> None:
    """``SiluAndMul.forward_native``: the activation of a step."""
    import torch.nn.functional as F  # noqa: N812 - as everybody calls it

    module.F = instead_of(F, silu=frame(F.silu, lambda args: args[0].shape[0] > ABOVE, F.silu))


def in_load(module: Any) -> None:
    """``create_weights``: the fourth tensor of the weights."""
    from torch.utils._device import DeviceContext

    made: list[object] = []

    def hit(args: Sequence[Any]) -> bool:
        made.append(args)
        return len(made) > 3

    module.ModelWeightParameter = frame(module.ModelWeightParameter, hit, DeviceContext.__torch_function__)


def in_kvcache(module: Any) -> None:
    """The tensors of the KV cache."""
    import torch
    from torch.utils._device import DeviceContext

    module.torch = instead_of(
        torch, zeros=frame(torch.zeros, lambda _: True, DeviceContext.__torch_function__)
    )


PLACES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "mlp": ("vllm.model_executor.layers.activation", in_mlp),
    "load": ("vllm.model_executor.layers.linear", in_load),
    "kvcache": ("vllm.v1.worker.utils", in_kvcache),
}


class Finder(importlib.abc.MetaPathFinder):
    """Changes the one module right after it was imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        """The module's own spec, with a step behind its execution."""
        where, change = PLACES[PHASE]
        if name != where:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if PHASE in PLACES:
    sys.meta_path.insert(0, Finder())
