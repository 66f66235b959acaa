"""Where the entry point of packages built before 0.1.0 leads; see unisono_autoload."""

from unisono_autoload import register as register
