"""Find out whether a Python file evaluates once more after it has trained."""

from __future__ import annotations

import ast

from gspo_hpc.importers.texts.syntax import Tree, called

EVALUATES = "evaluates after the run"  # among the variables of a run
ALWAYS, ASKED, PERHAPS = "always", "do_eval", "perhaps"


def evaluates(tree: Tree) -> str:
    """Return when a file evaluates behind its training: always, with do_eval, perhaps, or never ("")."""
    trained = {ast.unparse(call.func.value): call for call in tree.calls
               if isinstance(call.func, ast.Attribute) and called(call) == "train"}  # fmt: skip
    found = [_condition(tree, call) for call in tree.calls
             if isinstance(call.func, ast.Attribute) and called(call) == "evaluate"
             and (train := trained.get(ast.unparse(call.func.value))) is not None and train.lineno < call.lineno
             and tree.function_of(call) is tree.function_of(train)]  # fmt: skip
    return next((one for one in (ALWAYS, ASKED, PERHAPS) if one in found), "")


def _condition(tree: Tree, call: ast.Call) -> str:
    """Return under which condition a call runs."""
    tests: list[str] = []
    below, above = call, tree.parent(call)
    while above is not None and not isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        if isinstance(above, ast.If) and below in above.body:
            tests.append(ast.unparse(above.test).rpartition(".")[2])
        below, above = above, tree.parent(above)  # type: ignore[assignment]
    if tests == ["do_eval"]:
        return ASKED
    return ALWAYS if tree.certain(call) else PERHAPS
