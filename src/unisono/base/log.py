"""What unisono tells a program besides results and errors: warnings in the log ``logging.getLogger("unisono")``."""

from __future__ import annotations

import contextlib
import functools
import logging
import os

import torch
import typing_extensions

#: Code below these folders is a library's: the source line of a call is that of the nearest caller outside of them.
LIBRARY_FOLDERS = [
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    *(module.__file__ or "" for module in (contextlib, functools, typing_extensions)),  # decorators
]

_logger = logging.getLogger("unisono")


WARN_AFTER_S = 10.0  # or a quarter of the limit, if that is less; as in core/group/health.cc


def warn(text: str) -> None:
    """Logs a call that is late: who is missing and where it is. Called by the core and by transports that wait."""
    _logger.warning("%s", text)
