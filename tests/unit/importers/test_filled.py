"""Tests that fail while a variable is empty, and then end the script: a run is given it; held against bash (5 s)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gspo_hpc.importers.convert import convert

RUN = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model q --gradient_accumulation_steps 8 --num_generations 8 "
ENDS = [
    '[ -d "$A" ] || exit 1',
    "[[ -f $A ]] || { echo; exit 1; }",
    '[ ! -d "$A" ] && exit 1',
    'if [ ! -e "$A" ]; then exit 1; fi',
    'if [ -s "$A" ]; then B=1; else exit 1; fi',
    'test -d "$A" || exit 1',
    'if ! test -r "$A"; then exit 1; fi',
    'if ! [ -x "$A" ]; then exit 1; fi',
    '[ -d "$A" ] && [ -f "$A/x" ] || exit 1',
    '[ -d "$A" ] || [ -d "$B" ] || exit 1',
    '[ -f "$A/adapter_config.json" ] || exit 1',
    'if [ ! -d "${A}/checkpoint" ]; then exit 1; fi',
    'die() { exit 1; }\n[ -d "$A" ] || die',
    'need() { [ -d "$1" ] || exit 2; }\nneed "$A"',
    '[[ "$A" =~ ^[0-9]+$ ]] || exit 1',
    '[[ ! "$A" =~ ^[[:digit:]]+$ ]] && exit 1',
    '[[ $A =~ "x" ]] || exit 1',
    'echo "$A" | grep -qx "out/.*" || exit 1',
    'echo "$A" | grep -x "out/.*" > /dev/null || exit 1',
    'if ! echo "$A" | grep -qE "^(out|in)"; then exit 1; fi',
    'grep -qF x <<< "$A" || exit 1',
    'printf "%s" "$A" | grep -q "" || exit 1',
    'set -e\n[ -n "$A" ]',
    'set -euo pipefail\n[[ -d "$A" ]]',
    'set -o errexit\ntest -n "$A"',
    'until [ -n "$A" ]; do exit 1; done',
    'until [ -d "$A" ]; do exit 1; done',
    'while [ -z "$A" ]; do echo; exit 1; done',
    'unset A\n[ -n "${A+x}" ] || exit 1',
    'echo -n "$A" | grep -q "" || exit 1',
    '[ -n "$A" -a -d / ] || exit 1',
]
GOES_ON = [
    '[ -z "$A" ] || [ -d "$A" ] || exit 1',
    '[ -d / ] || [ -d "$A" ] || exit 1',
    'if [ -n "$A" ] && [ ! -d "$A" ]; then exit 1; fi',
    '[ -d "$A" ] || echo',
    'if [ -d "$A" ]; then exit 1; fi',
    '[ ! -f "/nowhere/x$A" ] || exit 1',
    "[ -d $A ] || exit 1",
    '([ -d "$A" ] || exit 1)',
    '[[ "$A" =~ ^[0-9]*$ ]] || exit 1',
    '[[ ! "$A" =~ ^[0-9]+$ ]] || exit 1',
    'echo "$A" | grep -q "^x*$" || exit 1',
    'echo "$A" | grep -q "x\\?" || exit 1',
    '! echo "$A" | grep -q x || exit 1',
    '[ -n "$A" ]',
    'set -e\n[ -n "$A" ] && echo',
    'set -e\n[ -n "$A" ] || echo',
    'set -e\nif [ -n "$A" ]; then echo; fi',
    'set -e\n! [ -n "$A" ]',
    'set -e\nset +e\n[ -n "$A" ]',
    'until [ -z "$A" ]; do exit 1; done',
    '[ -f "${A}x" ] || exit 1',  # there is a file x
    'echo "$A" | grep -q "" || exit 1',
    '[ -n "$A" -o -d / ] || exit 1',
]


@pytest.mark.parametrize("demand", [*ENDS, *GOES_ON])
def test_a_variable_is_demanded_where_bash_ends_with_it_empty(demand: str, tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    begin = f'A="${{A:-}}"\nB=""\n{demand}\n'
    done = subprocess.run(
        ["bash", "-c", f"{begin}echo reached"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert ("reached" in done.stdout) == (demand in GOES_ON)
    found = convert(f'{begin}{RUN} --adapters "$A"', name="run.sh")
    (item,) = [item for item in found.left if item.name == "adapters"]
    if demand in GOES_ON:
        assert item.why.startswith("switched off") and not found.open
    else:
        assert "has to be given to the script (line" in item.why and "--adapters $A" in found.open
