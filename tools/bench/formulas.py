"""Compare advantages, KL estimates and losses with the functions of verl, TRL, ms-swift and OpenRLHF, and print tables.

Both sides get the same arrays. A row says the largest difference of a value, and of the gradient in the log-probs where
there is one, as a share of the largest of ours. Rows that should agree must, and rows that are told to differ must
differ: otherwise the command ends with 1, since what a page says about a peer is no longer so.

    python tools/bench/formulas.py    needs the peers' environment (setup_peers.sh)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from implementations import packed_loss
from step import BENCH, REPO, environment

from gspo_hpc.algorithms.terms import advantages as terms
from gspo_hpc.algorithms.terms.kl import ESTIMATORS
from gspo_hpc.algorithms.terms.top_entropy import reached, thresholds

Arrays = dict[str, npt.NDArray[Any]]
Ours = Callable[[Arrays], Arrays]
GROUPS, GROUP = 8, 8
# Peers add 1e-4 or 1e-6 to a deviation of about a half, here nothing; the rest is single precision.
TOLERANCE = {"advantages": 1e-3, "kl": 1e-5, "loss": 1e-5}


@dataclass(frozen=True)
class Row:
    """One comparison: an entry of peer_formulas.py with a term of ours, on one set of inputs."""

    inputs: str  # name of the set; its first word is the kind
    ours: str
    peer: str
    differs: str = ""  # why, where it does
    within: float = 0.0  # what it may differ by; 0: the tolerance of its kind


def advantage_inputs(seed: int, lengths: str = "different", rewards: str = "different") -> Arrays:
    """Rewards of two functions for 8 groups of 8, one right or wrong and one graded, with lengths of 1 to 32 tokens.

    With equal rewards all of a group got the same: 0.1, 0.2 and so on to 0.8.
    """
    rng = np.random.default_rng(seed)
    count = GROUPS * GROUP
    parts = np.stack([rng.integers(0, 2, count), rng.random(count)], axis=1).astype(np.float32)
    if rewards == "equal":
        parts[:] = (0.1 * (1 + np.arange(count) // GROUP))[:, None]
    weights = np.array([1.0, 0.5], np.float32) if rewards == "different" else np.array([1.0, 0.0], np.float32)
    tokens = rng.integers(1, 33, count) if lengths == "different" else np.full(count, 16)
    return {
        **{"parts": parts, "weights": weights, "rewards": parts @ weights},
        **{"lengths": tokens, "group": np.array(GROUP)},
    }


def kl_inputs(seed: int, distance: float, moved: float) -> Arrays:
    """Log-probs of 4,096 tokens, those of a reference `distance` away, and of a policy that sampled `moved` away."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.0, 4096).astype(np.float32)
    return {
        "logprobs": logprobs,
        "reference": logprobs + rng.normal(0.0, distance, 4096).astype(np.float32),
        "old": logprobs - rng.normal(0.0, moved, 4096).astype(np.float32),
        "upstream": np.ones(4096, np.float32),
    }


def loss_inputs(seed: int) -> Arrays:
    """Log-probs of 64 responses of up to 64 tokens that moved far enough for every bound to be reached."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 65, 64)
    old = -rng.exponential(1.0, int(lengths.sum())).astype(np.float32)
    drift = np.repeat(rng.normal(0.0, 0.03, 64), lengths) + rng.normal(0.0, 0.25, len(old))
    return {
        **{"lengths": lengths, "old": old, "logprobs": old + drift.astype(np.float32)},
        "rollout": old + rng.normal(0.0, 0.1, len(old)).astype(np.float32),
        "advantages": rng.standard_normal(64).astype(np.float32),
        "padded": np.array(64),
        "reference": old + rng.normal(0.0, 0.3, len(old)).astype(np.float32),
        "entropies": rng.exponential(0.5, len(old)).astype(np.float32),
    }


INPUTS: dict[str, Arrays] = {
    "advantages": advantage_inputs(1),
    "advantages, equal lengths": advantage_inputs(1, lengths="equal"),
    "advantages, equal rewards": advantage_inputs(1, rewards="equal"),
    "kl": kl_inputs(2, 0.3, 0.1),
    "kl, on-policy": kl_inputs(2, 0.3, 0.0),
    "kl, far": kl_inputs(2, 8.0, 0.1),
    "loss": loss_inputs(3),
}


def advantage(kind: Any, normalize: bool = False) -> Ours:
    """Our advantages of a whole rollout."""

    def run(data: Arrays) -> Arrays:
        group, nothing = int(data["group"]), np.zeros(int(data["group"]), bool)
        rewards, parts = (data[name].reshape(-1, group, *data[name].shape[1:]) for name in ("rewards", "parts"))
        if kind == "gdpo":
            found = [terms.by_reward(one, data["weights"].tolist(), nothing) for one in parts]
        else:
            found = [terms.group_advantages(one, nothing, normalize, kind) for one in rewards]
        values = np.concatenate(found)
        return {"value": values / terms.batch_scale(data["rewards"], values, np.zeros(len(values), bool), kind)}

    return run


def kl(name: str) -> Ours:
    """Our estimate of each token, and the gradient of their sum."""

    def run(data: Arrays) -> Arrays:
        logprobs = torch.from_numpy(data["logprobs"]).clone().requires_grad_()
        distance = torch.from_numpy(data["reference"]) - logprobs
        value = ESTIMATORS["k3" if name == "unbiased" else name](distance)
        if name == "unbiased":
            value = value * torch.exp(logprobs - torch.from_numpy(data["old"]))
        value.sum().backward()
        assert logprobs.grad is not None
        return {"value": value.detach().numpy(), "grad": logprobs.grad.numpy()}

    return run


def loss(**settings: Any) -> Ours:
    """Our loss with an algorithm's settings, and its gradient; of CISPO the gradient alone, whose value has log r."""

    def run(data: Arrays) -> Arrays:
        if settings.get("correction") == "bypass":  # as the trainer gives them to the loss
            data = data | {"old": data["rollout"]}
        if "top_entropy_quantile" in settings:
            (lowest,) = thresholds([data["entropies"]], settings["top_entropy_quantile"], lambda counts: counts)
            data = data | {"selected": reached(data["entropies"], lowest).astype(bool)}
        found = packed_loss(data, settings)()
        value = {} if settings["name"] == "cispo" else {"value": found["loss"].numpy()}
        return value | {"grad": found["grad"].numpy()}

    return run


CLIP = {"clip_low": 0.2, "clip_high": 0.28}
WIDE = {"clip_low": 0.02, "clip_high": 0.03}
TRUNCATED = {"correction": "truncated", "correction_high": 1.1}
MASKED = {"correction": "masked", "correction_low": 0.9, "correction_high": 1.1}
NO_LOWER = {"correction": "masked", "correction_low": 1e-9, "correction_high": 1.1}
REJECTION = {"correction": "rejection", "correction_low": 0.98, "correction_high": 1.02}
OURS: dict[str, Ours] = {
    "group": advantage("group", normalize=True),
    "group, no std": advantage("group"),
    "leave_one_out": advantage("leave_one_out"),
    "batch_std": advantage("batch_std"),
    "reinforce_baseline": advantage("reinforce_baseline"),
    "gdpo": advantage("gdpo"),
    **{name: kl(name) for name in ("k1", "k2", "k3", "absolute", "unbiased")},
    "grpo": loss(name="grpo", **CLIP),
    "grpo, dual_clip 1.6": loss(name="grpo", dual_clip=1.6, **CLIP),
    "dapo": loss(name="dapo", **CLIP),
    "dapo, dual_clip 1.6": loss(name="dapo", dual_clip=1.6, **CLIP),
    "dapo, truncated 1.1": loss(name="dapo", **TRUNCATED, **CLIP),
    "dapo, masked 0.9 to 1.1": loss(name="dapo", **MASKED, **CLIP),
    "dapo, rejection 0.98 to 1.02": loss(name="dapo", **REJECTION, **CLIP),
    "grpo, truncated 1.1": loss(name="grpo", **TRUNCATED, **CLIP),
    "grpo, truncated 1.1, kl_beta 0.1": loss(name="grpo", kl_beta=0.1, **TRUNCATED, **CLIP),
    "grpo, masked 0 to 1.1": loss(name="grpo", **NO_LOWER, **CLIP),
    "grpo, rejection 0.98 to 1.02": loss(name="grpo", **REJECTION, **CLIP),
    "grpo, sequence_mask 0.02": loss(name="grpo", sequence_mask=0.02, **CLIP),
    "gspo, truncated 1.01": loss(name="gspo", correction="truncated", correction_high=1.01, **WIDE),
    "gspo, bypass": loss(name="gspo", correction="bypass", **WIDE),
    "grpo, top_entropy_quantile 0.2": loss(name="grpo", top_entropy_quantile=0.2, **CLIP),
    "grpo, entropy_coef 0.1": loss(name="grpo", entropy_coef=0.1, **CLIP),
    "dapo, entropy_coef 0.1": loss(name="dapo", entropy_coef=0.1, **CLIP),
    "dapo, top_entropy_quantile 0.2, entropy_coef 0.1": loss(
        name="dapo", top_entropy_quantile=0.2, entropy_coef=0.1, **CLIP
    ),
    "dr_grpo": loss(name="dr_grpo", **CLIP),
    "gspo": loss(name="gspo", **WIDE),
    "gspo_token": loss(name="gspo_token", **WIDE),
    "cispo": loss(name="cispo", clip_low=0.999, clip_high=0.4),
    "sapo": loss(name="sapo", **CLIP),
}
TOKENS = "mean and deviation weigh each completion by its tokens"
NOISE = "rounding of equal rewards is divided by its own deviation"
DIVISOR = 0.01  # with equal lengths what is left is the divisor: n - 1 completions, or all tokens
PRODUCT = "all tokens of a sequence are weighed by the product of their ratios"
OWN = "a sequence that is kept has the ratios of its tokens as weights, and 1 here"
CAP = "the estimate is bounded to 10, and beyond it the gradient is gone"
ROWS = (
    Row("advantages", "group", "verl grpo"),
    Row("advantages", "group", "TRL scale_rewards group"),
    Row("advantages", "group", "ms-swift grpo"),
    Row("advantages", "group", "OpenRLHF group_norm"),
    Row("advantages, equal rewards", "group", "verl grpo", NOISE),
    Row("advantages, equal rewards", "group", "TRL scale_rewards group"),
    Row("advantages, equal rewards", "group", "ms-swift grpo"),
    Row("advantages, equal rewards", "group", "OpenRLHF group_norm", NOISE),
    Row("advantages", "group, no std", "verl grpo, no std"),
    Row("advantages", "group, no std", "TRL scale_rewards none"),
    Row("advantages", "group, no std", "ms-swift grpo, none"),
    Row("advantages", "group, no std", "OpenRLHF dr_grpo"),
    Row("advantages", "leave_one_out", "verl rloo"),
    Row("advantages", "leave_one_out", "TRL RLOOTrainer"),
    Row("advantages", "leave_one_out", "ms-swift rloo"),
    Row("advantages", "leave_one_out", "OpenRLHF rloo"),
    Row("advantages", "batch_std", "TRL scale_rewards batch"),
    Row("advantages", "batch_std", "ms-swift grpo, batch"),
    Row("advantages", "reinforce_baseline", "ms-swift reinforce_plus_plus"),
    Row("advantages", "reinforce_baseline", "verl reinforce_plus_plus_baseline", TOKENS),
    Row("advantages", "reinforce_baseline", "OpenRLHF reinforce_baseline", TOKENS),
    Row("advantages, equal lengths", "reinforce_baseline", "verl reinforce_plus_plus_baseline", within=DIVISOR),
    Row("advantages, equal lengths", "reinforce_baseline", "OpenRLHF reinforce_baseline", within=DIVISOR),
    Row("advantages", "gdpo", "TRL normalize_then_sum"),
    Row("advantages", "gdpo", "ms-swift gdpo"),
    Row("advantages", "gdpo", "verl gdpo", TOKENS),
    Row("advantages, equal lengths", "gdpo", "verl gdpo", within=DIVISOR),
    Row("kl", "k1", "verl k1"),
    Row("kl", "k1", "OpenRLHF k1"),
    Row("kl", "absolute", "verl abs"),
    Row("kl", "k2", "verl k2"),
    Row("kl", "k2", "OpenRLHF k2"),
    Row("kl", "k3", "verl k3"),
    Row("kl", "k3", "TRL"),
    Row("kl", "k3", "ms-swift"),
    Row("kl", "k3", "OpenRLHF k3"),
    Row("kl, far", "k3", "verl k3", CAP),
    Row("kl, far", "k3", "ms-swift", CAP),
    Row("kl, far", "k3", "OpenRLHF k3", CAP),
    Row("kl", "unbiased", "TRL use_bias_correction_kl"),
    Row(
        "kl",
        "unbiased",
        "OpenRLHF k3, unbiased_gradient",
        "the value is k3 without the ratio; the gradient is the same",
    ),
    Row("kl, on-policy", "unbiased", "verl k3+"),
    Row("kl", "unbiased", "verl k3+", "no ratio: right on-policy alone"),
    Row("loss", "grpo", "TRL grpo"),
    Row("loss", "grpo", "ms-swift grpo"),
    Row("loss", "dapo", "TRL dapo"),
    Row("loss", "dapo", "OpenRLHF ppo"),
    Row("loss", "dapo, dual_clip 1.6", "OpenRLHF ppo, dual_clip"),
    Row("loss", "grpo, dual_clip 1.6", "TRL grpo, delta"),
    Row("loss", "dr_grpo", "TRL dr_grpo"),
    Row("loss", "gspo", "TRL grpo, sequence"),
    Row("loss", "gspo", "ms-swift grpo, sequence"),
    Row("loss", "gspo", "OpenRLHF gspo"),
    Row("loss", "gspo_token", "ms-swift grpo, sequence_token"),
    Row("loss", "sapo", "TRL sapo"),
    Row("loss", "sapo", "ms-swift sapo"),
    Row("loss", "cispo", "TRL cispo"),
    Row("loss", "dapo, truncated 1.1", "verl, token"),
    Row("loss", "dapo, truncated 1.1", "TRL dapo, token_truncate"),
    Row("loss", "dapo, truncated 1.1", "OpenRLHF ppo, clip"),
    Row("loss", "grpo, truncated 1.1", "ms-swift grpo, token_truncate"),
    Row("loss", "dapo, truncated 1.1", "verl, sequence", PRODUCT),
    Row("loss", "grpo, truncated 1.1, kl_beta 0.1", "TRL grpo, token_truncate, beta"),
    Row(
        "loss", "grpo, truncated 1.1, kl_beta 0.1", "ms-swift grpo, token_truncate, beta", "the KL term is weighed, too"
    ),
    Row("loss", "gspo, truncated 1.01", "ms-swift grpo, sequence, sequence_truncate"),
    Row("loss", "gspo, truncated 1.01", "TRL grpo, sequence, sequence_truncate", PRODUCT),
    Row("loss", "dapo, masked 0.9 to 1.1", "verl, token, two bounds"),
    Row("loss", "dapo, masked 0.9 to 1.1", "TRL dapo, token_mask"),
    Row("loss", "dapo, masked 0.9 to 1.1", "OpenRLHF ppo, masked"),
    Row("loss", "grpo, masked 0 to 1.1", "ms-swift grpo, token_mask"),
    Row("loss", "grpo, rejection 0.98 to 1.02", "verl, seq_mean_k1, mean over sequences"),
    Row("loss", "dapo, rejection 0.98 to 1.02", "verl, seq_mean_k1", "a mean over the tokens that are left"),
    Row("loss", "dapo, rejection 0.98 to 1.02", "TRL dapo, sequence_mask", PRODUCT + ", and dropped by it"),
    Row("loss", "grpo, rejection 0.98 to 1.02", "ms-swift grpo, sequence_mask", OWN + ". No lower bound"),
    Row("loss", "dapo, rejection 0.98 to 1.02", "OpenRLHF ppo, sequences masked", OWN),
    Row("loss", "gspo, bypass", "OpenRLHF gspo, masked"),
    Row("loss", "grpo, sequence_mask 0.02", "TRL grpo, off_policy_mask"),
    Row("loss", "grpo, sequence_mask 0.02", "ms-swift grpo, off_policy_sequence_mask"),
    Row("loss", "grpo, top_entropy_quantile 0.2", "TRL grpo, top_entropy_quantile"),
    Row("loss", "grpo, top_entropy_quantile 0.2", "ms-swift grpo, top_entropy_quantile"),
    Row("loss", "dapo, entropy_coef 0.1", "verl token-mean, entropy_coeff"),
    Row("loss", "dapo, entropy_coef 0.1", "TRL dapo, entropy_coef"),
    Row("loss", "grpo, entropy_coef 0.1", "verl seq-mean-token-mean, entropy_coeff"),
    Row(
        "loss",
        "grpo, entropy_coef 0.1",
        "TRL grpo, entropy_coef",
        "the bonus is a mean over all tokens, whatever the loss is",
    ),
    Row(
        "loss",
        "dapo, top_entropy_quantile 0.2, entropy_coef 0.1",
        "TRL dapo, top_entropy_quantile, entropy_coef",
        "the bonus is a mean over the tokens that were chosen",
    ),
)


def difference(ours: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Return the largest difference, as a share of the largest of ours where that is not 0."""
    assert ours.shape == other.shape and np.isfinite(other).all()
    return float(np.abs(ours - other).max() / (np.abs(ours).max() or 1.0))


def compared(peers: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[Row, dict[str, float]]]:
    """Yield each row with its differences, of the value and of the gradient."""
    for row in ROWS:
        ours = OURS[row.ours](INPUTS[row.inputs])
        yield row, {key: difference(ours[key], peers[f"{row.inputs}/{row.peer}:{key}"]) for key in ours}


def main() -> int:
    """Compare, and print a table for each kind; 1 if a row is not as it is told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = os.environ.get("GSPO_HPC_PEERS_VENV") or REPO / ".venv-peers"
    parser.add_argument("--peers-venv", type=Path, default=Path(peers), help="made by setup_peers.sh")
    args = parser.parse_args()
    python = args.peers_venv / "bin" / "python"
    if not python.exists():
        parser.error(f"no peers in {args.peers_venv}: bash tools/bench/setup_peers.sh")
    with tempfile.TemporaryDirectory(prefix="gspo_hpc.formulas.") as folder:
        given, found = Path(folder, "given.npz"), Path(folder, "found.npz")
        arrays = {f"{which}/{name}": array for which, data in INPUTS.items() for name, array in data.items()}
        np.savez(given, allow_pickle=False, **arrays)
        command = [python, BENCH / "peer_formulas.py", given, found]
        subprocess.run(command, check=True, cwd=REPO, env=environment(OMP_NUM_THREADS="1"))
        with np.load(found, allow_pickle=False) as file:
            results = {name: file[name] for name in file.files}
    wrong, shown, columns = 0, "", tuple[str, ...]()
    for row, far in compared(results):
        kind = row.inputs.partition(",")[0]
        if kind != shown:
            print(f"\n| inputs | ours | theirs | {' | '.join(far)} | |\n|---|---|---|{'---|' * (len(far) + 1)}")
            shown, columns = kind, tuple(far)
        agrees = max(far.values()) <= (row.within or TOLERANCE[kind])
        if agrees == bool(row.differs):
            wrong += 1
            print(f"formulas.py: {row} is {'equal' if agrees else 'not equal'}: {far}", file=sys.stderr)
        numbers = " | ".join(f"{far[key]:.0e}" if key in far else "-" for key in columns)
        print(f"| {row.inputs} | {row.ours} | {row.peer} | {numbers} | {row.differs} |")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
