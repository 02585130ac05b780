"""Packed documents: one sequence of the data holds several, and with `data.document_mask` a token
attends only within its own.

    tokens       …  x  y  ]  [  a  b  c  ]  [  ]  [  d …       [ is bos, which begins every document
    positions    0  1  2  3  0  1  2  3  4  0  1  0  1 …       they restart in each document
    boundaries   0           4              9    11    …  T    where each begins, counted through
                                                               the micro-batch's sequences

What precedes the first bos of a sequence is the tail of a document that began in another one: a
document of its own here. The loss is untouched: at its eos a document still predicts the bos of the
next.

The mask keeps documents that a sampler put side by side by chance from being each other's context
(Llama 3, section 3.2, https://arxiv.org/abs/2407.21783; Zhao et al. 2024,
https://arxiv.org/abs/2402.13991).
"""

import torch
from torch import Tensor
from torch.nn import functional

from parallel.mesh import to_device


def find_documents(tokens: Tensor, bos_id: int, device: str) -> tuple[Tensor, Tensor]:
    """Of tokens [B, S] on the host: positions [S, B] int64, and boundaries [N + 1] int32 of the N
    documents, on `device`.

    N is a shape. Counted on a device, the host would have to wait for it.
    """
    assert tokens.device.type == "cpu", "documents are found before tokens go to the device"
    begins = tokens == bos_id
    begins[:, 0] = True
    index = torch.arange(tokens.shape[1])
    # [B, S]: where the document of each token begins
    begin_of = torch.where(begins, index, 0).cummax(dim=1).values
    boundaries = functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=tokens.numel())
    positions = (index - begin_of).T.contiguous()
    return to_device(positions, device), to_device(boundaries.to(torch.int32), device)
