"""What megatron-core needs to train on a machine without a GPU. Where there is one, :func:`prepare` does nothing.

Megatron is written for CUDA, but what a small GPT over gloo really calls of it is little. In this process, without touching
a file of Megatron's:

* ``torch.cuda.current_device()`` is the CPU, which is where Megatron then makes its buffers; ``synchronize()`` is nothing.
* The random state of "the GPU" (``manual_seed``, ``get_rng_state``, ``set_rng_state``) is the one of the CPU, so that
  Megatron's tracker keeps its streams apart: one that tensor parallel ranks share, one of each rank's own.
* ``torch.compile``, with which Megatron decorates small functions, is off. It would want a C++ compiler.
* Megatron's warnings that TransformerEngine, Apex and absl are not installed are not shown.
* ``triton``, which versions from 0.18 on import unconditionally, is an empty stand-in if it isn't installed.

This makes no Megatron of every kind run: nothing here is for TransformerEngine, mixtures of experts, pipelines, Megatron's
own optimizers, or a fully parallel load.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import types
import warnings
from typing import Any

import torch


def prepare() -> None:
    """Call it before anything of Megatron is imported. Imports parts of it.

    Raises:
        ImportError: there is no megatron-core, or it wants something that isn't there.
    """
    if torch.cuda.is_available():
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = _get_rng_state
    cuda.set_rng_state = _set_rng_state
    if importlib.util.find_spec("triton") is None:
        _stand_in_for_triton()

    from megatron.core.tensor_parallel import random as megatron_random

    # These two go past the functions above, to the generators of real devices.
    megatron_random._get_cuda_rng_state = _get_rng_state
    megatron_random._set_cuda_rng_state = _set_rng_state
    # The tracker warns when the state of the CPU changes while it lends out the GPU's. Here they are one.
    logging.getLogger(megatron_random.__name__).addFilter(lambda record: "CPU RNG state" not in record.getMessage())


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


def _stand_in_for_triton() -> None:
    # torch looks for triton once and remembers the answer. Had it not looked yet, it would take the stand-in for the real one.
    import torch._inductor.runtime.hints
    import torch._inductor.runtime.triton_compat
    import torch.utils._triton

    torch.utils._triton.has_triton_package()
    triton, language = _OnlyDecorators("triton"), _OnlyDecorators("triton.language")
    vars(triton).update(__version__="0.0.0", language=language)
    sys.modules.update({"triton": triton, "triton.language": language})


class _OnlyDecorators(types.ModuleType):
    """A module in which every name is a decorator, with or without arguments, that leaves its function as it is."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__}.{name}")
        return _decorator


def _decorator(*args: Any, **_: Any) -> Any:
    return args[0] if args and callable(args[0]) else _decorator
