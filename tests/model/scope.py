"""A walk over every world that the core of the model can reach in a small scope; so the law itself is checked.

Two actors, who may be anywhere in their work when the other one goes on; two or three batches; faults: staging that is lost,
heartbeats that are, and actors that die. Worlds that differ only in attempts of which no actor knows any more are one.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.model import core, invariants
from tests.model.core import World

ACTORS = 2
SIZE_AGAIN = 2  # what an opaque source chooses when it has to choose again; planned batches have one record each


class Place(NamedTuple):
    """A world, and the attempt that each actor is at, if any."""

    world: World
    actors: tuple[tuple[int, int] | None, ...]

    def goes_on(self, after: core.Step, number: int, at: tuple[int, int] | None) -> "Place":
        """Return the place after a step, in which an actor is at this attempt."""
        return Place(after[0], (*self.actors[:number], at, *self.actors[number + 1 :]))


class Scene(NamedTuple):
    """A place, by its number, and how many faults may still strike."""

    place: int
    faults: int


class Move(NamedTuple):
    """A step that an actor or a fault makes from a place: its name and the attempt or batch that it is about."""

    step: str
    of: tuple[Any, ...]
    after: Place

    def __str__(self) -> str:
        return f"{self.step}{self.of}"


class Reached(NamedTuple):
    """How a scene was reached first, and from which ones it is reached by moves that are neither faults nor an operator's."""

    by: tuple[Scene, Move] | None
    back: list[Scene]


class Walk:
    """Visits every scene that can be reached if at most so many batches are planned; checks each place, and each move.

    Raises: AssertionError, with the shortest way there.
    """

    def __init__(self, world: World, txids: int, faults: int) -> None:
        first = Place(world, (None,) * ACTORS)
        self.places, self._numbers = [first], {first: 0}
        self._moves: dict[tuple[int, bool], list[tuple[Move, int]]] = {}
        self.scenes = {Scene(0, faults): Reached(None, [])}
        self.moves = 0
        self._txids = txids
        waiting = deque(self.scenes)
        while waiting:
            scene = waiting.popleft()
            for is_fault in (False, True) if scene.faults else (False,):
                for move, number in self._moves_from(scene, is_fault=is_fault):
                    self.moves += 1
                    after = Scene(number, scene.faults - is_fault)
                    if after not in self.scenes:
                        self.scenes[after] = Reached((scene, move), [])
                        waiting.append(after)
                    if not is_fault and not move.step.startswith(("skip", "redo")):
                        self.scenes[after].back.append(scene)

    def _moves_from(self, scene: Scene, *, is_fault: bool) -> list[tuple[Move, int]]:
        """Return the moves and the places after them, which are found and checked once, whatever may strike after that."""
        if (known := self._moves.get((scene.place, is_fault))) is not None:
            return known
        place, found = self.places[scene.place], self._moves.setdefault((scene.place, is_fault), [])
        for move in faults(place) if is_fault else moves(place, self._txids):
            after = canonical(move.after)
            number = self._numbers.setdefault(after, len(self.places))
            if is_new := number == len(self.places):
                self.places.append(after)
            found.append((move, number))
            try:
                check(place.world, move, is_new=is_new)
            except AssertionError as broken:
                raise AssertionError(f"{broken}\nafter {self.path(scene)} and {move}") from broken
        return found

    def path(self, scene: Scene) -> list[str]:
        """Return the moves by which a scene was reached first: as few as possible."""
        steps: list[str] = []
        while (by := self.scenes[scene].by) is not None:
            scene, move = by
            steps.append(str(move))
        return steps[::-1]

    def stuck(self) -> list[Scene]:
        """Return the scenes from which no steps without further faults lead to the commit of every planned batch (I20)."""
        worlds = [place.world for place in self.places]
        reached = {s for s in self.scenes if worlds[s.place].cursor == len(worlds[s.place].batches) == self._txids}
        waiting = deque(reached)
        while waiting:
            new = set(self.scenes[waiting.popleft()].back) - reached
            reached |= new
            waiting.extend(new)
        return [scene for scene in self.scenes if scene not in reached]


def check(before: World, move: Move, *, is_new: bool) -> None:
    """Check a move, and the place that it leads to."""
    after = move.after.world
    invariants.i2_atomicity(before, after)
    invariants.i6_metadata_once(before, after)
    invariants.i8_idempotence(before, after, move.step)
    if move.step in ("stage", "seal", "fail"):
        invariants.i5_inertness(before, after, *move.of)
    for holds in invariants.OF_WORLDS if is_new else ():
        holds(after)


def moves(place: Place, txids: int) -> Iterator[Move]:
    """Yield each move that can be made from a place, in which at most so many batches are planned."""
    world = place.world
    planned = range(1, len(world.batches) + 1)
    steps: list[tuple[Any, tuple[Any, ...]]] = [(core.commit_ready, ())]
    steps += [(core.plan, ((1,),))] if len(planned) < txids else []
    steps += [(law, (txid,)) for txid in planned for law in (core.commit, core.skip, core.redo)]
    for law, of in steps:
        after, _ = core.taken(law, world, *of)
        if after != world:
            yield Move(law.__name__, of, place._replace(world=after))
    for number, actor in enumerate(place.actors):
        if actor is not None:
            yield from _work(place, number, actor)
        elif actor not in place.actors[:number]:  # of two idle ones, it does not matter which one begins
            for txid, mode in ((txid, mode) for txid in planned for mode in ("resume", "restage", "redo")):
                begun = core.taken(core.start, world, txid, mode, SIZE_AGAIN)
                at = (txid, len(begun[0].batches[txid - 1].attempts))
                if begun[0] != world:
                    yield Move(f"{mode} by {number}", (txid,), place.goes_on(begun, number, at))


def _work(place: Place, number: int, actor: tuple[int, int]) -> Iterator[Move]:
    """Yield how an actor goes on with its attempt."""
    world, own = place.world, core.attempt(place.world, *actor)
    if own.phase == "open" and not own.is_staged and not own.damage:
        yield Move("stage", actor, place.goes_on(core.taken(core.stage, world, *actor), number, actor))
    if own.is_staged or own.phase == "failed":
        yield Move("seal", actor, place.goes_on(core.taken(core.seal, world, *actor), number, None))
    yield Move("fail", actor, place.goes_on(core.taken(core.fail, world, *actor), number, None))


def faults(place: Place) -> Iterator[Move]:
    """Yield what can strike: an actor dies, or is silent for long; staging is lost."""
    world = place.world
    for number, actor in enumerate(place.actors):
        if actor is not None:
            silent = core.fall_silent(world, *actor)
            yield Move("die", actor, place.goes_on(silent, number, None))
            yield Move("fall_silent", actor, place.goes_on(silent, number, actor))
    for txid in range(max(world.cursor, 1), len(world.batches) + 1):
        newest = world.batches[txid - 1].newest
        if newest and newest.is_staged:
            at = (txid, len(world.batches[txid - 1].attempts))
            yield Move("lose_staging", at, place._replace(world=core.lose_staging(world, *at)[0]))


def canonical(place: Place) -> Place:
    """Return the same place without the attempts that no actor knows any more, and without what can no longer matter.

    Numbers of attempts are compared for equality alone, so that the remaining ones are counted from 1 changes nothing. Actors
    are alike, so their order does not matter.
    """
    world, places = place.world, dict[tuple[int, int], tuple[int, int]]()
    worked_at = {at[0] for at in place.actors if at}
    batches, commits = [], list(world.commits)
    for txid, batch in enumerate(world.batches, 1):
        committed = world.commits[txid - 1].attempt if txid <= world.cursor else 0
        kept: list[core.Attempt] = []
        for number, own in enumerate(batch.attempts, 1):
            is_newest = number == len(batch.attempts) and (txid >= world.cursor or txid in worked_at)
            if number == committed or (is_newest and txid >= world.cursor):
                is_silent, damage = own.is_silent and own.phase == "open", "" if number == committed else own.damage
                is_same = (is_silent, damage) == (own.is_silent, own.damage)  # as most are: a copy takes long
                kept.append(own if is_same else own._replace(is_silent=is_silent, damage=damage))  # no step asks for the rest
            elif is_newest or (txid, number) in place.actors:
                kept.append(core.Attempt(batch.input, batch.continues, 1, own.phase, own.is_staged))
            else:
                continue
            places[txid, number] = (txid, len(kept))
        batches.append(batch if tuple(kept) == batch.attempts else batch._replace(attempts=tuple(kept)))
        if committed and places[txid, committed][1] != committed:
            commits[txid - 1] = world.commits[txid - 1]._replace(attempt=places[txid, committed][1])
    actors = tuple(sorted((places[at] if at else None for at in place.actors), key=lambda at: at or (0, 0)))
    return Place(world._replace(batches=tuple(batches), commits=tuple(commits)), actors)
