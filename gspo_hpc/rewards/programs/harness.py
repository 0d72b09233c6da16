"""The program that runs in the sandbox for assertions: it runs the model's program, then one assertion after another.

It says what became of each on a line that begins with a word which the model's program does not know, on a copy of its
standard output; what the program prints itself goes nowhere. Another process could not judge better: an assertion is
code that runs beside the program, so a program that is written to deceive its tests can. Only the plainest way is
closed: an object that says it equals whatever an assertion compares it with is not equal to a literal.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gspo_hpc.sandbox.outcomes import Outcome

Verdict = Literal["right", "wrong", "crashed", "not_compiled", "too_slow"]
_TOLD: tuple[Verdict, ...] = ("right", "wrong", "crashed")  # of an assertion

TEXT = '''
import ast, json, os, sys, traceback

asked = json.loads(sys.stdin.readline())
told, nothing, write = os.dup(1), os.open(os.devnull, os.O_RDWR), os.write
os.dup2(nothing, 0)
os.dup2(nothing, 1)


def tell(word, place, verdict):
    write(told, f"{word} {place} {verdict}\\n".encode())


def answers_itself(value):
    """Tell whether a value, or one in it, has a comparison that the program or unittest.mock wrote."""
    if type(value) in (list, tuple, set, frozenset):
        return any(map(answers_itself, value))
    if type(value) is dict:
        return any(answers_itself(one) for pair in value.items() for one in pair)
    code = getattr(type(value).__eq__, "__code__", None)
    return code is not None and (
        code.co_filename in ("program.py", "<string>") or type(value).__eq__.__module__ == "unittest.mock"
    )


def same(left, right):
    return not answers_itself(left) and not answers_itself(right) and left == right


def is_literal(node):
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


class Compared(ast.NodeTransformer):
    """Has the harness compare what an assertion compares with a literal."""

    def visit_Assert(self, node):
        test = node.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            sides = [test.left, *test.comparators]
            if any(map(is_literal, sides)):
                node.test = ast.Call(ast.Name("harness_same", ast.Load()), sides, [])
        return node


def run(word, program, assertions):
    try:
        compiled = compile(program, "program.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        traceback.print_exc()
        return tell(word, 0, "not_compiled")
    names = {"__name__": "program"}
    exec(compiled, names)
    for place, assertion in enumerate(assertions):
        try:
            checked = ast.fix_missing_locations(Compared().visit(ast.parse(assertion, "test.py")))
            names["harness_same"] = same
            exec(compile(checked, "test.py", "exec"), names)
        except AssertionError:
            tell(word, place, "wrong")
        except BaseException:
            traceback.print_exc()
            tell(word, place, "crashed")
        else:
            tell(word, place, "right")


word, program, assertions = asked.pop("word"), asked.pop("program"), asked.pop("assertions")
run(word, program, assertions)
os._exit(0)
'''


def question(program: str, assertions: Sequence[str]) -> tuple[str, str]:
    """Return the standard input of the harness, and the word that its answers begin with."""
    word = secrets.token_hex(16)
    return json.dumps({"word": word, "program": program, "assertions": list(assertions)}), word


def verdicts(outcome: Outcome, word: str, count: int) -> list[Verdict]:
    """Return what became of each of so many assertions; where the program ended before one, how it ended.

    A program can find the word and write lines of its own. So the lines must be those that the harness writes: one for
    each assertion, in order, or the one of a program that does not compile. Otherwise all assertions are crashed.
    """
    told = [line.partition(" ")[2] for line in outcome.stdout.split("\n") if line.startswith(f"{word} ")]
    if told == ["0 not_compiled"]:
        return ["not_compiled"] * count
    if len(told) > count:
        return ["crashed"] * count
    found: list[Verdict] = []
    for place, line in enumerate(told):
        verdict = next((one for one in _TOLD if line == f"{place} {one}"), None)
        if verdict is None:
            return ["crashed"] * count
        found.append(verdict)
    return found + [how_it_ended(outcome)] * (count - len(found))


def how_it_ended(outcome: Outcome) -> Verdict:
    """Return the verdict on a program that did not come to its end, or not well."""
    if outcome.timed_out:
        return "too_slow"
    return "not_compiled" if outcome.does_not_compile else "crashed"
