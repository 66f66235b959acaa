# ruff: noqa: E501
"""Calls that must be refused, as a table: one line each, however long, so that they can be compared."""

import torch
import torch.distributed as dist

import unisono
from tests.uneven.cases import premul_sum

SUM = dist.ReduceOp.SUM


def gather(of, output, input, splits=None):
    unisono.all_gather_into_tensor_uneven(output, input, splits, of)


def reduce(of, output, input, splits=None, op=SUM):
    unisono.reduce_scatter_tensor_uneven(output, input, splits, op, of)


def exchange(of, output, input, matrix):
    unisono.all_to_all_vc(output, input, matrix, of)


def tensor(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def strided(*shape):
    return torch.zeros(*shape, 2)[..., 0]


def overlapping():
    """A part of two elements that begins one element off this rank's rows."""
    whole = tensor(5)
    return whole, whole[1:3] if dist.get_rank() == 0 else whole[1:4]


CONTIGUOUS = "Tensors must be contiguous"
DENSE = "Tensors must be dense"
DEVICE = "Tensors must be on a supported device"
DTYPE = "output tensor must have the same type as input tensor"
DIVIDES = "Tensor's dim 0 does not divide equally across group size"
NUMBER = "Number of tensor splits not equal to group size"
TOTAL = "Split sizes doesn't match total dim 0 size"

# A name, the error, its first line, a piece of its second line, and a call by two ranks (r is the rank).
REFUSED = [
    ("g contiguous out", RuntimeError, CONTIGUOUS, "a contiguous 'output', got shape [5]", lambda of, r: gather(of, strided(5), tensor(2 + r), [2, 3])),
    ("g contiguous in", RuntimeError, CONTIGUOUS, "a contiguous 'input', got shape", lambda of, r: gather(of, tensor(5), strided(2 + r), [2, 3])),
    ("r contiguous", RuntimeError, CONTIGUOUS, "a contiguous 'input'", lambda of, r: reduce(of, tensor(2 + r), strided(5), [2, 3])),
    ("g dense", RuntimeError, DENSE, "a strided 'output', got torch.sparse_coo", lambda of, r: gather(of, tensor(5).to_sparse(), tensor(2 + r), [2, 3])),
    ("r device", RuntimeError, DEVICE, "'output' on meta", lambda of, r: reduce(of, torch.empty(2 + r, device="meta"), tensor(5), [2, 3])),
    ("g dtype", RuntimeError, DTYPE, "expected torch.int32, got torch.float32", lambda of, r: gather(of, tensor(5), tensor(2 + r, dtype=torch.int32), [2, 3])),
    ("r dtype", RuntimeError, DTYPE, "expected torch.float32, got torch.int32", lambda of, r: reduce(of, tensor(2 + r, dtype=torch.int32), tensor(5), [2, 3])),
    ("g float8 dtypes", RuntimeError, DTYPE, "float8_e5m2", lambda of, r: gather(of, torch.empty(5, dtype=torch.float8_e4m3fn), torch.empty(2 + r, dtype=torch.float8_e5m2), [2, 3])),
    ("g divides", RuntimeError, DIVIDES, "expected a multiple of 2 rows, got 5", lambda of, r: gather(of, tensor(5, 2), tensor(5))),
    ("g divides, empty list", RuntimeError, DIVIDES, "expected a multiple of 2 rows, got 5", lambda of, r: gather(of, tensor(5, 2), tensor(5), [])),
    ("r divides", RuntimeError, DIVIDES, "expected a multiple of 2 rows, got 3", lambda of, r: reduce(of, tensor(3), tensor(3, 2))),
    ("g number", RuntimeError, NUMBER, "expected 2 splits, got 3", lambda of, r: gather(of, tensor(5), tensor(2), [2, 2, 1])),
    ("r number", RuntimeError, NUMBER, "expected 2 splits, got 1", lambda of, r: reduce(of, tensor(5), tensor(5), [5])),
    ("g total", RuntimeError, TOTAL, "add up to 5, got [2, 4], which add up to 6", lambda of, r: gather(of, tensor(5), tensor(2), [2, 4])),
    ("r total", RuntimeError, TOTAL, "add up to 5, got [2, 2], which add up to 4", lambda of, r: reduce(of, tensor(2), tensor(5), [2, 2])),
    ("r total, empty rows", RuntimeError, TOTAL, "add up to 5, got [1, 1]", lambda of, r: reduce(of, tensor(1, 0), tensor(5, 0), [1, 1])),
    ("g negative", ValueError, "split sizes must not be negative", "got [6, -1]", lambda of, r: gather(of, tensor(5), tensor(6), [6, -1])),
    ("r negative", ValueError, "split sizes must not be negative", "got [-1, 6]", lambda of, r: reduce(of, tensor(6), tensor(5), [-1, 6])),
    ("g 0-dim whole", ValueError, "'output' must have at least one dimension", "got none", lambda of, r: gather(of, tensor(()), tensor(1), [1, 0])),
    ("g 0-dim part", ValueError, "'input' must have at least one dimension", "got none", lambda of, r: gather(of, tensor(2), tensor(()), [1, 1])),
    ("r 0-dim whole", ValueError, "'input' must have at least one dimension", "got none", lambda of, r: reduce(of, tensor(1), tensor(()), [1, 0])),
    ("r 0-dim part", ValueError, "'output' must have at least one dimension", "got none", lambda of, r: reduce(of, tensor(()), tensor(2), [1, 1])),
    ("g size", ValueError, "'input' must have as many elements as this rank's rows", "of shape [7]", lambda of, r: gather(of, tensor(5, 2), tensor(7), [2, 3])),
    ("r size", ValueError, "'output' must have as many elements as this rank's rows", "of shape [7]", lambda of, r: reduce(of, tensor(7), tensor(5, 2), [2, 3])),
    ("g overlap", ValueError, "'input' overlaps 'output' and is not exactly this rank's part", "", lambda of, r: gather(of, *overlapping(), [2, 3])),
    ("r overlap", ValueError, "'output' overlaps 'input' and is not exactly this rank's part", "", lambda of, r: reduce(of, *reversed(overlapping()), [2, 3])),
    ("r op third", TypeError, "'op' the fourth", "reduce_scatter_tensor_uneven(output, input, input_split_sizes, op=", lambda of, r: reduce(of, tensor(2), tensor(4), SUM)),
    ("r premul third", TypeError, "'op' the fourth", "write", lambda of, r: reduce(of, tensor(2), tensor(4), premul_sum(2.0))),
    ("g op third", TypeError, "split sizes must be whole numbers", "integer tensor", lambda of, r: gather(of, tensor(4), tensor(2), SUM)),
    ("g float splits", TypeError, "split sizes must be whole numbers", "[2.0, 3.0]", lambda of, r: gather(of, tensor(5), tensor(2 + r), [2.0, 3.0])),
    ("g bool splits", TypeError, "split sizes must be whole numbers", "[True, False]", lambda of, r: gather(of, tensor(1), tensor(1 - r), [True, False])),
    ("g 2-D splits", TypeError, "split sizes must be whole numbers", "[[2, 3]]", lambda of, r: gather(of, tensor(5), tensor(2 + r), torch.tensor([[2, 3]]))),
    ("g float tensor", TypeError, "split sizes must be whole numbers", "", lambda of, r: gather(of, tensor(5), tensor(2 + r), torch.tensor([2.0, 3.0]))),
    ("g number for splits", TypeError, "split sizes must be whole numbers", "got 5", lambda of, r: gather(of, tensor(5), tensor(2 + r), 5)),
    ("g no tensor", TypeError, "'output' must be a tensor", "got list", lambda of, r: gather(of, [1.0], tensor(1), [1, 0])),
    ("r unknown op", ValueError, "argument 'op' must be one of", "", lambda of, r: reduce(of, tensor(2 + r), tensor(5), [2, 3], "mean")),
    ("r bitwise floats", TypeError, "band is not defined for torch.float32", "", lambda of, r: reduce(of, tensor(2 + r), tensor(5), [2, 3], dist.ReduceOp.BAND)),
    ("r avg of bool", TypeError, "avg is not defined for torch.bool", "", lambda of, r: reduce(of, tensor(2 + r, dtype=torch.bool), tensor(5, dtype=torch.bool), [2, 3], "avg")),
    ("x dtype", RuntimeError, DTYPE, "", lambda of, r: exchange(of, tensor(2), tensor(2, dtype=torch.int32), [[1, 1], [1, 1]])),
    ("x contiguous", RuntimeError, CONTIGUOUS, "", lambda of, r: exchange(of, tensor(2), strided(2), [[1, 1], [1, 1]])),
    ("x rows", RuntimeError, NUMBER, "expected 2 rows of 2 numbers, got rows of [2]", lambda of, r: exchange(of, tensor(2), tensor(2), [[1, 1]])),
    ("x flat", RuntimeError, NUMBER, "expected 2 rows of 2 numbers, got 3 numbers", lambda of, r: exchange(of, tensor(2), tensor(2), [1, 1, 1])),
    ("x negative", ValueError, "send counts must not be negative", "", lambda of, r: exchange(of, tensor(2), tensor(2), [[3, -1], [-1, 3]])),
    ("x input", RuntimeError, TOTAL, "'input' of 3 elements, row", lambda of, r: exchange(of, tensor(3), tensor(2), [[1, 2], [2, 1]])),
    ("x output", RuntimeError, TOTAL, "'output' of 3 elements, column", lambda of, r: exchange(of, tensor(2), tensor(3), [[1, 2], [2, 1]])),
    ("x overlap", ValueError, "'output' overlaps 'input'", "", lambda of, r: exchange(of, (t := tensor(3))[:2], t[1:], [[1, 1], [1, 1]])),
    ("x no numbers", TypeError, "split sizes must be whole numbers", "", lambda of, r: exchange(of, tensor(2), tensor(2), [["a", 1], [1, 1]])),
]  # fmt: skip

# Calls with two faults each, and which of them is reported.
FIRST = [
    (CONTIGUOUS, lambda of: gather(of, strided(5), tensor(2, dtype=torch.int32), [1])),
    (DTYPE, lambda of: gather(of, tensor(5), tensor(2, dtype=torch.int32), [1])),
    (DTYPE, lambda of: gather(of, tensor(5), tensor(2, dtype=torch.int32))),
    (DIVIDES, lambda of: gather(of, tensor(5), tensor(99))),
    (NUMBER, lambda of: gather(of, tensor(5), tensor(99), [7, 7, 7])),
    (TOTAL, lambda of: gather(of, tensor(5), tensor(99), [-1, 7])),
    (CONTIGUOUS, lambda of: reduce(of, tensor(2, dtype=torch.int32), strided(5), [1])),
    (DTYPE, lambda of: reduce(of, tensor(2, dtype=torch.int32), tensor(5), [1, 1, 1])),
    (DIVIDES, lambda of: reduce(of, tensor(99), tensor(5))),
    (NUMBER, lambda of: reduce(of, tensor(99), tensor(5), [9])),
    (TOTAL, lambda of: reduce(of, tensor(99), tensor(5), [9, -1])),
]
