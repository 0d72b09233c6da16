"""The side of a `verifiers` environment, in a Python of its own: it imports that package and nothing of this one.

Its text is given to the other Python as a program, so it needs no file there. It answers lines of JSON with lines of
JSON. A conversation is the package's own rollout, whose client waits for the messages that come over these lines; the
package decides what follows a message, when a conversation ends, and what it was worth.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

OLDEST = 256  # conversations that are kept open; one that is asked for again later begins anew and is led to its place


def message(one: Any) -> dict[str, Any]:
    """Return a message of the package as plain JSON."""
    return dict(one) if isinstance(one, dict) else one.model_dump(exclude_none=True)


def text_of(one: dict[str, Any]) -> str:
    """Return the text of a message. Raises ValueError where it has other content, such as an image."""
    content = one.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part["text"]) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"a message of the role {one.get('role')} has content that is no text")
    return content


def scores_groups(rubric: Any) -> bool:
    """Tell whether a function of a rubric, or of one that it consists of, scores a group as a whole."""
    is_of_group = getattr(rubric, "_is_group_func", None)
    if is_of_group is not None and any(map(is_of_group, getattr(rubric, "funcs", ()))):
        return True
    return any(map(scores_groups, getattr(rubric, "rubrics", ())))


class Talk:
    """One rollout of the package, whose model is whoever calls :meth:`say`."""

    def __init__(self, environment: Any, row: dict[str, Any]) -> None:
        """Begin it. Where the rubric scores groups, it refuses to score one rollout: it is left unscored."""
        from verifiers.clients import Client
        from verifiers.types import Response, ResponseMessage

        self._asked: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._seen: list[dict[str, Any]] | None = None
        talk = self

        class Model(Client):  # type: ignore[misc]
            """The model of the rollout."""

            async def get_response(
                self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
            ) -> Any:
                if tools:
                    raise ValueError("the environment offers tools by the interface of an API, which is not supported")
                await talk._asked.put([message(one) for one in prompt])
                said = await talk._said.get()
                found = ResponseMessage(role="assistant", content=said, finish_reason="stop", is_truncated=False)
                return Response(id="", created=0, model=model, message=found)

        for name in getattr(Model, "__abstractmethods__", ()):
            setattr(Model, name, get_nothing)
        Model.__abstractmethods__ = frozenset()
        self._in_group = scores_groups(getattr(environment, "rubric", None))
        if self._in_group:
            rollout = environment.rollout(dict(row), Model(None), "model", {})
        else:
            rollout = environment.run_rollout(row, Model(None), "model", {}, state_columns=[])
        self._task = asyncio.ensure_future(rollout)

    async def say(self, said: str) -> dict[str, Any]:
        """Return what follows a message of the model: a reply, or the end with its reward."""
        if self._seen is None:
            first = await self._next()
            if isinstance(first, dict):
                return first
            self._seen = first
        await self._said.put(said)
        after = await self._next()
        if isinstance(after, dict):
            return after
        known = len(self._seen) + 1
        if [text_of(one) for one in after[: known - 1]] != [text_of(one) for one in self._seen]:
            raise ValueError("the environment changes what was said before")
        new, self._seen = after[known:], after
        if wrong := [one["role"] for one in new if one["role"] != "user"]:
            raise ValueError(f"the environment answers with a message of the role {wrong[0]}")
        return {"reply": "\n\n".join(text_of(one) for one in new)}

    @property
    def state(self) -> Any:
        """The package's own record of a rollout that is over and not scored."""
        return self._task.result()

    def end(self) -> None:
        """Drop the rollout."""
        self._task.cancel()

    async def _next(self) -> list[dict[str, Any]] | dict[str, Any]:
        """Return the messages before the next one of the model, or the end."""
        asked = asyncio.ensure_future(self._asked.get())
        await asyncio.wait({asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        output = self._task.result()
        if error := output.get("error"):
            raise ValueError(f"the environment failed: {error}")
        if self._in_group:
            return {"over": True, "reward": 0.0, "in_group": True}
        return {"over": True, "reward": float(output["reward"])}


async def get_nothing(*_: Any, **__: Any) -> None:
    """Stand for what a client of an endpoint needs, and this one does not."""


class Side:
    """The environment, its rows, and the conversations that are open, by row and by what the model has said."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        import verifiers

        if not hasattr(verifiers, "load_environment"):
            raise ValueError(
                f"verifiers {verifiers.__version__} has another interface: install verifiers>=0.1.14,<0.2 there"
            )
        self._environment = verifiers.load_environment(name, **arguments)
        self._open: dict[str, list[Talk]] = {}  # a random environment may be elsewhere in each of those of one key

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Return the first rows of the environment's data."""
        found = self._environment.get_dataset(n=count)
        return [{key: value for key, value in dict(one).items() if value is not None} for one in found]

    async def turn(self, row: dict[str, Any], said: list[str], replies: list[str]) -> dict[str, Any]:
        """Return what follows the last message. A conversation that is not open is led there first."""
        talk = self._taken(key(row, said[:-1], replies)) if said[:-1] else None
        led = talk is not None
        talk = talk or Talk(self._environment, row)
        try:
            if not led:
                await lead(talk, said[:-1], replies)
            answer = await talk.say(said[-1])
        except BaseException:
            talk.end()
            raise
        if "reply" in answer:
            self._open.setdefault(key(row, said, [*replies, answer["reply"]]), []).append(talk)
            if sum(map(len, self._open.values())) > OLDEST:
                oldest = self._taken(next(iter(self._open)))
                assert oldest is not None
                oldest.end()
        return answer

    async def scores(self, row: dict[str, Any], group: list[dict[str, Any]]) -> list[float]:
        """Return what the rubric gives each conversation of a group, all of which are led to their ends again."""
        states = []
        for one in group:
            talk = Talk(self._environment, row)
            try:
                await lead(talk, one["said"][:-1], one["replies"])
                if not (answer := await talk.say(one["said"][-1])).get("over"):
                    raise ValueError(f"asked again, the environment goes on: {json.dumps(answer)[:200]}")
                states.append(talk.state)
            finally:
                talk.end()
        await self._environment.rubric.score_group(states)
        return [float(one["reward"]) for one in states]

    def _taken(self, name: str) -> Talk | None:
        """Return an open conversation of this name, which is open no more."""
        talks = self._open.get(name)
        if talks is None:
            return None
        taken = talks.pop(0)
        if not talks:
            del self._open[name]
        return taken


async def lead(talk: Talk, said: list[str], replies: list[str]) -> None:
    """Say again what the model said. Raises ValueError where the replies are others than before."""
    for before, reply in zip(said, replies, strict=True):
        if (again := await talk.say(before)) != {"reply": reply}:
            raise ValueError(f"asked again, the environment answers otherwise: {json.dumps(again)[:200]}")


def key(row: dict[str, Any], said: list[str], replies: list[str]) -> str:
    """Return the name of an open conversation: what both sides have said so far."""
    return json.dumps([row, said, replies], sort_keys=True)


async def serve(name: str, arguments: dict[str, Any], out: int) -> None:
    """Answer lines of standard input until it ends."""
    side: Side | None = None
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            side = side or Side(name, arguments)
            asked = json.loads(line)
            answer: Any
            if "rows" in asked:
                answer = side.rows(asked["rows"])
            elif "group" in asked:
                answer = await side.scores(asked["row"], asked["group"])
            else:
                answer = await side.turn(asked["row"], asked["said"], asked["replies"])
            text = json.dumps({"answer": answer})
        except BaseException as error:  # of the environment, whatever it is
            told = " ".join(str(error).split())[:1000]
            text = json.dumps({"error": f"{type(error).__name__}: {told}" if told else type(error).__name__})
        os.write(out, f"{text}\n".encode())


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)  # what the environment prints is no answer
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # also what it prints before a sudden end
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(sys.argv[1], json.loads(sys.argv[2]), answers))
    os._exit(0)
