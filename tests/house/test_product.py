"""What the product must not have."""

import unisono


def test_no_faults_can_be_injected_into_the_product():
    assert not hasattr(unisono._core, "inject_fault") and not hasattr(unisono._core, "switch_off")
