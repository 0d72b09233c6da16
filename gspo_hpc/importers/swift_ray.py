"""Read `device_groups`, with which ms-swift gives the GPUs of a run on Ray to the roles of its workers.

Its ranks count over all nodes, nproc_per_node to a node, as ms-swift's resource manager places them. `swift rlhf` has
one role, `default`, which trains.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_hpc.importers.draft import Draft
from gspo_hpc.importers.inputs import yaml_value

_NAME = "device_groups"
_SIZES = ("nproc_per_node", "nnodes")  # beside the groups
_RANGE = re.compile(r"(?:list\()?\s*range\(\s*(\d{1,6})\s*(?:,\s*(\d{1,6})\s*)?\)\s*\)?")
_ROLE = "default"


def machines(draft: Draft) -> tuple[int, int] | None:
    """Return (nodes, GPUs of each) that train according to `device_groups`, None if it is not given or not read."""
    if _NAME not in draft.values:
        return None
    if not draft.switch("use_ray"):
        draft.drop(_NAME, "ms-swift reads it with use_ray true only")
        return None
    given = draft.values[_NAME]
    groups = yaml_value(given) if isinstance(given, str) else given
    if not isinstance(groups, Mapping):
        draft.wrong(_NAME, "must be a mapping of groups, or its JSON")
        return None
    each = _count(groups.get("nproc_per_node"))
    if each is None:
        draft.refuse(f"{_NAME}: nproc_per_node {groups.get('nproc_per_node')}: must be a whole number, 1 or more")
        return None
    trains = _trains(draft, {str(name): group for name, group in groups.items() if name not in _SIZES})
    if trains is None:
        return None
    nodes = Counter(rank // each for rank in trains)
    if len({*nodes.values()}) != 1:
        shown = ", ".join(str(nodes[node]) for node in sorted(nodes))
        draft.refuse(f"{_NAME}: {shown} GPUs of its nodes train; here every node has equally many")
        return None
    for key in ("cluster.nodes", "cluster.gpus_per_node"):
        draft.credit(key, _NAME)
    return len(nodes), nodes.most_common(1)[0][1]


def _trains(draft: Draft, groups: Mapping[str, Any]) -> list[int] | None:
    """Return the ranks of the group that trains; refuse every other group by its name."""
    found: list[int] | None = None
    for name, group in groups.items():
        where = f"{_NAME}.{name}"
        workers = group.get("workers") if isinstance(group, Mapping) else None
        ranks = _ranks(group.get("ranks")) if isinstance(group, Mapping) else None
        if not isinstance(group, Mapping) or not isinstance(workers, Sequence) or isinstance(workers, str):
            draft.refuse(f"{where}: a group has device, ranks and workers (a list of roles)")
        elif [*workers] != [_ROLE]:
            roles = ", ".join(map(str, workers)) or "none"
            draft.refuse(f"{where}: its workers are {roles}; swift rlhf has the role {_ROLE} alone, which trains")
        elif str(group.get("device")).upper() != "GPU":
            draft.refuse(f"{where}: device {group.get('device')}: training on GPUs is what is converted")
        elif not ranks or len({*ranks}) != len(ranks):
            draft.refuse(f"{where}: ranks {group.get('ranks')}: must be a number, a list or list(range(0, 4))")
        elif found is not None:
            draft.refuse(f"{where}: the role {_ROLE} stands in two groups")
        else:
            found = ranks
    if found is None and not draft.problems:
        draft.refuse(f"{_NAME}: no group has the role {_ROLE}, which trains")
    return None if draft.problems else found


def _ranks(given: Any) -> list[int] | None:
    """Return the ranks of a group, None if they are not understood. A number means so many, from 0 on."""
    if isinstance(given, list) and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in given):
        return given
    if (count := _count(given)) is not None:
        return [*range(count)]
    if isinstance(given, str) and (match := _RANGE.fullmatch(given.strip())):
        first, end = (int(match[1]), int(match[2])) if match[2] else (0, int(match[1]))
        return [*range(first, end)] if end - first < 1 << 16 else None
    if isinstance(given, str) and given.strip().startswith("["):
        read = yaml_value(given)
        return _ranks(read) if isinstance(read, list) else None
    return None


def _count(given: Any) -> int | None:
    """Return a number of at least 1, None if it is none."""
    text = str(given).strip()
    return int(text) if re.fullmatch(r"0*[1-9][0-9]{0,4}", text) else None
