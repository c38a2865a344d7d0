"""What a check found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vlmfast.errors import VLMFastError


class CheckFailed(AssertionError):
    """A family or a stage does not do what it must."""


@dataclass(frozen=True)
class Check:
    """One check that passed or that does not apply.

    Parameters
    ----------
    name : str
        What was checked, and on which input.
    ran : bool
        Whether it applies.
    note : str
        A figure, or why it does not apply.
    """

    name: str
    ran: bool = True
    note: str = ""


@dataclass
class Report:
    """The checks of one family or stage, in the order in which they ran.

    Parameters
    ----------
    of : str
        ``model_type``, or the recipe.
    checks : list of Check
    """

    of: str
    checks: list[Check] = field(default_factory=list)

    def passed(self, name: str, note: str = "") -> None:
        self.checks.append(Check(name, True, note))

    def left_out(self, name: str, reason: str) -> None:
        self.checks.append(Check(name, False, reason))

    def names(self, *, ran: bool = True) -> set[str]:
        """The names of the checks that ran, or of those that do not apply."""
        return {check.name for check in self.checks if check.ran is ran}

    def require(self, holds: Any, name: str, reason: str) -> None:
        """Raise `CheckFailed` unless a condition holds."""
        if not holds:
            raise CheckFailed(f"{self.of}: {name}: {reason}")

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Any exception inside the block fails the check ``name``."""
        try:
            yield
        except CheckFailed:
            raise
        except Exception as error:
            reason = f"raised {type(error).__name__}: {error}".rstrip()
            raise CheckFailed(f"{self.of}: {name}: {reason}") from error

    def refuses(self, name: str, error: type[VLMFastError], call: Callable[[], Any]) -> None:
        """Bad input must raise ``error``: neither another exception nor none."""
        try:
            call()
        except error:
            self.passed(name)
            return
        except Exception as other:
            raise CheckFailed(
                f"{self.of}: {name}: raised {type(other).__name__} ({other}), not {error.__name__}"
            ) from other
        raise CheckFailed(f"{self.of}: {name}: raised nothing, not {error.__name__}")

    def __str__(self) -> str:
        lines = [f"{self.of}: {len(self.names())} checks passed"]
        for check in self.checks:
            note = f" ({check.note})" if check.note else ""
            lines.append(f"  {'passed ' if check.ran else 'not run'}  {check.name}{note}")
        return "\n".join(lines)
