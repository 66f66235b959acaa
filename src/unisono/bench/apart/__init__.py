"""What also runs in the peers' own environments: the standard library, numpy and mpi4py, but neither torch nor unisono."""
