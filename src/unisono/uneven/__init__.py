"""Uneven collectives that write into a given tensor, with the signatures of torch_npu.distributed."""
