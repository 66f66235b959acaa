"""Libraries that people use on top of torch.distributed, run on gloo and on unisono: ``make clients``.

A program is a file of ``programs/``. It says what it needs from PyPI (``REQUIREMENTS``) and has the functions
``CASES``, by the words that stand in the table; each takes a :class:`tests.clients.case.Case` and returns what the
backends are compared by. More is optional: ``ENVIRONMENT``, the folder of the packages it shares with other programs;
``BESIDE``, what else to install; ``PIP_OPTIONS`` for the first; ``SHOWN``, the packages whose versions the table has;
``RANKS``, the numbers of ranks to run; ``BY_NAME = False``, where unisono is chosen by ``UNISONO_GLOO=1``;
``PROBE``, a line of Python that must work, or else the packages on PyPI are not what is meant; ``TOLERANCE``;
``VARIABLES`` of the environment; ``TORCHRUN = False``, where the library starts its own ranks.
"""
