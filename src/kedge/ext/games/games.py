"""Small games of several turns, generated from a seed, each with a scripted expert."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.records.protocols import Reset, Step

CALCULATOR_RULES = (
    "You have a calculator for one operation at a time: write calc 17 + 25 to use it."
    " When you know the result, write answer 42."
)
USAGE = "Write calc and one operation, like calc 17 + 25, or answer and a number, like answer 42."
OPERATION = re.compile(r"\s*(-?\d{1,18})\s*([+-])\s*(-?\d{1,18})\s*")
COMMAND = re.compile(r"\s*(calc|answer)\b(.*)", re.DOTALL | re.IGNORECASE)


def calculate(expression: str) -> str:
    """Add or subtract two whole numbers.

    Args:
        expression: One operation, for example "17 + 25" or "42 - 8".

    Returns:
        The result.
    """
    operation = OPERATION.fullmatch(expression)
    if operation is None:
        raise ValueError(f"{expression.strip()!r} is not one operation like 17 + 25")
    left, sign, right = operation.groups()
    return str(int(left) + int(sign + "1") * int(right))


class Calculator:
    """A sum of several terms; the policy uses a calculator that does one operation at a time.

        task    Compute 17 + 25 - 8.
        policy  calc 17 + 25
        task    42
        policy  calc 42 - 8
        task    34
        policy  answer 34           reward 1, the end

    The reward is 1 for a correct answer and 0 for a wrong one, which both end the episode.

    Args:
        terms: the fewest and the most terms of a sum.
        largest: terms are drawn from 1 to this.
        rules: whether the first observation explains the commands.
    """

    def __init__(
        self, *, terms: tuple[int, int] = (2, 5), largest: int = 99, rules: bool = True
    ) -> None:
        if not 2 <= terms[0] <= terms[1]:
            raise ValueError(f"terms must be (fewest, most) with 2 <= fewest <= most, got {terms}")
        self.terms, self.largest, self.rules = tuple(terms), largest, rules
        self.result = 0

    def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> Reset:
        """The sum of this seed."""
        rng = random.Random(f"calculator {seed}")
        terms = [rng.randint(1, self.largest) for _ in range(rng.randint(*self.terms))]
        signs = [1, *(rng.choice((1, -1)) for _ in terms[1:])]
        self.result = sum(sign * term for sign, term in zip(signs, terms, strict=True))
        text = str(terms[0])
        for sign, term in zip(signs[1:], terms[1:], strict=True):
            text += f" {'+' if sign > 0 else '-'} {term}"
        task = f"Compute {text}."
        return f"{CALCULATOR_RULES}\n{task}" if self.rules else task, {}

    def step(self, response: Any) -> Step:
        """Use the calculator, or answer."""
        command = COMMAND.fullmatch(str(getattr(response, "text", response)))
        verb, rest = (command[1].lower(), command[2].strip()) if command else ("", "")
        observation, legal = USAGE, False
        if verb == "calc":
            try:
                observation, legal = calculate(rest), True
            except ValueError as error:
                observation = f"{error}. {USAGE}"
        elif verb == "answer" and re.fullmatch(r"-?\d{1,18}", rest):
            correct = int(rest) == self.result
            words = "Correct." if correct else f"Wrong: it is {self.result}."
            return words, float(correct), True, False, {"metrics": {"success": float(correct)}}
        return observation, 0.0, False, False, {"metrics": {"illegal": float(not legal)}}

    def random_action(self, rng: random.Random) -> str:
        """An arbitrary command."""
        left, right = rng.randint(1, self.largest), rng.randint(1, self.largest)
        return rng.choice((f"calc {left} + {right}", f"calc {left} - {right}", f"answer {left}"))

    @staticmethod
    def expert(messages: Sequence[Mapping[str, str]]) -> str:
        """The best next command, from the conversation (observations are the user's) alone."""
        terms = re.findall(r"[+-]|\d+", messages[0]["content"].rpartition("Compute")[2])
        total = terms.pop(0)
        for command, result in zip(messages[1::2], messages[2::2], strict=True):
            expected = f"calc {total} {terms[0]} {terms[1]}" if terms else None
            if command["content"] == expected:
                total, terms = result["content"], terms[2:]
        return f"calc {total} {terms[0]} {terms[1]}" if terms else f"answer {total}"


class GuessNumber:
    """A number to find by bisection: after a guess the policy learns whether it is higher or lower.

        task    I think of a number from 1 to 64. You have 7 guesses.
        policy  32
        task    Higher.
        policy  48
        task    Correct.            reward 1, the end

    The reward is 1 when it is guessed and 0 when the guesses are used up.

    Args:
        highest: the number is drawn from 1 to this.
        guesses: None: as many as bisection needs at most.
    """

    def __init__(self, *, highest: int = 64, guesses: int | None = None) -> None:
        if highest < 1:
            raise ValueError(f"highest must be at least 1, got {highest}")
        self.highest = highest
        self.guesses = highest.bit_length() if guesses is None else guesses
        self.number, self.left = 0, 0

    def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> Reset:
        """The number of this seed."""
        self.number = random.Random(f"guess number {seed}").randint(1, self.highest)
        self.left = self.guesses
        task = f"I think of a number from 1 to {self.highest}. You have {self.guesses} guesses."
        return task, {}

    def step(self, response: Any) -> Step:
        """Answer a guess.  Anything but a number in the range uses up a guess, too."""
        text = str(getattr(response, "text", response)).strip()
        guess = int(text) if re.fullmatch(r"\d{1,18}", text) else 0
        self.left -= 1
        if guess == self.number:
            return "Correct.", 1.0, True, False, {"metrics": {"success": 1.0}}
        legal = 1 <= guess <= self.highest
        info = {"metrics": {"illegal": float(not legal)}}
        if self.left <= 0:
            return f"It was {self.number}.", 0.0, True, False, info
        words = "Higher." if self.number > guess else "Lower."
        if not legal:
            words = f"Guess one number from 1 to {self.highest}, and write nothing else."
        return words, 0.0, False, False, info

    def random_action(self, rng: random.Random) -> str:
        """An arbitrary guess."""
        return str(rng.randint(1, self.highest))

    @staticmethod
    def expert(messages: Sequence[Mapping[str, str]]) -> str:
        """The middle of the remaining range, from the conversation alone."""
        limits = re.search(r"from (\d+) to (\d+)", messages[0]["content"])
        if limits is None:
            raise ValueError(f"not a game of GuessNumber: {messages[0]['content']!r}")
        low, high = int(limits[1]), int(limits[2])
        for guess, answer in zip(messages[1::2], messages[2::2], strict=True):
            if answer["content"] == "Higher.":
                low = max(low, int(guess["content"]) + 1)
            elif answer["content"] == "Lower.":
                high = min(high, int(guess["content"]) - 1)
        return str((low + high) // 2)


STEPS = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}
OPPOSITE = {"north": "south", "east": "west", "south": "north", "west": "east"}
NAMES = ("Hall", "Attic", "Cellar", "Kitchen", "Library", "Study", "Garden", "Tower")
COLORS = ("red", "blue", "green")
GOLD = "gold"
FEWEST, MOST = 6, 12  # turns that the expert needs
WORLD_RULES = "Find the gold. Commands: go north, open north, take red key, take gold."

Place = tuple[int, int]


@dataclass(slots=True)
class Room:
    """The visible contents of a room; the expert remembers it in the same form."""

    name: str
    exits: list[str] = field(default_factory=list)
    doors: dict[str, str] = field(default_factory=dict)  # locked doors: direction -> color
    things: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The room in words."""
        parts = [f"{self.name}."]
        if self.exits:
            parts.append(f"Exits: {', '.join(d for d in STEPS if d in self.exits)}.")
        parts += [f"{self.doors[d].capitalize()} door: {d}." for d in STEPS if d in self.doors]
        if self.things:
            parts.append(f"Here: {', '.join(sorted(self.things))}.")
        return " ".join(parts)


def beyond(place: Place, direction: str) -> Place:
    """The place next to this one."""
    step = STEPS[direction]
    return place[0] + step[0], place[1] + step[1]


class TextWorld:
    """Rooms with locked doors, keys, and gold to find; the reward is 1 when it is taken.

        task    Hall. Exits: north, east. Red door: south.
        policy  go east
        task    Attic. Exits: west. Here: red key.
        policy  take red key
        task    Taken. Attic. Exits: west.
        ...
        policy  take gold           reward 1, the end

    The policy sees one room at a time and has to remember the rest.  Every world can be solved in 6
    to 12 turns by exploring the nearest unknown exit first.

    Args:
        rooms: the fewest and the most rooms of a world, up to 8.
        rules: whether the first observation explains the task and the commands.
    """

    def __init__(self, *, rooms: tuple[int, int] = (4, 7), rules: bool = True) -> None:
        if not 3 <= rooms[0] <= rooms[1] <= len(NAMES):
            raise ValueError(
                f"rooms must be (fewest, most) with 3 <= fewest <= most <= {len(NAMES)},"
                f" got {rooms}"
            )
        self.size, self.rules = tuple(rooms), rules
        self.rooms: dict[Place, Room] = {}
        self.place: Place = (0, 0)
        self.held: set[str] = set()

    def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> Reset:
        """The world of this seed, at its first room."""
        rng = random.Random(f"text world {seed}")
        while True:
            rooms = make_rooms(rng, rng.randint(*self.size))
            if rooms is not None and FEWEST <= turns_of_expert(rooms) <= MOST:
                break
        self._enter(rooms)
        words = self.rooms[self.place].text()
        return (f"{WORLD_RULES}\n{words}" if self.rules else words), {}

    def _enter(self, rooms: dict[Place, Room]) -> None:
        self.rooms, self.place, self.held = copy.deepcopy(rooms), (0, 0), set()

    def step(self, response: Any) -> Step:
        """Carry out a command."""
        command = " ".join(str(getattr(response, "text", response)).lower().split())
        words, legal = self._act(command)
        if command == f"take {GOLD}" and legal:
            return words, 1.0, True, False, {"metrics": {"success": 1.0}}
        text = f"{words} {self.rooms[self.place].text()}".strip()
        return text, 0.0, False, False, {"metrics": {"illegal": float(not legal)}}

    def _act(self, command: str) -> tuple[str, bool]:
        """Run a command; returns what happened, and whether the command was possible."""
        here, (verb, _, rest) = self.rooms[self.place], command.partition(" ")
        if verb == "go" and rest in here.exits:
            self.place = beyond(self.place, rest)
            return "", True
        if verb == "go" and rest in here.doors:
            return f"The {here.doors[rest]} door is locked.", False
        if verb == "go":
            return "There is no way.", False
        if verb == "take" and rest in here.things:
            here.things.remove(rest)
            self.held.add(rest)
            return "You found the gold." if rest == GOLD else "Taken.", True
        if verb == "take":
            return "That is not here.", False
        if verb == "open" and rest in here.doors:
            return self._open(here, rest)
        if verb == "open":
            return "No locked door is there.", False
        return "Unknown command.", False

    def _open(self, here: Room, direction: str) -> tuple[str, bool]:
        color = here.doors[direction]
        if f"{color} key" not in self.held:
            return f"You need the {color} key.", False
        behind = self.rooms[beyond(self.place, direction)]
        for room, way in ((here, direction), (behind, OPPOSITE[direction])):
            del room.doors[way]
            room.exits.append(way)
        return "Opened.", True

    def random_action(self, rng: random.Random) -> str:
        """A random command that is valid in the current room."""
        here = self.rooms[self.place]
        commands = [f"go {d}" for d in here.exits] + [f"take {t}" for t in here.things]
        commands += [f"open {d}" for d, c in here.doors.items() if f"{c} key" in self.held]
        return rng.choice(sorted(commands))

    @staticmethod
    def expert(messages: Sequence[Mapping[str, str]]) -> str:
        """The next command of a careful explorer, from the conversation alone."""
        return next_command(remember(messages))


@dataclass(slots=True)
class Memory:
    """Everything that the conversation has shown: rooms, current place and keys."""

    rooms: dict[Place, Room] = field(default_factory=dict)
    place: Place = (0, 0)
    keys: set[str] = field(default_factory=set)  # colors of the keys that the policy carries

    def see(self, text: str) -> None:
        """Remember the room that is described at the end of an observation."""
        found = re.search(rf"({'|'.join(NAMES)})\.(.*)$", text)
        if found is None:
            raise ValueError(f"not an observation of TextWorld: {text!r}")
        room = Room(found[1])
        for part in found[2].split("."):
            label, _, rest = part.strip().partition(": ")
            if label == "Exits":
                room.exits = rest.split(", ")
            elif label == "Here":
                room.things = rest.split(", ")
            elif label:
                room.doors[rest] = label.split()[0].lower()
        self.rooms[self.place] = room


def remember(messages: Sequence[Mapping[str, str]]) -> Memory:
    """Follow a conversation from its beginning."""
    memory = Memory()
    memory.see(messages[0]["content"])
    for command, observation in zip(messages[1::2], messages[2::2], strict=True):
        verb, _, rest = " ".join(command["content"].lower().split()).partition(" ")
        here = memory.rooms[memory.place]
        if verb == "go" and rest in here.exits:
            memory.place = beyond(memory.place, rest)
        elif verb == "take" and rest in here.things:
            memory.keys.add(rest.split()[0])
        memory.see(observation["content"])
    return memory


def next_command(memory: Memory) -> str:
    """Take a thing, open a door, or walk toward the nearest thing, door or unknown room.

    Breadth-first over known rooms, directions in a fixed order.
    """
    first_step: dict[Place, str] = {memory.place: ""}
    queue = [memory.place]
    for place in queue:
        room = memory.rooms.get(place)
        here = place == memory.place
        wanted = room is None  # the room has not been seen yet
        if room is not None:
            openable = [d for d in STEPS if room.doors.get(d) in memory.keys]
            if here and room.things:
                return f"take {sorted(room.things)[0]}"
            if here and openable:
                return f"open {openable[0]}"
            wanted = bool(openable or room.things)
        if wanted:
            return f"go {first_step[place]}"
        assert room is not None
        for direction in STEPS:
            target = beyond(place, direction)
            if direction in room.exits and target not in first_step:
                first_step[target] = first_step[place] or direction
                queue.append(target)
    raise ValueError("nothing is left to explore; the world has no solution")


def make_rooms(rng: random.Random, count: int) -> dict[Place, Room] | None:
    """A random tree of rooms; None if a required door does not fit."""
    rooms = {(0, 0): Room("")}
    names = rng.sample(NAMES, count)
    rooms[0, 0].name = names[0]
    parents: dict[Place, tuple[Place, str]] = {}
    while len(rooms) < count:
        place, direction = rng.choice(sorted(rooms)), rng.choice(sorted(STEPS))
        target = beyond(place, direction)
        if target not in rooms:
            rooms[place].exits.append(direction)
            rooms[target] = Room(names[len(rooms)], [OPPOSITE[direction]])
            parents[target] = (place, direction)
    goal = rng.choice(sorted(parents))
    rooms[goal].things.append(GOLD)
    colors = rng.sample(COLORS, 2)
    for color in colors[: rng.randint(1, 2)]:
        key_room = lock_path(rng, rooms, parents, goal, color)
        if key_room is None:
            return None
        goal = key_room  # put a second door on the way to the first key
    return rooms


def lock_path(
    rng: random.Random,
    rooms: dict[Place, Room],
    parents: Mapping[Place, tuple[Place, str]],
    goal: Place,
    color: str,
) -> Place | None:
    """Lock a door on the way from the start to ``goal``; the room of its key, or None."""
    way = [goal]
    while way[-1] != (0, 0):
        way.append(parents[way[-1]][0])
    free = [p for p in way[:-1] if parents[p][1] in rooms[parents[p][0]].exits]
    if len(free) < len(way) - 1 or not free:
        return None  # the way already has a door, or the policy starts at the goal
    behind = rng.choice(free)
    before, direction = parents[behind]
    rooms[before].exits.remove(direction)
    rooms[before].doors[direction] = color
    rooms[behind].exits.remove(OPPOSITE[direction])
    rooms[behind].doors[OPPOSITE[direction]] = color
    reachable = [(0, 0)]
    for place in reachable:
        reachable += [
            beyond(place, d) for d in rooms[place].exits if beyond(place, d) not in reachable
        ]
    empty = sorted(p for p in reachable if not rooms[p].things)
    if not empty:
        return None
    key = rng.choice(empty)
    rooms[key].things.append(f"{color} key")
    return key


def turns_of_expert(rooms: dict[Place, Room]) -> int:
    """Turns that the expert needs, counted up to one more than allowed."""
    world = TextWorld(rules=False)
    world._enter(rooms)
    messages: list[Any] = [{"role": "user", "content": world.rooms[0, 0].text()}]
    for turn in range(1, MOST + 2):
        command = TextWorld.expert(messages)
        observation, _, terminated, _, _ = world.step(command)
        if terminated:
            return turn
        messages += [
            {"role": "assistant", "content": command},
            {"role": "user", "content": observation},
        ]
    return MOST + 1
