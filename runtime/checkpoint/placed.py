"""Tells DCP which part of a tensor a rank holds."""

from typing import Any, cast

from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from parallel.placement import local_region


class Placed(DTensor):
    """This rank's part `local` of a global tensor like `like`, for DCP to write from or read into.

    DCP asks DTensor for the part's place. Where both tp and FSDP shard a dimension, DTensor cuts
    it over dp first and each piece over tp, but FSDP cuts what a tp rank holds. The two differ if
    tp does not divide a vocabulary: of 33 rows on tp 2 and dp 4, the last rank holds 4, not 3. This
    class answers for itself, by the protocol in torch/distributed/_checkpointable.py.
    """

    def __new__(cls, local: Tensor, like: DTensor) -> "Placed":
        made = super().__new__(cls, local, like._spec, requires_grad=False)
        return cast(Placed, made)  # torch declares it a DTensor

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        region = local_region(self)
        if not all(region):  # it may begin where the next part does, and DCP keeps one of such
            return []
        offsets = Size([part.start for part in region])
        return [ChunkStorageMetadata(offsets, sizes=Size(map(len, region)))]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        about = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, about, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]
