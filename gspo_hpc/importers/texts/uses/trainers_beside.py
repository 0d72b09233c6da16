"""Read the trainers that a Python file imports from files beside it, as if the file defined them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gspo_hpc.importers.texts import trainers
from gspo_hpc.importers.texts.syntax import Tree, base_name
from gspo_hpc.importers.texts.uses.beside import is_known, parse, path_of, statements

_DEEPEST = 6  # files that import from each other


@dataclass(frozen=True)
class TrainerBeside:
    """A trainer's class in a file beside the one that is read."""

    tree: Tree  # of its file
    name: str
    file: str
    others: Mapping[str, TrainerBeside] = field(default_factory=dict)  # that its own file imports

    def is_trls(self) -> bool:
        """Tell whether it is derived from TRL's trainer and from no other class that is not plain."""
        return trainers.is_trls(self.tree, self.tree.classes[self.name], self.others)

    def changes(self) -> dict[str, str]:
        """Return what it changes in TRL's trainer, as :func:`trainers.of_class` does."""
        try:
            found = trainers.of_class(self.tree, self.name, self.others)
        except ValueError as error:
            where = f"{self.file}, " if str(error).startswith("line ") else ""  # else it has the name of another file
            raise ValueError(f"{where}{error}") from None
        return {f"{self.file}, {what}" if what.startswith("class ") else what: why for what, why in found.items()}


def of_file(tree: Tree, place: Path | None, depth: int = 0) -> dict[str, TrainerBeside]:
    """Return the trainers that a file uses, whatever for, by its names for them. `place`: the file."""
    if place is None or depth > _DEEPEST:
        return {}
    used = {node.id for node in tree.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    found: dict[str, TrainerBeside] = {}
    for node in tree.nodes:
        for item in node.names if isinstance(node, ast.ImportFrom) and not is_known(node) else ():
            if (name := item.asname or item.name) in used and isinstance(node, ast.ImportFrom):
                if (theirs := _class(node, item.name, place, depth)) is not None:
                    found[name] = theirs
    return found


def _class(node: ast.ImportFrom, name: str, place: Path, depth: int) -> TrainerBeside | None:
    """Return the trainer of this name in a module that is imported from, None if it has none or is not at hand."""
    for _ in range(_DEEPEST):  # a package may import it from one of its modules
        path = path_of(node, place)
        module = None if path is None else parse(path)
        if path is None or module is None:
            return None
        match statements(module).get(name):
            case ast.ClassDef(bases=bases) if bases:
                tree = Tree(module)
                others = of_file(tree, path, depth + 1)
                found = TrainerBeside(tree, name, path.name, others)
                return found if any(base in others or base.endswith("Trainer") for base in _bases(tree, name)) else None
            case ast.ImportFrom(names=[item]) as inner:
                node, name, place = inner, item.name, path
            case _:
                return None
    return None


def _bases(tree: Tree, name: str) -> Iterator[str]:
    """Yield the names of the classes outside of a file that one of its classes is derived from."""
    left, seen = [name], set[str]()
    while left:
        one = left.pop()
        if one not in tree.classes:
            yield tree.originals.get(one, one)
            yield one
        elif one not in seen:
            seen.add(one)
            left += map(base_name, tree.classes[one].bases)
