"""Written as for Ascend, to be started by torchrun: both uneven collectives, results to a file per rank."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch_npu

dist.init_process_group(backend="hccl")
rank = int(os.environ["LOCAL_RANK"])
torch.npu.set_device(rank)
rows = [3, 1]

whole = (torch.arange(8, dtype=torch.int32).reshape(4, 2) + 10 * rank).npu()
part = torch.zeros(rows[rank], 2, dtype=torch.int32).npu()
torch_npu.distributed.reduce_scatter_tensor_uneven(part, whole, input_split_sizes=rows, async_op=False)

gathered = torch.zeros(4, 2, dtype=torch.int32, device="npu")
work = torch_npu.distributed.all_gather_into_tensor_uneven(gathered, part, output_split_sizes=rows, async_op=True)
work.wait()

with open(os.path.join(sys.argv[1], f"rank_{rank}.json"), "w") as file:
    values = {"device": str(part.device), "part": part.tolist(), "gathered": gathered.cpu().numpy().tolist()}
    json.dump({**values, "argv": sys.argv[1:], "name": __name__}, file)
dist.destroy_process_group()
