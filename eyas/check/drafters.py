"""`eyas drafters`: nothing in, a table of the drafting methods out. Loads torch only once it is asked."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def drafters() -> None:
    """List the drafting methods: what each needs, where it may run, and what its `head` is."""
    from eyas.drafters.methods import METHODS

    table = Table("drafter", "needs", "runs", "head")
    for name, method in METHODS.items():
        head = method.needs_head or method.may_head or "none"
        table.add_row(name, ", ".join(method.needs) or "tokens alone", method.place, head)
    Console().print(table)
