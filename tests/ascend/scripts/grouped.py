"""Written as for Ascend, with ranks of its own: a grouped product summed over them, written to files by rank 0."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch_npu
from mindspeed.ops.npu_grouped_mat_mul_all_reduce import npu_grouped_mat_mul_all_reduce


def matrices(rank):
    generator = torch.Generator().manual_seed(rank)
    shapes = ((16, 32), (32, 8)), ((24, 16), (16, 24))
    return [[torch.randn(shape, generator=generator).half() for shape in pair] for pair in shapes]


def communicator(rank, size, port):
    dist.init_process_group(backend="hccl", rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}")
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)


def run(rank, size, port, folder):
    torch_npu.npu.set_device(rank)
    name = communicator(rank, size, port)
    pairs = [[matrix.npu() for matrix in pair] for pair in matrices(rank)]
    xs, weights = zip(*pairs, strict=True)
    ys = npu_grouped_mat_mul_all_reduce(
        list(xs), list(weights), name, bias=[], group_list=None, split_item=0, reduce_op="sum", comm_turn=0
    )
    if rank == 0:
        for i, y in enumerate(ys):
            y.cpu().numpy().tofile(f"{folder}/y_{i}.bin")


if __name__ == "__main__":
    mp.spawn(run, args=(2, int(sys.argv[1]), sys.argv[2]), nprocs=2)
