"""Sums over ranks of many tensors, in few exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from uniml_rl.engines.ranks import exchanging

_BUCKET_ELEMENTS = 32 << 20
"""Elements that one all-reduce sums: few calls, and a buffer of 128 MiB if they are float32."""


@torch.no_grad()
def sum_gradients(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Puts the sum over the ranks of `group` (None is all) in place of each; every rank brings the same shapes."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        with exchanging("summing gradients"):
            dist.all_reduce(flat, group=group)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device each, as many as one all-reduce takes."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        fits = size + tensor.numel() <= _BUCKET_ELEMENTS
        if bucket and not (fits and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
