"""The register of rules: every name has one rule, and docs/plan.md lists them as they are."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from gspo_hpc.config.schema import Config
from gspo_hpc.planning.builder import Broken
from gspo_hpc.planning.plan import judge
from gspo_hpc.planning.rules import registry
from gspo_hpc.planning.rules.ids import RuleId, Topic


def test_every_name_has_one_rule() -> None:
    rules = registry.rules()
    names = [name for enum in RuleId.__subclasses__() for name in enum]
    assert sorted(names) == sorted(rules) and len(names) == len(set(names)) > 50
    for rule_id, rule in rules.items():
        assert rule_id == rule_id.lower() and rule_id.isidentifier() and len(rule_id) <= 40
        assert not rule.meaning.endswith(".") and "\n" not in rule.meaning


def test_every_file_of_the_folder_is_read() -> None:
    folder = Path(registry.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "ids", "registry", "planned_only"}
    modules = [importlib.import_module(f"gspo_hpc.planning.rules.{name}") for name in sorted(files)]
    with_rules = {rule.check.__module__ for rule in registry.rules().values()}
    assert with_rules == {module.__name__ for module in modules}


def test_rules_about_memory_are_asked_for_apart() -> None:
    plan = judge(Config())
    assert plan.broken == []
    registry.apply(plan, memory=True)
    assert plan.broken == []  # no GPU is named
    assert {rule.topic for rule in registry.rules().values()} == set(Topic)


def test_broken_rules_are_listed_by_topic_whichever_was_found_first() -> None:
    """Rules about memory are tried last, and stand before those of the engine's arguments."""
    order = [next(name for name, rule in registry.rules().items() if rule.topic is topic) for topic in Topic]
    found = [Broken(name, "") for name in reversed(order)]
    assert [item.rule for item in registry.listed(found)] == order


def test_the_documentation_lists_the_rules_as_they_are(project: Path) -> None:
    command = [sys.executable, str(project / "tools" / "rules.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    page = (project / "docs" / "plan.md").read_text("utf-8")
    for rule_id, rule in registry.rules().items():
        assert f"| `{rule_id}` | {rule.meaning} |\n" in page
