"""The page of ``gspo-hpc keys``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from gspo_hpc.cli.pages.render import item, text
from gspo_hpc.config.reading import peer_names
from gspo_hpc.config.reference.settings import Setting


def page(found: Sequence[Setting], word: str) -> Iterator[RenderableType]:
    """Yield the parts of the page: what another project's name is here, then the settings, one below the other."""
    if (here := peer_names.here(word)) is not None:
        yield text(f"{word} is ", (here, "bold"))
        yield ""
    for one in found:
        default = "" if one.default == "null" else f"; default: {one.default}"
        yield item(text((one.key, "bold"), "  "), f"{one.values}{default}")
        yield item("    ", one.meaning)
