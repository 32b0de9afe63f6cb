"""The environment of docs/your_own_environment.md, with a player to imitate, so that a small policy can be made for it.

    PYTHONPATH=docs/examples python learner/grpo_llm.py --env-id guess:Mine/GuessTheNumber-v0 --model MODEL
"""

import math

import gymnasium as gym

from agent_r1 import Task, Tool, ToolEnv


class GuessTheNumber(ToolEnv):
    """Find a number from 1 to 20 by comparing it with guesses."""

    instructions = "Find the number. Compare it with guesses, then answer as <answer>number</answer>."
    PROCESS_WEIGHTS = {**ToolEnv.PROCESS_WEIGHTS, "out_of_range": -0.1}
    floor = 0.05  # a blind guess; python -m agent_r1.validate

    def __init__(self, **kwargs):
        super().__init__([Tool.from_function(self.compare, timeout=math.inf)], **kwargs)

    def compare(self, guess: int) -> str:
        """Say whether the number is higher or lower than a guess."""
        number = self.task.metadata["number"]
        return "higher" if number > guess else "lower" if number < guess else "equal"

    def make_task(self, index):
        number = 37 * index % 20 + 1
        return Task(f"number-{index}", "Which number from 1 to 20 is it?", [str(number)], {"number": number})

    def judge_result(self, call, result):
        return {"out_of_range": 1.0} if result.ok and not 1 <= call.arguments["guess"] <= 20 else {}

    def judge_answer(self, answer):
        correct = float(answer in self.task.answers)
        return correct, {"em": correct}

    def demonstration(self, rng=None):
        """What `sft_llm.py` imitates: halving the interval. With `rng` a careless player, who guesses at random in what
        is left of it, and answers after a random number of guesses."""
        low, high, turns = 1, 20, []
        patience = self.max_turns - 1 if rng is None else int(rng.integers(1, self.max_turns))
        guess = 0
        while len(turns) < patience and self.task.answers != [str(guess)]:
            guess = (low + high) // 2 if rng is None else int(rng.integers(low, high + 1))
            turns.append(self.dialect.tool_call("compare", {"guess": guess}))
            low, high = (guess + 1, high) if self.compare(guess) == "higher" else (low, guess - 1)
        answer = guess if self.task.answers == [str(guess)] else int((rng or self.np_random).integers(low, high + 1))
        return [*turns, f"<answer>{answer}</answer>"]

    @staticmethod
    def vocabulary():
        """What a tokenizer made by `sft_llm.py --model scratch` keeps whole."""
        return [str(number) for number in range(1, 21)]


gym.register("Mine/GuessTheNumber-v0", entry_point=GuessTheNumber)
