"""The house: which floor may use which."""
