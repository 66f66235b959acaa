"""`unisono bench`: collectives measured as nccl-tests does it, against the memory's limit and against peers, in one run."""
