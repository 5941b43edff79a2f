"""Small games of several turns, generated from a seed, each with a scripted expert."""

from kedge.environments.games.calculator import Calculator, calculate
from kedge.environments.games.guess_number import GuessNumber
from kedge.environments.games.text_world import TextWorld

__all__ = ["Calculator", "GuessNumber", "TextWorld", "calculate"]
