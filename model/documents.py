"""Packed documents: a sequence of the data holds several documents, and with `data.document_mask` a
token attends only to tokens of its own document.

    tokens       …  x  y  ]  [  a  b  c  ]  [  ]  [  d …       [ is bos, which begins every document
    positions    0  1  2  3  0  1  2  3  4  0  1  0  1 …       they restart in each document
    boundaries   0           4              9    11    …  T    where each begins, counted through
                                                               the micro-batch's sequences

The tokens before the first bos of a sequence are the end of a document that began in another
sequence; they count as a separate document here. The loss does not change: at its eos a document
still predicts the bos of the next one.

The mask prevents documents that are in one sequence by chance from being each other's context
(Llama 3, section 3.2, https://arxiv.org/abs/2407.21783; Zhao et al. 2024,
https://arxiv.org/abs/2402.13991).
"""

import torch
from torch import Tensor
from torch.nn import functional

from parallel.mesh import to_device


def find_documents(tokens: Tensor, bos_id: int, device: str) -> tuple[Tensor, Tensor]:
    """Find the documents in tokens [B, S] on the host. Returns, on `device`, positions [S, B] int64
    and the boundaries [N + 1] int32 of the N documents.

    N is part of a shape: if it were counted on a GPU, the host would have to wait for it.
    """
    assert tokens.device.type == "cpu", "find documents before tokens are copied to the device"
    begins = tokens == bos_id
    begins[:, 0] = True
    index = torch.arange(tokens.shape[1])
    # [B, S]: where the document of each token begins
    begin_of = torch.where(begins, index, 0).cummax(dim=1).values
    boundaries = functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=tokens.numel())
    positions = (index - begin_of).T.contiguous()
    return to_device(positions, device), to_device(boundaries.to(torch.int32), device)
