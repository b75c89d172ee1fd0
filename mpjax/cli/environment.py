"""`mpjax env`: prints the versions, devices and settings that a bug report needs."""

from __future__ import annotations

from typing import Annotated

import typer

from mpjax.cli import output

NAME = "env"
EPILOG = """\b
Examples:
  mpjax env
  mpjax env --json > environment.json

\b
Paste the output into bug reports. The keys of --json: system, packages,
driver, devices, kernels, tuning_tables and variables. A part that can't be
found out is a sentence with the error.
"""


def command(
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show versions, driver, devices and settings."""
    from mpjax import environment

    if json:
        output.print_json(environment.collect())
    else:
        output.write(environment.report() + "\n")
