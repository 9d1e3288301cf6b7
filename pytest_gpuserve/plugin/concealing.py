"""What pytest prints of our errors leaves the machine as a bundle does: in CI's logs, junit files and pages."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..errors import GpuserveError
    from ..spec import ServerSpec


def conceal(error: GpuserveError, *specs: ServerSpec) -> None:
    """Redact the message of ``error``, which may quote a command line or a log, with what is secret of ``specs``."""
    from ..report.redact import Redactor

    environments = (os.environ, *(dict(spec.env) for spec in specs))
    flags = (f"--{name.lstrip('-')}={value}" for spec in specs for name, value in spec.args)
    redactor = Redactor.of(*environments, argv=(*flags, *(word for spec in specs for word in spec.command or ())))
    error.args = tuple(redactor.redact(part) if isinstance(part, str) else part for part in error.args)
