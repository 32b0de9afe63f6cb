"""PharmaSim: conversations in which a pharmacist questions a customer and names the cause of the problem."""

from agent_r1.task_data.pharma_sim import Scenario
from agent_r1.tasks.pharma_sim.environment import PharmaSimEnv
from agent_r1.tasks.pharma_sim.scenarios import generate_task, match_question

__all__ = ["PharmaSimEnv", "Scenario", "generate_task", "match_question"]
