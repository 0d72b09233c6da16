"""Take apart conditions that have to be met: that hold, or that do not, where a shell script goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from gspo_hpc.importers.scripts.conditions import leaves, split_at
from gspo_hpc.importers.scripts.parse import is_arithmetic, source_of

if TYPE_CHECKING:
    from tree_sitter import Node

Found = TypeVar("Found")
_BRACKETS = ("[", "]", "[[", "]]", "(", ")", "comment")


@dataclass(frozen=True)
class Asked(Generic[Found]):
    """Ways to find what the parts of a condition ask for. The last argument of each: whether the part has to hold."""

    words: Callable[[list[Node], bool, bool], Found]  # of one test: its words, and whether they stand in [[ ]]
    joined: Callable[[list[Found], bool], Found]  # of several, of which all have to be met, or else any one
    computed: Callable[[Node, bool], Found]  # of (( ))
    run: Callable[[Node, bool], Found]  # of any other command
    nothing: Found

    def of(self, node: Node, holds: bool) -> Found:
        """Return what a condition asks for that has to hold, or not to hold."""
        parts = [child for child in node.children if child.type not in _BRACKETS]
        match node.type:
            case "negated_command":
                return self.of(parts[-1], not holds) if len(parts) == 2 else self.nothing
            case "list" if len(parts) == 3:
                every = holds == (source_of(parts[1]) == "&&")
                return self.joined([self.of(part, holds) for part in (parts[0], parts[2])], every)
            case "test_command" | "compound_statement" | "subshell" if is_arithmetic(node):
                return self.computed(node, holds)
            case "test_command" | "parenthesized_expression":
                words = [leaf for part in parts for leaf in leaves(part)]
                return self.tested(words, holds, node.children[0].type != "[")
            case "command" if source_of(node.children[0]) == "test":
                return self.tested(node.children[1:], holds, double=False)
        return self.run(node, holds)

    def tested(self, words: list[Node], holds: bool, double: bool) -> Found:
        """Return what the words of a test ask for. `double`: they stand in [[ ]]."""
        for sign in ("||", "&&") if double else ("-o", "-a"):
            if len(parts := split_at(words, sign)) > 1:
                found = [self.tested(part, holds, double) for part in parts]
                return self.joined(found, holds == (sign in ("&&", "-a")))
        if words and source_of(words[0]) == "!":
            return self.tested(words[1:], not holds, double)
        if len(words) == 1 and words[0].type == "parenthesized_expression":
            inner = [leaf for part in words[0].children[1:-1] for leaf in leaves(part)]
            return self.tested(inner, holds, double)
        return self.words(words, holds, double)
