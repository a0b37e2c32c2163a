"""Restore: from a committed checkpoint into the caller's state, the same one on every rank.

Rank 0 chooses (nobody else looks at the directory to decide); each rank plans what to read, the ranks compare keys; each reads
and checks; the ranks compare outcomes. Only when all have read everything are values put in place and objects loaded. With
``"latest"``, a checkpoint that turns out to be damaged on any rank is left by all of them for the next older one.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ckpt_engine.agreeing import attempt, opened
from ckpt_engine.commit.coordinator import Coordinator
from ckpt_engine.commit.directory import CheckpointDirectory, parse_step
from ckpt_engine.config import EngineConfig
from ckpt_engine.errors import CheckpointError, ConfigError, CorruptionError, KeyMismatchError, NotCommittedError
from ckpt_engine.restore.reader import TensorRead, load_object, read_object, read_tensors
from ckpt_engine.restore.source import CheckpointSource
from ckpt_engine.results import Restored, RestoreReport
from ckpt_engine.state import FlatState, assign, build_nested, collector_paused, flatten
from ckpt_engine.train_state import TrainState

log = logging.getLogger("ckpt_engine")

_RANK = re.compile(r"rank(\d+)")


@dataclasses.dataclass
class LoadPlan:
    """What one rank reads.

    Attributes:
        tensors: (key in the checkpoint, tensor to fill), whole or sharded.
        values: (key in the state, key in the checkpoint) of pickled values.
        fresh: key in the state to the new tensor that will stand there.
        containers: key of an empty container in the state to the checkpoint's keys that fill it.
        missing, unused: keys that only the state, only the checkpoint has. mismatches: one line each.
    """

    tensors: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    values: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    fresh: dict[str, Any] = dataclasses.field(default_factory=dict)
    containers: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)
    unused: set[str] = dataclasses.field(default_factory=set)
    mismatches: list[str] = dataclasses.field(default_factory=list)
    casts: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def take_everything(self, flat: FlatState, source: CheckpointSource) -> None:
        """An empty state takes all that the checkpoint has (with one rank, where it is clear whose everything is)."""
        flat.paths[""] = ()
        saved = source.metadata.state_dict_metadata
        self.containers[""] = _in_order(source)
        self.unused.clear()
        _plan_container(flat, "", self.containers[""], saved, self)


class Restorer:
    """Restores for one engine."""

    def __init__(
        self, coordinator: Coordinator, directory: CheckpointDirectory, config: EngineConfig, *, threads: int
    ) -> None:
        self._coordinator = coordinator
        self._directory = directory
        self._config = config
        self._threads = threads
        self._rank = coordinator.rank
        self._count = 0

    def restore(
        self, state: dict[str, Any], step: int | Literal["latest"], *, strict: bool, path: str | None
    ) -> Restored | None:
        """See :meth:`ckpt_engine.CheckpointEngine.restore`."""
        self._count += 1
        tag = f"restore/{self._count}"
        candidates: list[tuple[int | None, str]] = self._round(
            f"{tag}/choose", lambda: b"", lambda _: pickle.dumps(self._candidates(step, path)), step=None
        )
        skipped: list[tuple[int, str]] = []
        for number, (found, where) in enumerate(candidates):
            try:
                restored = self._load(f"{tag}/{number}", state, found, where, strict=strict)
            except CorruptionError as error:
                if step != "latest" or path is not None or number == len(candidates) - 1:
                    raise
                log.warning("step %s is damaged and skipped: %s", found, error)
                skipped.append((-1 if found is None else found, str(error)))
                continue
            return dataclasses.replace(restored, report=dataclasses.replace(restored.report, skipped=tuple(skipped)))
        return None

    def _candidates(self, step: int | Literal["latest"], path: str | None) -> list[tuple[int | None, str]]:
        """On rank 0: (step, directory), best first."""
        if path is not None:
            if not os.path.isdir(path):
                raise NotCommittedError("there is no such checkpoint directory", path=path, phase="restore")
            return [(None, os.path.abspath(path))]
        committed = self._directory.newest_first()
        if step == "latest":
            if not committed and (stock := self._directory.unverified_steps()):
                log.warning(
                    "no committed checkpoint; steps %s have no commit record and can be asked for by number", stock
                )
            elif not committed:
                single = parse_step(os.path.basename(self._directory.path)) is not None
                advice = ": this is the directory of one step, the engine wants the one above" if single else ""
                log.warning("there is nothing to restore in %s%s", self._directory.path, advice)
            return [(s, self._directory.path_of(s)) for s in committed]
        if not isinstance(step, int) or isinstance(step, bool):
            raise ConfigError(f'step is {step!r}, expected a step number or "latest"', phase="restore")
        where = self._directory.path_of(step)
        if step not in committed and step not in self._directory.unverified_steps():
            if os.path.isdir(where):  # says what is wrong with it (B032)
                CheckpointSource.open(where, step=step)
            raise NotCommittedError(
                f"step {step} is not committed; committed are {sorted(committed)}",
                step=step,
                path=where,
                phase="restore",
            )
        return [(step, where)]

    def _load(self, tag: str, state: dict[str, Any], step: int | None, path: str, *, strict: bool) -> Restored:
        holder: list[tuple[CheckpointSource, FlatState, LoadPlan]] = []

        def prepare() -> bytes:
            with collector_paused():
                source = CheckpointSource.open(path, step=step)
                flat = flatten(state, rank=self._rank)
                plan = plan_load(flat, source, self._rank)
                if not state and self._coordinator.world_size == 1:
                    plan.take_everything(flat, source)
            holder.append((source, flat, plan))
            return pickle.dumps((plan.missing, plan.unused, plan.mismatches, plan.casts))

        def compare(payloads: list[bytes]) -> bytes:
            return pickle.dumps(
                _compare_keys([pickle.loads(p) for p in opened(payloads)], strict=strict, step=step, path=path)
            )

        missing, unexpected = self._round(f"{tag}/keys", prepare, compare, step=step)
        source, flat, plan = holder[0]
        loaded: dict[str, Any] = {}
        size = [0]

        def load() -> bytes:
            with collector_paused():  # the trainer waits for this, and nothing that is made here is garbage
                size[0] = _read(source, flat, plan, loaded, threads=self._threads, config=self._config, step=step)
            if self._rank != 0:
                return pickle.dumps(None)
            data = source.train_state_bytes()
            found = TrainState.from_bytes(data, path=path) if data is not None else self._legacy_train_state(source)
            return pickle.dumps((found, source.commit.step if source.commit is not None else None))

        found, committed_step = self._round(f"{tag}/read", load, lambda payloads: opened(payloads)[0], step=step)
        assign(state, flat, loaded)
        number = next(
            (s for s in (committed_step, step, found.step if found is not None else None) if s is not None), 0
        )
        report = RestoreReport(
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            notes=tuple(plan.notes),
            bytes=size[0],
            verified=self._config.checksum and (source.commit is None or source.commit.checksum is not None),
        )
        return Restored(number, found, report, path)

    def _legacy_train_state(self, source: CheckpointSource) -> TrainState | None:
        """From the fields that Megatron-LM keeps in its common state, where there is no ``train_state.pt``."""
        saved = source.metadata.state_dict_metadata
        values: dict[str, Any] = {}
        for key in saved:
            head, _, field = key.partition(".")
            if isinstance(saved[key], BytesStorageMetadata) and (key in _LEGACY_KEYS or (head == "args" and field)):
                data = read_object(source, key, verify=self._config.checksum)
                values[field or head] = load_object(data, fqn=key, trusted=self._config.allow_pickle)
        args = values.pop("args", None)
        if args is not None:
            values = {**(args if isinstance(args, Mapping) else vars(args)), **values}
        return TrainState.from_args(values) if values.get("iteration") is not None else None

    def _round(
        self, tag: str, work: Callable[[], bytes], judge: Callable[[list[bytes]], bytes], *, step: int | None
    ) -> Any:
        payload, original = attempt(work, rank=self._rank, step=step, phase="restore")

        def checked(payloads: list[bytes]) -> bytes:
            opened(payloads)
            return judge(payloads)

        try:
            return pickle.loads(self._coordinator.decide(tag, payload, checked, phase="restore", step=step))
        except CheckpointError as error:
            if self._coordinator.world_size == 1:
                error.remote_traceback = None  # it isn't remote, and Python shows its own
            # With several ranks the verdict counts: a rank that went by its own error would fall back to another step.
            alone = self._coordinator.world_size == 1 and isinstance(original, CheckpointError)
            if original is not None and (alone or not isinstance(original, Exception)):
                raise original from None
            raise


_LEGACY_KEYS = ("iteration", "args", "num_floating_point_operations_so_far")


def plan_load(flat: FlatState, source: CheckpointSource, rank: int) -> LoadPlan:
    """Matches the keys of a state with those of a checkpoint."""
    saved = source.metadata.state_dict_metadata
    plan = LoadPlan(unused=set(saved))
    rename = _per_rank_names(flat, saved, rank, plan)
    empties = _empties(source)
    order = _in_order(source)
    flat.paths.update(flat.empties)
    for key, value in [*flat.values.items(), *((key, {}) for key in flat.empties)]:
        name = rename(key)
        entry = saved.get(name)
        if entry is None:
            if _is_empty(value):
                children = _below(source, order, name)
                if children or any(k == name or k.startswith(name + ".") for k in empties):
                    plan.containers[key] = children
                    plan.unused.difference_update(children)
                    continue
                if value is not None:  # stock DCP forgets empty containers: not one more missing key
                    continue
            plan.missing.append(key)
            continue
        plan.unused.discard(name)
        tensor = isinstance(value, (torch.Tensor, ShardedTensor))
        if isinstance(entry, TensorStorageMetadata):
            if not tensor:
                value = plan.fresh[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            elif value.size() != entry.size:
                plan.mismatches.append(
                    f"{key!r} has shape {tuple(value.size())}, expected {tuple(entry.size)} as saved"
                )
                continue
            elif value.dtype != entry.properties.dtype:
                plan.casts.append(f"{key!r} has dtype {value.dtype}, expected {entry.properties.dtype} as saved")
            plan.tensors.append((name, value))
        elif tensor:
            plan.mismatches.append(f"{key!r} is a tensor, but a pickled value was saved")
        else:
            plan.values.append((key, name))
    for key, children in plan.containers.items():
        _plan_container(flat, key, children, saved, plan)
    return plan


def _in_order(source: CheckpointSource) -> list[str]:
    """Keys in the order of the state that was saved; dropping the duplicates of several ranks has mixed up that of the metadata."""
    saved = source.metadata.state_dict_metadata
    first = {key: None for key in source.metadata.planner_data or () if key in saved}
    return list(first | dict.fromkeys(saved))


def _below(source: CheckpointSource, keys: Sequence[str], name: str) -> list[str]:
    """The ``keys`` inside of the container ``name``; by path, since the flat key "a.b" may be no part of "a"."""
    paths = source.metadata.planner_data or {}
    found = []
    for key in keys:
        if key.startswith(name + "."):
            path = paths.get(key)
            if path is None or any(".".join(map(str, path[:depth])) == name for depth in range(1, len(path))):
                found.append(key)
    return found


def _empties(source: CheckpointSource) -> dict[str, tuple[str | int, ...]]:
    """Empty mappings of the state that was saved: flat key to path."""
    return {} if source.commit is None else {".".join(map(str, path)): path for path in source.commit.empty}


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (Mapping, list)) and not value)


def _per_rank_names(flat: FlatState, saved: Mapping[str, Any], rank: int, plan: LoadPlan) -> Callable[[str], str]:
    """How keys of per-rank values are called in the checkpoint: by another rank's number where this rank wasn't there."""
    swaps: dict[str, str] = {}
    for prefix in flat.per_rank:
        found = set()
        for key in saved:
            if key.startswith(prefix + "."):
                match = _RANK.fullmatch(key[len(prefix) + 1 :].split(".", 1)[0])
                if match:
                    found.add(int(match.group(1)))
                    plan.unused.discard(key)
        if found and rank not in found:
            other = sorted(found)[rank % len(found)]
            swaps[f"{prefix}.rank{rank}"] = f"{prefix}.rank{other}"
            plan.notes.append(f"{prefix!r} of rank {rank} is that of rank {other}: the saving run had no rank {rank}")

    def rename(key: str) -> str:
        for mine, other in swaps.items():
            if key == mine or key.startswith(mine + "."):
                return other + key[len(mine) :]
        return key

    return rename


def _plan_container(
    flat: FlatState, key: str, children: Sequence[str], saved: Mapping[str, Any], plan: LoadPlan
) -> None:
    """Everything under an empty container is new: tensors are made for it, sharded like the parameters they belong to."""
    params = _optimizer_params(flat, key)
    for child in children:
        entry = saved[child]
        if isinstance(entry, TensorStorageMetadata):
            param = params.get(child[len(key) + 1 :].split(".", 1)[0])
            if isinstance(param, DTensor) and param.shape == entry.size:
                tensor: torch.Tensor = torch.zeros_like(param, dtype=entry.properties.dtype, requires_grad=False)
            else:
                tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            plan.fresh[child] = tensor
            plan.tensors.append((child, tensor))
        else:
            plan.values.append((child, child))


def _optimizer_params(flat: FlatState, key: str) -> dict[str, Any]:
    """Position (as in the optimizer's state dict) to parameter, if ``key`` is the empty state of an optimizer."""
    for path, target, _ in flat.objects:
        if isinstance(target, torch.optim.Optimizer) and flat.paths[key] == (*path, "state"):
            params = [param for group in target.param_groups for param in group["params"]]
            return {str(number): param for number, param in enumerate(params)}
    return {}


def _compare_keys(
    found: Sequence[tuple[list[str], set[str], list[str], list[str]]], *, strict: bool, step: int | None, path: str
) -> tuple[list[str], list[str]]:
    """On rank 0: (missing on any rank, unexpected on all).

    Raises:
        KeyMismatchError: shapes differ, or ``strict`` and anything else does.
    """
    missing = sorted({key for keys, _, _, _ in found for key in keys})
    unexpected = sorted(set.intersection(*(unused for _, unused, _, _ in found)))
    problems = sorted({line for _, _, lines, _ in found for line in lines})
    if strict:
        problems += sorted({line for _, _, _, lines in found for line in lines})
        problems += [f"{key!r} is not in the checkpoint" for key in missing]
        problems += [f"{key!r} is in the checkpoint only" for key in unexpected]
    if problems:
        shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise KeyMismatchError(
            f"state and checkpoint differ: {shown}",
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            step=step,
            path=path,
            phase="restore",
            hint="restore(strict=False) loads what fits and reports the rest (shapes have to fit)",
        )
    return missing, unexpected


def _read(
    source: CheckpointSource,
    flat: FlatState,
    plan: LoadPlan,
    loaded: dict[str, Any],
    *,
    threads: int,
    config: EngineConfig,
    step: int | None,
) -> int:
    """Reads everything of a plan; new tensors and values are in ``loaded`` afterwards, under keys of the state."""
    reads = _tensor_reads(source, plan.tensors)
    size = read_tensors(source, reads, threads=threads, verify=config.checksum, step=step)
    inner: dict[str, Any] = {}
    in_container = {child for children in plan.containers.values() for child in children}
    for key, name in plan.values:
        data = read_object(source, name, verify=config.checksum)
        size += len(data)
        (inner if key in in_container else loaded)[key] = load_object(data, fqn=name, trusted=config.allow_pickle)
    for key, tensor in plan.fresh.items():
        (inner if key in in_container else loaded)[key] = tensor
    paths = source.metadata.planner_data or {}
    for key, children in plan.containers.items():
        int_keys = set(source.commit.int_keys) if source.commit is not None else set()
        if source.commit is None and _optimizer_params(flat, key):
            int_keys.add(key)  # stock metadata doesn't tell; an optimizer's state is keyed by position
        child_paths = {child: tuple(paths.get(child, (child,))) for child in children}
        within = flat.paths[key]
        empties = {
            k: path
            for k, path in _empties(source).items()
            if path[: len(within)] == within and not any(c == k or c.startswith(k + ".") for c in children)
        }
        values = {child: inner[child] for child in children} | {k: {} for k in empties}
        loaded[key] = build_nested(values, child_paths | empties, int_keys, len(flat.paths[key]))
    return size


def _tensor_reads(source: CheckpointSource, tensors: Sequence[tuple[str, Any]]) -> list[TensorRead]:
    """Read requests; DCP's planner works out which part of which chunk a shard needs."""
    reads: list[TensorRead] = []
    for name, tensor in tensors:
        entry = source.metadata.state_dict_metadata[name]
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else []
        if not isinstance(tensor, (DTensor, ShardedTensor)) and len(chunks) == 1 and chunks[0].sizes == tensor.shape:
            chunk = chunks[0]
            zeros = torch.Size([0] * len(chunk.sizes))
            reads.append(TensorRead(MetadataIndex(name, chunk.offsets, 0), zeros, chunk.sizes, tensor.detach(), name))
        else:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner({name: tensor}, source.metadata, False)
            for item in planner.create_local_plan().items:
                target = planner.resolve_tensor(item).detach()
                reads.append(TensorRead(item.storage_index, item.storage_offsets, item.lengths, target, name))
    return reads
