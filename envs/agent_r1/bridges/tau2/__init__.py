"""tau2-bench: the service desk of a company, with its policy and its tools."""

from agent_r1.bridges.tau2.environment import Tau2Env, Tau2TelecomEnv

__all__ = ["Tau2Env", "Tau2TelecomEnv"]
