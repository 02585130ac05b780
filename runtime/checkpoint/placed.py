"""Tells DCP which part of a tensor a rank reads."""

from typing import cast

from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from parallel.placement import local_region


class Placed(DTensor):
    """This rank's part `local` of a global tensor like `like`, for DCP to read into.

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
        offsets = Size([part.start for part in region])
        return [ChunkStorageMetadata(offsets, sizes=Size(map(len, region)))]
