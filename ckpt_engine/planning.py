"""From a flat state to what each rank writes.

``torch.distributed.checkpoint`` plans: its :class:`DefaultSavePlanner` makes the write items of each rank, drops duplicates
and validates the whole. Around it, this module keeps the result for as long as the structure stays the same, and checks
what DCP leaves open: tensors that can't be represented, ranks that disagree about a key, replicated values that differ.

The steps of an agreement between ranks (bytes in, bytes out) are here; who talks to whom is the engine's business:

1. :meth:`Planner.begin` on each rank: the :class:`Proposal`, "same structure as plan P" or "new structure".
2. :func:`judge_begin` on rank 0: reuse, or plan anew.
3. if anew: :meth:`Planner.local_plan` on each rank, :meth:`Planner.judge_plan` on rank 0, :meth:`Planner.adopt` on each rank.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import dataclasses
import hashlib
import operator
import pickle
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ckpt_engine.coverage import Chunk, coverage_problems
from ckpt_engine.errors import StateError
from ckpt_engine.layout.image import TensorSpec
from ckpt_engine.spool import Pickled
from ckpt_engine.state import FlatState, check_tensor, collector_paused
from ckpt_engine.storage.checksum import crc32
from ckpt_engine.structure import SameMemory, check_shards, local_of, matches, structure
from ckpt_engine.values import pickle_value as pickle_value
from ckpt_engine.values import value_digest

#: What stock DCP puts into ``Metadata.version``, where its metadata has one.
DCP_VERSION = "1.0.0"

_BYTES = WriteItemType.BYTE_IO

#: Problems that an error lists; more of them have the same cause.
_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a rank says at the start of a save."""

    step: int
    plan_id: str | None
    group_digests: dict[int, str]
    train_state_digest: str


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """The tensors that a rank writes. DCP's write items hold a kilobyte each; this is what is needed of them again.

    Attributes:
        keys: flat key of each.
        offsets: its offset in the global tensor, or ``None``.
        indirect: by number, the write items that only DCP's planner finds the tensor of (one of several shards).
    """

    keys: list[str]
    offsets: list[torch.Size | None]
    indirect: dict[int, WriteItem]

    def pick(self, numbers: Sequence[int]) -> Outgoing:
        """Only these, in this order."""
        indirect = {new: self.indirect[old] for new, old in enumerate(numbers) if old in self.indirect}
        return Outgoing([self.keys[n] for n in numbers], [self.offsets[n] for n in numbers], indirect)


@dataclasses.dataclass(frozen=True)
class _LocalItems:
    """A local plan without its weight: all its items, and the shapes of the tensors (``None``: a pickled value)."""

    outgoing: Outgoing
    sizes: list[torch.Size | None]

    @classmethod
    def of(cls, plan: SavePlan, flat: FlatState) -> _LocalItems:
        counts = collections.Counter(item.index.fqn for item in plan.items)
        indirect = {}
        for number, item in enumerate(plan.items):
            value = flat.values.get(item.index.fqn)
            sharded = isinstance(value, ShardedTensor) or (isinstance(value, DTensor) and counts[item.index.fqn] > 1)
            if item.type != _BYTES and sharded:
                indirect[number] = item
        keys = [item.index.fqn for item in plan.items]
        offsets = [item.index.offset for item in plan.items]
        sizes = [None if item.tensor_data is None else item.tensor_data.chunk.sizes for item in plan.items]
        return cls(Outgoing(keys, offsets, indirect), sizes)


@dataclasses.dataclass
class RankPlan:
    """What this rank writes, for as long as the structure stays the same.

    Attributes:
        plan_id: the same on every rank.
        tensors: which tensors to write, in layout order; ``specs`` are parallel to them.
        blobs: flat keys of the pickled values that this rank writes.
        digest: digest of the global structure.
        groups: keys that are compared between ranks, those that the same ranks hold together.
        metadata: on rank 0, DCP's metadata without storage data; its ``planner_data`` holds the paths.
        all_items: on rank 0, per rank the metadata indices of its (tensors, blobs).
        int_keys, empty: on rank 0, prefixes of mappings with int keys and paths of empty mappings, of all ranks.
    """

    plan_id: str
    structure: list[Any]
    tensors: Outgoing
    specs: list[TensorSpec]
    blobs: list[str]
    digest: str
    groups: list[list[str]]
    metadata: Metadata | None = None
    all_items: list[tuple[list[MetadataIndex], list[MetadataIndex]]] = dataclasses.field(default_factory=list)
    int_keys: tuple[str, ...] = ()
    empty: tuple[tuple[str | int, ...], ...] = ()


class Planner:
    """Plans the saves of one rank and remembers the last plan. Holds no tensor and no storage between saves."""

    def __init__(self, rank: int, verify_replicas: str = "values") -> None:
        self._rank = rank
        self._verify = verify_replicas
        self.plan: RankPlan | None = None
        self._local: _LocalItems | None = None
        self._own: Any = None

    # -- every save ------------------------------------------------------------------------------------------------

    def begin(self, flat: FlatState, step: int, blobs: Mapping[str, Pickled], train_state: bytes | None) -> Proposal:
        """This rank's opening of a save.

        Raises:
            StateError: a tensor can't be saved exactly; the key is named.
        """
        plan = self.plan if self.plan is not None and matches(self.plan.structure, flat) else None
        digests: dict[int, str] = {}
        if plan is not None and plan.groups:
            values = self._digests(flat, blobs)
            for number, keys in enumerate(plan.groups):
                if keys[0] in values:
                    digests[number] = _combine([values[key] for key in keys])
        return Proposal(
            step=step,
            plan_id=plan.plan_id if plan else None,
            group_digests=digests,
            train_state_digest=hashlib.sha256(train_state).hexdigest() if train_state is not None else "",
        )

    def _digests(self, flat: FlatState, blobs: Mapping[str, Pickled]) -> dict[str, str]:
        digests = {}
        if self._verify != "off":
            for key, value in flat.values.items():
                if key in blobs:
                    digests[key] = value_digest(value, blobs[key])
                elif self._verify == "all" and type(value) is not DTensor and isinstance(value, torch.Tensor):
                    digests[key] = f"{_tensor_crc(value):08x}"
        return digests

    # -- when the structure is new -----------------------------------------------------------------------------------

    def local_plan(self, flat: FlatState, blobs: Mapping[str, Pickled]) -> bytes:
        """This rank's write items, pickled, for rank 0, which keeps its own as they are."""
        with collector_paused():
            return self._local_plan(flat, blobs)

    def _local_plan(self, flat: FlatState, blobs: Mapping[str, Pickled]) -> bytes:
        for key, value in flat.values.items():
            if isinstance(value, torch.Tensor):
                if isinstance(value, DTensor):
                    local_of(key, value)
                else:
                    check_tensor(key, value)
            elif isinstance(value, ShardedTensor):
                check_shards(key, value)
        try:
            plan = _write_items(flat.values, self._rank)
        except Exception as error:
            raise _unplannable(flat.values, self._rank, error) from error
        self._local = _LocalItems.of(plan, flat)
        _check_shapes(self._local, flat)
        items = (plan, flat.paths, flat.empties, sorted(flat.int_keys), self._digests(flat, blobs))
        if self._rank == 0:
            self._own = items
            return b""
        return pickle.dumps(items)

    def judge_plan(self, payloads: Sequence[bytes]) -> tuple[bytes, str]:
        """On rank 0: the global plan from everybody's local plans; returns what :meth:`adopt` takes, and the structure's digest.

        Raises:
            StateError: ranks disagree about a key, or the shards of a tensor don't cover it exactly once.
        """
        with collector_paused():
            return self._judge_plan(payloads)

    def _judge_plan(self, payloads: Sequence[bytes]) -> tuple[bytes, str]:
        plans: list[SavePlan] = []
        paths: dict[str, Any] = {}
        empties: dict[str, Any] = {}
        int_keys: set[str] = set()
        digests: list[dict[str, str]] = []
        own, self._own = self._own, None
        for rank, payload in enumerate(payloads):
            plan, rank_paths, rank_empties, rank_int_keys, rank_digests = pickle.loads(payload) if rank else own
            plans.append(plan)
            _check_paths(paths, rank_paths)
            paths.update(rank_paths)
            empties.update(rank_empties)
            int_keys.update(rank_int_keys)
            digests.append(rank_digests)
        empties = _empty_everywhere(empties, paths)
        _check_agreement(plans)
        groups = _check_replicas(digests)
        try:
            final, metadata = DefaultSavePlanner(
                flatten_state_dict=False, flatten_sharded_tensors=False
            ).create_global_plan(plans)
        except (ValueError, AssertionError, RuntimeError, TypeError, KeyError) as error:
            problems = _coverage(plans) or [str(error)]
            more = f"\n... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise StateError(
                "the ranks' shards don't form whole tensors:\n" + "\n".join(problems[:_SHOWN]) + more, phase="plan"
            ) from error
        metadata = dataclasses.replace(metadata, planner_data=paths)
        self._global = (metadata, [_split(plan) for plan in final], tuple(sorted(int_keys)), tuple(empties.values()))
        kept = []
        for before, after in zip(plans, final, strict=True):
            names = {(item.index.fqn, item.index.offset) for item in after.items}
            kept.append([(item.index.fqn, item.index.offset) in names for item in before.items])
        described = hashlib.sha256()
        for key in sorted(metadata.state_dict_metadata):  # one by one: all of it as one text would be megabytes
            described.update(repr((key, str(metadata.state_dict_metadata[key]))).encode(errors="surrogatepass"))
        digest = described.hexdigest()
        return pickle.dumps((uuid.uuid4().hex, digest, [bytes(row) for row in kept], groups)), digest

    def adopt(self, verdict: bytes, flat: FlatState) -> RankPlan:
        """Takes rank 0's verdict; ``self.plan`` is the new plan afterwards."""
        plan_id, digest, kept, groups = pickle.loads(verdict)
        local = self._local
        self._local = None
        if local is None:
            raise RuntimeError("adopt() without local_plan()")
        kept_items = [number for number, keep in enumerate(kept[self._rank]) if keep]
        tensors = [number for number in kept_items if local.sizes[number] is not None]
        outgoing = local.outgoing.pick(tensors)
        plan = RankPlan(
            plan_id=plan_id,
            structure=list(structure(flat)),
            tensors=outgoing,
            specs=_specs(outgoing.keys, [local.sizes[n] for n in tensors], resolve(outgoing, flat)),
            blobs=[local.outgoing.keys[number] for number in kept_items if local.sizes[number] is None],
            digest=digest,
            groups=groups,
        )
        if self._rank == 0:
            plan.metadata, plan.all_items, plan.int_keys, plan.empty = self._global
            del self._global
        self.plan = plan
        return plan


def judge_begin(proposals: Sequence[Proposal]) -> bool:
    """On rank 0: whether the plan that all ranks have can be used again.

    Raises:
        StateError: the ranks are not saving the same step, or not with the same train state.
    """
    steps = [p.step for p in proposals]
    if len(set(steps)) > 1:
        raise StateError(f"the ranks save different steps: {dict(enumerate(steps))}", phase="plan")
    for rank, proposal in enumerate(proposals):  # rank 0 writes it; the others may leave it out, but not say otherwise
        if proposal.train_state_digest not in ("", proposals[0].train_state_digest):
            raise StateError(
                f"the train state of rank {rank} differs from that of rank 0", key="train_state", phase="plan"
            )
    groups: dict[int, set[str]] = {}
    for proposal in proposals:
        for number, digest in proposal.group_digests.items():
            groups.setdefault(number, set()).add(digest)
    plan_ids = {p.plan_id for p in proposals}
    return len(plan_ids) == 1 and None not in plan_ids and all(len(found) == 1 for found in groups.values())


# --------------------------------------------------------------------------------------------------------------------


def _write_items(values: dict[str, Any], rank: int) -> SavePlan:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(values, is_coordinator=rank == 0)
    return planner.create_local_plan()


def _unplannable(values: dict[str, Any], rank: int, error: Exception) -> StateError:
    """DCP doesn't say which key it failed for: they are tried one by one."""
    for key, value in values.items():
        try:
            _write_items({key: value}, rank)
        except Exception as cause:
            return StateError(
                f"{key!r} ({type(value).__name__}) can't be planned: {type(cause).__name__}: {cause}",
                key=key,
                phase="plan",
            )
    return StateError(f"the state can't be planned: {type(error).__name__}: {error}", phase="plan")


def resolve(outgoing: Outgoing, flat: FlatState) -> list[torch.Tensor]:
    """The local tensor of each tensor to write, detached."""
    found: list[Any] = [flat.values.get(key) for key in outgoing.keys]
    if outgoing.indirect:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(flat.values)
        for number, item in outgoing.indirect.items():
            found[number] = planner.resolve_data(item)
    for number, value in enumerate(found):
        if isinstance(value, DTensor):
            value = value.to_local()
        if not isinstance(value, torch.Tensor):
            key = outgoing.keys[number]
            raise StateError(f"{key!r} is a {type(value).__name__}, expected a tensor", key=key, phase="plan")
        found[number] = value.detach()
    return found


def _check_shapes(local: _LocalItems, flat: FlatState) -> None:
    """A shard that isn't as large as its placement says, found while that still is an error of the call, on every rank."""
    numbers = [n for n, key in enumerate(local.outgoing.keys) if isinstance(flat.values.get(key), DTensor)]
    outgoing = local.outgoing.pick(numbers)
    _specs(outgoing.keys, [local.sizes[n] for n in numbers], resolve(outgoing, flat))


def _coverage(plans: Sequence[SavePlan]) -> list[str]:
    """What is wrong with the shards of all ranks, a line for each key."""
    held: dict[str, list[tuple[Chunk, int]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            if data is not None:
                box = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
                chunk = Chunk(item.index.fqn, *box, tuple(data.size), data.properties.dtype)
                if all(chunk != known for known, _ in held.setdefault(item.index.fqn, [])):  # replicas are dropped
                    held[item.index.fqn].append((chunk, rank))
    return [problem for key, chunks in held.items() for problem in coverage_problems(key, chunks)]


def _specs(
    keys: Sequence[str], sizes: Sequence[torch.Size | None], tensors: Sequence[torch.Tensor]
) -> list[TensorSpec]:
    same = SameMemory()
    specs = []
    for number, (key, size, tensor) in enumerate(zip(keys, sizes, tensors, strict=True)):
        if size != tensor.shape:
            raise StateError(
                f"{key!r} has shape {tuple(tensor.shape)}, expected {size} from the plan", key=key, phase="plan"
            )
        specs.append(TensorSpec(tuple(tensor.shape), tensor.dtype, same.seen(number, tensor)))
    return specs


def _split(plan: SavePlan) -> tuple[list[MetadataIndex], list[MetadataIndex]]:
    return [i.index for i in plan.items if i.type != _BYTES], [i.index for i in plan.items if i.type == _BYTES]


def _check_agreement(plans: Sequence[SavePlan]) -> None:
    """A key has one kind, dtype and global shape on all ranks; DCP would take whichever came first."""
    seen: dict[str, tuple[Any, int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            what = ("value",) if data is None else ("tensor", data.properties.dtype, tuple(data.size))
            known, owner = seen.setdefault(item.index.fqn, (what, rank))
            if known != what:
                raise StateError(
                    f"{item.index.fqn!r} is {known} on rank {owner} and {what} on rank {rank}",
                    key=item.index.fqn,
                    phase="plan",
                )


def _check_paths(known: Mapping[str, Any], paths: Mapping[str, Any]) -> None:
    """A key has one path on all ranks: on restore only one could be put back."""
    there = map(known.get, paths, paths.values())
    if any(map(operator.ne, there, paths.values())):  # in C: this is every key of every rank
        key = next(key for key, path in paths.items() if known.get(key, path) != path)
        raise StateError(
            f"values of two ranks flatten to the key {key!r}: {known[key]!r} and {paths[key]!r}",
            key=key,
            phase="plan",
            hint="rename one of them",
        )


def _empty_everywhere(empties: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """The mappings that are empty on every rank: what one rank has in it would be gone if the record said "empty"."""
    if not empties:
        return {}
    everything = {**paths, **empties}
    order = sorted(everything)

    def is_filled(key: str, path: tuple[Any, ...]) -> bool:
        if key in paths:
            return True
        start = key + "."
        for position in range(bisect.bisect_left(order, start), len(order)):
            if not order[position].startswith(start):
                return False
            if everything[order[position]][: len(path)] == path:  # not a key with a dot next to the mapping
                return True
        return False

    return {key: path for key, path in empties.items() if not is_filled(key, path)}


def _check_replicas(digests: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Of a replicated value one rank's copy is written: if they differ, the others' would be lost without a word.

    Returns the keys that several ranks hold, grouped by who holds them.
    """
    holders: dict[str, dict[str, list[int]]] = {}
    for rank, table in enumerate(digests):
        for key, digest in table.items():
            holders.setdefault(key, {}).setdefault(digest, []).append(rank)
    together: dict[tuple[int, ...], list[str]] = {}
    for key, groups in holders.items():
        ranks = tuple(sorted(rank for found in groups.values() for rank in found))
        if len(ranks) > 1:
            together.setdefault(ranks, []).append(key)
        if len(groups) > 1:
            shown = " / ".join(f"ranks {found}" for found in groups.values())
            raise StateError(
                f"{key!r} is replicated but its value differs between {shown}; one rank's copy would be saved and the others lost",
                key=key,
                phase="plan",
                hint='wrap it in PerRank(...) if each rank has its own, or set verify_replicas="off" to keep one copy',
            )
    return list(together.values())


def is_blob(value: Any) -> bool:
    """Whether a flat value is written as a pickle rather than as tensor data."""
    return not isinstance(value, (torch.Tensor, ShardedTensor))


def _tensor_crc(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = flat.numel() * flat.element_size()
    return crc32((ctypes.c_char * size).from_address(flat.data_ptr())) if size else 0


def _combine(digests: Sequence[str]) -> str:
    return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
