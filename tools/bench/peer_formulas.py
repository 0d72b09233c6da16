"""Peers' side of formulas.py: advantages, KL estimates and losses, by the functions of the peers themselves.

    peer_formulas.py INPUT OUTPUT    reads arrays, writes those of every entry of PEERS as NAME:value and NAME:grad

verl's functions are imported; those of the others are taken from their files (peer_sources.py). Losses are in
peer_losses.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peer_losses import LOSSES
from peer_sources import Arrays, Names, defined, statements
from torch import Tensor

# ---- advantages [N] of N completions in groups of G, from rewards [N] or by reward function [N, k] ----


def _by_tokens(data: Arrays) -> tuple[Tensor, Tensor, npt.NDArray[Any]]:
    """Return rewards on the last token [N, L], the mask of tokens [N, L] and the group of each completion."""
    lengths = torch.from_numpy(data["lengths"])
    mask = (torch.arange(int(lengths.max()))[None, :] < lengths[:, None]).float()
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(lengths)), lengths - 1] = torch.from_numpy(data["rewards"])
    return rewards, mask, np.arange(len(lengths)) // int(data["group"])


def verl_advantage(name: str, **keys: Any) -> Callable[[Arrays], Tensor]:
    """One of verl's registered estimators; all tokens of a completion have the same advantage."""

    def run(data: Arrays) -> Tensor:
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn

        rewards, mask, groups = _by_tokens(data)
        return get_adv_estimator_fn(name)(rewards, mask, groups, **keys)[0][:, 0]

    return run


def verl_gdpo(data: Arrays) -> Tensor:
    """Verl's GDPO, which reads the rewards of the functions from the batch."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rewards, mask, groups = _by_tokens(data)
    names = [f"r{place}" for place in range(data["parts"].shape[1])]
    config = {"gdpo_reward_keys": names, "gdpo_reward_weights": data["weights"].tolist()}
    prompts = torch.zeros(len(mask), 1)
    batch = {"prompts": prompts, "attention_mask": torch.cat((prompts, mask), dim=1).long()}
    parts = dict(zip(names, data["parts"].T, strict=True))
    function = get_adv_estimator_fn("gdpo")
    return function(rewards, mask, groups, config=config, non_tensor_batch=parts, batch=batch)[0][:, 0]


def trl_advantage(aggregation: str, scale: str) -> Callable[[Arrays], Tensor]:
    """The statements of TRL's GRPOTrainer."""

    def run(data: Arrays) -> Tensor:
        from trl.trainer.utils import nanstd

        code = statements("trl", "trainer/grpo_trainer.py", "unscorable_mask =", "advantages = torch.nan_to_num")
        weights = torch.from_numpy(data["weights"])
        self = SimpleNamespace(multi_objective_aggregation=aggregation, reward_weights=weights, scale_rewards=scale)
        self.reward_funcs = [None] * len(weights)
        space = {"torch": torch, "nanstd": nanstd, "self": self, "device": "cpu"}
        space |= {"rewards_per_func": torch.from_numpy(data["parts"]), "num_generations": int(data["group"])}
        exec(code, space)
        return space["advantages"]

    return run


def trl_rloo(data: Arrays) -> Tensor:
    """The statements of TRL's RLOOTrainer."""
    from trl.trainer.utils import nanstd

    code = statements("trl", "trainer/rloo_trainer.py", "grouped_rewards =", "advantages = torch.nan_to_num")
    space = {"torch": torch, "nanstd": nanstd, "self": SimpleNamespace(normalize_advantages=False)}
    space |= {"rewards": torch.from_numpy(data["rewards"]), "num_generations": int(data["group"])}
    exec(code, space)
    return space["advantages"]


def swift_advantage(estimator: str, scale: str) -> Callable[[Arrays], Tensor]:
    """ms-swift's function."""

    def run(data: Arrays) -> Tensor:
        nanstd = defined("swift", "utils/torch_utils.py", "nanstd")
        function = defined("swift", "rl_core/advantage.py", "compute_advantages", given={"nanstd": nanstd})
        parts, weights = torch.from_numpy(data["parts"]), torch.from_numpy(data["weights"])
        return function(parts, weights, int(data["group"]), estimator, scale)[0]

    return run


def openrlhf_advantage(estimator: str) -> Callable[[Arrays], Tensor]:
    """OpenRLHF's method, without KL and length penalties; the whole rollout is one experience."""

    def run(data: Arrays) -> Tensor:
        file = "trainer/ppo_utils/experience_maker.py"
        reward = defined("openrlhf", "models/utils.py", "compute_reward")
        given = {"compute_reward": reward, "apply_length_penalties": lambda *_: None}
        method = defined("openrlhf", file, "compute_advantages_and_returns", given=given)
        returns = defined("openrlhf", file, "get_cumulative_returns")
        rewards, mask, _ = _by_tokens(data)
        advantage = SimpleNamespace(estimator=estimator, gamma=1.0, no_std_norm=False)
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=int(data["group"])),
            algo=SimpleNamespace(advantage=advantage),
            reward=SimpleNamespace(clip_range=None),
        )
        own = SimpleNamespace(strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=0.0))
        own.advantage_estimator = estimator
        own.get_cumulative_returns = lambda *given: returns(own, *given)
        index = list(range(len(mask)))
        one = SimpleNamespace(index=index, rewards=rewards.sum(1), info={}, kl=torch.zeros_like(mask), action_mask=mask)
        return method(own, [one])[0].advantages[:, 0]

    return run


# ---- KL estimates [T], and the gradient of their weighted sum in the log-probs ----


def verl_kl(name: str) -> Callable[[Names], Tensor]:
    """Verl's kl_penalty."""

    def run(data: Names) -> Tensor:
        from verl.trainer.ppo.core_algos import kl_penalty

        return kl_penalty(data["logprobs"], data["reference"], name)

    return run


def trl_kl(corrected: bool) -> Callable[[Names], Tensor]:
    """The statements of TRL's loss for the KL term."""

    def run(data: Names) -> Tensor:
        file = "trainer/grpo_trainer.py"
        code = statements("trl", file, "ref_per_token_logps =", "if self.args.use_bias_correction_kl")
        args = SimpleNamespace(use_bias_correction_kl=corrected)
        space = {"torch": torch, "self": SimpleNamespace(args=args), "per_token_logps": data["logprobs"]}
        space |= {"inputs": {"ref_per_token_logps": data["reference"]}}
        space |= {"coef_1": torch.exp(data["logprobs"] - data["old"])}
        exec(code, space)
        return space["per_token_kl"]

    return run


def swift_kl(data: Names) -> Tensor:
    """The statements of ms-swift's loss for the KL term."""
    code = statements("swift", "rlhf_trainers/grpo_trainer.py", "safe_ratio = torch.clamp(ref", "per_token_kl =")
    space = {"torch": torch, "per_token_logps": data["logprobs"], "ref_per_token_logps": data["reference"]}
    exec(code, space)
    return space["per_token_kl"]


def openrlhf_kl(name: str, unbiased: bool = False) -> Callable[[Names], Tensor]:
    """OpenRLHF's compute_approx_kl."""

    def run(data: Names) -> Tensor:
        function = defined("openrlhf", "models/utils.py", "KL_IS_WEIGHT_CLIP", "compute_approx_kl")
        return function(data["logprobs"], data["reference"], data["old"], name, unbiased)

    return run


ADVANTAGES: dict[str, Callable[[Arrays], Tensor]] = {
    "verl grpo": verl_advantage("grpo"),
    "verl grpo, no std": verl_advantage("grpo", norm_adv_by_std_in_grpo=False),
    "verl rloo": verl_advantage("rloo"),
    "verl reinforce_plus_plus_baseline": verl_advantage("reinforce_plus_plus_baseline"),
    "verl gdpo": verl_gdpo,
    "TRL scale_rewards group": trl_advantage("sum_then_normalize", "group"),
    "TRL scale_rewards none": trl_advantage("sum_then_normalize", "none"),
    "TRL scale_rewards batch": trl_advantage("sum_then_normalize", "batch"),
    "TRL normalize_then_sum": trl_advantage("normalize_then_sum", "group"),
    "TRL RLOOTrainer": trl_rloo,
    "ms-swift grpo": swift_advantage("grpo", "group"),
    "ms-swift grpo, none": swift_advantage("grpo", "none"),
    "ms-swift grpo, batch": swift_advantage("grpo", "batch"),
    "ms-swift rloo": swift_advantage("rloo", "none"),
    "ms-swift reinforce_plus_plus": swift_advantage("reinforce_plus_plus", "batch"),
    "ms-swift gdpo": swift_advantage("grpo", "gdpo"),
    "OpenRLHF group_norm": openrlhf_advantage("group_norm"),
    "OpenRLHF dr_grpo": openrlhf_advantage("dr_grpo"),
    "OpenRLHF rloo": openrlhf_advantage("rloo"),
    "OpenRLHF reinforce_baseline": openrlhf_advantage("reinforce_baseline"),
}
KLS: dict[str, Callable[[Names], Tensor]] = {
    "verl k1": verl_kl("k1"),
    "verl abs": verl_kl("abs"),
    "verl k2": verl_kl("k2"),
    "verl k3": verl_kl("k3"),
    "verl k3+": verl_kl("k3+"),
    "TRL": trl_kl(False),
    "TRL use_bias_correction_kl": trl_kl(True),
    "ms-swift": swift_kl,
    "OpenRLHF k1": openrlhf_kl("k1"),
    "OpenRLHF k2": openrlhf_kl("k2"),
    "OpenRLHF k3": openrlhf_kl("k3"),
    "OpenRLHF k3, unbiased_gradient": openrlhf_kl("k3", unbiased=True),
}


def of_kl(run: Callable[[Names], Tensor], data: Arrays) -> Arrays:
    """Return the estimates of a KL function, and the gradient in the log-probs of their sum weighted by `upstream`."""
    tensors = {name: torch.from_numpy(data[name]).clone() for name in ("logprobs", "reference", "old", "upstream")}
    tensors["logprobs"].requires_grad_()
    value = run(tensors)
    (value * tensors["upstream"]).sum().backward()
    assert tensors["logprobs"].grad is not None
    return {"value": value.detach().numpy(), "grad": tensors["logprobs"].grad.numpy()}


def main(arguments: Sequence[str]) -> None:
    """Read the arrays, write the results. Names in the file: SET/NAME of the inputs, SET/PEER:value of the results."""
    with np.load(arguments[0], allow_pickle=False) as file:
        given = {name: file[name] for name in file.files}
    sets: dict[str, Arrays] = {}
    for name, array in given.items():
        which, _, key = name.partition("/")
        sets.setdefault(which, {})[key] = array
    found: Arrays = {}
    for which, data in sets.items():
        kind = which.partition(",")[0]
        if kind == "advantages":
            results = {peer: {"value": run(data).numpy()} for peer, run in ADVANTAGES.items()}
        elif kind == "kl":
            results = {peer: of_kl(run, data) for peer, run in KLS.items()}
        else:
            results = {peer: run(data) for peer, run in LOSSES.items()}
        for peer, values in results.items():
            found |= {f"{which}/{peer}:{key}": array for key, array in values.items()}
    np.savez(arguments[1], allow_pickle=False, **found)


if __name__ == "__main__":
    main(sys.argv[1:])
