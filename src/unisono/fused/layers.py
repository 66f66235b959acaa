"""Tensor parallelism in one call: the linear layers of a model cut over the ranks, for inference.

A layer is cut by its outputs (each rank has some columns of the product and gives them on) or by its inputs (each rank
has a part of every sum, and the sums are added over the ranks); the second takes up what the first gave. In the tree
order layers that are not cut also take the core's product, whose bits do not depend on threads or the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..calls.groups import place
from ..group.names import GroupLike
from .matmul import local_matmul, matmul_all_reduce

OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
INPUTS = ("o_proj", "down_proj")


class ParallelLinear(nn.Module):
    """This rank's part of a linear layer. ``matrix`` is its weight, [inputs, outputs].

    ``cut`` is "outputs", "inputs" or "" (whole on every rank).
    """

    matrix: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, layer: nn.Linear, group: GroupLike, cut: str, order: str | None, rank: int, size: int) -> None:
        super().__init__()
        matrix: torch.Tensor = layer.weight.detach().t()
        bias: torch.Tensor | None = layer.bias
        if cut:
            matrix = matrix.chunk(size, dim=1 if cut == "outputs" else 0)[rank]
        if cut == "outputs" and bias is not None:
            bias = bias.chunk(size)[rank]
        self.in_features, self.out_features = matrix.shape
        self.cut, self.order, self.group = cut, order, group
        self.register_buffer("matrix", matrix.contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        with torch.no_grad():
            if self.cut == "inputs":
                y = matmul_all_reduce(rows, self.matrix, self.group, bias=self.bias, order=self.order)
            else:
                y = local_matmul(rows, self.matrix, self.bias, self.order)
        return y.view(*x.shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, cut={self.cut!r}, order={self.order!r}"


def tensor_parallel(
    model: nn.Module,
    group: GroupLike = None,
    *,
    order: str | None = None,
    outputs: Sequence[str] = OUTPUTS,
    inputs: Sequence[str] = INPUTS,
) -> nn.Module:
    """Cuts the linear layers of a model over the ranks of a group, in place, for inference; returns the model.

    Every rank gives the same whole model, and keeps its part. ``outputs`` and ``inputs`` are the last names of the
    layers that are cut by their outputs and by their inputs; the defaults are those of Llama and its kin. Attention
    must take the number of its heads from its projections' outputs, as Hugging Face's does.

    ``order="tree"``: 1, 2, 4, 8, … ranks give the same bits, see docs/same_bits.md::

        model = unisono.tensor_parallel(Llama(config), group, order="tree")
        logits = model(tokens)          # the same on every rank, and whatever the number of ranks

    Gradients do not flow through the layers it makes.

    Args:
        model: the whole model, the same on every rank; changed in place
        group: None for the default group, a name, a torch ProcessGroup or a unisono.Group
        order: None, or "tree"
        outputs: the last names of the layers that are cut by their outputs
        inputs: the last names of the layers that are cut by their inputs

    Returns:
        The same model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"tensor_parallel: argument 'model' must be a torch.nn.Module, got {type(model).__name__}")
    rank, size, _ = place("tensor_parallel", group)
    found = []
    for name, layer in model.named_modules():
        last = name.rpartition(".")[2]
        cut = "outputs" if last in outputs else "inputs" if last in inputs else ""
        if isinstance(layer, nn.Linear) and (cut or order is not None):
            found.append((name, layer, cut))
            features = {"outputs": layer.out_features, "inputs": layer.in_features, "": size}[cut]
            if features % size:
                raise ValueError(f"layer {name!r}: {features} {cut} do not divide equally between {size} ranks")
    if not any(cut for _, _, cut in found):
        raise ValueError(f"no layer to cut: expected one of {', '.join((*outputs, *inputs))}")
    made = [ParallelLinear(layer, group, cut, order, rank, size) for _, layer, cut in found]
    for (name, _, _), parallel in zip(found, made, strict=True):  # only now: an error leaves the model as it was
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, parallel)
    return model
