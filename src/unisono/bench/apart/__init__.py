"""What also runs in the peers' own environments: with numpy and mpi4py, but neither torch nor unisono."""
