"""The former name of `agent_r1.task_data`."""

from agent_r1.task_data import *  # noqa: F403
