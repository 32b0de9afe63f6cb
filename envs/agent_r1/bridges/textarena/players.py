"""Knowledge of TextArena's games, for `environment.py`: possible moves, and the solutions of some games."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from string import ascii_lowercase
from typing import Any


def base(game: str) -> str:
    """Return the name of a game without version and variant."""
    return game.partition("-v0")[0]


def _each(form: str, *values: Any) -> list[str]:
    """Return the form filled with each combination of values."""
    return [form.format(*some) for some in itertools.product(*values)]


MOVES: dict[str, Callable[[Any], list[str]]] = {
    "TicTacToe": lambda env: _each("[{}]", range(9)),
    "WildTicTacToe": lambda env: _each("[{} {}]", "XO", range(9)),
    "UltimateTicTacToe": lambda env: _each("[{} {}]", range(9), range(9)),
    "SimpleTak": lambda env: _each("[{}]", range(env.board_size**2)),
    "ConnectFour": lambda env: _each("[col {}]", range(env.num_cols)),
    "Othello": lambda env: _each("[{}, {}]", range(env.N), range(env.N)),
    "Nim": lambda env: _each("[{} {}]", range(len(env.initial_piles)), range(1, max(env.initial_piles) + 1)),
    "Chopsticks": lambda env: _each("[attack {} {}]", "01", "01") + _each("[split {} {}]", range(5), range(5)),
    "Battleship": lambda env: _each("[{}{}]", ascii_lowercase[: env.grid_size], range(env.grid_size)),
    "KuhnPoker": lambda env: ["[check]", "[bet]", "[call]", "[fold]"],
    "PigDice": lambda env: ["[roll]", "[hold]"],
    "LiarsDice": lambda env: _each("[Bid: {}, {}]", range(1, 11), range(1, 7)) + ["[Call]"] * 20,
    "GameOfPureStrategy": lambda env: _each("[{}]", "A 2 3 4 5 6 7 8 9 10 J Q K".split()),
    "IteratedMatchingPennies": lambda env: ["[heads]", "[tails]"],
    "IteratedRockPaperScissors": lambda env: ["[rock]", "[paper]", "[scissors]"],
    "IteratedTwoThirdsAverage": lambda env: _each("[{}]", range(101)),
    "FrozenLake": lambda env: ["[up]", "[down]", "[left]", "[right]"],
    "Secretary": lambda env: ["[accept]", "[continue]"],
}
"""The possible moves of a game; the game decides which are allowed. The scripted player draws from these."""
SOLVED = ("GuessTheNumber", "Mastermind", "TowerOfHanoi")


def solve(name: str, env: Any) -> str:
    """Return the next move, from the player's knowledge."""
    state = env.state.game_state
    if name == "GuessTheNumber":
        low, high = env.min_number, env.max_number
        for guess, hint in state["guess_history"]:
            low, high = (max(low, guess + 1), high) if hint == "higher" else (low, min(high, guess - 1))
        return f"[{(low + high) // 2}]"
    if name == "Mastermind":
        numbers = range(1, state["num_numbers"] + 1)
        twice, length = state["duplicate_numbers"], state["code_length"]
        codes = itertools.product(numbers, repeat=length) if twice else itertools.permutations(numbers, length)
        told = [(entry["guess"], (entry["black"], entry["white"])) for entry in state["history"]]
        code = next(code for code in codes if all(pegs(guess, code) == found for guess, found in told))
        return f"[{' '.join(map(str, code))}]"
    return "[{} {}]".format(*hanoi_step(state["towers"], env.num_disks, "C"))


def pegs(guess: Sequence[int], code: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of black and white pegs."""
    black = sum(guessed == peg for guessed, peg in zip(guess, code, strict=True))
    return black, sum(min(guess.count(digit), code.count(digit)) for digit in set(guess)) - black


def hanoi_step(towers: Mapping[str, Sequence[int]], disk: int, goal: str) -> tuple[str, str]:
    """Return the next move that brings disks 1 to `disk` to a tower."""
    at = next(name for name, disks in towers.items() if disk in disks)
    if at == goal:
        return hanoi_step(towers, disk - 1, goal)
    rest = next(name for name in "ABC" if name not in (at, goal))
    free = all(other >= disk for other in (*towers[at], *towers[goal]))
    return (at, goal) if free else hanoi_step(towers, disk - 1, rest)
