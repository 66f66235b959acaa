"""What every floor uses: errors, settings, tensors in shared memory, handles."""
