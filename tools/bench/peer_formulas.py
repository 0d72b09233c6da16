"""Peers' side of formulas.py: advantages, KL estimates and losses, by the functions of the peers themselves.

    peer_formulas.py INPUT OUTPUT    reads arrays, writes those of every entry of PEERS as NAME:value and NAME:grad

verl's functions are imported. The others' packages cannot be imported without what they train with (DeepSpeed,
modelscope), and TRL's formulas are statements of a long method; so functions, classes and statements are taken from
the files of the installed packages, and run as they stand there.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Union

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Arrays = dict[str, npt.NDArray[Any]]
Names = dict[str, Any]
TYPES: Names = {"torch": torch, "nn": nn, "Tensor": Tensor, "Optional": Optional, "Union": Union}
TYPES |= {"List": list, "Tuple": tuple, "Dict": dict, "itertools": itertools}


def tree(package: str, file: str) -> ast.Module:
    """Return the syntax tree of a file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is not installed: setup_peers.sh"
    return ast.parse((Path(next(iter(spec.submodule_search_locations))) / file).read_text())


def defined(package: str, file: str, *names: str, given: Names | None = None) -> Any:
    """Return the last of the functions, classes and constants of these names in a file, run with what is given."""
    space = TYPES | (given or {})
    for node in ast.walk(tree(package, file)):
        assigned = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id
        if assigned in names or (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names):
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []
            code = "from __future__ import annotations\n" + ast.unparse(node)
            exec(compile(code, file, "exec"), space)
    return space[names[-1]]


def statements(package: str, file: str, first: str, last: str) -> Any:
    """Return the statements of a block from that which begins with `first` to that which begins with `last`."""
    for node in ast.walk(tree(package, file)):
        body = getattr(node, "body", None)
        texts = [ast.unparse(one) for one in body] if isinstance(body, list) else []
        begins = [place for place, text in enumerate(texts) if text.startswith(first)]
        ends = [place for place, text in enumerate(texts) if text.startswith(last)]
        if begins and ends:
            return compile("\n".join(texts[begins[0] : ends[-1] + 1]), file, "exec")
    raise LookupError(f"{package}/{file} has no block from {first!r} to {last!r}: another version?")


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


# ---- losses of B sequences, packed [T] in the data and padded [B, L] for the peers ----


class _Padded:
    """Log-probs of the packed arrays as leaves of [B, L], and back."""

    def __init__(self, data: Arrays) -> None:
        mask = np.arange(int(data["padded"]))[None, :] < data["lengths"][:, None]
        self.mask = torch.from_numpy(mask)
        found = {}
        for name in ("logprobs", "old", "rollout"):
            array = np.zeros(mask.shape, np.float32)
            array[mask] = data[name]
            found[name] = torch.from_numpy(array)
        self.logprobs = found["logprobs"].requires_grad_()
        self.old, self.rollout = found["old"], found["rollout"]
        self.advantages = torch.from_numpy(data["advantages"])


def trainer_loss(package: str, kind: str, level: str = "token", **settings: Any) -> Callable[[Arrays], Arrays]:
    """The statements of the loss of TRL's or ms-swift's GRPOTrainer."""
    file = {"trl": "trainer/grpo_trainer.py", "swift": "rlhf_trainers/grpo_trainer.py"}[package]

    def run(data: Arrays) -> Arrays:
        padded = _Padded(data)
        code = statements(package, file, "log_ratio = per_token_logps -", "if self.loss_type in ['grpo', 'sapo']")
        args = SimpleNamespace(
            delta=settings.get("delta"),
            **{f"sapo_temperature_{sign}": settings.get(f"tau_{sign}") for sign in ("pos", "neg")},
            use_bias_correction_kl=False,
        )
        own = SimpleNamespace(
            **{"beta": 0.0, "use_vllm": False, "rollout_importance_sampling_mode": None, "_has_teacher": False},
            **{"off_policy_mask_threshold": None, "off_policy_sequence_mask_delta": None, "args": args},
            loss_type=kind,
            importance_sampling_level=level,
            epsilon_low=settings.get("low"),
            epsilon_high=settings.get("high"),
            tau_pos=settings.get("tau_pos"),
            tau_neg=settings.get("tau_neg"),
            max_completion_length=int(data["padded"]),
            model=SimpleNamespace(training=False),
            accelerator=SimpleNamespace(num_processes=1),
        )
        count = padded.mask.sum()
        space: Names = {"torch": torch, "self": own, "per_token_logps": padded.logprobs, "entropy_mask": None}
        space |= {"old_per_token_logps": padded.old, "mask": padded.mask, "completion_mask": padded.mask}
        space |= {"inputs": {"num_items_in_batch": count}, "num_items_in_batch": count}
        space |= {"per_token_kl": None, "rollout_is_weights": None}
        space["advantages"] = padded.advantages[:, None].expand_as(padded.mask)
        exec(code, space)
        space["loss"].backward()
        assert padded.logprobs.grad is not None
        return {"value": space["loss"].detach().numpy(), "grad": padded.logprobs.grad[padded.mask].numpy()}

    return run


def openrlhf_loss(**keys: Any) -> Callable[[Arrays], Arrays]:
    """OpenRLHF's PolicyLoss."""

    def run(data: Arrays) -> Arrays:
        masked_mean = defined("openrlhf", "models/utils.py", "masked_mean")
        names = ("aggregate_loss", "PolicyLoss")
        loss_of = defined("openrlhf", "models/loss.py", *names, given={"masked_mean": masked_mean})(**keys)
        padded = _Padded(data)
        advantages = padded.advantages[:, None].expand_as(padded.mask)
        loss = loss_of(padded.logprobs, padded.old, advantages, padded.mask.float(), padded.rollout)[0]
        loss.backward()
        assert padded.logprobs.grad is not None
        return {"value": loss.detach().numpy(), "grad": padded.logprobs.grad[padded.mask].numpy()}

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
CLIP: Names = {"low": 0.2, "high": 0.28}
LOSSES: dict[str, Callable[[Arrays], Arrays]] = {
    "TRL grpo": trainer_loss("trl", "grpo", **CLIP),
    "TRL grpo, delta": trainer_loss("trl", "grpo", delta=1.6, **CLIP),
    "TRL grpo, sequence": trainer_loss("trl", "grpo", "sequence", low=0.02, high=0.03),
    "TRL dapo": trainer_loss("trl", "dapo", **CLIP),
    "TRL dr_grpo": trainer_loss("trl", "dr_grpo", **CLIP),
    "TRL cispo": trainer_loss("trl", "cispo", low=None, high=1.4),
    "TRL sapo": trainer_loss("trl", "sapo", tau_pos=1.0, tau_neg=1.05),
    "ms-swift grpo": trainer_loss("swift", "grpo", **CLIP),
    "ms-swift grpo, sequence": trainer_loss("swift", "grpo", "sequence", low=0.02, high=0.03),
    "ms-swift grpo, sequence_token": trainer_loss("swift", "grpo", "sequence_token", low=0.02, high=0.03),
    "ms-swift sapo": trainer_loss("swift", "sapo", tau_pos=1.0, tau_neg=1.05),
    "OpenRLHF ppo": openrlhf_loss(clip_eps_low=0.2, clip_eps_high=0.28),
    "OpenRLHF ppo, dual_clip": openrlhf_loss(clip_eps_low=0.2, clip_eps_high=0.28, dual_clip=1.6),
    "OpenRLHF gspo": openrlhf_loss(clip_eps_low=0.02, clip_eps_high=0.03, policy_loss_type="gspo"),
    "OpenRLHF ppo, masked": openrlhf_loss(
        clip_eps_low=0.2, clip_eps_high=0.28, is_correction_level="token", is_correction_threshold=(0.9, 1.1)
    ),
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
