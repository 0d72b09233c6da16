"""The input of a time estimate: the sizes of a model, and the work of one rollout."""

from __future__ import annotations

from typing import NamedTuple

from gspo_hpc.config.schema import Config
from gspo_hpc.models import flops
from gspo_hpc.models.architecture import Architecture
from gspo_hpc.planning.estimates import adapters, parameters


class Sizes(NamedTuple):
    """The sizes of a model that the estimate uses."""

    layers: int
    layers_with_experts: int
    hidden: int
    vocabulary: int
    parameters: int
    expert_parameters: int  # of all routed experts, in `parameters`
    experts: int  # of a layer; 0: none
    top_k: int
    token_flops: float  # forward, of all layers, without scores and output layer
    score_flops: float  # forward, of all layers, for one query and one key
    cache_bytes: float  # of one token, in 16 bits, over all layers
    cache_heads: int  # the cache can be cut into as many parts
    adapters: int = 0  # their parameters, which are then all that is trained
    expert_adapters: int = 0  # of all routed experts, in `adapters`

    @property
    def output_flops(self) -> float:
        """Forward operations of the output layer for one token."""
        return 2.0 * self.hidden * self.vocabulary

    @property
    def active_adapters(self) -> float:
        """The parameters of adapters that a token is multiplied with: of experts those that it goes to."""
        chosen = self.top_k / self.experts if self.experts else 0.0
        return self.adapters - self.expert_adapters * (1.0 - chosen)

    @property
    def expert_ffn(self) -> float:
        """The inner size of one expert; 0 without experts."""
        return self.expert_parameters / max(1, self.layers_with_experts * self.experts * 3 * self.hidden)


class Talk(NamedTuple):
    """Averages of the conversations of a run that somebody knows; None: nobody does."""

    turns: float | None = None  # messages of the model in a conversation, on average
    reply_tokens: float | None = None  # of one reply of the environment or of tools, on average
    answer_seconds: float | None = None  # that the environment or a tool takes to answer a message, on average


class Work(NamedTuple):
    """One rollout: tokens are averages, but for `longest`. Responses are whole conversations where there are some."""

    completions: int
    completions_per_prompt: int
    prompt_tokens: float
    response_tokens: float
    longest: int  # response
    turns: float = 1.0  # messages of the model in a conversation
    reply_tokens: float = 0.0  # of one reply; there is one less than messages
    answers: float = 0.0  # for which a conversation waits
    answer_seconds: float = 0.0  # of one answer

    @property
    def read_tokens(self) -> float:
        """Tokens of a response that the environment or tools wrote, which engines read and do not sample."""
        return (self.turns - 1.0) * self.reply_tokens

    @property
    def sampled(self) -> float:
        """The share of the tokens of a response that the model sampled."""
        return 1.0 - self.read_tokens / self.response_tokens


def sizes(arch: Architecture, config: Config) -> Sizes:
    """Return the sizes used for the estimate."""
    experts = arch.experts
    mixed = sum(map(arch.has_experts, range(arch.num_layers)))
    routed = 0 if experts is None else mixed * experts.count * 3 * arch.hidden_size * experts.ffn_hidden_size
    scores = 4.0 * arch.num_layers * arch.num_attention_heads * arch.head_dim
    cache, heads = 4.0 * arch.num_layers * arch.num_key_value_heads * arch.head_dim, arch.num_key_value_heads
    if arch.mixers:
        scores = 2.0 * sum(mixer.scores for mixer in arch.mixers)
        cache = 2.0 * sum(mixer.cache for mixer in arch.mixers)
        heads = min((mixer.cache_heads for mixer in arch.mixers if mixer.cache), default=1)
    return Sizes(
        layers=arch.num_layers,
        layers_with_experts=mixed,
        hidden=arch.hidden_size,
        vocabulary=arch.vocab_size,
        parameters=parameters.parameters(arch),
        expert_parameters=routed,
        experts=0 if experts is None else experts.count,
        top_k=0 if experts is None else experts.top_k,
        token_flops=float(flops.per_token(arch)),
        score_flops=scores,
        cache_bytes=cache,
        cache_heads=heads,
        adapters=adapters.of_model(arch, config),
        expert_adapters=adapters.experts_of_model(arch, config),
    )


def work(config: Config, completions: int, response_tokens: float | None = None, talk: Talk | None = None) -> Work:
    """Return a rollout of that many completions. Lengths that nobody knows yet are half of what is allowed.

    So are the messages of a conversation. Replies that nobody knows are as long as the messages before them, and
    answers of unknown seconds take none.
    """
    rollout = config.rollout
    tokens = min(response_tokens or rollout.max_response_length / 2, rollout.max_response_length)
    found = Work(
        completions,
        config.batch.num_generations or 1,
        rollout.max_prompt_length / 2,
        tokens,
        rollout.max_response_length,
    )
    environment, talk = config.environment, talk or Talk()
    if not environment.talks:
        return found
    turns = min(talk.turns or (1 + environment.max_turns) / 2, environment.max_turns)
    message = tokens / (2.0 * turns - 1.0)
    # A message has a token at least, so that what the environment says leaves room for all of them.
    reply = message if talk.reply_tokens is None else talk.reply_tokens
    if turns > 1.0:
        reply = min(reply, max(0.0, tokens - turns) / (turns - 1.0))
    answers = turns if environment.name is not None else turns - 1.0  # without one, the last message calls no tool
    seconds = min(talk.answer_seconds or 0.0, environment.timeout)
    return found._replace(turns=turns, reply_tokens=reply, answers=answers, answer_seconds=seconds)
