"""A walk over every world that the core of the model can reach in a small scope; so the law itself is checked.

Two actors, who may be anywhere in their work when the other one goes on; two or three batches; faults: staging that is lost,
heartbeats that are, and actors that die. Worlds that differ only in attempts of which nobody knows any more are one.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tests.model import core, invariants
from tests.model.core import World

ACTORS = 2
SIZE_AGAIN = 2  # what an opaque source chooses when it has to choose again; planned batches have one record each


class Scope(NamedTuple):
    """How much a walk visits: the kinds of source and states, and how many batches are planned and faults strike at most."""

    source: Literal["transactional", "opaque"]
    states: Literal["transactional", "opaque"]
    txids: int
    faults: int


class Scene(NamedTuple):
    """A world, the attempt that each actor is at, if any, and the faults that may still strike."""

    world: World
    actors: tuple[tuple[int, int] | None, ...]
    faults: int


class Move(NamedTuple):
    """A step that an actor or a fault makes from a scene: its name and the attempt or batch that it is about."""

    step: str
    of: tuple[int, ...]
    after: Scene


@dataclass
class Walk:
    """What a walk has found: every scene with a move that leads to it, and how many moves there are."""

    scenes: dict[Scene, tuple[Scene, Move] | None]
    back: dict[Scene, list[Scene]]  # by moves that are neither faults nor those of an operator
    moves: int = 0

    def path(self, scene: Scene) -> list[str]:
        """Return the moves by which a scene was reached first: as few as possible."""
        steps: list[str] = []
        while (reached := self.scenes[scene]) is not None:
            scene, move = reached
            steps.append(f"{move.step}{move.of}")
        return steps[::-1]


def walk(scope: Scope) -> Walk:
    """Visit every scene that can be reached, and check each of them, and each move.

    Raises: AssertionError, with the shortest way there.
    """
    first = Scene(World(scope.source, scope.states), (None,) * ACTORS, scope.faults)
    found = Walk({first: None}, {})
    waiting = deque([first])
    while waiting:
        scene = waiting.popleft()
        for move in moves(scene, scope.txids):
            found.moves += 1
            after = canonical(move.after)
            is_new = after not in found.scenes
            if is_new:
                found.scenes[after] = scene, move
                waiting.append(after)
            if after.faults == scene.faults and not move.step.startswith(("skip", "redo")):
                found.back.setdefault(after, []).append(scene)
            try:
                check(scene, move, is_new=is_new)
            except AssertionError as broken:
                raise AssertionError(f"{broken}\nafter {found.path(scene)} and {move.step}{move.of}") from broken
    return found


def check(scene: Scene, move: Move, *, is_new: bool) -> None:
    """Check a move, and the scene that it leads to."""
    before, after = scene.world, move.after.world
    invariants.i2_atomicity(before, after)
    invariants.i6_metadata_once(before, after)
    invariants.i8_idempotence(before, after, move.step)
    if move.step in ("stage", "seal", "fail", "beat"):
        invariants.i5_inertness(before, after, move.of[0], move.of[1])
    if is_new:
        for holds in invariants.OF_WORLDS:
            holds(after)


def stuck(found: Walk, txids: int) -> list[Scene]:
    """Return the scenes from which no steps without further faults lead to the commit of every planned batch (I20)."""
    done = [scene for scene in found.scenes if scene.world.cursor == len(scene.world.batches) == txids]
    reached, waiting = set(done), deque(done)
    while waiting:
        for scene in found.back.get(waiting.popleft(), ()):
            if scene not in reached:
                reached.add(scene)
                waiting.append(scene)
    return [scene for scene in found.scenes if scene not in reached]


def moves(scene: Scene, txids: int) -> Iterator[Move]:
    """Yield each move that can be made from a scene, in which at most so many batches are planned."""
    world = scene.world

    def made(step: str, of: tuple[int, ...], law: Callable[..., core.Step], **more: Any) -> Scene | None:
        after, _ = law(world, *of, **more)
        return None if after == world else scene._replace(world=after)

    steps: list[tuple[str, tuple[int, ...], Scene | None]] = []
    if len(world.batches) < txids:
        steps.append(("plan", (), made("plan", (), core.plan, sizes=(1,))))
    for txid in range(1, len(world.batches) + 1):
        of = (txid,)
        steps += [("commit", of, made("commit", of, core.commit)), ("skip", of, made("skip", of, core.skip))]
        steps.append(("redo", of, made("redo", of, core.redo)))
    steps.append(("commit_ready", (), made("commit_ready", (), core.commit_ready)))
    for number, actor in enumerate(scene.actors):
        if actor not in scene.actors[:number]:  # of two idle ones, it does not matter which one begins
            steps += list(_work(scene, number, actor))
    for step, of, after in steps:
        if after is not None:
            yield Move(step, of, after)
    if scene.faults:
        yield from _faults(scene)


def _work(scene: Scene, number: int, actor: tuple[int, int] | None) -> Iterator[tuple[str, tuple[int, ...], Scene]]:
    """Yield what an actor can do: begin an attempt, or go on with the one that it is at."""
    world = scene.world
    if actor is None:
        for txid in range(1, len(world.batches) + 1):
            for mode in ("resume", "restage", "redo"):
                after, _ = core.start(world, txid, mode, SIZE_AGAIN)
                if after != world:
                    at = (txid, len(after.batches[txid - 1].attempts))
                    yield f"{mode} by {number}", (txid,), _with_actor(scene, number, at)._replace(world=after)
        return
    own = core.attempt(world, *actor)
    after, _ = core.stage(world, *actor)
    if own.phase == "open" and not own.is_staged and not own.damage:
        yield "stage", actor, scene._replace(world=after)
    if own.is_staged or own.phase == "failed":
        after, _ = core.seal(world, *actor)
        yield "seal", actor, _with_actor(scene, number, None)._replace(world=after)
    after, _ = core.fail(world, *actor)
    yield "fail", actor, _with_actor(scene, number, None)._replace(world=after)


def _faults(scene: Scene) -> Iterator[Move]:
    """Yield what can strike: an actor dies, or is silent for long; staging is lost."""
    left = scene._replace(faults=scene.faults - 1)
    for number, actor in enumerate(scene.actors):
        if actor is not None:
            silent, _ = core.fall_silent(scene.world, *actor)
            yield Move("die", actor, _with_actor(left, number, None)._replace(world=silent))
            yield Move("fall_silent", actor, left._replace(world=silent))
    for txid in range(max(scene.world.cursor, 1), len(scene.world.batches) + 1):
        newest = len(scene.world.batches[txid - 1].attempts)
        if newest and core.attempt(scene.world, txid, newest).is_staged:
            lost, _ = core.lose_staging(scene.world, txid, newest)
            yield Move("lose_staging", (txid, newest), left._replace(world=lost))


def _with_actor(scene: Scene, number: int, at: tuple[int, int] | None) -> Scene:
    return scene._replace(actors=(*scene.actors[:number], at, *scene.actors[number + 1 :]))


def canonical(scene: Scene) -> Scene:
    """Return the same scene without the attempts that nobody knows any more, and without what can no longer matter.

    Numbers of attempts are compared for equality alone, so that the remaining ones are counted from 1 changes nothing. Actors
    are alike, so their order does not matter.
    """
    world, places = scene.world, dict[tuple[int, int], tuple[int, int]]()
    worked_at = {at[0] for at in scene.actors if at}
    batches, commits = [], list(world.commits)
    for txid, batch in enumerate(world.batches, 1):
        committed = world.commits[txid - 1].attempt if txid <= world.cursor else 0
        kept = []
        for number, own in enumerate(batch.attempts, 1):
            is_newest = number == len(batch.attempts) and (txid >= world.cursor or txid in worked_at)
            if is_newest or number == committed or (txid, number) in scene.actors:
                counts = number == committed or (is_newest and txid >= world.cursor)
                kept.append(
                    _ended(own, number == committed)
                    if counts
                    else core.Attempt(batch.input, batch.continues, 1, own.phase, own.is_staged)
                )
                places[txid, number] = (txid, len(kept))
        batches.append(batch if kept == [*batch.attempts] else batch._replace(attempts=tuple(kept)))
        if committed:
            commits[txid - 1] = world.commits[txid - 1]._replace(attempt=places[txid, committed][1])
    actors = tuple(sorted((places[at] if at else None for at in scene.actors), key=lambda at: at or (0, 0)))
    return Scene(world._replace(batches=tuple(batches), commits=tuple(commits)), actors, scene.faults)


def _ended(own: core.Attempt, has_committed: bool) -> core.Attempt:
    """Return an attempt without the heartbeat and the staging that nobody asks for once it has ended."""
    own = own._replace(is_silent=False) if own.is_silent and own.phase != "open" else own
    return own._replace(damage="") if has_committed and own.damage else own
