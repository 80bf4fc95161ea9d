"""The template environment: escapes everything, knows only the templates of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from evenhand import __version__
from evenhand.files import atomic_write


def environment() -> Environment:
    """Return the environment that every page uses."""
    made = Environment(
        loader=PackageLoader("evenhand.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["version"] = __version__
    return made


def write_page(path: Path, template: str, **values: Any) -> None:
    """Render a template to a file that appears whole or not at all."""
    page = environment().get_template(template).render(**values)
    with atomic_write(path) as file:
        # Half surrogate pairs of garbled rollouts have no UTF-8 form.
        file.write(page.encode("utf-8", "replace").decode("utf-8"))
