"""`mpjax env`: what a bug report needs."""

from __future__ import annotations

import typer

NAME = "env"
EPILOG = "Paste it into bug reports."


def command() -> None:
    """Show versions, driver, devices and settings."""
    from mpjax import environment

    typer.echo(environment.report())
