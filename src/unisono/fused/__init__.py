"""Matrix products fused with the collective before or after them."""
