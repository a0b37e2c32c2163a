"""Which chunk lies in which shard file of a Megatron save: names as Megatron has them, places known before a byte is written.

``__{rank}_{n}.distcp``, as many as the strategy's ``thread_count`` says; with a separation hint, half as many, and as many
again, ``{hint}__{rank}_{n}.distcp``, for what begins with it. One file keeps all writers busy: the count is Megatron's business.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Sequence

from ckpt_engine.commit.manifest import PartStatic
from ckpt_engine.committing import MetadataComposer
from ckpt_engine.coverage import Chunk
from ckpt_engine.layout.image import FileImage, TensorSpec, plan_files
from ckpt_engine.layout.records import TemplateCache
from ckpt_engine.persisting import describe_tensors
from ckpt_engine.saving import Columns
from ckpt_engine.spool import Pickled


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a strategy and its caller ask for.

    Attributes:
        files: how many files; ``hint``: prefix of the names that are kept apart.
        complete: objects, too, have to be there with all their shards.
    """

    files: int = 1
    hint: str | None = None
    complete: bool = False


@dataclasses.dataclass(eq=False)
class FileLayout:
    """The files of one rank, for as long as the structure stays the same.

    Attributes:
        images: one per file; ``places`` says for each value which of them it goes into.
        columns: (file, offset, length) of each chunk.
        static: the repeating part of the part manifest.
        composer: on rank 0, makes ``.metadata`` of saves with it.
        committed: a save with it was committed, so that rank 0's composer knows the columns.
    """

    images: list[FileImage]
    places: list[int]
    columns: Columns
    static: PartStatic
    composer: MetadataComposer = dataclasses.field(default_factory=MetadataComposer)
    committed: bool = False

    def by_file(self, values: Sequence[Pickled]) -> list[list[Pickled]]:
        """The values of each file."""
        found: list[list[Pickled]] = [[] for _ in self.images]
        for value, place in zip(values, self.places, strict=True):
            found[place].append(value)
        return found

    @property
    def value_order(self) -> list[int]:
        """Numbers of the values in file order, as :class:`ckpt_engine.persisting.ShardSave` places them."""
        return sorted(range(len(self.places)), key=self.places.__getitem__)


def lay_out(
    chunks: Sequence[Chunk],
    names: Sequence[str],
    wanted: Wanted,
    templates: TemplateCache,
    *,
    rank: int,
    first: int,
    checksum: bool,
) -> FileLayout:
    """Distributes chunks and values over files.

    Args:
        names: key of each value.
        first: number of the first file; a directory that holds a whole checkpoint keeps its files until the commit.
    """
    specs = [TensorSpec(chunk.sizes, chunk.dtype) for chunk in chunks]
    bins = max(1, wanted.files if wanted.hint is None else wanted.files // 2)
    images: list[FileImage] = []
    places = [-1] * len(names)
    for prefix in ("",) if wanted.hint is None else ("", wanted.hint):

        def belongs(key: str, prefix: str = prefix) -> bool:
            return wanted.hint is None or key.startswith(wanted.hint) == bool(prefix)

        mine = [number for number, chunk in enumerate(chunks) if belongs(chunk.key)]
        values = [number for number, name in enumerate(names) if belongs(name)]
        if not mine and not values:
            continue
        begin = len(images)
        files = [f"{prefix}__{rank}_{first + begin + n}.distcp" for n in range(bins)]
        found, _ = plan_files([specs[number] for number in mine], files, templates)
        for image in found:
            image.items = [mine[item] for item in image.items]
        images += found
        loads = [image.tensor_bytes for image in found]
        for number in values:
            places[number] = begin + loads.index(min(loads))
    columns = (array.array("q"), array.array("q"), array.array("q"))
    where = {
        item: (number, start, template.length)
        for number, image in enumerate(images)
        for item, start, template in zip(image.items, image.starts, image.templates, strict=True)
    }
    for item in range(len(chunks)):
        for column, value in zip(columns, where[item], strict=True):
            column.append(value)
    static = describe_tensors(
        images,
        [chunk.key for chunk in chunks],
        [list(chunk.offset) for chunk in chunks],
        specs,
        rank=rank,
        checksum=checksum,
    )
    return FileLayout(images, places, columns, static)
