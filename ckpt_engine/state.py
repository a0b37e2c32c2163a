"""From a nested state to flat keys and back.

A *state* is a nested dict (lists inside are fine) of tensors, DTensors, objects with ``state_dict``/``load_state_dict``
(modules, optimizers, anything stateful), :class:`PerRank` values and picklable values. :func:`flatten` turns it into flat
keys by the rules of ``torch.distributed.checkpoint`` (components joined by ``"."``; a list is opened only when there is a
tensor or a mapping in it), so that stock loaders find what they expect. On top of those rules: objects are opened at any
depth, empty mappings are remembered, and whatever can't be written back exactly raises a
:class:`StateError` that names the key. :func:`assign` puts loaded values back in place.

Nothing here reads tensor contents or touches the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from ckpt_engine.errors import StateError

PathItem = str | int

#: Tensor types whose memory is exactly what their shape and strides say.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

#: Deeper than this a state contains itself, for all that is known; Python's own recursion limit may be anything.
_MAX_DEPTH = 128


class PerRank:
    """A value that each rank has one of its own (RNG state, data-loader position).

    It is saved under a key per rank. On restore a rank gets its own back; a rank that the saving run didn't have gets that of
    rank ``rank % saved_ranks``, and the restore report says so.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class RngState(PerRank):
    """The random number generators of this rank: Python's, NumPy's (if loaded), torch's and those of the CUDA devices."""

    def __init__(self) -> None:
        super().__init__(None)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the generators' states."""
        version, internal, gauss = random.getstate()
        state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
        numpy = _loaded("numpy")
        if numpy is not None:
            name, keys, position, has_gauss, cached = numpy.random.get_state()
            state["numpy"] = [name, [int(k) for k in keys], int(position), int(has_gauss), float(cached)]
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts the generators back."""
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(state["torch"].cpu())
        numpy = _loaded("numpy")
        if numpy is not None and "numpy" in state:
            name, keys, position, has_gauss, cached = state["numpy"]
            numpy.random.set_state((name, numpy.array(keys, dtype="uint32"), position, has_gauss, cached))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([t.cpu() for t in state["cuda"]])


def _loaded(module: str) -> Any:
    import sys

    return sys.modules.get(module)


@dataclasses.dataclass
class FlatState:
    """A flattened state.

    Attributes:
        values: flat key to tensor, DTensor, ShardedTensor or picklable value.
        paths: flat key to path, as DCP's ``planner_data`` has it (dict keys as str, list positions as int).
        empties: key to path of the empty mappings, which stand for nothing in DCP's metadata.
        int_keys: prefixes of the mappings whose keys are ints; DCP's paths lose that.
        objects: (path, object, the dict that its ``state_dict()`` gave), innermost last.
        per_rank: prefixes of the :class:`PerRank` values, without the rank's own component.
        containers: key to path of the mappings and opened lists, the outermost one left out.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    paths: dict[str, tuple[PathItem, ...]] = dataclasses.field(default_factory=dict)
    empties: dict[str, tuple[PathItem, ...]] = dataclasses.field(default_factory=dict)
    int_keys: set[str] = dataclasses.field(default_factory=set)
    objects: list[tuple[tuple[PathItem, ...], Any, Any]] = dataclasses.field(default_factory=list)
    per_rank: list[str] = dataclasses.field(default_factory=list)
    containers: dict[str, tuple[PathItem, ...]] = dataclasses.field(default_factory=dict)


def flatten(state: Mapping[str, Any], *, rank: int = 0) -> FlatState:
    """Flattens ``state``; see the module docstring.

    Args:
        state: nested mapping. It is not changed; objects in it are asked for their ``state_dict()``.
        rank: this rank, for :class:`PerRank` values.

    Raises:
        StateError: a key is neither str nor int, two paths give one flat key (to values or to containers: what is kept about
            a container is kept by its flat key), a container is inside of itself, or the state isn't a mapping.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"state is a {type(state).__name__}, expected a dict", phase="plan")
    flat = FlatState()
    try:
        _open(flat, (), "", state, rank)
    except _TooDeepError as error:
        raise _describe_depth(state, error.path) from None
    return flat


class _TooDeepError(Exception):
    def __init__(self, path: tuple[PathItem, ...]) -> None:
        self.path = path


def _describe_depth(state: Any, path: tuple[PathItem, ...]) -> StateError:
    """Which container along ``path`` is one that it lies in."""
    first: dict[int, int] = {}
    container = state
    for depth, item in enumerate(path):
        if isinstance(container, PerRank):
            container = container.value
            continue
        if not isinstance(container, (Mapping, list)):
            break
        start = first.setdefault(id(container), depth)
        if start != depth:
            where, outer = (".".join(map(str, path[:length])) for length in (depth, start))
            return StateError(
                f"{where!r} is the {type(container).__name__} that it lies in, {outer or 'the state'!r}: "
                "a state can't contain itself",
                key=where,
                phase="plan",
            )
        container = container[int(item)] if isinstance(container, list) else container[_real_key(container, item)]
    where = ".".join(map(str, path[:8]))
    return StateError(f"{where + '...'!r} is nested more than {_MAX_DEPTH} levels deep", key=where, phase="plan")


def _unwrap(value: Any) -> Any:
    """The module inside DistributedDataParallel or torch.compile: their prefixes would tie a checkpoint to the wrapper."""
    while isinstance(value, torch.nn.Module):
        if isinstance(value, torch.nn.parallel.DistributedDataParallel):
            value = value.module
        elif type(value).__name__ == "OptimizedModule" and isinstance(
            getattr(value, "_orig_mod", None), torch.nn.Module
        ):
            value = value._orig_mod
        else:
            break
    return value


def is_object(value: Any) -> bool:
    """Whether ``value`` is opened through ``state_dict()``."""
    return (
        not isinstance(value, (type, torch.Tensor, Mapping))
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def _list_is_open(values: list[Any], depth: int) -> bool:
    return depth > _MAX_DEPTH or any(  # a list inside of itself is opened, and then refused for its depth
        isinstance(v, (torch.Tensor, ShardedTensor, Mapping, PerRank))
        or is_object(v)
        or (isinstance(v, list) and _list_is_open(v, depth + 1))
        for v in values
    )


def _open(flat: FlatState, path: tuple[PathItem, ...], key: str, value: Any, rank: int) -> None:
    if len(path) > _MAX_DEPTH:
        raise _TooDeepError(path)
    if isinstance(value, PerRank):
        flat.per_rank.append(key)
        name = f"rank{rank}"
        path, key = (*path, name), f"{key}.{name}"
        value = value if is_object(value) else value.value
    if is_object(value):
        target = _unwrap(value)
        content = target.state_dict()
        flat.objects.append((path, target, content))
        value = content
    if isinstance(value, Mapping):
        if path:
            _container(flat, path, key)
            if not value:
                if key in flat.values:
                    raise _collision(key, flat.paths[key], path)
                flat.empties[key] = path
        prefix = key + "." if path else ""
        kinds: set[type] = set()
        for name, item in value.items():
            if type(name) is not str and type(name) is not int:
                raise StateError(
                    f"key {name!r} ({type(name).__name__}) in {key or 'the state'!r} can't be flattened, expected str or int",
                    key=f"{prefix}{name}",
                    phase="plan",
                )
            kinds.add(type(name))
            text = str(name)
            child = prefix + text
            if isinstance(item, torch.Tensor):  # the fast path: most of a state is tensors in dicts
                _leaf(flat, (*path, text), child, item)
            else:
                _open(flat, (*path, text), child, item, rank)
        if len(kinds) > 1:
            raise StateError(
                f"the keys of {key or 'the state'!r} are str and int mixed, which can't be told apart later",
                key=key,
                phase="plan",
            )
        if int in kinds:
            if path and not key:
                raise StateError(
                    "a mapping with int keys is called '', which can't be told from the state itself later",
                    key=key,
                    phase="plan",
                )
            flat.int_keys.add(key)
        return
    if isinstance(value, list) and _list_is_open(value, len(path)):
        _container(flat, path, key)
        for index, item in enumerate(value):
            _open(flat, (*path, index), f"{key}.{index}", item, rank)
        return
    _leaf(flat, path, key, value)


def _leaf(flat: FlatState, path: tuple[PathItem, ...], key: str, value: Any) -> None:
    if key in flat.values:
        raise _collision(key, flat.paths[key], path)
    if key in flat.empties:
        raise _collision(key, flat.empties[key], path)
    flat.values[key] = value
    flat.paths[key] = path


def _container(flat: FlatState, path: tuple[PathItem, ...], key: str) -> None:
    if key in flat.containers:
        raise _collision(key, flat.containers[key], path)
    flat.containers[key] = path


def _collision(key: str, one: tuple[PathItem, ...], other: tuple[PathItem, ...]) -> StateError:
    return StateError(
        f"two values flatten to the key {key!r}: {one!r} and {other!r}",
        key=key,
        phase="plan",
        hint="rename one of them",
    )


def check_tensor(key: str, tensor: torch.Tensor) -> None:
    """Refuses tensors whose bytes can't be read through shape and strides. Runs for every tensor of every save.

    Raises:
        StateError: names the key and says what to save instead. A wrapper subclass (FP8 and other quantised tensors) has
            an empty storage of its own: copying that would write garbage without an error. So has a tensor whose storage
            was given back (``untyped_storage().resize_(0)``, the way to off-load weights): reading it ends the process.
    """
    kind = type(tensor)
    problem = None
    if kind not in _PLAIN_TYPES and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        problem = (
            f"a {kind.__name__}, a tensor subclass that keeps its data elsewhere",
            "save its inner tensors or its dequantised value",
        )
    elif tensor.layout is not torch.strided:
        problem = f"a {tensor.layout} tensor", "save its indices and values as tensors of their own"
    elif tensor.is_nested:
        problem = "a nested tensor", "save its values and offsets"
    elif tensor.is_quantized:
        problem = f"quantised ({tensor.dtype})", "save int_repr(), scale and zero point"
    elif tensor.is_meta:
        problem = "on the meta device and has no data", "materialise it first"
    elif _HAVE_NAMES and any(name is not None for name in getattr(tensor, "names", ())):
        problem = "a named tensor", "drop the names with rename(None)"
    elif tensor.dtype not in _SAVED and (trouble := _try_dtype(tensor.dtype)) is not None:
        problem = f"of {tensor.dtype}, which {trouble}", "save view(torch.uint8) of it"
    elif (trouble := storage_problem(tensor)) is not None:
        problem = trouble, "put its data back before saving, or leave it out of the state"
    if problem is not None:
        raise StateError(f"{key!r} is {problem[0]}; it can't be saved exactly", key=key, phase="plan", hint=problem[1])


def storage_problem(tensor: torch.Tensor) -> str | None:
    """What is wrong with the memory of a strided tensor; ``None`` if there is as much as shape and strides need."""
    try:
        held = tensor.untyped_storage().nbytes()
        tensor.data_ptr()
    except RuntimeError as error:
        return f"a tensor without memory that can be read ({error})"
    needed: int | torch.SymInt
    if tensor.is_contiguous():
        needed = tensor.numel()
    else:
        needed = 1 + sum((int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if needed:
        needed = (tensor.storage_offset() + needed) * tensor.element_size()
    if needed > held:
        return f"a tensor of shape {tuple(tensor.shape)} whose storage has {held} of the {needed} bytes that it needs"
    return None


def _try_dtype(dtype: torch.dtype) -> str | None:
    """What keeps tensors of ``dtype`` from being saved (the sub-byte and the bits types fail); ``None`` is remembered."""
    try:
        torch.save(torch.empty(1, dtype=dtype, device="cpu"), io.BytesIO())
        if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
            torch.iinfo(dtype)  # DCP asks it for the size of an element
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        return f"torch can't save ({type(error).__name__}: {error})"
    _SAVED.add(dtype)
    return None


#: Types that tensors have been saved with.
_SAVED: set[torch.dtype] = set()

#: Later versions of torch have no named tensors, and asking each tensor for what it doesn't have is slow.
_HAVE_NAMES = hasattr(torch.Tensor, "names")


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile, for foreground work that makes many objects of which none is garbage.

    Each collection would visit all of them again: planning 20,000 tensors takes twice as long with it. For calls that the
    trainer waits for only: in the background it would take the trainer's own collector away.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


# --------------------------------------------------------------------------------------------------------------------
# Back into place


def build_nested(
    values: Mapping[str, Any], paths: Mapping[str, tuple[PathItem, ...]], int_keys: set[str], skip: int
) -> Any:
    """Nested containers from flat ``values``.

    Args:
        values: flat key to value.
        paths: flat key to full path.
        int_keys: prefixes (flat) of mappings with int keys.
        skip: number of leading path components that lie outside of the result.
    """
    holder: dict[PathItem, Any] = {}

    def enter(container: Any, item: PathItem, make: Callable[[], Any]) -> Any:
        if isinstance(container, list):
            while len(container) <= int(item):
                container.append(None)
            if container[int(item)] is None:
                container[int(item)] = make()
            return container[int(item)]
        return container.setdefault(item, make())

    for key, value in values.items():
        path = paths[key]
        container: Any = holder
        item: PathItem = ""  # the root of the result lives in holder[""]
        for depth in range(skip, len(path)):
            container = enter(container, item, list if type(path[depth]) is int else dict)
            item = path[depth]
            if type(item) is str and ".".join(map(str, path[:depth])) in int_keys:
                item = int(item)
        if isinstance(container, list):
            enter(container, item, lambda: None)
            container[int(item)] = value
        else:
            container[item] = value
    return holder.get("", {})


def assign(state: Any, flat: FlatState, loaded: Mapping[str, Any]) -> None:
    """Writes ``loaded`` values (flat key of the template to value) into ``state`` and calls ``load_state_dict`` of the objects.

    Tensors that were filled in place need not be in ``loaded``. Objects are loaded innermost first, so that an outer one
    sees its parts restored.
    """
    contents = {path: content for path, _, content in flat.objects}
    for key, value in loaded.items():
        _set(state, contents, flat.paths[key], value)
    for path, target, content in reversed(flat.objects):
        target.load_state_dict(contents.get(path, content))


def _set(state: Any, contents: dict[tuple[PathItem, ...], Any], path: tuple[PathItem, ...], value: Any) -> None:
    if not path:
        state.update(value)
        return
    if path in contents:  # the whole content of an object, which was empty in the template
        contents[path] = value
        return
    container: Any = state
    for depth, item in enumerate(path, start=1):
        last = depth == len(path)
        if isinstance(container, PerRank):  # the component is the rank's own, there is no container of that name
            if last:
                container.value = value
                return
            container = contents.get(path[:depth], container.value)
        elif last:
            _put(container, item, value, path)
        elif path[:depth] in contents:
            container = contents[path[:depth]]
        else:
            container = container[int(item)] if isinstance(container, list) else container[_real_key(container, item)]


def _put(container: Any, item: PathItem, value: Any, path: tuple[PathItem, ...]) -> None:
    if isinstance(container, list):
        container[int(item)] = value
    elif isinstance(container, MutableMapping):
        container[_real_key(container, item)] = value
    else:
        raise StateError(
            f"can't put a value back into a {type(container).__name__} at {'.'.join(map(str, path))!r}", phase="restore"
        )


def _real_key(container: Mapping[Any, Any], item: PathItem) -> Any:
    """The key as the container has it: paths carry ``str`` where the mapping may have had ints."""
    if item in container or not isinstance(item, str):
        return item
    return int(item) if item.lstrip("-").isdigit() and int(item) in container else item
