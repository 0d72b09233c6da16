"""``gspo-hpc train``: a few steps with the engine at most of the card, and checkpoints on the way."""

from __future__ import annotations

from .. import models, runs
from ..environment import Environment
from ..rows import Recorder

EXPECTED = "truncation"  # the completions of a random model hardly ever end by themselves


def run(env: Environment, record: Recorder) -> None:
    """Make the run that nothing happens to, and look at what it has left."""
    steps = env.sizes.steps
    whole = runs.Run(env, "whole", runs.write_config(env, "whole", models.light(env)))
    whole.start()
    what = f"{steps} steps"
    runs.judge(record, what, whole, whole.finish(), steps)
    wanted = sorted({*range(3, steps + 1, 3), steps})
    found = whole.checkpoints()
    record.check(f"{what}: whole checkpoints", str(found), str(wanted), found == wanted)
    norms = [float(one["grad_norm"]) for one in whole.records()] or [0.0]
    record.check(f"{what}: gradients", f"norms {min(norms):.3g} to {max(norms):.3g}", "not 0", min(norms) > 0.0)
    runs.speed(record, what, whole)
    _, symptoms = runs.harness.diagnose(whole.folder)
    problems = [name for name, symptom in symptoms.items() if symptom["severity"] == "problem" and name != EXPECTED]
    bound = f"none but {EXPECTED}"
    record.check(f"{what}: problems that diagnose finds", ", ".join(problems) or "none", bound, not problems)
    others = [name for name in symptoms if name not in problems]
    record.figure(f"{what}: what else diagnose finds", ", ".join(others) or "nothing")
    whole.discard()
