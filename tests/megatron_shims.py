"""What megatron-core needs to save and load on a machine without a GPU. For processes of the tests; no package is edited.

* ``torch.cuda.synchronize`` and ``torch.cuda.current_device``, which its save path calls unconditionally;
* ``device="cuda"`` in its fully parallel load and its reuse of cached structures (:class:`CudaMeansCpu`);
* ``np.product``, which numpy 2 lacks, for versions before 0.16;
* ``yaml``, which ``megatron.training`` before 0.19 imports for an option that no test uses;
* ``triton``, which 0.18 and later import unconditionally: an empty stand-in, after torch has found out that there is none.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


def use(folder: str) -> None:
    """Makes this process import Megatron from ``folder``, and able to run it."""
    sys.path.insert(0, folder)
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    if not hasattr(np, "product"):
        np.product = np.prod  # type: ignore[attr-defined]
    if importlib.util.find_spec("yaml") is None:
        sys.modules["yaml"] = _Anything("yaml")
    if importlib.util.find_spec("triton") is None:
        _stand_in_for_triton()


def _stand_in_for_triton() -> None:
    # torch looks for triton once and remembers: with the stand-in found it would go on to use it.
    import torch._inductor.runtime.hints
    import torch._inductor.runtime.triton_compat
    import torch.utils._triton

    torch.utils._triton.has_triton_package()
    triton, language = _Anything("triton"), _Anything("triton.language")
    triton.__version__ = "0.0.0"
    triton.language = language
    sys.modules["triton"], sys.modules["triton.language"] = triton, language


class _Anything(types.ModuleType):
    """A module in which every name is a decorator that changes nothing."""

    __path__: list[str] = []  # noqa: RUF012 - the import system wants a list here

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def decorator(*args: Any, **_: Any) -> Any:
            return args[0] if args and callable(args[0]) else decorator

        return decorator


class CudaMeansCpu(TorchFunctionMode):
    """Inside, ``device="cuda"`` and ``.cuda()`` give tensors on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
