"""The template environment: escapes everything, knows only the templates of this package."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from evenhand import __version__
from evenhand.core.files import atomic_write


@cache
def environment() -> Environment:
    """Return the environment that every page uses; templates are compiled once."""
    made = Environment(
        loader=PackageLoader("evenhand.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["version"] = __version__
    script = source("page.js")
    made.globals["script"] = Markup(script)  # our own file
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # A page runs this one script and loads nothing, whatever the rollouts on it hold.
    made.globals["content_security_policy"] = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    return made


def source(name: str) -> str:
    """Return a file of the template set as it is: a style sheet or a script."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def well_formed(page: str) -> str:
    """Return a page as UTF-8 can hold it: half surrogate pairs of garbled rollouts become `?`."""
    return page.encode("utf-8", "replace").decode("utf-8")


def write_page(path: Path, template: str, **values: Any) -> None:
    """Render a template to a file that appears whole or not at all."""
    page = environment().get_template(template).render(**values)
    with atomic_write(path) as file:
        file.write(well_formed(page))
