"""Write random Python scripts that train with TRL, and run them with Python on a small package in place of TRL."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

DEFAULTS = {"beta": 0.0, "epsilon": 0.2, "learning_rate": 1e-6, "temperature": 1.0}
_TRL = '''
"""As much of TRL as the scripts use."""
from dataclasses import dataclass

@dataclass
class GRPOConfig:
    beta: float = 0.0
    epsilon: float = 0.2
    learning_rate: float = 1e-6
    temperature: float = 1.0

got = []
class GRPOTrainer:
    def __init__(self, model=None, args=None):
        self.args = args
        got.append(dict(vars(args)))
    def train(self):
        got.append(dict(vars(self.args)))

class TrlParser:
    def __init__(self, dataclass_types):
        self.types, self.defaults = dataclass_types, {}
    def set_defaults(self, **more):
        self.defaults.update(more)
    def parse_args_and_config(self):
        return tuple(one(**self.defaults) for one in self.types)
'''
_ENV = '''
"""What only running a script tells."""
count = 0
def flag():
    global count
    count += 1
    return count % 3 != 1
def times():
    return 2 if flag() else 0
def change(what):
    if isinstance(what, dict):
        what["beta"] = 0.77
    elif isinstance(what, list):
        for item in what: change(item)
    else:
        what.epsilon = 0.78
'''
_EXTRA = "N0 = 0.91\nN2 = 0.92\nD1 = {'beta': 0.93}\n"
_DRIVER = """
import contextlib, io, json, sys, traceback
found = []
for script in json.load(sys.stdin):
    for name in ("trl", "env", "extra"):
        sys.modules.pop(name, None)
    error = ""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            exec(compile(script, "script", "exec"), {"__name__": "__main__"})
        except BaseException as problem:
            error = repr(problem)
    found.append((sys.modules["trl"].got if "trl" in sys.modules else [], error))
json.dump(found, sys.stdout)
"""


def run(scripts: Sequence[str], folder: Path) -> list[tuple[list[dict[str, Any]], str]]:
    """Return for each script the arguments that its trainer got, each time that it read them, and its error."""
    for name, text in {"trl": _TRL, "env": _ENV, "extra": _EXTRA, "driver": _DRIVER}.items():
        (folder / f"{name}.py").write_text(text)
    ran = subprocess.run([sys.executable, str(folder / "driver.py")], input=json.dumps(scripts), capture_output=True,
                         text=True, check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(folder)})  # fmt: skip
    return [(got, error) for got, error in json.loads(ran.stdout)]


class Writer:
    """Writes one script, from constructs that the reader claims to understand."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = [f"N{n}" for n in range(4)]
        self.dicts = [f"D{n}" for n in range(3)]
        self.made = 0
        self.configs: list[str] = []
        self.functions: list[tuple[str, int]] = []
        self.depth = 0
        self.parser = False

    def script(self) -> str:
        """Return a script."""
        head = ["import copy, json", "from contextlib import nullcontext, suppress",
                "from dataclasses import dataclass, field, replace", "from env import change, flag, times",
                "from trl import GRPOConfig, GRPOTrainer, TrlParser"]  # fmt: skip
        body = [*self._begin(), *self._some(0, 3), *self._config(), *self._some(0, 4), self._train(), *self._some(0, 1)]
        if self.chance(0.3):
            body = ["def main():", *_inside(line for line in body if "import *" not in line), "main()"]
            if self.chance(0.3):
                body[-1:] = ["if __name__ == '__main__':", "    main()"]
        return "\n".join([*head, *body]) + "\n"

    def chance(self, share: float) -> bool:
        """Tell whether something happens."""
        return self.random.random() < share

    def new(self, letter: str) -> str:
        """Return a name that is not used yet."""
        self.made += 1
        return f"{letter}{self.made}x"

    # -- expressions

    def number(self) -> str:
        """Return an expression that is a number."""
        name = self.random.choice(self.names)
        some = str(self.random.randint(1, 60) / 100)
        return self.random.choice([
            some, some, some, name, name, f"{some} + 1", f"{name} * 2", f"max({some}, {name})", f"float('{some}')",
            f"({some} if flag() else {name})", f"({some} if True else {name})", f"({name} := {some})",
            f"{self.random.choice(self.dicts)}.get('beta', {some})", f"{{'a': {some}}}['a']", f"-{name}",
            f"[{name}, 1][0]",
            f"[{name} for _ in range(1)][0]", f"(lambda: {name})()",
        ] if self.chance(0.7) else [some])  # fmt: skip

    def key(self) -> str:
        """Return an argument."""
        return self.random.choice([*DEFAULTS])

    def pairs(self, form: str) -> str:
        """Return several arguments with their values."""
        keys = self.random.sample([*DEFAULTS], self.random.randint(1, 3))
        return ", ".join(form.format(key, self.number()) for key in keys)

    def mapping(self) -> str:
        """Return an expression that is a mapping of arguments."""
        name, plain = self.random.choice(self.dicts), f"{{{self.pairs(chr(39) + '{}' + chr(39) + ': {}')}}}"
        return self.random.choice([
            plain, plain, plain, f"dict({self.pairs('{}={}')})", f"{{**{name}, '{self.key()}': {self.number()}}}",
            f"{name} | {plain}", f"{name}.copy()", f"copy.deepcopy({name})", f"dict({name})", name, f"({name} or {{}})",
            f"({name} if flag() else {plain})",
        ])  # fmt: skip

    # -- statements

    def _begin(self) -> list[str]:
        """Return the names that all other statements use."""
        lines = [f"{name} = {self.random.randint(1, 60) / 100}" for name in self.names]
        lines += [f"{name} = {{{self.pairs(chr(39) + '{}' + chr(39) + ': {}')}}}" for name in self.dicts]
        if self.chance(0.15):
            lines.insert(self.random.randrange(len(lines) + 1), "from extra import *")
            return lines if self.chance(0.5) else [lines.pop(lines.index("from extra import *")), *lines]
        return lines

    def _some(self, least: int, most: int) -> list[str]:
        return [line for _ in range(self.random.randint(least, most)) for line in self._statement()]

    def _statement(self) -> list[str]:
        quiet: list[Callable[[], list[str]]] = [self._print, self._constant, self._mapping, self._local, self._class]
        loud: list[Callable[[], list[str]]] = [self._change, self._change, self._again, self._function, self._held]
        deep: list[Callable[[], list[str]]] = [self._block]
        choices = quiet * 2 + loud + (deep * 3 if self.depth < 2 else [])
        if self.configs:
            choices += [self._write] * 8
        return self.random.choice(choices)()

    def _print(self) -> list[str]:
        name = self.random.choice(self.dicts)
        return [self.random.choice([
            f"print({name}, len({name}), json.dumps({name}))", f"for k, v in {name}.items(): print(k, v)",
            f"print('beta' in {name}, [*{name}], f'{{{name}}}')", f"assert {name} or not {name}",
            *(f"print({config}, {config}.beta, vars({config}))" for config in self.configs),
        ])]  # fmt: skip

    def _constant(self) -> list[str]:
        name, other = self.new("N"), self.new("N")
        lines = [self.random.choice([
            f"{name} = {other} = {self.number()}", f"{name}, {other} = {self.number()}, {self.number()}",
            f"{name}: float = {self.number()}; {other} = {name}", f"print({name} := {self.number()}); {other} = 1",
        ])]  # fmt: skip
        self.names += [name, other]
        return lines

    def _mapping(self) -> list[str]:
        name, value = self.new("D"), self.mapping()
        self.dicts.append(name)
        return [f"{name} = {value}"]

    def _local(self) -> list[str]:
        """Return code whose names are its own."""
        name, other = self.random.choice(self.names), self.random.choice(self.dicts)
        return self.random.choice([
            [f"print([{name} for {name} in range(2)])"], [f"print({{{other}: 1 for {other} in range(2)}})"],
            [f"def {self.new('f')}({name}, {other}=None):", f"    {name} = {other} = 0.5", f"    return {name}"],
            [f"{self.new('f')} = lambda {name}: {name}"], [f"class {self.new('C')}:", f"    {name} = 0.5"],
        ])  # fmt: skip

    def _class(self) -> list[str]:
        own = self.new("C")
        lines = [f"class {own}:", f"    rate = {self.number()}"]
        self.names.append(f"{own}.rate")
        if self.chance(0.3):
            lines.append(
                self.random.choice([f"{own}.rate = 0.66", f"setattr({own}, 'rate', 0.66)", f"{own}().rate = 1"])
            )
        self.names[-1] = name = self.new("N")  # := needs a name
        return [*lines, f"{name} = {own}.rate"]

    def _change(self) -> list[str]:
        """Return a change of a mapping."""
        name, key, value = self.random.choice(self.dicts), self.key(), self.number()
        return [self.random.choice([
            f"{name}['{key}'] = {value}", f"{name}.update({key}={value})", f"{name} |= {{'{key}': {value}}}",
            f"change({name})", f"[{name}.update({key}={value}) for _ in range(times())]",
            f"for d in ({name}, {{}}): d['{key}'] = {value}", f"{name}.__setitem__('{key}', {value})",
            f"(lambda d: d.update({key}={value}))({name})", f"{name}.pop('{key}', None)",
            f"print(d := {name}); d['{key}'] = 1",
            f"def f{self.made}d(d={name}): d['{key}'] = {value}\nf{self.made}d()",
            f"def f{self.made}d(*d): d[0]['{key}'] = {value}\nf{self.made}d({name})",
            f"def f{self.made}d(**d): d['{key}'] = {value}\nf{self.made}d(**{name})",
            f"def f{self.made}d(d):\n    e = d\n    e['{key}'] = {value}\nf{self.made}d(d={name})",
            f"def f{self.made}d(): return {name}\nf{self.made}d()['{key}'] = {value}",
            f"list(map(change, [{name}]))", f"sorted([{name}], key=change)",
        ])]  # fmt: skip

    def _held(self) -> list[str]:
        name, held, key = self.random.choice(self.dicts), self.new("H"), self.key()
        made, inner = self.random.choice([
            (f"{held} = [{name}]", f"{held}[0]"), (f"{held} = {{'x': {name}}}", f"{held}['x']"),
            (f"{held} = {name}", held), (f"{held}, _ = {name}, 1", held),
            (f"{held} = dict(x={name})", f"{held}.get('x')"),
            (f"{held} = {{**{name}}}", held), (f"class {held}: kw = {name}", f"{held}.kw"),
        ])  # fmt: skip
        then = [f"{inner}['{key}'] = {self.number()}", f"print({inner})", f"change({inner})"]
        return [made, self.random.choice(then)]

    def _again(self) -> list[str]:
        """Return another value for a name."""
        name = self.random.choice(self.names[:4])
        return self.random.choice([
            [f"{name} = {self.number()}"], [f"{name} += 1"], [f"for {name} in (0.1, 0.2): pass"],
            [f"with nullcontext(0.3) as {name}: pass"], [f"match 0.4:\n    case {name}: pass"],
            [f"[{name} := v for v in (0.5, 0.6)]"], ["from extra import N0"], [f"import json as {name}; {name} = 0.7"],
            [f"try: raise ValueError\nexcept ValueError as {name}: pass\n{name} = 0.8"],
            [f"match {{'a': 0.4}}:\n    case {{'a': {name}}}: pass"], [f"from extra import N2 as {name}"],
            [f"if ({name} := 0.45) and flag(): pass"],
            [f"def {self.new('f')}():", f"    global {name}", f"    {name} = 0.9"],
            [f"def f{self.made}y():", f"    global {name}", f"    {name} = 0.95", f"f{self.made}y()"],
        ])  # fmt: skip

    def _function(self) -> list[str]:
        """Return a function that may change mappings, names and configs around it, and calls of it."""
        name = self.new("f")
        kept = self.names[:], self.dicts[:]
        body = [line for line in self._some(1, 2) if line]
        self.names, self.dicts = kept
        if self.chance(0.3):
            body = [f"if {self.random.choice(['flag()', 'True'])}: return", *body]
        own = "" if not self.configs or self.chance(0.5) else self.random.choice(self.configs)
        lines = [f"def {name}({own}):", *_inside(body)]
        call = [f"{name}({own})"]
        for _ in range(self.random.choice([0, 1, 1, 1, 2])):
            lines += self._wrapped(call) if self.chance(0.3) else call
        return lines

    def _block(self) -> list[str]:
        self.depth += 1
        kept = self.names[:], self.dicts[:], self.configs[:]
        body = self._some(1, 2)
        self.names, self.dicts, self.configs = kept
        self.depth -= 1
        return self._wrapped(body)

    def _wrapped(self, body: list[str]) -> list[str]:
        """Return a body in a statement that may run it, or not, or only in part."""
        inner = _inside(body)
        fails = _inside(self.random.choice([["change(None)", *body], [*body, "change(None)"]]))
        return self.random.choice([
            ["if flag():", *inner], ["if True:", *inner], ["if flag():", "    pass", "else:", *inner],
            ["for _ in range(times()):", *inner], ["while flag():", *inner, "    break"],
            ["with nullcontext():", *inner],
            ["with suppress(Exception):", *fails], ["try:", *fails, "except Exception:", "    pass"],
            ["try:", "    change(None)", "except Exception:", *inner], ["try:", "    pass", "finally:", *inner],
            ["try:", *fails, "except* Exception:", "    pass"], ["match times():", "    case 0:", *_inside(inner)],
        ])  # fmt: skip

    # -- the config

    def _config(self) -> list[str]:
        self.configs = ["args"]
        lines: list[str] = []
        own = "GRPOConfig"
        for _ in range(self.random.choice([0, 0, 1, 2])):
            name = self.new("Config")
            base = self.random.choice([own, "GRPOConfig"])
            if self.chance(0.8):
                lines.append("@dataclass")
            lines.append(f"class {name}({base}):")
            for key in self.random.sample([*DEFAULTS], self.random.randint(1, 2)):
                value = self.number().replace(":=", "+")
                form = ["{}: float = {}", "{}: float = field(default={})", "{} = {}",
                        "{}: float = field(default_factory=lambda: {})"]  # fmt: skip
                lines.append("    " + self.random.choice(form).format(key, value))
            own = name if self.chance(0.7) else own
        if self.chance(0.25):
            types = f"({own},)"
            if self.chance(0.3):
                lines.append(f"types = ({own},)")
                types = "types"
            lines.append(f"parser = TrlParser({types})")
            for _ in range(self.random.choice([0, 1, 2])):
                preset = [f"parser.set_defaults({self.pairs('{}={}')})"]
                lines += self._wrapped(preset) if self.chance(0.4) else preset
            return [*lines, "(args,) = parser.parse_args_and_config()"]
        given = self.pairs("{}={}") if self.chance(0.6) else f"**{self.mapping()}"
        made = f"args = {own}({given})"
        if self.chance(0.1):  # a function that is given the values
            name = self.new("f")
            return [*lines, f"def {name}(**kw):", f"    return {own}(**kw)", f"args = {name}({given})"]
        if self.chance(0.1):
            name, key = self.new("f"), self.key()
            return [
                *lines,
                f"def {name}(value=0.5):",
                f"    return {own}({key}=value)",
                f"args = {name}({self.number()})",
            ]
        if self.chance(0.1):  # an attribute of an object
            name = self.new("R")
            return [*lines, f"class {name}:", "    def __init__(self):", f"        self.args = {own}({given})",
                    f"        self.args.{self.key()} = {self.number()}", f"args = {name}().args"]  # fmt: skip
        if self.chance(0.2):
            name = self.new("f")
            return [*lines, f"def {name}():", f"    args = {own}({given})", "    return args", f"args = {name}()"]
        return [*lines, made]

    def _write(self) -> list[str]:
        config, key, value, other = self.random.choice(self.configs), self.key(), self.number(), self.new("a")
        lines, name = self.random.choice([
            ([f"{config}.{key} = {value}"], ""), ([f"setattr({config}, '{key}', {value})"], ""),
            ([f"vars({config}).update({key}={value})"], ""), ([f"{config}.__dict__['{key}'] = {value}"], ""),
            ([f"for k, v in {self.random.choice(self.dicts)}.items(): setattr({config}, k, v)"], ""),
            ([f"[setattr({config}, '{key}', {value}) for _ in range(times())]"], ""), ([f"{config}.{key} *= 2"], ""),
            ([f"flag() and setattr({config}, '{key}', {value})"], ""), ([f"change({config})"], ""),
            ([f"args = replace({config}, {key}={value})"], ""), ([f"args = copy.copy({config})"], ""),
            ([f"{other} = {config}"], other), ([f"{other} = replace({config}, {key}={value})"], other),
            ([f"{other} = copy.deepcopy({config})"], other), ([f"{other} = {config} if flag() else args"], other),
            ([f"def {other}(a):", f"    a.{key} = {value}", f"{other}({config})"], ""),
            ([f"def {other}(a):", f"    return replace(a, {key}={value})", f"args = {other}({config})"], ""),
            ([f"class {other}:", "    def __init__(self, a):", "        self.a = a", "    def go(self):",
              f"        self.a.{key} = {value}", f"{other}({config}).go()"], ""),
            ([f"(lambda a: setattr(a, '{key}', {value}))({config})"], ""),
            ([f"{other}, args = args, replace({config}, {key}={value})"], other),
            ([f"class {other}: pass", f"{other}.a = {config}", f"{other}.a.{key} = {value}"], ""),
            ([f"{other} = [{config}]", f"{other}[0].{key} = {value}"], ""),
            ([f"for {other} in ({config},): {other}.{key} = {value}"], ""),
            ([f"async def {other}(): {config}.{key} = {value}", f"import asyncio; asyncio.run({other}())"], ""),
            ([f"async def {other}(): {config}.{key} = {value}", f"{other}().close()"], ""),
            ([f"def {other}():", f"    {config}.{key} = {value}", "    yield", f"{other}()"], ""),
            ([f"def {other}():", f"    {config}.{key} = {value}", "    yield", f"for _ in {other}(): pass"], ""),
            ([f"def {other}(a): a.{key} = {value}", f"def {other}(a): pass", f"{other}({config})"], ""),
            ([f"def {other}(f): return lambda *a: None", f"@{other}", f"def {other}f(a): a.{key} = {value}",
              f"{other}f({config})"], ""),
            ([f"class {other}:", f"    def go(self, a): a.{key} = {value}", f"class {other}s({other}):",
              "    def go(self, a): pass", f"{other}s().go({config})"], ""),
            ([f"def {other}(n):", f"    {config}.{key} = n / 10", f"    if n: {other}(n - 1)", f"{other}(2)"], ""),
            ([f"{other} = {config}.__setattr__", f"{other}('{key}', {value})"], ""),
            ([f"def {other}(a, value): a.{key} = value", f"{other}({config}, {value})"], ""),
            ([f"with nullcontext({config}) as {other}: {other}.{key} = {value}"], ""),
            ([f"try: {config}.{key} = {value}", "except ValueError: pass", f"else: {config}.{key} = 0.99"], ""),
            ([f"{config}.{key}, _ = {value}, 1"], ""),
        ])  # fmt: skip
        if name:
            self.configs.append(name)
        return lines

    def _train(self) -> str:
        given = self.random.choice([*self.configs, "args", "args"])
        return f"GRPOTrainer(model='m/m', args={given}).train()"


def _inside(lines: Iterable[str]) -> list[str]:
    return [f"    {part}" for line in lines for part in line.split("\n")] or ["    pass"]
