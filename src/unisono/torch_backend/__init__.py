"""The torch.distributed backend "unisono"."""
