"""An engine of a model that classifies sequences: it gives a number for each, and generates nothing.

Its process, its start, restart and end, and its sleep are those of every engine. Its weights are those of its folder,
so it sleeps at level 1, where they wait in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from gspo_hpc.engine.engine import Engine


class Classifier(Engine):
    """An engine whose settings say that it classifies."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the logit of each sequence, as transformers' model with one label gives it, in float32.

        Raises EngineDied as :meth:`Engine.step` does, and ValueError for a model that has another number of labels.
        """
        names = [f"score-{next(self._ids)}" for _ in sequences]
        found = self._call("classify", names, [list(tokens) for tokens in sequences])
        labels = {len(logits) for logits in found}
        if labels - {1}:
            raise ValueError(f"the reward model has {max(labels)} labels: it must have one, whose logit is the score")
        return [logits[0] for logits in found]
