"""Changes that a Python file makes to its GRPOConfig, and what it gives TRL's trainer beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.importers.convert import Converted, convert

HEAD = "import copy, dataclasses\nfrom dataclasses import replace\nfrom trl import GRPOConfig, GRPOTrainer\n"
MADE = "args = GRPOConfig(num_generations=8, per_device_train_batch_size=8, epsilon=0.2)\n"
TRAINED = "trainer = GRPOTrainer(model='m/m', reward_funcs=[f], args=args, train_dataset=ds)\n"


def _of(body: str, after: str = "") -> Converted:
    return convert(f"{HEAD}{MADE}{body}\n{TRAINED}{after}\n", gpus=1)


@pytest.mark.parametrize(
    "body",
    [
        "args.epsilon = 0.5",
        "args = dataclasses.replace(args, epsilon=0.5)",
        "args = replace(args, **{'epsilon': 0.5})",
        "setattr(args, 'epsilon', 0.5)",
        "args.__setattr__('epsilon', 0.5)",
        "NAME = 'epsilon'\nsetattr(args, NAME, 0.5)",
        "for k, v in {'epsilon': 0.5}.items(): setattr(args, k, v)",
        "MORE = {'epsilon': 0.5}\nfor k, v in MORE.items():\n    setattr(args, k, v)",
        "args.__dict__.update(epsilon=0.5)",
        "args.__dict__['epsilon'] = 0.5",
        "vars(args).update({'epsilon': 0.5})",
        "def tune(a):\n    a.epsilon = 0.5\ntune(args)",
        "def tune(a):\n    a.epsilon = 0.5\n    return a\nargs = tune(args)",
        "def tune():\n    args.epsilon = 0.5\ntune()",
        "class T:\n  def __init__(self, a):\n    self.a = a\n  def go(self):\n    self.a.epsilon = 0.5\nT(args).go()",
        "other = args\nother.epsilon = 0.5",
        "from typing import cast\nother = cast(GRPOConfig, args)\nother.epsilon = 0.5",
        "other, n = args, 3\nother.epsilon = 0.5",
        "args.epsilon = 0.1\nargs.epsilon = 0.5",
        "if (same := args): pass\nsame.epsilon = 0.5",
        "with open('log', 'w') as log:\n    args.epsilon = 0.5",
        "import torch\nwith torch.device('cpu'), args.main_process_first():\n    args.epsilon = 0.5",
        "try:\n    pass\nfinally:\n    args.epsilon = 0.5",
        "print([setattr(args, 'epsilon', 0.5), 1][1:], f'{x}', *y, **{'z': not -x})",
        "if setattr(args, 'epsilon', 0.5): pass",
        "def tune():\n    def inner(): return 3\n    args.epsilon = 0.5\n    return inner\ntune()",
        "import asyncio\nasync def tune():\n    args.epsilon = 0.5\nasyncio.run(tune())",
        "class T:\n    def tune(self): args.epsilon = 0.5\nt = T()\nt.tune()",
    ],
)
def test_a_literal_that_is_written_in_plain_order_counts(body: str) -> None:
    found = _of(body)
    assert found.config.algorithm.clip_low == 0.5 and found.open == ()


@pytest.mark.parametrize(
    "body",
    [
        "args.epsilon += 0.1",
        "if x: args.epsilon = 0.5",
        "for s in range(3):\n    args.epsilon = 0.5",
        "try:\n    args.epsilon = 0.5\nexcept E:\n    pass",
        "args.epsilon = compute()",
        "setattr(args, 'epsilon', compute())",
        "for k, v in {'epsilon': 0.5}.items(): setattr(args, k, v * 2)",
        "del args.epsilon",
        "def tune(a, e):\n    a.epsilon = e\ntune(args, 0.5)",
        "def tune(a):\n    if a: return\n    a.epsilon = 0.5\ntune(args)",
        "def tune(a):\n    a.epsilon = 0.5\nif x: tune(args)",
        "def a(c):\n    c.epsilon = 0.5\ndef b(c):\n    c.epsilon = 0.1\nfor go in (a, b):\n    go(1)\na(args)",
        "[setattr(args, 'epsilon', 0.5) for _ in range(n)]",
        "{setattr(args, 'epsilon', 0.5) for _ in range(n)}",
        "{1: setattr(args, 'epsilon', 0.5) for _ in range(n)}",
        "any(setattr(args, 'epsilon', 0.5) for _ in range(n))",
        "[1 for _ in range(n) if setattr(args, 'epsilon', 0.5)]",
        "try:\n    args.epsilon = 0.5\nexcept* E:\n    pass",
        "try:\n    pass\nexcept* E:\n    args.epsilon = 0.5",
        "x and setattr(args, 'epsilon', 0.5)",
        "y < x < setattr(args, 'epsilon', 0.5)",
        "assert x, setattr(args, 'epsilon', 0.5)",
        "lambda: setattr(args, 'epsilon', 0.5)",
        "tune = lambda: setattr(args, 'epsilon', 0.5)\ntune()",
        "match x:\n    case 1:\n        args.epsilon = 0.5",
        "match x:\n    case 1 if setattr(args, 'epsilon', 0.5):\n        pass",
        "from contextlib import suppress\nwith suppress(E):\n    args.epsilon = 0.5",
        "with mine:\n    args.epsilon = 0.5",
        "def tune():\n    args.epsilon = 0.5",
        "def tune():\n    args.epsilon = 0.5\n    yield\ntune()",
        "async def tune():\n    args.epsilon = 0.5\ntune()",
        "def tune(a=setattr(args, 'epsilon', 0.5)): ...",
        "def tune():\n    with open(f):\n        if x: return\n        args.epsilon = 0.5\ntune()",
        "if x:\n    def tune(): args.epsilon = 0.5\nelse:\n    def tune(): args.epsilon = 0.1\ntune()",
        "def tune(): args.epsilon = 0.5\nfrom mine import tune\ntune()",
        "class T:\n    def tune(self): args.epsilon = 0.5\nmine.tune()",
        "class T:\n    def tune(self): args.epsilon = 0.5\nclass U(T):\n    def tune(self): pass\nU().tune()",
        "class C:\n    cfg = args\nC.cfg.epsilon = 0.5",
        "class C:\n    cfg = args\n    def go(self):\n        self.cfg.epsilon = 0.5\nC().go()",
        "class C:\n    @property\n    def cfg(self):\n        return args\nC().cfg.epsilon = 0.5",
        "class C: pass\nc = C()\nc.cfg = args\ndef go(d):\n    d.cfg.epsilon = 0.5\ngo(c)",
    ],
)
def test_a_write_that_may_not_happen_is_known_only_when_the_script_runs(body: str) -> None:
    found = _of(body)
    (left,) = [item for item in found.left if item.name == "epsilon"]
    assert "known only when the script runs" in left.why
    assert any(given.startswith("epsilon=$(") for given in found.open)


LATE = ("trainer.args.{} = {}", "args.{} = {}", "getattr(trainer, 'args').{} = {}", "setattr(trainer.args, '{}', {})")


@pytest.mark.parametrize("line", LATE)
def test_what_the_trainer_reads_when_it_is_made_is_set_too_late_afterwards(line: str) -> None:
    found = _of("", f"{line.format('epsilon', 0.5)}\ntrainer.train()")
    assert not found.open and found.config.algorithm.clip_low == 0.2
    (item,) = [item for item in found.left if item.name.startswith("epsilon=0.5")]
    assert "has read it by then: what is given before counts" in item.why


@pytest.mark.parametrize("line", LATE)
def test_what_the_trainer_reads_while_it_trains_may_be_set_after_it_is_made(line: str) -> None:
    """It makes its optimizer and its schedule in train()."""
    body = "args.lr_scheduler_type = 'cosine'"
    found = _of(body, f"{line.format('lr_scheduler_type', repr('constant'))}\ntrainer.train()")
    assert not found.open and found.config.optimizer.lr_decay_style == "constant"
    after = "\n".join(line.format(*pair) for pair in (("learning_rate", 3e-6), ("max_steps", 7), ("save_steps", 9)))
    config = _of("args.learning_rate = 1e-6", f"def main():\n    trainer.train()\n{after}\nmain()").config
    assert (config.optimizer.lr, config.run.max_steps, config.checkpoint.interval) == (3e-6, 7, 9)


@pytest.mark.parametrize("name", ["learning_rate", "save_steps"])
def test_what_is_set_after_the_training_changes_nothing(name: str) -> None:
    found = _of(f"args.{name} = 3", f"trainer.train()\ntrainer.args.{name} = 4")
    assert not found.open and (found.config.optimizer.lr, found.config.checkpoint.interval)[name == "save_steps"] == 3
    assert [item.why for item in found.left if item.name.startswith(f"{name}=4")] == ["it is set after the training"]


@pytest.mark.parametrize(
    "after",
    [
        "trainer.args.seed = 5\ntrainer.train()",  # read at both times
        "trainer.args.warmup_ratio = 5\ntrainer.train()",  # of transformers 4 while it trains, of 5 before
        "trainer.args.learning_rate = 5",  # another file trains
        "trainer.create_optimizer()\ntrainer.args.learning_rate = 5\ntrainer.train()",
    ],
)
def test_a_literal_that_the_trainer_may_have_read_before_is_called_one(after: str) -> None:
    found = _of("", after)
    (given,) = found.open
    (item,) = [item for item in found.left if item.given == given]
    assert "5 is set after the trainer is made, which may have read it by then" in item.why
    assert "only when the script runs" not in item.why


def test_the_learning_rate_in_a_json_of_deepspeed_is_that_with_which_the_config_is_made() -> None:
    after = "args.learning_rate = 5\nargs.save_steps = 7\ntrainer.train()"
    found = convert(f"{HEAD}{MADE[:-2]}, deepspeed='ds.json')\n{TRAINED}{after}", gpus=1)
    assert found.config.checkpoint.interval == 7 and any(given.startswith("learning_rate=$(5") for given in found.open)


def test_a_trainers_own_method_runs_while_it_trains() -> None:
    own = "class M(GRPOTrainer):\n  def train(self):\n    args.save_steps = 5\n    super().train()\n"
    text = f"{HEAD}{own}{MADE}t = M('m/m', args=args)\nt.train()"
    assert any(given.startswith("save_steps=$(5") for given in convert(text, gpus=1).open)


def test_what_is_set_after_one_of_two_trainers_is_made_is_not_known() -> None:
    assert "only when the script runs" in next(
        item.why for item in _of("", f"args.epsilon = 0.5\n{TRAINED}trainer.train()").left if item.name == "epsilon"
    )


@pytest.mark.parametrize(
    "body",
    [
        "tune(args)",
        "from mine import tune\ntune(x, config=args)",
        "mine.tune([args])",
        "for name in names: setattr(args, name, 1)",
        "args.__dict__.update(more)",
        "args = replace(args, **more)",
        "args.set_training(batch_size=3)",
        "held = {}\nheld['args'] = args",
        "def tune(*all):\n    all[0].epsilon = 0.5\ntune(args)",
        "GRPOConfig.epsilon = 0.5",
        "exec(open('more.py').read())",
        "globals()['args'].epsilon = 0.5",
        "vars()['args'].epsilon = 0.5",
        "import sys\nsys.modules[__name__].args.epsilon = 0.5",
        "import __main__\n__main__.args.epsilon = 0.5",
        "f = args.__setattr__\nf('epsilon', 0.5)",
        "f = args.set_training\nf(batch_size=3)",
        "run = args\nsetattr(run, name, 0.5)",
        "type(args).__setattr__(args, 'epsilon', 0.5)",
        "GRPOConfig.__setattr__(args, 'epsilon', 0.5)",
        "args.__class__ = Mine",
        "args.__class__.epsilon = 0.5",
        "import operator\noperator.setitem(vars(args), 'epsilon', 0.5)",
        "fix(GRPOConfig)",
        "C = GRPOConfig\nfix(C)",
        "types = (S, GRPOConfig)\nfix(types)",
        "types = (S, GRPOConfig)\ntypes[1].epsilon = 0.5",
        "types = (S, GRPOConfig)\nothers = types\nfix(others)",
        "held.types = (S, GRPOConfig)",
        "import mine\nmine.fix([GRPOConfig])",
        "setattr(GRPOConfig, 'epsilon', 0.5)",
        "GRPOConfig.__dataclass_fields__['epsilon'].default = 0.5",
        "for f in GRPOConfig.__dataclass_fields__.values():\n    f.default = 0.5",
        "vars(GRPOConfig)['__dataclass_fields__']['epsilon'].default = 0.5",
        "GRPOConfig.__post_init__ = mine",
        "getattr(args, '__setattr__')('epsilon', 0.5)",
        "f = getattr(args, '__setattr__')\nf('epsilon', 0.5)",
        "import importlib\nimportlib.import_module('trl').GRPOConfig = Mine",
        "GRPOConfig = Mine",
        "@wrapped\ndef tune(a):\n    print(a)\ntune(args)",
        "eval('args.__setattr__(\"epsilon\", 0.5)')",
        "from mine import replace\nargs = replace(args, seed=3)",
        "def replace(a, **more):\n    a.epsilon = 0.5\n    return other(a)\nargs = replace(args, seed=3)",
        "import mine as copy\nargs = copy.copy(args)",
        "from mine import args",
        "try:\n    pass\nexcept Exception as args:\n    pass",
        "import trl\ntrl.GRPOConfig = Mine",
    ],
)
def test_a_place_that_may_change_anything_makes_every_argument_uncertain(body: str) -> None:
    found = _of(body)
    left = {item.name: item.why for item in found.left}
    for name in ("num_generations", "per_device_train_batch_size", "epsilon"):
        assert "may change it: its value is known only when the script runs" in left[name]
    assert found.config.batch.num_generations == 8  # as it is given
    assert {item.name for item in found.carried} == {"model_name_or_path"}
    assert any(given.startswith("line ") for given in found.open)
    assert any("which may set any argument" in line for line in found.assumed)


@pytest.mark.parametrize(
    "body",
    [
        "print(args)",
        "import torch\n@torch.no_grad()\ndef show(a):\n    print(a)\nshow(args)",
        "eval(text, {'__builtins__': None}, {})",
        "import json\nlogger.info(f'{args}')\njson.dumps(args.to_dict())",
        "from transformers import set_seed\nset_seed(args.seed)\nos.makedirs(args.output_dir)",
        "def show(a):\n    print(a.epsilon)\nshow(args)",
        "assert args and isinstance(args, GRPOConfig)",
        "n = getattr(args, 'seed')\nnames = [name for name in vars(args)]",
        "print(args.__class__.__name__, GRPOConfig.__name__)",
        "def show(a: GRPOConfig, b: 'GRPOConfig' = None, c: type[GRPOConfig] | None = None) -> GRPOConfig: ...",
        "names = [f.name for f in dataclasses.fields(GRPOConfig)]",
        "import inspect\ninspect.signature(GRPOTrainer.__init__)",
        "from trl import TrlParser\ntypes = (ScriptArguments, GRPOConfig)\n"
        "if subs: parser = subs.add_parser('grpo', dataclass_types=types)\nelse: parser = TrlParser(types, prog='x')",
        "from transformers import HfArgumentParser\nparser = HfArgumentParser((GRPOConfig,))",
    ],
)
def test_reading_a_config_changes_nothing(body: str) -> None:
    found = _of(body)
    assert found.open == () and "epsilon" in {item.name for item in found.carried}


def test_a_mapping_of_the_config_may_be_changed_by_another_name() -> None:
    made = MADE.replace("epsilon=0.2", "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr': 1e-7}")
    for body in ("kw = args.lr_scheduler_kwargs\nkw['min_lr'] = 1e-6", "args.lr_scheduler_kwargs.update(min_lr=1e-6)"):
        found = convert(f"{HEAD}{made}{body}\n{TRAINED}", gpus=1)
        assert "lr_scheduler_kwargs" not in {item.name for item in found.carried}
    found = convert(f"{HEAD}{made}kw = args.lr_scheduler_kwargs\nprint(kw)\n{TRAINED}", gpus=1)
    assert found.config.optimizer.min_lr == 1e-7


def test_a_function_may_return_the_config() -> None:
    text = (
        f"{HEAD}def cfg(lr=1e-6):\n    return GRPOConfig(num_generations=8, learning_rate=lr), 3\n"
        "args, n = cfg()\nargs.beta = 0.2\nGRPOTrainer('m/m', [f], args)\n"
    )
    found = convert(text, gpus=1)
    assert found.config.algorithm.kl_beta == 0.2 and found.config.model.path == "m/m"
    assert found.open == ("learning_rate=$(lr)",)


def test_a_mapping_that_is_edited_is_not_what_it_was() -> None:
    text = f"{HEAD}kw = {{'num_generations': 8, 'beta': 0.1}}\n%sargs = GRPOConfig(max_steps=4, **kw)\n{TRAINED}"
    assert convert(text % "", gpus=1).config.algorithm.kl_beta == 0.1
    for edit, beta in (("kw['beta'] = 0.3\n", 0.3), ("kw.update(beta=0.3)\n", 0.3), ("del kw['beta']\n", 0.0)):
        found = convert(text % edit, gpus=1)
        assert found.open == () and found.config.algorithm.kl_beta == beta
    for edit in ("tune(kw)\n", "k = kw\nk['beta'] = 0.3\n"):
        found = convert(text % edit, gpus=1)
        assert found.open == ("**kw",) and found.config.algorithm.kl_beta == 0
        assert "it may give any argument" in next(item.why for item in found.left if item.name == "**kw")


PARSED = "from trl import GRPOConfig, GRPOTrainer, TrlParser\n"


def test_what_a_script_sets_after_its_parser_goes_before_the_command(tmp_path: Path) -> None:
    file = tmp_path / "t.py"
    run = "accelerate launch --num_processes 1 t.py --num_generations 8 --epsilon 0.2 --beta 0.01"

    def of(body: str) -> Converted:
        file.write_text(f"{PARSED}{body}")
        return convert(run, folder=tmp_path)

    parse = "(args,) = TrlParser((GRPOConfig,)).parse_args_and_config()\n"
    found = of(f"{parse}args.epsilon = 0.5\nargs.num_iterations = 4\nGRPOTrainer(model='m/m', args=args)\n")
    config = found.config
    assert (config.algorithm.clip_low, config.batch.num_iterations, config.algorithm.kl_beta) == (0.5, 4, 0.01)
    assert config.model.path == "m/m" and found.open == ()
    assert any("t.py sets model_name_or_path, epsilon, num_iterations itself" in line for line in found.assumed)
    body = "def main(s, args):\n    args.epsilon = 0.5\n    tune(s, args)\n    GRPOTrainer(model=s.model, args=args)\n"
    found = of(f"{body}p = TrlParser((S, GRPOConfig))\nscript, args = p.parse_args_and_config()\nmain(script, args)\n")
    assert found.config.algorithm.clip_low == 0.5 and found.config.algorithm.kl_beta == 0.01
    assert "tune(s, args) may change it" in {item.name: item.why for item in found.left}["beta"]
    found = of(
        "p = TrlParser((GRPOConfig,))\np.set_defaults(beta=0.3, learning_rate=2e-6)\n"
        "(args,) = p.parse_args_and_config()\n"
    )
    assert found.config.algorithm.kl_beta == 0.01 and found.config.optimizer.lr == 2e-6
    found = of("(args,) = TrlParser((GRPOConfig,)).parse_dict({'beta': 0.5})\n")
    assert found.config.algorithm.kl_beta == 0.5  # it stands in the file, and the command is not read
    assert {item.name: item.why for item in found.left}["--epsilon"] == "an argument of t.py itself"
    found = of("(args,) = TrlParser((GRPOConfig,)).parse_dict({'beta': load()})\n")
    assert "parse_dict" in {item.name: item.why for item in found.left}["beta"]


def test_defaults_of_a_config_class_of_the_files_own_are_read(tmp_path: Path) -> None:
    own = "from dataclasses import dataclass, field\n@dataclass\nclass Mine(GRPOConfig):\n    epsilon: float = 0.4\n"
    own += "    beta: float = field(default=0.3)\n"
    found = convert(f"{HEAD}{own}args = Mine(num_generations=8, beta=0.1)\n{TRAINED}", gpus=1)
    assert (found.config.algorithm.clip_low, found.config.algorithm.kl_beta) == (0.4, 0.1)
    (tmp_path / "t.py").write_text(f"{PARSED}{own}(args,) = TrlParser((Mine,)).parse_args_and_config()\n")
    found = convert("python t.py --num_generations 8 --beta 0.2", folder=tmp_path, gpus=1)
    assert (found.config.algorithm.clip_low, found.config.algorithm.kl_beta) == (0.4, 0.2)
    other = convert(f"from trl import GRPOTrainer\nfrom mine import GRPOConfig\n{MADE}{TRAINED}", gpus=1)
    assert "a GRPOConfig of mine's own may change it" in other.left[0].why


def test_every_argument_of_the_trainer_is_in_a_list() -> None:
    given = "'m/m', [f], args, ds, callbacks=[X()], eval_dataset=es, processing_class=tok, foo=3, **kw"
    found = convert(f"{HEAD}{MADE}GRPOTrainer({given})", gpus=1)
    left = {item.name for item in found.left}
    assert {"callbacks", "eval_dataset", "processing_class", "dataset_name", "reward_funcs", "**kw"} <= left
    assert [item.given for item in found.strange] == ["foo=3"] and "**kw" in found.open
    assert "model_name_or_path" in {item.name for item in found.carried}
    found = convert(f"{HEAD}{MADE}GRPOTrainer('m/m', optimizers=(AdamW(p, lr=1), None), args=args)", gpus=1)
    assert "it is AdamW here" in {item.name: item.why for item in found.left}["optimizers"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class T(GRPOTrainer):\n    def _compute_loss(self, m, i): ...\nT(args=args)", "overrides _compute_loss"),
        (
            "class A(GRPOTrainer):\n    def _get_per_token_logps(self): ...\nclass B(A): pass\nB(args=args)",
            "A overrides",
        ),
        (
            "class T(GRPOTrainer):\n    def _compute_loss(self, m, i): ...\nK = T if x else U\nK(args=args)",
            "overrides _compute_loss",
        ),
        ("GRPOTrainer.compute_loss = mine\nGRPOTrainer(args=args)", "compute_loss of TRL's trainer is replaced"),
        ("t = GRPOTrainer(args=args)\nt._compute_loss = mine", "_compute_loss of TRL's trainer is replaced"),
        ("GRPOTrainer(args=args, optimizers=(torch.optim.SGD(p, lr=1), None))", "there is only AdamW here"),
    ],
)
def test_another_objective_or_optimizer_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        convert(f"{HEAD}{MADE}{text}\n", gpus=1)
    assert expected in str(refused.value) and len(str(refused.value).splitlines()) == 1


AFTER = "t = GRPOTrainer('m/m', args=args)\n"


@pytest.mark.parametrize(
    "text",
    [
        "class M(GRPOTrainer): compute_loss = mine\nM('m/m', args=args)",
        "class M(GRPOTrainer):\n  if x:\n    def compute_loss(self): ...\nM('m/m', args=args)",
        "class M(GRPOTrainer):\n  from mine import compute_loss\nM('m/m', args=args)",
        "class M(GRPOTrainer):\n  compute_loss: object = mine\nM('m/m', args=args)",
        "class X:\n  def compute_loss(self): ...\nclass M(GRPOTrainer, X): pass\nM('m/m', args=args)",
        "from trl import GRPOTrainer as T\nclass M(T):\n  def compute_loss(self): ...\nM('m/m', args=args)",
        "setattr(GRPOTrainer, 'compute_loss', mine)\nGRPOTrainer('m/m', args=args)",
        "T = GRPOTrainer\nT.compute_loss = mine\nT('m/m', args=args)",
        "from trl import GRPOTrainer as T\nT.compute_loss = mine\nT('m/m', args=args)",
        "import trl.trainer.grpo_trainer as g\ng.GRPOTrainer.compute_loss = mine\nGRPOTrainer('m/m', args=args)",
        "class M(GRPOTrainer): pass\nM.compute_loss = mine\nM('m/m', args=args)",
        "M = type('M', (GRPOTrainer,), {'compute_loss': mine})\nM('m/m', args=args)",
        "from unittest import mock\nmock.patch.object(GRPOTrainer, 'compute_loss', mine).start()\n" + AFTER,
        AFTER + "setattr(t, 'compute_loss', mine)",
        AFTER + "t.__dict__['compute_loss'] = mine",
        AFTER + "vars(t)['compute_loss'] = mine",
        AFTER + "t.__setattr__('compute_loss', mine)",
        AFTER + "object.__setattr__(t, 'compute_loss', mine)",
    ],
)
def test_another_loss_is_refused_by_whatever_way_it_gets_into_the_trainer(text: str) -> None:
    with pytest.raises(ValueError, match=r"^line \d+: (M overrides|X overrides)?.*compute_loss of TRL's trainer"):
        convert(f"{HEAD}{MADE}{text}\n", gpus=1)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("class M(GRPOTrainer): extra = mine\nM('m/m', args=args)", "class M: extra"),
        ("@patched\nclass M(GRPOTrainer): pass\nM('m/m', args=args)", "class M: patched (line 5)"),
        ("class M(GRPOTrainer, metaclass=X): pass\nM('m/m', args=args)", "class M: X (line 5)"),
        ("class M(GRPOTrainer):\n  vars()[name] = mine\nM('m/m', args=args)", "class M: vars()[name] (line 6)"),
        ("from mine import X\nclass M(X, GRPOTrainer): pass\nM('m/m', args=args)", "X"),
        ("M = type('M', (GRPOTrainer,), more)\nM('m/m', args=args)", "line 5: type('M', (GRPOTrainer,), more)"),
        ("M = made(GRPOTrainer)\nM('m/m', args=args)", "line 5: made(GRPOTrainer)"),
        ("setattr(GRPOTrainer, name, mine)\n" + AFTER, "line 5: setattr(GRPOTrainer, name, mine)"),
        ("import trl\ntrl.GRPOTrainer = Mine\n" + AFTER, "line 6: trl.GRPOTrainer = Mine"),
        ("GRPOTrainer = mine.Trainer\nGRPOTrainer('m/m', args=args)", "line 5: GRPOTrainer = mine.Trainer"),
        (AFTER + "f = getattr(t, '__setattr__')\nf('beta', 1)", "line 6: getattr(t, '__setattr__')"),
        ("import trl.trainer.utils as u\nu.pad = mine\n" + AFTER, "line 6: u.pad = mine"),
        ("from transformers import Trainer\nTrainer.log = mine\n" + AFTER, "line 6: Trainer.log = mine"),
        (AFTER + "patch(t)", "line 6: patch(t)"),
        (AFTER + "@wrapped\ndef go(a): ...\ngo(t)", "line 8: go(t)"),
        (AFTER + "import mine\nmine.patch(x, trainers=[t])", "line 7: mine.patch(x, trainers=[t])"),
        (AFTER + "held['t'] = t", "line 6: held['t'] = t"),
        (AFTER + "setattr(t, name, 1)", "line 6: setattr(t, name, 1)"),
        (AFTER + "t.__dict__.update(beta=1)", "line 6: t.__dict__.update(beta=1)"),
        (AFTER + "f = t.__setattr__\nf('beta', 1)", "line 6: f = t.__setattr__"),
        (AFTER + "t.optimizer.param_groups[0]['lr'] = 1", "line 6: t.optimizer.param_groups[0]['lr'] = 1"),
        (AFTER + "def go(a):\n    patch(a)\ngo(t)", "line 7: patch(a)"),
    ],
)
def test_what_may_change_the_trainer_is_listed_with_its_line(text: str, line: str) -> None:
    assert line in {item.given for item in convert(f"{HEAD}{MADE}{text}\n", gpus=1).left}


@pytest.mark.parametrize("line", ["t.beta = 0.5", "setattr(t, 'beta', 0.5)", "vars(t)['beta'] = 0.5"])
def test_an_argument_that_is_set_on_the_trainer_is_not_known(line: str) -> None:
    found = convert(f"{HEAD}{MADE}{AFTER}{line}\n", gpus=1)
    assert found.open == ("beta=$(GRPOTrainer.beta in line 6)",)
    assert {item.given for item in found.left} == {*found.open, "GRPOTrainer.beta (line 6)"}
    assert convert(f"{HEAD}{MADE}{AFTER}t.epsilon_low = 0.5\n", gpus=1).open[0].startswith("epsilon=$(")


@pytest.mark.parametrize(
    "text",
    [
        AFTER + "t.train()\nt.save_model(args.output_dir)\nt.push_to_hub()\nprint(t, t.model.config.use_cache)",
        AFTER + "if t.is_world_process_zero(): t.log_metrics('x', t.evaluate())\nt.train(resume_from_checkpoint=None)",
        "def build(a):\n    t = GRPOTrainer('m/m', args=a)\n    return t\ndef go(t):\n    t.train()\ngo(build(args))",
        "def main(a: GRPOConfig) -> GRPOTrainer:\n    return GRPOTrainer('m/m', args=a)\nmain(args)",
        "try:\n    import trl\nexcept ImportError:\n    GRPOConfig = GRPOTrainer = None\n" + AFTER,
        "T = GRPOTrainer\nt: GRPOTrainer = T('m/m', args=args)\nassert isinstance(t, GRPOTrainer)",
        "class R:\n  def __init__(self, a):\n    self.t = GRPOTrainer('m/m', args=a)\nR(args).t.train()",
    ],
)
def test_an_ordinary_use_of_the_trainer_is_not_listed(text: str) -> None:
    found = convert(f"{HEAD}{MADE}{text}\n", gpus=1)
    assert not found.left and not found.open and len(found.carried) == 4


def test_callbacks_and_a_checkpoint_that_the_trainers_methods_get_are_listed() -> None:
    for text in ("t.add_callback(Mine(t.model))", "from trl import Log\nt.add_callback(Log(t))"):
        (item,) = convert(f"{HEAD}{MADE}{AFTER}{text}\n", gpus=1).left
        assert item.why == "callbacks have no counterpart here"
    for given, shown in (("resume_from_checkpoint=last()", "$(last())"), ("'a/b'", "a/b"), ("True", "true")):
        (item,) = convert(f"{HEAD}{MADE}{AFTER}t.train({given})\n", gpus=1).left
        assert item.given == f"resume_from_checkpoint={shown}" and "resumes the run here" in item.why


@pytest.mark.parametrize(
    ("before", "given"),
    [
        ("", "{'a': 1, **({'quantization_config': own.q} if own.few else {})}"),
        ("kw = dict(a=1)\nif own.few:\n    kw['quantization_config'] = own.q", "kw"),
        ("kw = {'a': 1}\nif own.few:\n    kw.update(quantization_config=own.q)", "kw"),
        ("kw = {'a': 1}\nkw.update({'quantization_config': own.q} if own.few else {})", "kw"),
    ],
)
def test_what_a_model_is_loaded_with_is_listed_one_by_one(before: str, given: str) -> None:
    """The whole was cut off, and with it weights that are quantized under a condition."""
    text = f"{HEAD}{before}\nargs = GRPOConfig(beta=0.1, num_generations=8, model_init_kwargs={given})\n{AFTER}"
    why = {item.name: item.why for item in convert(text, gpus=1).left}
    assert why["model_init_kwargs quantization_config=own.q"] == "weights are never quantized here"
    assert why["model_init_kwargs a=1"] == "it has no counterpart here"


def test_what_a_yaml_loads_a_model_with_is_named() -> None:
    text = "num_generations: 8\nbeta: 0.1\nmodel_init_kwargs: {dtype: bfloat16, device_map: auto, load_in_4bit: true}"
    why = {item.name: item.why for item in convert(text, source="trl", gpus=1).left}["model_init_kwargs"]
    assert why == "device_map, load_in_4bit of it: no counterpart here; weights are never quantized here"


@pytest.mark.parametrize("config", ["from own.arguments import Mine as C", "from trl import GRPOConfig as C"])
def test_a_trainer_of_another_module_is_told(tmp_path: Path, config: str) -> None:
    """Also where the file takes its config from another module: its command was read, and not its trainer."""
    script = "python grpo.py --num_generations 8 --per_device_train_batch_size 8 --beta 0.1"
    text = f"from trl import TrlParser\n{config}\nfrom own.trainer import GRPOTrainer\n"
    text += "args = TrlParser((C,)).parse_args_and_config()\nGRPOTrainer('m/m', [f], args).train()\n"
    (tmp_path / "grpo.py").write_text(text)
    found = convert(script, folder=tmp_path, name="run.sh", gpus=1)
    told = "grpo.py trains with own.trainer.GRPOTrainer, which is not TRL's: what that changes is not known"
    assert told in found.assumed and "own.trainer.GRPOTrainer" in {item.name for item in found.left}
    (tmp_path / "grpo.py").write_text(text.replace("own.trainer", "trl"))
    assert not any("trains with" in line for line in convert(script, folder=tmp_path, name="run.sh", gpus=1).assumed)


def test_a_trainer_of_the_files_own_may_pass_its_config_on() -> None:
    own = "class M(GRPOTrainer):\n  def __init__(self, model, args):\n    {}\n    super().__init__(model, args=args)\n"
    for line in ("pass", "print(args)"):
        found = convert(f"{HEAD}{MADE}{own.format(line)}M('m/m', args)\n", gpus=1)
        assert found.open == () and "class M: __init__" in {item.given for item in found.left}
    for line in ("args = replace(args, epsilon=0.5)", "args.epsilon = 0.5"):
        found = convert(f"{HEAD}{MADE}{own.format(line)}M('m/m', args)\n", gpus=1)
        assert "epsilon" not in {item.name for item in found.carried}


def test_a_config_by_another_name_is_read() -> None:
    text = (
        "from trl import GRPOConfig as C, GRPOTrainer as T\nargs = C(num_generations=8, beta=0.1)\nT('m/m', [f], args)"
    )
    found = convert(text, gpus=1)
    assert found.config.algorithm.kl_beta == 0.1 and found.config.model.path == "m/m" and found.open == ()
    other = convert(text.replace("trl import GRPOConfig as C,", "mine import GRPOConfig as C\nfrom trl import"), gpus=1)
    assert "a GRPOConfig of mine's own" in other.open
    own = "class Mine(GRPOConfig):\n    @property\n    def beta(self): return 1\nargs = Mine(num_generations=8)\n"
    assert "line 6: Mine.beta" in convert(f"{HEAD}{own}{TRAINED}", gpus=1).open


def test_a_trainer_that_is_not_trls_is_listed() -> None:
    own = "class T(GRPOTrainer):\n    def log(self, x): ...\nT('m/m', args=args)\n"
    found = convert(f"{HEAD}{MADE}{own}", gpus=1)
    assert "class T: log" in {item.given for item in found.left} and found.config.model.path == "m/m"
    found = convert(f"{HEAD}{MADE}from mine import MyGRPOTrainer\nMyGRPOTrainer('m/m', args=args)\n", gpus=1)
    assert "MyGRPOTrainer" in {item.given for item in found.left}
    found = _of("", "trainer.beta = 0.5")
    assert "GRPOTrainer.beta (line 7)" in {item.given for item in found.left}
