"""Which values of a Python file are certain: names by their scopes, and mappings that nothing changes."""

from __future__ import annotations

import pytest

from gspo_hpc.importers.convert import Converted, convert

HEAD = "import copy, json\nfrom trl import GRPOConfig, GRPOTrainer\n"
TRAINED = "GRPOTrainer(model='m/m', args=args)\n"


def _of(body: str, given: str) -> Converted:
    return convert(f"{HEAD}{body}\nargs = GRPOConfig(num_generations=8, {given})\n{TRAINED}", gpus=1)


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ("B = 0.25", "beta=B"),
        ("B: float = 0.25", "beta=B"),
        ("A = B = 0.25", "beta=B"),
        ("A, B = 1, 0.25", "beta=B"),
        ("(A, [B, C]), D = (1, [0.25, 2]), f()", "beta=B"),
        ("P = (1, 0.25)\nA, B = P", "beta=B"),
        ("print(B := 0.25)", "beta=B"),
        ("", "epsilon=(B := 0.25), beta=B"),
        ("B = 1 / 2 ** 2", "beta=B"),
        ("B = max(0.25, float('0.1'))", "beta=B"),
        ("SMALL = True\nB = 0.25 if SMALL else 1", "beta=B"),
        ("from mine import *\nB = 0.25", "beta=B"),
        ("from mine import *\nB = 0.25\ndef f():\n    return B\nprint(f())", "beta=B"),
        ("def warm():\n    B = 1\n    return B\nB = 0.25", "beta=B"),
        ("squares = [B for B in range(3)]\nB = 0.25", "beta=B"),
        ("def f(B): return B\nB = 0.25\ng = lambda B: B", "beta=B"),
        ("class C:\n    B = 1\nB = 0.25", "beta=B"),
        ("class C:\n    A = 0.25\n    B = A", "beta=C.B"),
        ("class C:\n    KW = {'beta': 0.25}", "**C.KW"),
        ("base = {'beta': 0.25}", "**base"),
        ("base = dict(beta=0.25)", "**base"),
        ("base = {'beta': 1}\nmore = {**base, 'beta': 0.25}", "**more"),
        ("base = {'beta': 1}", "**{**base, 'beta': 0.25}"),
        ("base = {'beta': 1}\nmore = base | {'beta': 0.25}", "**more"),
        ("base = {'beta': 1}", "**dict(base, beta=0.25)"),
        ("base = {'beta': 1}", "**(base | dict(beta=0.25))"),
        ("base = {'beta': 0.25, 'seed': now()}", "**base"),
        ("base = {'beta': 0.25}", "beta=base['beta']"),
        ("base = {'beta': 0.25}", "beta=base.get('beta')"),
        ("both = {'grpo': {'beta': 0.25}}", "**both['grpo']"),
        ("base = {'beta': 0.25}\nother = base.copy()\nother['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nother = copy.deepcopy(base)\nother['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nother = base\nprint(other)", "**base"),
        ("base = {'beta': 0.25}\nother = {**base}\nother['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nfor k, v in base.items(): print(k, v)", "**base"),
        ("base = {'beta': 0.25}\nprint(json.dumps(base), len(base), 'beta' in base, [*base], f'{base}')", "**base"),
        ("base = {'beta': 0.25}\nif base and isinstance(base, dict): assert base", "**base"),
        ("base = {'beta': 0.25}\ndef show(d, n=1):\n    print(d['beta'], n)\nshow(base)\nshow(d=base)", "**base"),
        ("base = {'beta': 0.25}\nall = [base]\nfor n in range(len(all)): print(all[n])", "**base"),
        ("base = {'beta': 0.25}\nimport wandb\nwandb.init(config=base)", "**base"),
        ("base = {'beta': 0.25}\ndef build(**kw):\n    kw['beta'] = 1\nbuild(**base)", "**base"),
        ("base = {'beta': 0.25}\nfull = {}\nfull.update(base)\nfull['beta'] = 1", "**base"),
    ],
)
def test_a_value_that_only_harmless_code_touches_is_certain(body: str, given: str) -> None:
    found = _of(body, given)
    assert found.config.algorithm.kl_beta == 0.25
    assert "beta" in {item.name for item in found.carried}
    assert set(found.open) <= {"seed=$(now())"}


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ("B = 0.25\nif x: B = 1", "beta=B"),
        ("B = 0.25\nfrom mine import *", "beta=B"),
        ("B = 0.25\ntry:\n    from mine import B\nexcept ImportError: pass", "beta=B"),
        ("if x: B = 0.25\nfrom mine import *", "beta=B"),
        ("from mine import *\nif x: B = 0.25", "beta=B"),
        ("from mine import *\ndef f():\n    B = 0.25\n    return B", "beta=B"),
        ("from mine import *\nA = B\nB = 0.25", "beta=A"),
        ("from mine import *\ndef f(): return 1\nA = [B]\nf()\nB = 0.25", "beta=A[0]"),
        ("def f():\n    global B\n    B = 1\nB = 0.25\nf()", "beta=B"),
        ("B = 0.25\nmatch x:\n    case {'beta': B}: pass", "beta=B"),
        ("B = 0.25\nmatch x:\n    case [*B]: pass", "beta=B"),
        ("B = 0.25\nmatch x:\n    case {**B}: pass", "beta=B"),
        ("B = 0.25\nfor B in x: pass", "beta=B"),
        ("B = 0.25\nwith x as B: pass", "beta=B"),
        ("B = 0.25\n[B := y for y in x]", "beta=B"),
        ("B = 0.25\nimport mine as B", "beta=B"),
        ("B = 0.25\nclass B: pass", "beta=B"),
        ("B = 0.25\ndef B(): pass", "beta=B"),
        ("B = 0.25\nB += 1", "beta=B"),
        ("A, *B = 0.25, 1", "beta=B"),
        ("B = 0.25 if x else 1", "beta=B"),
        ("class C:\n    B = 0.25\nC.B = 1", "beta=C.B"),
        ("class C:\n    B = 0.25\nsetattr(C, 'B', 1)", "beta=C.B"),
        ("class C:\n    B = 0.25\nclass D(C): pass\nD.B = 1", "beta=D.B"),
        ("class C(E):\n    B = 0.25", "beta=C.B"),
        ("@made\nclass C:\n    B = 0.25", "beta=C.B"),
        ("class C:\n    B = 0.25\n    def f(self): type(self).B = 1\nC().f()", "beta=C.B"),
        ("base = {'beta': 0.25}\nother = base\nother['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nother = base\nother['beta'] = 1", "beta=base['beta']"),
        ("base = other = {'beta': 0.25}\nother['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\na, b = 1, base\nb['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nfor d in (base, {}): d['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\n[d.update(beta=1) for d in [base]]", "**base"),
        ("base = {'beta': 0.25}\nother = base if x else {}\nother['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nother = base or {}\nother['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nprint(other := base)\nother['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nheld = {'x': base}\nheld['x']['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nheld = {'x': base}\nfor d in held.values(): d['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nheld = dict(x=base)\nheld.get('x').update(beta=1)", "**base"),
        ("base = {'beta': 0.25}\nheld = [base]\nheld[0]['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nheld['x'] = base", "**base"),
        ("base = {'beta': 0.25}\nself.x = base", "**base"),
        ("base = {'beta': 0.25}\nbase.__setitem__('beta', 1)", "**base"),
        ("base = {'beta': 0.25}\nbase |= {'beta': 1}", "**base"),
        ("base = {'beta': 0.25}\nf = base.update\nf(beta=1)", "**base"),
        ("base = {'beta': 0.25}\nfor base['beta'] in (1, 2): pass", "**base"),
        ("base = {'beta': 0.25}\ndef tune(config): config['beta'] = 1\ntune(config=base)", "**base"),
        ("base = {'beta': 0.25}\ndef tune(c):\n    d = c\n    d['beta'] = 1\ntune(base)", "**base"),
        ("base = {'beta': 0.25}\ndef tune(*c): c[0]['beta'] = 1\ntune(base)", "**base"),
        ("base = {'beta': 0.25}\ndef get(): return base, 1\nc, _ = get()\nc['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\ndef build(over=base): over['beta'] = 1\nbuild()", "**base"),
        ("base = {'beta': 0.25}\ntune = lambda c: c.update(beta=1)\ntune(base)", "**base"),
        ("base = {'beta': 0.25}\nfrom mine import mergeConfig\nmergeConfig(base)", "**base"),
        ("base = {'beta': 0.25}\ndef print(d): d['beta'] = 1\nprint(base)", "**base"),
        ("base = {'beta': 0.25}\nheld = [base].copy()\nheld[0]['beta'] = 1", "**base"),
        ("base = {'beta': 0.25}\nlist(map(tune, [base]))", "**base"),
        ("both = {'grpo': {'beta': 0.25}}\nboth['grpo']['beta'] = 1", "**both['grpo']"),
        ("both = {'grpo': {'beta': 0.25}}\nc = both['grpo']\nc['beta'] = 1", "**both['grpo']"),
        ("both = {'grpo': {'beta': 0.25}}\nc = {**both}\nc['grpo']['beta'] = 1", "**both['grpo']"),
        ("base = {'beta': 0.25}", "**{**base, **more()}"),
        ("base = {'beta': 0.25}", "**(base | more())"),
        ("class C:\n    KW = {'beta': 0.25}\nC.KW['beta'] = 1", "**C.KW"),
    ],
)
def test_a_value_that_may_be_another_one_is_open(body: str, given: str) -> None:
    found = _of(body, given)
    assert "beta" not in {item.name for item in found.carried}
    assert any(text.startswith(("beta=$(", "**")) for text in found.open)


def test_a_variable_of_a_function_that_another_one_changes_is_open() -> None:
    text = (
        f"{HEAD}def main():\n    lr = 0.25\n    def bump():\n        nonlocal lr\n        lr *= 10\n{{}}"
        "    args = GRPOConfig(num_generations=8, beta=lr)\n    GRPOTrainer(model='m/m', args=args)\nmain()\n"
    )
    assert convert(text.format("    bump()\n"), gpus=1).open == ("beta=$(lr)",)
    assert convert(text.replace("nonlocal lr", "lr = 1").format(""), gpus=1).config.algorithm.kl_beta == 0.25


def test_names_that_are_made_of_each_other_take_no_time() -> None:
    chain = "\n".join(f"B{n + 1} = B{n} + B{n}" for n in range(60))
    assert _of(f"B0 = 1\n{chain}", "seed=B60 // B59, beta=0.25").config.run.seed == 2
    held = "\n".join(f"D{n + 1} = {{**D{n}, 'beta': 0.25}}; E{n} = [D{n}, D{n}]" for n in range(60))
    assert _of(f"D0 = {{'beta': 1}}\n{held}", "**D60").config.algorithm.kl_beta == 0.25
    for begin, form in (("'x'", "{0} + {0}"), ("[1]", "{0} + {0}"), ("9", "{0} * {0}"), ("1", "({0}, {0})")):
        chain = "\n".join(f"B{n + 1} = {form.format(f'B{n}')}" for n in range(60))
        assert _of(f"B0 = {begin}\n{chain}", "beta=B60").open == ("beta=$(B60)",)
    assert _of("A = [B, B]\nB = [A, A]", "beta=B").open == ("beta=$(B)",)
