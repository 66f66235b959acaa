"""Every way of moving data, with the same tests for each."""
