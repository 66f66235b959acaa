"""From what a user wrote to a checked request: reduce operations, splits, counts, roots and groups, each read once."""
