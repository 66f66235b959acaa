"""Ways to move data between the ranks of a group: the core, gloo, backends with list forms, and any other."""
