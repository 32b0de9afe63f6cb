"""tau2-bench: a company's service desk, its policy and its tools. Here what its domains share, and telecom."""

from agent_r1.bridges.tau2.environment import Tau2Env, Tau2TelecomEnv

__all__ = ["Tau2Env", "Tau2TelecomEnv"]
